"""StepLoop: plans a step, runs it, commits its result. The same loop serves and simulates. Imports no torch."""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from weft.core import HostTimes, Outcome, Plan, Request, Scheduler, StepBatch, StepRecord
from weft.engine.executor import Executor, PendingStep, StepInputs, StepMasks, StepResult
from weft.engine.sequence import Sequence
from weft.engine.sequence_table import SequenceTable, TokenEvent

# Before a plan, how long to wait for new grammar masks, as a share of the last step's time. Most masks take 50 us, and
# the next plan may be due before that. During the wait, the device computes the step in flight.
MASK_SHARE = 1 / 8
IDLE_WAIT = 0.001  # seconds to wait for a mask when there is no other work; short: the caller may have new requests

Event = TypeVar("Event")


class RequestTable(Protocol[Event]):
    """What StepLoop calls to get the inputs of a step, and to hand over its result.

    SequenceTable implements it for serving, and the simulator's TraceTable without token ids.
    """

    def wait_for_new_masks(self, seconds: float) -> bool: ...
    def wait_for_a_mask(self, seconds: float) -> None: ...
    def released(self) -> list[Request]: ...
    def inputs(self, batch: StepBatch, new_requests: list[Request]) -> StepInputs: ...
    def masks(self, batch: StepBatch) -> StepMasks | None: ...
    def refuse(self, requests: list[Request]) -> list[Event]: ...
    def hash_filled(self, batch: StepBatch) -> list[Request]: ...
    def process_result(self, plan: Plan, result: StepResult, outcome: Outcome) -> list[Event]: ...
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
    """Drives one scheduler and one executor: the caller calls `step` as long as `has_work`.

    `depth` steps (0 or 1) are in flight while the next is planned.
    """

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
        self._early_events: list[Event] = []  # events that the next `step` returns first
        self._all_or_nothing = _AllOrNothing(self._fail)
        self.last_seconds = 0.0  # device time of the last step
        self._returned_at: float | None = None  # when the last `step` call returned; None: there was no work left

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight or self._early_events) or self.scheduler.has_work

    def step(self) -> list[Event]:
        """Submits the next step if there is one, then commits the oldest step if more than `depth` are in flight.

        With nothing to submit, the oldest step in flight is committed. Returns the events since the last call.
        """
        while len(self._in_flight) > self.depth:  # more than `depth` remain only if Ctrl-C interrupted an earlier call
            self._early_events += self._finish_oldest_step()
        began = self.clock()
        outside = 0.0 if self._returned_at is None else began - self._returned_at
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
                self._early_events += self.table.refuse(plan.refused)
        finishes_step = len(self._in_flight) > self.depth or (batch is None and len(self._in_flight) > 0)
        if batch is None and not finishes_step:
            self.table.wait_for_a_mask(IDLE_WAIT)
        events = self._finish_oldest_step() if finishes_step else []
        early, self._early_events = self._early_events, []  # only now: Ctrl-C in the wait above must not lose them
        self._returned_at = self.clock() if self.has_work else None
        return early + events

    def discard_in_flight(self) -> None:
        """Commits the steps in flight and plans no more. Their events are lost: end or abort the sequences first."""
        while self._in_flight:
            self._finish_oldest_step()

    def close(self) -> None:
        """Closes the executor and stops the threads. No request may be added afterwards."""
        self.executor.close()
        self.table.close()

    def _finish_oldest_step(self) -> list[Event]:
        """Waits for the oldest step in flight and commits it. Returns its events."""
        plan, pending, times = self._in_flight[0]
        assert plan.batch is not None, "only batches are in flight"
        with self._all_or_nothing:
            # Now, while the device still computes: there may be many tokens to hash. From the scheduler's copy of the
            # batch, where positions are corrected if the step before did not accept all tokens.
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
            events = self.table.process_result(plan, result, outcome)
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
    """The loop that serves: a StepLoop with a SequenceTable."""

    table: SequenceTable

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        depth: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        on_record: Callable[[StepRecord], None] = lambda record: None,
    ) -> None:
        super().__init__(scheduler, executor, SequenceTable(scheduler), depth=depth, clock=clock, on_record=on_record)

    @property
    def sequences(self) -> dict[str, Sequence]:
        """Streams that have not ended, by the id of their request."""
        return self.table.sequences

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence.request)
        self.table.add(sequence)

    def abort(self, sequence: Sequence, reason: str = "abort") -> None:
        """Ends a sequence now. No later event names it. Does nothing if the sequence has ended."""
        if self.table.remove(sequence):
            self.scheduler.abort(sequence.request, reason, self.clock())

    def num_computed_tokens(self, sequence: Sequence) -> int:
        """Tokens of a sequence with computed keys and values, for progress displays."""
        slot = sequence.request.slot
        return int(self.scheduler.slots.computed[slot]) if slot >= 0 else 0
