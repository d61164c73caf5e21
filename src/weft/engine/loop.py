"""The engine loop: plan a step, run it, commit its result. Owns the token values and the streams. Imports no torch."""

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

# Before a plan, how long to wait for new grammar masks, as a share of the last step's time. Most masks take 50 us, and
# the next plan may be due before that. During the wait, the device computes the step in flight.
MASK_SHARE = 1 / 8
IDLE_WAIT = 0.001  # seconds to wait for a mask when there is no other work; short: the caller may have new requests


class TokenEvent(NamedTuple):
    """What one step produced for one request."""

    stream: Stream
    token: int | None  # None: the request was refused, or only prompt log probabilities arrived
    finish_reason: str | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # for positions prompt_first + 1, prompt_first + 2, ...
    prompt_first: int = 0
    embedding: NDArray[np.float32] | None = None  # only of pooling requests


class _InFlight(NamedTuple):
    plan: StepPlan
    pending: PendingStep
    times: HostTimes  # without the commit, which comes later


class Loop:
    """Drives one scheduler and one executor. `depth` steps (0 or 1) are in flight while the next is planned."""

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
        self._held: list[TokenEvent] = []  # returned by the next `step`
        self._by_slot: list[Any] = [None] * scheduler.slots.size  # by slot: the Stream that gets its tokens, or None
        self._masks = MaskBuilder()
        self.last_seconds = 0.0  # device time of the last step
        self._stop_ids: set[int] = set()  # of all streams so far; most steps sample none of them
        self._left_at: float | None = None  # when the last `step` call returned; None: there was no work left

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
        """Ends a stream now. No later event names it. Does nothing if the stream has ended."""
        if self.streams.pop(stream.request.id, None) is not None:
            if stream.request.slot >= 0:
                self._by_slot[stream.request.slot] = None
            self._masks.drop(stream)
            self.scheduler.abort(stream.request, reason, self.clock())

    def step(self) -> list[TokenEvent]:
        """Submits the next step if there is one, then commits the oldest step if more than `depth` are in flight.

        With nothing to submit, the oldest step in flight is committed. Returns the events since the last call.
        """
        while len(self._in_flight) > self.depth:  # Ctrl-C interrupted an earlier wait for one of them
            self._held += self._take_in()
        began = self.clock()
        outside = 0.0 if self._left_at is None else began - self._left_at
        if self._masks.wait_for_new(MASK_SHARE * self.last_seconds if self._in_flight else 0.0):
            began = self.clock()  # waiting does not count as host time
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
        held, self._held = self._held, []  # only now: Ctrl-C during the wait above must not lose them
        self._left_at = self.clock() if self.has_work else None
        return held + events

    def drain(self) -> None:
        """Commits the steps in flight without planning more. Their events are lost: end or abort the streams first."""
        while self._in_flight:
            self._take_in()

    def close(self) -> None:
        """Closes the executor and stops the threads. No stream may be added afterwards."""
        self.executor.close()
        self._masks.close()

    def prefilled(self, stream: Stream) -> int:
        """Number of tokens of a stream with computed keys and values, for progress displays."""
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
        """Masks for the rows of a plan that sample. Call `_inputs` first: it registers the streams that join."""
        if not self._masks.streams:
            return None
        sampling = plan.slots[plan.samples]
        places = np.flatnonzero(self.scheduler.slots.constrained[sampling])
        if not len(places):
            return None
        return StepMasks(places, self._masks.take([self._by_slot[slot] for slot in sampling[places].tolist()]))

    def _take_refusals(self) -> list[TokenEvent]:
        """Events of the requests that the scheduler refused because it could not meet their targets."""
        refused = [TokenEvent(self.streams.pop(request.id), None, "refused") for request in self.scheduler.refused]
        for event in refused:
            self._masks.drop(event.stream)
        self.scheduler.refused.clear()
        return refused

    def _take_in(self) -> list[TokenEvent]:
        plan, pending, times = self._in_flight[0]
        with self._all_or_nothing():
            filled = self._hash_filled(plan)  # while the device computes: the tokens are known, and may be many
        try:
            result = pending.result()  # Ctrl-C here loses nothing: the step stays in flight
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
        """Appends sampled tokens to their streams, adds finished requests to `outcome` and returns the events."""
        events = []
        for row, found in result.prompt_logprobs.items():
            if plan.requests[row].state is not State.FINISHED:
                stream = self.streams[plan.requests[row].id]
                first = int(plan.first[row])
                events.append(TokenEvent(stream, None, None, prompt_logprobs=found, prompt_first=first))
        # Hot path, run for every request in every step: a look-up by slot, an append, a tuple built directly.
        # Finish reasons and log probabilities are rare and added afterwards.
        by_slot, make = self._by_slot, tuple.__new__
        rows, tokens = np.flatnonzero(plan.samples), result.tokens
        streams = [by_slot[slot] for slot in plan.slots[rows].tolist()]
        if None in streams:  # aborted, or finished in the step before: drop the surplus token
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
        """Starts computing the next mask of each stream with a grammar, in the background."""
        if self._masks.streams:
            for stream, token, reason, *_ in events:
                if stream.grammar is not None and token is not None and reason is None:
                    self._masks.advance(stream, token)

    def _ends(self, last: NDArray[np.bool_], streams: list[Stream], tokens: list[int]) -> list[tuple[int, str]]:
        """(index, reason) of the streams that finish with their new token."""
        ends = dict.fromkeys(np.flatnonzero(last).tolist(), "length")
        if not self._stop_ids.isdisjoint(tokens):
            for index, (stream, token) in enumerate(zip(streams, tokens, strict=True)):
                # min_tokens cannot delay the end of a grammar.
                least = stream.params.min_tokens if stream.grammar is None else 0
                if token in stream.stop_ids and len(stream.output) >= least:
                    ends[index] = "stop"
        return sorted(ends.items())

    def _hash_filled(self, plan: StepPlan) -> list[Request]:
        """Hashes the blocks that a step fills; returns their requests. A second call, after Ctrl-C, hashes nothing."""
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
        """Calls `_fail` if the body is interrupted by an error or Ctrl-C: its state may be half-updated."""
        try:
            yield
        except BaseException:
            self._fail()
            raise

    def _fail(self) -> None:
        """Ends every stream with "error" and resets the scheduler. The contents of all blocks are forgotten."""
        try:
            while self._in_flight:
                with contextlib.suppress(Exception):
                    self._in_flight.popleft().pending.result()
        finally:  # a second Ctrl-C must not leave the state half-reset
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
    stop_ids = tuple(stream.stop_ids) if stream.grammar is None else ()  # with a grammar, the masks exclude them
    return SlotSetup(
        request.slot,
        stream.params,
        stream.seed,
        stream.prompt,
        np.array(stream.output, np.int32),
        stop_ids,
    )
