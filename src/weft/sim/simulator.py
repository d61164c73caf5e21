"""Plays a trace against the real loop and scheduler, on a simulated executor with a virtual clock.

The clock jumps from step to step. `Truth` gives the time of a step: the profile's coefficients, optionally with noise
and a bias that the scheduler does not know.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Never

import numpy as np
from numpy.typing import NDArray

from weft.core import HostCost, Outcome, Plan, Promise, Request, Scheduler, StepBatch, StepRecord, StepShape, Targets
from weft.core.coefficients import Coefficients
from weft.engine.executor import StepInputs, StepResult
from weft.engine.loop import StepLoop
from weft.engine.residuals import Heat, Residuals
from weft.engine.simulated import SimulatedExecutor, VirtualClock
from weft.sim.traces import MOONCAKE_BLOCK, Arrival, Trace

NO_INPUTS = StepInputs(np.empty(0, np.int32), [])


@dataclass(frozen=True)
class Truth:
    """How long a step really takes."""

    coefficients: Coefficients
    bias: float = 0.0  # 0.1: every step takes 10% longer than the scheduler's cost model predicts
    noise: float = 0.0  # standard deviation of a random factor with mean 1
    seed: int = 0
    residuals: Residuals | None = None  # how the device differs from the coefficients; they include the noise

    def expected(self, shape: StepShape, heat: float) -> float:
        """Seconds of a step without noise."""
        seconds = self.coefficients.predict(shape) * (1 + self.bias)
        if self.residuals is None:
            return seconds
        return seconds * math.exp(self.residuals.expected(shape, heat))

    def clock(self) -> Callable[[StepShape, float], float]:
        """Returns a function: (shape of a step, idle seconds of the device before it) to seconds of the step."""
        rng = random.Random(self.seed)
        heat = Heat(self.coefficients)

        def seconds(shape: StepShape, idle: float) -> float:
            noise = self.noise if self.residuals is None else self.residuals.noise(shape)
            factor = max(0.5, rng.gauss(1.0, noise)) if noise else 1.0
            if self.residuals is None:
                return self.expected(shape, 0.0) * factor
            heat.note_idle(idle)
            duration = self.expected(shape, heat.share) * factor
            heat.note_step(shape, duration)
            return duration

        return seconds


@dataclass
class Played:
    """Results of a trace: arrays with one entry per request, in order of arrival, or one per gap."""

    span: float  # seconds of arrivals
    ended: float  # when the last step ended and its tokens were delivered
    arrival: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    ttft: NDArray[np.float64]  # infinite: no first token
    finished: NDArray[np.float64]  # infinite: never finished
    refused: NDArray[np.bool_]
    promised: NDArray[np.bool_]  # False: no TTFT target (flex class, or even an idle machine would have missed it)
    gap_owner: NDArray[np.int64]  # number of the gap's request
    gaps: NDArray[np.float64]
    steps: int
    prefill_tokens: int
    cached_tokens: int
    preemptions: int


def play(
    trace: Trace,
    scheduler: Scheduler,
    truth: Truth,
    targets: Targets,
    progress: Callable[[int], None] = lambda arrived: None,
    host: HostCost | None = None,
    make_table: "MakeTable | None" = None,
) -> Played:
    """Runs a trace to its end. One step is in flight while the next is planned, as when serving.

    `host` is the host time of steps, in addition to the device's (default: none). `make_table` makes the table of the
    requests (default: a TraceTable).
    """
    host = host or HostCost()
    clock = VirtualClock()
    executor = SimulatedExecutor(clock, truth.clock(), host)
    table = (make_table or TraceTable)(trace, scheduler, targets, clock, host)
    loop = StepLoop(scheduler, executor, table, clock=clock, on_record=table.note_record)
    while True:
        table.add_arrivals()
        calls = executor.calls
        loop.step()
        progress(table.arrived)
        if executor.calls == calls:  # nothing was planned, and nothing was in flight
            if table.arrived == len(trace.arrivals):
                return table.result()
            clock.now = max(clock.now, table.next_known_at)


class TraceTable:
    """The requests of a trace, for a loop in virtual time (a `RequestTable`). Records when tokens reach their clients.

    It keeps numbers in arrays and no token ids, because a day of traffic has millions of tokens.
    """

    def __init__(
        self, trace: Trace, scheduler: Scheduler, targets: Targets, clock: VirtualClock, host: HostCost
    ) -> None:
        self.trace, self.scheduler, self.targets, self.host = trace, scheduler, targets, host
        self.clock = clock
        self.api_free = 0.0  # when the tokens of all earlier steps are delivered
        self.deliveries: deque[tuple[float, float]] = deque(maxlen=4)  # (begin, end) of the last steps' deliveries
        self.arrived = 0
        count = len(trace.arrivals)
        self.index_of: dict[Request, int] = {}
        self.requests: list[Request] = []
        self.ttft = np.full(count, np.inf)
        self.finished = np.full(count, np.inf)
        self.refused = np.zeros(count, np.bool_)
        self.request_of_slot = np.zeros(scheduler.slots.size, np.int64)  # by slot: the request's number
        self.last_token = np.zeros(count)
        self.stops = any(arrival.max_tokens for arrival in trace.arrivals)  # some requests end before max_tokens
        # Output tokens that each request has still to generate.
        self.remaining = np.array([min(a.output_tokens, a.max_tokens or a.output_tokens) for a in trace.arrivals])
        self.gap_owners: list[NDArray[np.int64]] = []
        self.gaps: list[NDArray[np.float64]] = []
        self.steps = self.prefill_tokens = self.cached_tokens = self.preemptions = 0

    def add_arrivals(self) -> None:
        """Queues the requests that the engine has received by now."""
        arrivals = self.trace.arrivals
        while self.arrived < len(arrivals) and (known := self.next_known_at) <= self.clock.now:
            request = _request(self.arrived, arrivals[self.arrived], self.targets, self.scheduler.block_size)
            self.index_of[request] = self.arrived
            self.requests.append(request)
            self.scheduler.add(request)
            self.arrived += 1
            self.clock.now += self.host.arrival
            self.note_added(request, known)

    def note_added(self, request: Request, known: float) -> None:
        """The scheduler was given a request, which could be received from `known` on. For subclasses."""

    @property
    def next_known_at(self) -> float:
        """When the engine receives the next request. The API process first delivers tokens of earlier steps."""
        sent = self.trace.arrivals[self.arrived].time
        known = sent + self.host.request
        for begun, ended in self.deliveries:
            if begun < known and ended > sent:
                known += ended - max(begun, sent)
        return known

    def inputs(self, batch: StepBatch, new_requests: list[Request]) -> StepInputs:
        for request in new_requests:
            self.request_of_slot[request.slot] = self.index_of[request]
        return NO_INPUTS

    def refuse(self, requests: list[Request]) -> list[Never]:
        for request in requests:
            self.refused[self.index_of[request]] = True
        return []

    def process_result(self, plan: Plan, result: StepResult, outcome: Outcome) -> list[Never]:
        assert plan.batch is not None, "only a batch has a result"
        batch = plan.batch
        ended = self._ended(batch, plan.may_be_last)
        outcome.finished = [(self.requests[number], "length") for number in ended.tolist()]
        self._note_tokens(batch)
        self.finished[ended] = self.last_token[ended]
        return []

    def note_record(self, record: StepRecord) -> None:
        self.steps += 1
        self.prefill_tokens += record.prefill_tokens
        self.cached_tokens += record.cached_tokens
        self.preemptions += record.preemptions

    # A trace has no token ids, so nothing is hashed, masked or forgotten.

    def hash_filled(self, batch: StepBatch) -> list[Request]:
        return []

    def masks(self, batch: StepBatch) -> None:
        return None

    def released(self) -> list[Request]:
        return []

    def wait_for_new_masks(self, seconds: float) -> bool:
        return False

    def wait_for_a_mask(self, seconds: float) -> None:
        pass

    def forget(self, finished: list[tuple[Request, str]]) -> None:
        pass

    def fail(self, now: float) -> None:
        pass

    def close(self) -> None:
        pass

    def _ended(self, batch: StepBatch, may_be_last: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Numbers of the requests that finish in this step."""
        owners = self.request_of_slot[batch.slots[batch.is_sampled if self.stops else may_be_last]]
        ended: NDArray[np.int64] = owners[self.remaining[owners] == 1] if self.stops else owners
        return ended

    def _note_tokens(self, batch: StepBatch) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Records token times. Tokens reach their clients one by one, after the tokens of the previous step.

        Returns the numbers of the requests that got a token, and when.
        """
        owners = self.request_of_slot[batch.slots[batch.is_sampled]]
        if self.stops:  # drop tokens of requests that finished while this step was in flight
            owners = owners[self.remaining[owners] > 0]
            self.remaining[owners] -= 1
        begun = max(self.clock.now, self.api_free)
        times = begun + self.host.token * np.arange(1, len(owners) + 1, dtype=np.float64)
        self.api_free = begun + self.host.delivery_seconds(len(owners))
        self.deliveries.append((begun, self.api_free))
        is_first = np.isinf(self.ttft[owners])
        for index in np.flatnonzero(is_first).tolist():
            number = owners[index]
            self.ttft[number] = times[index] - self.requests[number].arrival
        later, later_times = (owners[~is_first], times[~is_first]) if is_first.any() else (owners, times)
        self.gap_owners.append(later)
        self.gaps.append(later_times - self.last_token[later])
        self.last_token[owners] = times
        return owners, times

    def result(self) -> Played:
        arrivals = self.trace.arrivals
        return Played(
            span=self.trace.span,
            ended=max(self.clock.now, self.api_free),
            arrival=np.array([a.time for a in arrivals]),
            prompt_tokens=np.array([a.prompt_tokens for a in arrivals]),
            output_tokens=np.array([a.output_tokens for a in arrivals]),
            ttft=self.ttft,
            finished=self.finished,
            refused=self.refused,
            promised=np.array([request.due < math.inf for request in self.requests], np.bool_),
            gap_owner=np.concatenate([np.empty(0, np.int64), *self.gap_owners]),
            gaps=np.concatenate([np.empty(0), *self.gaps]),
            steps=self.steps,
            prefill_tokens=self.prefill_tokens,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
        )


MakeTable = Callable[[Trace, Scheduler, Targets, VirtualClock, HostCost], TraceTable]


def _request(number: int, arrival: Arrival, targets: Targets, block_size: int) -> Request:
    per_id = MOONCAKE_BLOCK // block_size
    whole = arrival.prefix_ids[: arrival.prompt_tokens // MOONCAKE_BLOCK]  # a partial tail is not cached
    hashes: list[Hashable] = [name * per_id + block for name in whole for block in range(per_id)]
    promise = Promise() if arrival.flex else targets.promise(arrival.prompt_tokens)
    return Request(
        id=f"{number:06d}",
        prompt_tokens=arrival.prompt_tokens,
        max_tokens=arrival.max_tokens or arrival.output_tokens,
        arrival=arrival.time,
        hashes=hashes,
        tenant=arrival.tenant,
        flex=arrival.flex,
        gap_target=promise.gap,
        gap_source=promise.gap_source,
        ttft_target=promise.ttft,
        ttft_source=promise.ttft_source,
    )
