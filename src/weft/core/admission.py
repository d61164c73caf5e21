"""Admission: who is better refused at once, before anything is computed for it, and who may start now."""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from weft.core.budget import Allowance, StepLoad, least_step
from weft.core.cost import CostModel, StepShape
from weft.core.request import Request

MEMORY = 30.0  # seconds over which the load is averaged
QUIET = 0.25  # load up to which a step may be cut short for any first token; above,
WORTH = 0.5  # only where that costs no more than this share of the request's own work
MOST_LOAD = 0.85  # more than this is not believed


class Prefill(NamedTuple):
    """A prompt, or what is left of one."""

    request: Request
    first: int  # tokens that are computed or cached
    left: int  # tokens to compute


class Admission(Protocol):
    def screen(self, newcomer: Request, prefills: Callable[[], list[Prefill]], load: StepLoad) -> bool:
        """Whether a newcomer, which is among the `prefills` (in order), should be kept; False refuses it."""
        ...

    def is_hopeless(self, prefill: Prefill, load: StepLoad) -> bool:
        """Whether a request that has not started could not keep its promise even if it were the next."""
        ...

    def may_join(self, after: StepShape, gap: float) -> bool:
        """Whether a prefill may start, given the decode step that it will later be part of."""
        ...


class Everybody:
    """Nobody is refused, however long the queue."""

    def screen(self, newcomer: Request, prefills: Callable[[], list[Prefill]], load: StepLoad) -> bool:
        return True

    def is_hopeless(self, prefill: Prefill, load: StepLoad) -> bool:
        return False

    def may_join(self, after: StepShape, gap: float) -> bool:
        return True


class PromiseKeepers:
    """Those who can be promised their first token in time without breaking an earlier promise."""

    def __init__(self, cost: CostModel, allowance: Allowance) -> None:
        self.cost = cost
        self.allowance = allowance
        self._loads = _Loads()

    def screen(self, newcomer: Request, prefills: Callable[[], list[Prefill]], load: StepLoad) -> bool:
        """Walks the queue as it would be served if nothing else arrived, and asks who would come too late.

        Each prefill runs at the pace that decodes leave it; when it is done it decodes itself and slows the next ones.
        None of those who decode is assumed to end, so the walk errs on the late side.
        """
        if newcomer.batch or newcomer.due == math.inf:
            return True  # it is promised nothing
        cost, allowance = self.cost, self.allowance
        clock = load.start
        decodes, context, gap = load.shape.decodes, float(load.shape.context), load.gap
        self._loads.decay(clock)
        busy = min(self._loads.before(newcomer.tenant), MOST_LOAD)
        work = 0.0
        reached = False
        for request, first, count in prefills():
            reach = first + count  # read by each of its slices at most
            step = allowance.step(cost, decodes, context, gap, reach)
            pace = allowance.pace(cost, decodes, context, gap, reach)
            if pace <= 0:
                newcomer.predicted_ttft = math.inf
                return False
            seconds = cost.coefficients.prefill_seconds(first, count) * cost.bias / pace
            clock += seconds
            context += first + count + decodes * seconds / step  # those who decode write a token a step
            decodes, gap = decodes + 1, min(gap, request.gap_target)
            end = clock + step  # a first token comes at the end of a step, whatever else that step carries
            if end > request.due and allowance.cuts:
                # The step will be cut short for it (see Budget.tighten), which costs the others one step more.
                more = least_step(cost, decodes, context, reach)
                if busy < QUIET or more <= WORTH * seconds:
                    clock += more
                    end = clock
            spare = 0.0
            if request is newcomer:
                reached = True
                request.predicted_ttft = end - request.arrival
                # While it is read others will come with less slack and go before it: as in a queue with priorities,
                # its own work takes 1 / (1 - load) times as long.
                spare = seconds * busy / (1 - busy)
                work = seconds
            if reached and end + spare > request.due and self._minds(request, newcomer):
                return False
        self._loads.add(newcomer.tenant, work)
        return True

    def _minds(self, request: Request, newcomer: Request) -> bool:
        """Whether a newcomer must not make this one late. It may, where that one's tenant loads the device more."""
        if request.batch or request.rank[:2] > newcomer.rank[:2]:
            return False
        return request.tenant == newcomer.tenant or self._loads.of(request.tenant) <= self._loads.of(newcomer.tenant)

    def is_hopeless(self, prefill: Prefill, load: StepLoad) -> bool:
        request, first, count = prefill
        if request.due == math.inf:
            return False
        pace = self.allowance.pace(self.cost, load.shape.decodes, load.shape.context, load.gap, first)
        seconds = self.cost.coefficients.prefill_seconds(first, count) * self.cost.bias
        end = load.start + seconds / pace if pace > 0 else math.inf
        if end <= request.due:
            return False
        request.predicted_ttft = end - request.arrival
        return True

    def may_join(self, after: StepShape, gap: float) -> bool:
        return self.cost.predict(after) * self.cost.decode.margin <= gap


class _Loads:
    """Seconds of prefill work that were accepted in a second, of late, from each tenant."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}
        self._at = 0.0  # seconds on the scheduler's clock

    def decay(self, now: float) -> None:
        factor = math.exp((self._at - now) / MEMORY)
        self._at = now
        self._of = {tenant: load * factor for tenant, load in self._of.items() if load * factor > 1e-9}

    def add(self, tenant: str, seconds: float) -> None:
        self._of[tenant] = self.of(tenant) + seconds / MEMORY

    def of(self, tenant: str) -> float:
        return self._of.get(tenant, 0.0)

    def before(self, tenant: str) -> float:
        """The load that a tenant's next request meets: others count up to its own, since who got less goes first."""
        own = self.of(tenant)
        return sum(min(load, own) for load in self._of.values())
