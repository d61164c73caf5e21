"""The engine loop: plan a step, run it, commit its result. The same loop serves and simulates. Imports no torch."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from weft.core import HostTimes, Outcome, Plan, Request, Scheduler, StepBatch, StepRecord
from weft.engine.executor import Executor, PendingStep, StepInputs, StepMasks, StepResult
from weft.engine.stream import Stream
from weft.engine.streams import StreamTable, TokenEvent

# Before a plan, how long to wait for new grammar masks, as a share of the last step's time. Most masks take 50 us, and
# the next plan may be due before that. During the wait, the device computes the step in flight.
MASK_SHARE = 1 / 8
IDLE_WAIT = 0.001  # seconds to wait for a mask when there is no other work; short: the caller may have new requests

Event = TypeVar("Event")


class RequestTable(Protocol[Event]):
    """What a loop needs from the owner of its requests' token values. See StreamTable, which serves."""

    def wait_for_new_masks(self, seconds: float) -> bool: ...
    def wait_for_a_mask(self, seconds: float) -> None: ...
    def released(self) -> list[Request]: ...
    def inputs(self, batch: StepBatch, new_requests: list[Request]) -> StepInputs: ...
    def masks(self, batch: StepBatch) -> StepMasks | None: ...
    def refuse(self, requests: list[Request]) -> list[Event]: ...
    def hash_filled(self, batch: StepBatch) -> list[Request]: ...
    def take(self, plan: Plan, result: StepResult, outcome: Outcome) -> list[Event]: ...
    def forget(self, finished: list[tuple[Request, str]]) -> None: ...
    def fail(self, now: float) -> None: ...
    def close(self) -> None: ...


class _InFlight(NamedTuple):
    plan: Plan
    pending: PendingStep
    times: HostTimes  # without the commit, which comes later


class _AllOrNothing:
    """Calls `fail` if the body is interrupted by an error or Ctrl-C: its state may be half-updated.

    A class, because a generator would take three times as long, and every step enters it three times."""

    def __init__(self, fail: Callable[[], None]) -> None:
        self._fail = fail

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self._fail()


class StepLoop(Generic[Event]):
    """Drives one scheduler and one executor. `depth` steps (0 or 1) are in flight while the next is planned."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        table: RequestTable[Event],
        *,
        depth: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        on_record: Callable[[StepRecord], None] = lambda record: None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.table = table
        self.depth = depth
        self.clock = clock
        self.on_record = on_record
        self._in_flight: deque[_InFlight] = deque()
        self._held: list[Event] = []  # returned by the next `step`
        self._all_or_nothing = _AllOrNothing(self._fail)
        self.last_seconds = 0.0  # device time of the last step
        self._left_at: float | None = None  # when the last `step` call returned; None: there was no work left

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self._held) or self.scheduler.has_work

    def step(self) -> list[Event]:
        """Submits the next step if there is one, then commits the oldest step if more than `depth` are in flight.

        With nothing to submit, the oldest step in flight is committed. Returns the events since the last call.
        """
        while len(self._in_flight) > self.depth:  # Ctrl-C interrupted an earlier wait for one of them
            self._held += self._take_in()
        began = self.clock()
        outside = 0.0 if self._left_at is None else began - self._left_at
        if self.table.wait_for_new_masks(MASK_SHARE * self.last_seconds if self._in_flight else 0.0):
            began = self.clock()  # waiting does not count as host time
        with self._all_or_nothing:
            for request in self.table.released():
                self.scheduler.release(request)
            plan = self.scheduler.plan(began)
            batch = plan.batch
            if batch is not None:
                planned = self.clock()
                inputs = self.table.inputs(batch, plan.new_requests)
                pending = self.executor.submit(batch, inputs, self.table.masks(batch))
                times = HostTimes(planned - began, self.clock() - planned, 0.0, outside)
                self._in_flight.append(_InFlight(plan, pending, times))
            if plan.refused:
                self._held += self.table.refuse(plan.refused)
        taken = len(self._in_flight) > self.depth or (batch is None and self._in_flight)
        if batch is None and not taken:
            self.table.wait_for_a_mask(IDLE_WAIT)
        events = self._take_in() if taken else []
        held, self._held = self._held, []  # only now: Ctrl-C during the wait above must not lose them
        self._left_at = self.clock() if self.has_work else None
        return held + events

    def drain(self) -> None:
        """Commits the steps in flight without planning more. Their events are lost: end or abort the streams first."""
        while self._in_flight:
            self._take_in()

    def close(self) -> None:
        """Closes the executor and stops the threads. No request may be added afterwards."""
        self.executor.close()
        self.table.close()

    def _take_in(self) -> list[Event]:
        plan, pending, times = self._in_flight[0]
        assert plan.batch is not None, "only batches are in flight"
        with self._all_or_nothing:
            # While the device computes: these may be many tokens. The scheduler's batch has the true positions, if the
            # step before was not accepted in full.
            filled = self.table.hash_filled(self.scheduler.steps_in_flight[0].batch)
        try:
            result = pending.result()  # Ctrl-C here loses nothing: the step stays in flight
        except Exception:
            self._fail()
            raise
        began = self.clock()
        with self._all_or_nothing:
            self._in_flight.popleft()
            outcome = Outcome(filled=filled, accepted=result.accepted)
            self.last_seconds = result.finished - result.started
            events = self.table.take(plan, result, outcome)
            record = self.scheduler.commit(plan.batch, outcome, result.started, result.finished)
            record.host = times._replace(commit=self.clock() - began)
            self.on_record(record)
            self.table.forget(outcome.finished)
        return events

    def _fail(self) -> None:
        """Ends every request with "error" and resets the scheduler. The contents of all blocks are forgotten."""
        try:
            while self._in_flight:
                with contextlib.suppress(Exception):
                    self._in_flight.popleft().pending.result()
        finally:  # a second Ctrl-C must not leave the state half-reset
            self.table.fail(self.clock())
            self.scheduler.reset()


class Loop(StepLoop[TokenEvent]):
    """The loop that serves: its requests are streams of tokens."""

    table: StreamTable

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        depth: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        on_record: Callable[[StepRecord], None] = lambda record: None,
    ) -> None:
        super().__init__(scheduler, executor, StreamTable(scheduler), depth=depth, clock=clock, on_record=on_record)

    @property
    def streams(self) -> dict[str, Stream]:
        """Streams that have not ended, by the id of their request."""
        return self.table.streams

    def add(self, stream: Stream) -> None:
        self.scheduler.add(stream.request)
        self.table.add(stream)

    def abort(self, stream: Stream, reason: str = "abort") -> None:
        """Ends a stream now. No later event names it. Does nothing if the stream has ended."""
        if self.table.remove(stream):
            self.scheduler.abort(stream.request, reason, self.clock())

    def prefilled(self, stream: Stream) -> int:
        """Number of tokens of a stream with computed keys and values, for progress displays."""
        slot = stream.request.slot
        return int(self.scheduler.slots.computed[slot]) if slot >= 0 else 0
