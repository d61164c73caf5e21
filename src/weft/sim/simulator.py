"""Plays a trace against the real scheduler, under a virtual clock.

The clock jumps from step to step. `Truth` gives the time of a step: the profile's coefficients, optionally with noise
and a bias that the scheduler does not know.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core import HostCost, Outcome, Promise, Request, Scheduler, StepPlan, StepShape, Targets
from weft.core.cost import Coefficients
from weft.core.host import IDLE, WAKING
from weft.core.residuals import Heat, Residuals
from weft.sim.traces import MOONCAKE_BLOCK, Arrival, Trace


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
            heat.rest(idle)
            taken = self.expected(shape, heat.share) * factor
            heat.run(shape, taken)
            return taken

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
    promised: NDArray[np.bool_]  # False: no TTFT target (batch, or even an idle machine would have missed it)
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
) -> Played:
    """Runs a trace to its end. One step is in flight while the next is planned, as when serving.

    `host` is the host time of steps, in addition to the device's (default: none).
    """
    game = _Game(trace, scheduler, truth, targets, host or HostCost())
    while game.turn():
        progress(game.arrived)
    return game.result()


class _Game:
    def __init__(self, trace: Trace, scheduler: Scheduler, truth: Truth, targets: Targets, host: HostCost) -> None:
        self.trace, self.scheduler, self.targets, self.host = trace, scheduler, targets, host
        self.seconds = truth.clock()
        self.now = 0.0
        self.device_free = 0.0
        self.awake = WAKING  # steps that start before this time take longer, because of an idle period before
        self.api_free = 0.0  # when the tokens of all earlier steps are delivered
        self.deliveries: deque[tuple[float, float]] = deque(maxlen=4)  # (begin, end) of the last steps' deliveries
        self.arrived = 0
        self.in_flight: deque[tuple[StepPlan, float, float]] = deque()
        count = len(trace.arrivals)
        self.number: dict[Request, int] = {}
        self.requests: list[Request] = []
        self.ttft = np.full(count, np.inf)
        self.finished = np.full(count, np.inf)
        self.refused = np.zeros(count, np.bool_)
        self.owner = np.zeros(scheduler.slots.size, np.int64)  # by slot: the request's number
        self.last_token = np.zeros(count)
        self.stops = any(arrival.max_tokens for arrival in trace.arrivals)  # some requests end before max_tokens
        # Remaining output tokens of each request.
        self.left = np.array([min(a.output_tokens, a.max_tokens or a.output_tokens) for a in trace.arrivals])
        self.gap_owners: list[NDArray[np.int64]] = []
        self.gaps: list[NDArray[np.float64]] = []
        self.steps = self.prefill_tokens = self.cached_tokens = self.preemptions = 0

    def turn(self) -> bool:
        """Plans a step and commits the oldest step in flight. Returns False when the trace is done."""
        self._admit_arrivals()
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            for request in plan.joined:
                self.owner[request.slot] = self.number[request]
            self.now += self.host.before(len(plan.slots), plan.shape.slices > 0)
            started = max(self.now, self.device_free)
            idle = started - self.device_free
            if idle > IDLE:
                self.awake = started + WAKING
            slow = 1 + self.host.wake if started < self.awake else 1.0
            self.device_free = started + slow * self.seconds(plan.shape, idle)
            self.in_flight.append((plan, started, self.device_free))
        for request in self.scheduler.refused:
            self.refused[self.number[request]] = True
        self.scheduler.refused.clear()
        if len(self.in_flight) > 1 or (plan is None and self.in_flight):
            self._take_in(*self.in_flight.popleft())
        elif plan is None:
            if self.arrived == len(self.trace.arrivals):
                return False
            self.now = max(self.now, self._known_at(self.trace.arrivals[self.arrived].time))
        return True

    def _admit_arrivals(self) -> None:
        arrivals = self.trace.arrivals
        while self.arrived < len(arrivals) and self._known_at(arrivals[self.arrived].time) <= self.now:
            request = _request(self.arrived, arrivals[self.arrived], self.targets, self.scheduler.block_size)
            self.number[request] = self.arrived
            self.requests.append(request)
            self.scheduler.add(request)
            self.arrived += 1
            self.now += self.host.arrival

    def _known_at(self, sent: float) -> float:
        """When the engine receives a request. The process that reads it also delivers tokens, and these go first."""
        known = sent + self.host.request
        for begun, ended in self.deliveries:
            if begun < known and ended > sent:
                known += ended - max(begun, sent)
        return known

    def _take_in(self, plan: StepPlan, started: float, finished: float) -> None:
        self.now = max(self.now, finished) + self.host.commit
        outcome = Outcome(finished=[(plan.requests[row], "length") for row in self._last_rows(plan)])
        self._note_tokens(plan)
        for request, _ in outcome.finished:
            self.finished[self.number[request]] = self.last_token[self.number[request]]
        self.scheduler.commit(plan, outcome, started, finished)
        self.steps += 1
        self.prefill_tokens += plan.num_tokens - plan.num_decodes
        self.cached_tokens += plan.cached_tokens
        self.preemptions += plan.preemptions

    def _last_rows(self, plan: StepPlan) -> list[int]:
        """Rows of the requests that finish in this step."""
        rows = np.flatnonzero(plan.samples if self.stops else plan.last)
        if self.stops:
            rows = rows[self.left[self.owner[plan.slots[rows]]] == 1]
        found: list[int] = rows.tolist()
        return found

    def _note_tokens(self, plan: StepPlan) -> None:
        """Records token times. Tokens reach their clients one by one, after the tokens of the previous step."""
        owners = self.owner[plan.slots[plan.samples]]
        if self.stops:  # drop tokens of requests that finished while this step was in flight
            owners = owners[self.left[owners] > 0]
            self.left[owners] -= 1
        begun = max(self.now, self.api_free)
        times = begun + self.host.token * np.arange(1, len(owners) + 1)
        self.api_free = begun + self.host.delivery(len(owners))
        self.deliveries.append((begun, self.api_free))
        fresh = np.isinf(self.ttft[owners])
        for place in np.flatnonzero(fresh).tolist():
            number = owners[place]
            self.ttft[number] = times[place] - self.requests[number].arrival
        going, came = (owners[~fresh], times[~fresh]) if fresh.any() else (owners, times)
        self.gap_owners.append(going)
        self.gaps.append(came - self.last_token[going])
        self.last_token[owners] = times

    def result(self) -> Played:
        arrivals = self.trace.arrivals
        return Played(
            span=self.trace.span,
            ended=max(self.now, self.api_free),
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


def _request(number: int, arrival: Arrival, targets: Targets, block_size: int) -> Request:
    per_id = MOONCAKE_BLOCK // block_size
    whole = arrival.prefix_ids[: arrival.prompt_tokens // MOONCAKE_BLOCK]  # a partial tail is not cached
    hashes: list[Hashable] = [name * per_id + block for name in whole for block in range(per_id)]
    promise = Promise() if arrival.batch else targets.promise(arrival.prompt_tokens)
    return Request(
        id=f"{number:06d}",
        prompt_tokens=arrival.prompt_tokens,
        max_tokens=arrival.max_tokens or arrival.output_tokens,
        arrival=arrival.time,
        hashes=hashes,
        tenant=arrival.tenant,
        batch=arrival.batch,
        gap_target=promise.gap,
        gap_source=promise.gap_source,
        ttft_target=promise.ttft,
        ttft_source=promise.ttft_source,
    )
