"""The loop: plan, run, commit. It owns the token values and the streams, and imports no torch."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from weft.core import Outcome, Request, Scheduler, State, StepPlan, StepRecord
from weft.engine.executor import Executor, PendingStep, SlotSetup, StepInputs, StepResult, TokenLogprobs
from weft.engine.stream import Stream


class TokenEvent(NamedTuple):
    """One request's news from one step."""

    stream: Stream
    token: int | None  # None: it was refused, or only prompt log probabilities came
    finish_reason: str | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # for the positions behind `prompt_first`
    prompt_first: int = 0


class Loop:
    """Drives one scheduler and one executor, with `depth` steps in flight while the next is planned (0 or 1)."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        depth: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        on_record: Callable[[StepRecord], None] = lambda record: None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.depth = depth
        self.clock = clock
        self.on_record = on_record
        self.streams: dict[str, Stream] = {}
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._refused: list[TokenEvent] = []  # to be handed out with the next events

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self._refused) or self.scheduler.has_work

    def add(self, stream: Stream) -> None:
        self.scheduler.add(stream.request)
        self.streams[stream.request.id] = stream

    def abort(self, stream: Stream, reason: str = "abort") -> None:
        """Ends a stream now; no further event names it. Harmless if it has ended."""
        if self.streams.pop(stream.request.id, None) is not None:
            self.scheduler.abort(stream.request, reason, self.clock())

    def step(self) -> list[TokenEvent]:
        """One turn: submits the next step if there is one, then takes in the oldest that is due."""
        with self._all_or_nothing():
            plan = self.scheduler.plan(self.clock())
            if plan is not None:
                self._in_flight.append((plan, self.executor.submit(plan, self._inputs(plan))))
            self._refused += self._take_refusals()
        taken = len(self._in_flight) > self.depth or (plan is None and self._in_flight)
        events = self._take_in() if taken else []
        refused, self._refused = self._refused, []  # not before: waiting for the device may be interrupted
        return refused + events

    def drain(self) -> None:
        """Takes in what is in flight without planning more; its events are lost, so end or abandon streams first."""
        while self._in_flight:
            self._take_in()

    def prefilled(self, stream: Stream) -> int:
        """Tokens of a stream whose keys and values are computed, for progress displays."""
        slot = stream.request.slot
        return int(self.scheduler.slots.computed[slot]) if slot >= 0 else 0

    def _inputs(self, plan: StepPlan) -> StepInputs:
        first, count = plan.first.tolist(), plan.count.tolist()
        prefills = range(plan.num_decodes, len(plan.requests))
        values = [self.streams[plan.requests[row].id].values(first[row], count[row]) for row in prefills]
        setups = [_setup(self.streams[request.id]) for request in plan.joined]
        return StepInputs(np.concatenate(values) if values else np.empty(0, np.int32), setups)

    def _take_refusals(self) -> list[TokenEvent]:
        """Requests that the scheduler would rather not begin, as they could not keep their promise."""
        refused = [TokenEvent(self.streams.pop(request.id), None, "refused") for request in self.scheduler.refused]
        self.scheduler.refused.clear()
        return refused

    def _take_in(self) -> list[TokenEvent]:
        plan, pending = self._in_flight[0]
        try:
            result = pending.result()  # an interrupt while waiting here loses nothing: the step stays in flight
        except Exception:
            self._fail()
            raise
        with self._all_or_nothing():
            self._in_flight.popleft()
            outcome = Outcome()
            events = self._events(plan, result, outcome)
            self._hash_filled(plan, outcome)
            self.on_record(self.scheduler.commit(plan, outcome, result.started, result.finished))
            for request, _ in outcome.finished:
                del self.streams[request.id]
        return events

    def _events(self, plan: StepPlan, result: StepResult, outcome: Outcome) -> list[TokenEvent]:
        """Appends sampled tokens to their streams and notices who is done."""
        events = []
        for row, found in result.prompt_logprobs.items():
            if plan.requests[row].state is not State.FINISHED:
                stream = self.streams[plan.requests[row].id]
                first = int(plan.first[row])
                events.append(TokenEvent(stream, None, None, prompt_logprobs=found, prompt_first=first))
        # The one loop over all that run: its names are local and its tuples are made the short way, because every
        # request pays for it in every step.
        streams, ended, make = self.streams, State.FINISHED, tuple.__new__
        described, logprobs = result.logprobs, None
        sampling = np.flatnonzero(plan.samples).tolist()
        requests = plan.requests if len(sampling) == len(plan.requests) else [plan.requests[row] for row in sampling]
        last = plan.last[plan.samples].tolist()
        for row, request, token, is_last in zip(sampling, requests, result.tokens, last, strict=True):
            if request.state is ended:
                continue  # aborted, or ended in the step before: the surplus token is thrown away
            stream = streams[request.id]
            stream.output.append(token)
            reason = None
            if token in stream.stop_ids and len(stream.output) >= stream.params.min_tokens:
                reason = "stop"
                outcome.finished.append((request, reason))
            elif is_last:
                reason = "length"
                outcome.finished.append((request, reason))
            if described:
                logprobs = described.get(row)
            events.append(make(TokenEvent, (stream, token, reason, logprobs, None, 0)))
        return events

    def _hash_filled(self, plan: StepPlan, outcome: Outcome) -> None:
        size = self.scheduler.block_size
        end = plan.first + plan.count
        for row in np.flatnonzero(end // size > plan.first // size).tolist():
            request = plan.requests[row]
            if request.state is State.FINISHED:
                continue
            if self.streams[request.id].hash_full_blocks(int(end[row]), size):
                outcome.filled.append(request)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Books that were interrupted half-way (by an error or by Ctrl-C) are not to be trusted."""
        try:
            yield
        except BaseException:
            self._fail()
            raise

    def _fail(self) -> None:
        """Ends every stream with "error" and starts the books over; what a failed step left in blocks is forgotten."""
        try:
            while self._in_flight:
                with contextlib.suppress(Exception):
                    self._in_flight.popleft()[1].result()
        finally:  # a second Ctrl-C must not leave the books half-written
            for stream in self.streams.values():
                request = stream.request
                request.state, request.finish_reason, request.finished = State.FINISHED, "error", self.clock()
                request.slot = -1
            self.streams.clear()
            self.scheduler.reset()


def _setup(stream: Stream) -> SlotSetup:
    request: Request = stream.request
    return SlotSetup(
        request.slot,
        stream.params,
        stream.seed,
        stream.prompt,
        np.array(stream.output, np.int32),
        tuple(stream.stop_ids),
    )
