"""The loop: plan, run, commit. It owns the token values and the streams, and imports no torch."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import HostTimes, Outcome, Request, Scheduler, State, StepPlan, StepRecord
from weft.engine.executor import Executor, PendingStep, SlotSetup, StepInputs, StepMasks, StepResult, TokenLogprobs
from weft.engine.masks import MaskBuilder
from weft.engine.stream import Stream

# Of the last step's time: how long a plan waits for new masks while the device computes. Most masks take 50 us, but the
# next plan may be due before that; the device has the step in flight to do meanwhile.
MASK_SHARE = 1 / 8
IDLE_WAIT = 0.001  # seconds that a step waits for a mask where nothing else can be done; its caller may have news


class TokenEvent(NamedTuple):
    """One request's news from one step."""

    stream: Stream
    token: int | None  # None: it was refused, or only prompt log probabilities came
    finish_reason: str | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # for the positions behind `prompt_first`
    prompt_first: int = 0
    embedding: NDArray[np.float32] | None = None  # of a request that pools


class _InFlight(NamedTuple):
    plan: StepPlan
    pending: PendingStep
    times: HostTimes  # so far


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
        self._in_flight: deque[_InFlight] = deque()
        self._held: list[TokenEvent] = []  # to be handed out with the next events
        self._by_slot: list[Any] = [None] * scheduler.slots.size  # the Stream that a slot's tokens are for, if any
        self._masks = MaskBuilder()
        self.last_seconds = 0.0  # that the device took for the last step
        self._stop_ids: set[int] = set()  # of all streams there were: most steps sample none of them
        self._left_at: float | None = None  # when the last turn ended, with work left

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self._held) or self.scheduler.has_work

    def add(self, stream: Stream) -> None:
        self.scheduler.add(stream.request)
        self.streams[stream.request.id] = stream
        self._stop_ids |= stream.stop_ids
        if stream.grammar is not None:
            self._masks.open(stream)

    def abort(self, stream: Stream, reason: str = "abort") -> None:
        """Ends a stream now; no further event names it. Harmless if it has ended."""
        if self.streams.pop(stream.request.id, None) is not None:
            if stream.request.slot >= 0:
                self._by_slot[stream.request.slot] = None
            self._masks.drop(stream)
            self.scheduler.abort(stream.request, reason, self.clock())

    def step(self) -> list[TokenEvent]:
        """One turn: submits the next step if there is one, then takes in the oldest that is due."""
        while len(self._in_flight) > self.depth:  # an interrupt came while we waited for one of them
            self._held += self._take_in()
        began = self.clock()
        outside = 0.0 if self._left_at is None else began - self._left_at
        if self._masks.wait_for_new(MASK_SHARE * self.last_seconds if self._in_flight else 0.0):
            began = self.clock()  # to wait is no work
        with self._all_or_nothing():
            for stream in self._masks.collect():
                self.scheduler.release(stream.request)
            plan = self.scheduler.plan(began)
            if plan is not None:
                planned = self.clock()
                inputs = self._inputs(plan)
                pending = self.executor.submit(plan, inputs, self._step_masks(plan))
                times = HostTimes(planned - began, self.clock() - planned, 0.0, outside)
                self._in_flight.append(_InFlight(plan, pending, times))
            self._held += self._take_refusals()
        taken = len(self._in_flight) > self.depth or (plan is None and self._in_flight)
        if plan is None and not taken:
            self._masks.wait_for_first(IDLE_WAIT)
        events = self._take_in() if taken else []
        held, self._held = self._held, []  # not before: waiting for the device may be interrupted
        self._left_at = self.clock() if self.has_work else None
        return held + events

    def drain(self) -> None:
        """Takes in what is in flight without planning more; its events are lost, so end or abandon streams first."""
        while self._in_flight:
            self._take_in()

    def close(self) -> None:
        """Lets go of the executor and of threads. Nothing is added afterwards."""
        self.executor.close()
        self._masks.close()

    def prefilled(self, stream: Stream) -> int:
        """Tokens of a stream whose keys and values are computed, for progress displays."""
        slot = stream.request.slot
        return int(self.scheduler.slots.computed[slot]) if slot >= 0 else 0

    def _inputs(self, plan: StepPlan) -> StepInputs:
        first, count = plan.first.tolist(), plan.count.tolist()
        prefills = range(plan.num_decodes, len(plan.requests))
        values = [self.streams[plan.requests[row].id].values(first[row], count[row]) for row in prefills]
        joined = [self.streams[request.id] for request in plan.joined]
        for stream in joined:
            self._by_slot[stream.request.slot] = stream
        setups = [_setup(stream) for stream in joined]
        return StepInputs(np.concatenate(values) if values else np.empty(0, np.int32), setups)

    def _step_masks(self, plan: StepPlan) -> StepMasks | None:
        """The masks of a plan's samples; after `_inputs`, which notes the streams that join."""
        if not self._masks.streams:
            return None
        sampling = plan.slots[plan.samples]
        places = np.flatnonzero(self.scheduler.slots.constrained[sampling])
        if not len(places):
            return None
        return StepMasks(places, self._masks.take([self._by_slot[slot] for slot in sampling[places].tolist()]))

    def _take_refusals(self) -> list[TokenEvent]:
        """Requests that the scheduler would rather not begin, as they could not keep their promise."""
        refused = [TokenEvent(self.streams.pop(request.id), None, "refused") for request in self.scheduler.refused]
        for event in refused:
            self._masks.drop(event.stream)
        self.scheduler.refused.clear()
        return refused

    def _take_in(self) -> list[TokenEvent]:
        plan, pending, times = self._in_flight[0]
        with self._all_or_nothing():
            filled = self._hash_filled(plan)  # while the device computes: the values are known, and may be many
        try:
            result = pending.result()  # an interrupt while waiting here loses nothing: the step stays in flight
        except Exception:
            self._fail()
            raise
        began = self.clock()
        with self._all_or_nothing():
            self._in_flight.popleft()
            outcome = Outcome(filled=filled)
            self.last_seconds = result.finished - result.started
            events = self._events(plan, result, outcome)
            self._advance_masks(events)
            record = self.scheduler.commit(plan, outcome, result.started, result.finished)
            record.host = times._replace(commit=self.clock() - began)
            self.on_record(record)
            for request, _ in outcome.finished:
                self._masks.drop(self.streams.pop(request.id))
        return events

    def _events(self, plan: StepPlan, result: StepResult, outcome: Outcome) -> list[TokenEvent]:
        """Appends sampled tokens to their streams and notices who is done."""
        events = []
        for row, found in result.prompt_logprobs.items():
            if plan.requests[row].state is not State.FINISHED:
                stream = self.streams[plan.requests[row].id]
                first = int(plan.first[row])
                events.append(TokenEvent(stream, None, None, prompt_logprobs=found, prompt_first=first))
        # What every request pays for in every step: a look-up by slot, an append, a tuple made the short way. Ends
        # and log probabilities are put in afterwards, where there are any.
        by_slot, make = self._by_slot, tuple.__new__
        rows, tokens = np.flatnonzero(plan.samples), result.tokens
        streams = [by_slot[slot] for slot in plan.slots[rows].tolist()]
        if None in streams:  # aborted, or ended in the step before: the surplus token is thrown away
            kept = [index for index, stream in enumerate(streams) if stream is not None]
            rows, streams = rows[kept], [streams[index] for index in kept]
            tokens = [tokens[index] for index in kept]
        for stream, token in zip(streams, tokens, strict=True):
            stream.output.append(token)
        first = len(events)
        pairs = zip(streams, tokens, strict=True)
        events += [make(TokenEvent, (stream, token, None, None, None, 0, None)) for stream, token in pairs]
        for index, reason in self._ends(plan.last[rows], streams, tokens):
            events[first + index] = TokenEvent(streams[index], tokens[index], reason)
            outcome.finished.append((streams[index].request, reason))
            by_slot[plan.slots[rows[index]]] = None
        if result.logprobs:
            for index, row in enumerate(rows.tolist(), start=first):
                if row in result.logprobs:
                    events[index] = events[index]._replace(logprobs=result.logprobs[row])
        if result.embeddings:
            for index, row in enumerate(rows.tolist(), start=first):
                if row in result.embeddings:
                    events[index] = events[index]._replace(embedding=result.embeddings[row])
        return events

    def _advance_masks(self, events: list[TokenEvent]) -> None:
        """Begins the masks behind a step's tokens, in the background."""
        if self._masks.streams:
            for stream, token, reason, *_ in events:
                if stream.grammar is not None and token is not None and reason is None:
                    self._masks.advance(stream, token)

    def _ends(self, last: NDArray[np.bool_], streams: list[Stream], tokens: list[int]) -> list[tuple[int, str]]:
        """Which of these streams end with the token they got, and why."""
        ends = dict.fromkeys(np.flatnonzero(last).tolist(), "length")
        if not self._stop_ids.isdisjoint(tokens):
            for index, (stream, token) in enumerate(zip(streams, tokens, strict=True)):
                # A grammar's end cannot be put off.
                least = stream.params.min_tokens if stream.grammar is None else 0
                if token in stream.stop_ids and len(stream.output) >= least:
                    ends[index] = "stop"
        return sorted(ends.items())

    def _hash_filled(self, plan: StepPlan) -> list[Request]:
        """Whose blocks a step fills, hashed; a second time, after an interrupt, there is nothing to hash."""
        size = self.scheduler.block_size
        end = plan.first + plan.count
        filled = []
        for row in np.flatnonzero(end // size > plan.first // size).tolist():
            request = plan.requests[row]
            if request.state is not State.FINISHED:
                self.streams[request.id].hash_full_blocks(int(end[row]), size)
                filled.append(request)
        return filled

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
                    self._in_flight.popleft().pending.result()
        finally:  # a second Ctrl-C must not leave the books half-written
            for stream in self.streams.values():
                request = stream.request
                request.state, request.finish_reason, request.finished = State.FINISHED, "error", self.clock()
                request.slot = -1
            self.streams.clear()
            self._by_slot = [None] * len(self._by_slot)
            self._masks.clear()
            self.scheduler.reset()


def _setup(stream: Stream) -> SlotSetup:
    request: Request = stream.request
    stop_ids = tuple(stream.stop_ids) if stream.grammar is None else ()  # of a grammar, they are left out of the masks
    return SlotSetup(
        request.slot,
        stream.params,
        stream.seed,
        stream.prompt,
        np.array(stream.output, np.int32),
        stop_ids,
    )
