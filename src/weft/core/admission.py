"""Admission: who is better refused at once, before anything is computed for it, and who may start now."""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from weft.core.budget import BATCH_SHARE, Allowance, StepLoad, least_step
from weft.core.cost import CostModel, StepShape, decodes_alone
from weft.core.request import Request, State

MEMORY = 30.0  # seconds over which the load is averaged
QUIET = 0.25  # load up to which a step may be cut short for any first token; above,
WORTH = 0.5  # only where that costs no more than this share of the request's own work
MOST_LOAD = 0.85  # more than this is not believed
HOPE = 2.0  # times as fast as of late memory may come free; who would be late even so is hopeless


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
        None of those who decode is assumed to end before all must have, so the walk errs on the late side.
        """
        if newcomer.batch or newcomer.due == math.inf:
            return True  # it is promised nothing
        self._loads.decay(load.start)
        busy = min(self._loads.before(newcomer.tenant), MOST_LOAD)
        walk = _Walk(self.cost, self.allowance, load)
        work = 0.0
        reached = False
        for prefill in prefills():
            request = prefill.request
            if reached and request.rank[:2] > newcomer.rank[:2]:
                break  # nobody of a lower class is asked
            seconds = walk.serve(prefill)
            if seconds is None:
                if request is newcomer or (reached and request.due < math.inf and self._minds(request, newcomer)):
                    newcomer.predicted_ttft = newcomer.predicted_ttft if reached else math.inf
                    return False
                continue  # it waits for better times, and nobody for it
            end = walk.first_token(request, seconds, busy)
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
        if request.batch or request.rank[:2] > newcomer.rank[:2] or request.first_token is not None:
            return False
        return request.tenant == newcomer.tenant or self._loads.of(request.tenant) <= self._loads.of(newcomer.tenant)

    def is_hopeless(self, prefill: Prefill, load: StepLoad) -> bool:
        request, first, count = prefill
        if request.due == math.inf:
            return False
        pace = self.allowance.pace(self.cost, load.shape.decodes, load.shape.context, load.gap, first)
        seconds = self.cost.coefficients.prefill_seconds(first, count) * self.cost.bias
        wait = memory_wait(request, count, load.free, load.freed) / HOPE
        end = load.start + wait + (seconds / pace if pace > 0 else seconds)  # decodes that fill the step now may end
        if end <= request.due:
            return False
        request.predicted_ttft = end - request.arrival
        return True

    def may_join(self, after: StepShape, gap: float) -> bool:
        return self.cost.predict(after) * self.cost.decode.tail <= gap


class _Walk:
    """The queue as it would be served from now on, one prefill after the other."""

    def __init__(self, cost: CostModel, allowance: Allowance, load: StepLoad) -> None:
        self.cost, self.allowance = cost, allowance
        self.start = self.clock = load.start
        self.decodes, self.context, self.gap = load.shape.decodes, float(load.shape.context), load.gap
        self.crowded = load.crowded
        # Who decodes now must have ended by then; until then none is assumed to.
        self.present = load.shape
        self.drained = load.start + load.longest * load.gap if load.longest else load.start
        self.free, self.freed = load.free, load.freed
        self.step = 0.0  # seconds of the last step of the prompt that was just read
        self.reach = 0  # tokens of context that this step read

    def serve(self, prefill: Prefill) -> float | None:
        """Seconds that it takes to read a prompt at the pace that decodes leave it; None where they leave none.

        When it is read it decodes itself and slows the next ones.
        """
        request, first, count = prefill
        reach = first + count  # read by each of its slices at most
        self._wait_for_memory(request, count)
        if not self._can(request, reach) and self.clock < self.drained < math.inf:
            self._drain()
        if not self._can(request, reach):
            return None
        pace = self._pace(reach) or 1.0  # with nobody decoding it gets on even where a step takes too long
        self.step = self.allowance.step(self.cost, self.decodes, self.context, self.gap, reach)
        c = self.cost.coefficients
        seconds = (c.prefill_seconds(first, count) + c.unfilled_seconds(first, count)) * self.cost.bias / pace
        self.clock += seconds
        self.context += self.decodes * seconds / self.step  # those who decode write a token a step
        if request.max_tokens > 1:
            self.context += reach
            self.decodes, self.gap = self.decodes + 1, min(self.gap, request.gap_target)
        self.reach = reach
        return seconds

    def _wait_for_memory(self, request: Request, count: int) -> None:
        if request.state is State.WAITING:  # what the others need was counted
            self.clock = max(self.clock, self.start + memory_wait(request, count, self.free, self.freed))
            if request.max_tokens > 1 and not request.sibling:
                self.free -= count

    def first_token(self, request: Request, seconds: float, busy: float) -> float:
        """When the prompt that was just read brings its first token: at the end of a step, whatever else that carries.

        The step will be cut short for it if it must (see Budget.tighten), which costs the others one step more.
        """
        bias = self.cost.bias
        end = self.clock + self.step * bias
        if end > request.due and self.allowance.cuts:
            more = least_step(self.cost, self.decodes, self.context, self.reach) * bias
            if busy < QUIET or more <= WORTH * seconds:
                self.clock += more
                end = self.clock
        # Errors of single steps add up as in a random walk: one spread of their sum is to spare.
        return end + self.cost.prefill.spread * math.sqrt(self.step * max(0.0, end - self.start))

    def _pace(self, reach: int) -> float:
        pace = self.allowance.pace(self.cost, self.decodes, self.context, self.gap, reach)
        return min(pace, 1 - BATCH_SHARE) if self.crowded else pace

    def _can(self, request: Request, reach: int) -> bool:
        """Whether a prompt gets on at all, and may decode afterwards."""
        if not self.decodes:
            return True  # waiting would not make it any better; and who serves nobody learns nothing
        if self._pace(reach) <= 0:
            return False
        after = decodes_alone(self.decodes + 1, int(self.context + reach))
        gap = min(self.gap, request.gap_target)
        return request.max_tokens == 1 or self.cost.predict(after) * self.cost.decode.tail <= gap

    def _drain(self) -> None:
        """Waits until all who decode now have ended."""
        self.clock = self.drained
        self.decodes = max(0, self.decodes - self.present.decodes)
        self.context = max(0.0, self.context - self.present.context)
        if not self.decodes:
            self.gap = math.inf


def memory_wait(request: Request, count: int, free: float, freed: float | None) -> float:
    """Seconds that a prompt waits for memory, where it lacks some and it is known how fast that comes free."""
    if freed is None or request.sibling:
        return 0.0  # completions of one prompt share it
    return max(0.0, count - free) / freed


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
