"""Plays hand-made requests against a scheduler in virtual time, one step in flight, with an exact cost model."""

from collections import deque

import numpy as np

from tests.smooth import SMOOTH
from weft.core import CostModel, Outcome, Plan, Request, Scheduler, State, slo

PROFILE = SMOOTH
COST = PROFILE.coefficients


def exact_scheduler(*, tokens: int = 16_384, num_blocks: int = 200_000, seqs: int = 1024) -> Scheduler:
    policy = slo(CostModel(COST, spread=0.0), tokens)
    return Scheduler(policy=policy, num_blocks=num_blocks, block_size=16, max_num_seqs=seqs)


class Drive:
    def __init__(self, scheduler: Scheduler, requests: list[Request], horizon: float = 1e9) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.refused: list[str] = []
        self.preemptions = 0
        self._free = 0.0
        self._coming = deque(sorted(requests, key=lambda request: request.arrival))
        self._in_flight: deque[tuple[Plan, float, float]] = deque()
        while self._turn() and self.now < horizon:
            pass

    def _turn(self) -> bool:
        while self._coming and self._coming[0].arrival <= self.now:
            self.scheduler.add(self._coming.popleft())
        plan = self.scheduler.plan(self.now)
        if plan.batch is not None:
            step = self.scheduler.steps_in_flight[-1]
            started = max(self.now, self._free)
            self._free = started + COST.predict(plan.batch.shape)
            self._in_flight.append((plan, started, self._free))
            self.preemptions += len(step.preempted)
        self.refused += [request.id for request in plan.refused]
        if len(self._in_flight) > 1 or (plan.batch is None and self._in_flight):
            self._take_in(*self._in_flight.popleft())
        elif plan.batch is None:
            if not self._coming:
                return False
            self.now = max(self.now, self._coming[0].arrival)
        return True

    def _take_in(self, plan: Plan, started: float, finished: float) -> None:
        self.now = finished
        assert plan.batch is not None
        requests = self.scheduler.steps_in_flight[0].requests
        done = [requests[row] for row in np.flatnonzero(plan.may_be_last).tolist()]
        outcome = Outcome(finished=[(request, "length") for request in done if request.state is not State.FINISHED])
        self.scheduler.commit(plan.batch, outcome, started, finished)


def ttft(request: Request) -> float:
    assert request.first_token is not None, f"{request.id} got no first token"
    return request.first_token - request.arrival
