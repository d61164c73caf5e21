"""Admission: which requests are refused before any work is done for them, and which may start now."""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from weft.core.budget import FLEX_DELAY, FLEX_SHARE, FLEX_START_SHARE, BudgetPolicy, StepLoad
from weft.core.cost import CostModel
from weft.core.forecast import Array, Forecast, PendingPrefill, PromptRows, expected_first_tokens, forecast
from weft.core.lineup import Lineup
from weft.core.request import Request
from weft.core.shape import StepShape

LOAD_WINDOW_S = 10.0  # seconds over which the load of a tenant is averaged
MOST_LOAD = 0.6  # upper bound of the load; a higher estimate is not trusted
SURELY_ON_TIME = 4.0  # if the target is this many times the prefill time, an idle machine is certainly on time
FASTEST_FREEING = 2.0  # times the recent rate at which memory is freed: a request that is late even so is refused

MakeLineup = Callable[[Sequence[Request]], Lineup]  # builds the line-up with these new requests


class ScreeningResult(NamedTuple):
    """Result of screening new requests."""

    accepted: Sequence[Request]
    refused: Sequence[Request] = ()
    undecided: Sequence[Request] = ()  # the next plan decides on them, so that this one does not take long


class Admission(Protocol):
    """The part of a policy that refuses requests and decides whether a prefill may start."""

    def screen(self, newcomers: Sequence[Request], lineup: MakeLineup, load: StepLoad, visits: int) -> ScreeningResult:
        """Decides on new requests. They are all of one class and in screening order.

        `lineup` returns all prompts that are not computed yet, with the newcomers, in the order of service. The cost
        model is asked about `visits` of them or a few more.
        """
        ...

    def is_hopeless(self, prefill: PendingPrefill, load: StepLoad) -> bool:
        """Whether a request that has not started would miss its promise even if it were served next."""
        ...

    def fits_decode_step(self, after: StepShape, promised_max_step: float) -> bool:
        """Whether a prefill may start. `after` is the step in which it and all others decode."""
        ...

    def has_slack(
        self, after: StepShape, alone: StepShape, promised_max_step: float, default_max_step: float, is_start: bool
    ) -> bool:
        """Whether flex requests may be in a decode step. `after` is the step with them, `alone` the step without.

        `is_start`: one of them is about to start.
        """
        ...

    def is_possible(self, prefill: PendingPrefill) -> bool:
        """Whether an idle machine could give this request's first token in time."""
        ...


class AdmitAll:
    """Refuses no request, however long the queue is."""

    def screen(self, newcomers: Sequence[Request], lineup: MakeLineup, load: StepLoad, visits: int) -> ScreeningResult:
        return ScreeningResult(newcomers)

    def is_hopeless(self, prefill: PendingPrefill, load: StepLoad) -> bool:
        return False

    def fits_decode_step(self, after: StepShape, promised_max_step: float) -> bool:
        return True

    def has_slack(
        self, after: StepShape, alone: StepShape, promised_max_step: float, default_max_step: float, is_start: bool
    ) -> bool:
        return True

    def is_possible(self, prefill: PendingPrefill) -> bool:
        return True


class DeadlineAdmission:
    """Admits a request if its first token will be on time and no earlier promise is broken."""

    def __init__(self, cost: CostModel, budget_policy: BudgetPolicy) -> None:
        self.cost = cost
        self.budget_policy = budget_policy
        self._loads = _TenantLoads()

    def screen(self, newcomers: Sequence[Request], lineup: MakeLineup, load: StepLoad, visits: int) -> ScreeningResult:
        """Forecasts the queue with all newcomers, and refuses some if a promise would be broken.

        It refuses newcomers that are served before the broken promise, the last in screening order first, as many as
        needed. Then it forecasts the rest again.
        """
        if newcomers[0].flex:  # flex requests have no promise and are served last
            return ScreeningResult(newcomers)
        self._loads.decay(load.start)
        everything = lineup(newcomers)
        current = _ScreeningPass(self, newcomers, everything)
        refused: list[Request] = []
        while True:
            found = forecast(self.cost, self.budget_policy, load, current.lineup.rows, current.load_ahead)
            victims = current.victims(found)
            refused += current.remove(victims)
            visits -= found.visits
            if not victims or visits < 0:
                break
        if refused or found.waited.any():
            self._predict(everything, refused, load, current.load_ahead)
        if victims:  # it is not known yet whether the remaining ones are on time
            return ScreeningResult([], refused, current.newcomers)
        for position in current.lineup.newcomers:
            request = current.lineup.at(position)
            if request.due < math.inf:
                self._loads.add(request.tenant, float(found.prefill_seconds[position]))
                if not (refused or found.waited.any()):
                    request.predicted_ttft = float(found.expected_first_token[position]) - request.arrival
        return ScreeningResult(current.newcomers, refused)

    def _predict(self, lineup: Lineup, refused: Sequence[Request], load: StepLoad, load_ahead: float) -> None:
        """Sets `predicted_ttft` of all newcomers. The prediction of a refused one leaves out the other refused ones."""
        gone = set(refused)
        left_out = np.zeros(len(lineup.order), np.bool_)
        left_out[[position for position in lineup.newcomers if lineup.at(position) in gone]] = True
        expected = expected_first_tokens(self.cost, self.budget_policy, load, lineup.rows, load_ahead, left_out)
        for position in lineup.newcomers:
            request = lineup.at(position)
            if request.due < math.inf:
                request.predicted_ttft = float(expected[position]) - request.arrival

    def is_protected_from(self, request: Request, newcomer: Request) -> bool:
        """Whether `newcomer` must not make `request` late.

        False if `request` is a flex request, is of a lower class, has its first token already, or belongs to a tenant
        with more load than the tenant of `newcomer`.
        """
        if request is newcomer:
            return True
        if request.flex or request.class_key > newcomer.class_key or request.first_token is not None:
            return False
        return request.tenant == newcomer.tenant or self._loads.of(request.tenant) <= self._loads.of(newcomer.tenant)

    def load_ahead(self, tenant: str) -> float:
        """Load that is served before the next request of a tenant, at most MOST_LOAD."""
        return min(self._loads.ahead_of(tenant), MOST_LOAD)

    def is_hopeless(self, prefill: PendingPrefill, load: StepLoad) -> bool:
        request, first, remaining = prefill
        if request.promised_due == math.inf:
            return False
        pace = self.budget_policy.pace(self.cost, load.decode_load, first)
        seconds = self.cost.prefill_seconds(first, remaining) * self.cost.bias
        wait = 0.0  # seconds until there is memory
        if load.freed_per_second is not None and not request.sibling:  # completions of one prompt share its memory
            wait = max(0.0, remaining - load.free_tokens) / load.freed_per_second / FASTEST_FREEING
        # A pace of 0 means that the decodes fill the step. They may end.
        end = load.start + wait + (seconds / pace if pace > 0 else seconds)
        if end <= request.promised_due:
            return False
        request.predicted_ttft = end - request.arrival
        return True

    def fits_decode_step(self, after: StepShape, promised_max_step: float) -> bool:
        return self.cost.p99_seconds(after) <= promised_max_step

    def has_slack(
        self, after: StepShape, alone: StepShape, promised_max_step: float, default_max_step: float, is_start: bool
    ) -> bool:
        if min(promised_max_step, default_max_step) == math.inf:
            return True
        seconds = self.cost.predict(after) / (FLEX_START_SHARE if is_start else 1.0)
        late = seconds * self.cost.decode.p99_factor
        if late > FLEX_SHARE * promised_max_step:
            return False
        # A default target that is missed even without flex requests must not keep them out for ever.
        return late <= FLEX_SHARE * default_max_step or seconds <= FLEX_DELAY * self.cost.predict(alone)

    def is_possible(self, prefill: PendingPrefill) -> bool:
        request, first, remaining = prefill
        if SURELY_ON_TIME * self.cost.prefill_seconds(first, remaining) * self.cost.bias < request.ttft_target:
            return True  # most prompts need no forecast
        idle = StepLoad(prefill.request.arrival, StepShape(), math.inf)
        alone = forecast(self.cost, self.budget_policy, idle, PromptRows.of([prefill.pack()]), 0.0)
        return bool(alone.latest_first_token[0] <= prefill.request.promised_due)


class _ScreeningPass:
    """One call of `DeadlineAdmission.screen`: the newcomers, and the line-up without the ones refused so far."""

    def __init__(self, admission: DeadlineAdmission, newcomers: Sequence[Request], lineup: Lineup) -> None:
        self.admission = admission
        self.lineup = lineup
        self.newcomers = list(newcomers)
        self._screening_index = {request: number for number, request in enumerate(newcomers)}  # screening order
        self._loads = {tenant: admission.load_ahead(tenant) for tenant in {request.tenant for request in newcomers}}
        self.load_ahead = max(self._loads.values(), default=0.0)

    def remove(self, positions: Sequence[int]) -> list[Request]:
        """Removes the newcomers at these positions from the line-up. Returns them."""
        removed = [self.lineup.at(position) for position in positions]
        self.lineup = self.lineup.without(positions)
        gone = set(removed)
        self.newcomers = [request for request in self.newcomers if request not in gone]
        return removed

    def victims(self, found: Forecast) -> list[int]:
        """Positions of newcomers to refuse.

        For each prompt that would be late, refuses newcomers that are served before it (or the prompt itself), the last
        in screening order first, until their prefill time covers its delay. A prompt without room in the decode batch
        needs the room of one refused newcomer.
        """
        late = self._lateness(found)
        gone: set[int] = set()
        before: list[int] = []  # positions of newcomers up to here that may be refused, in screening order
        unseen = deque(self.lineup.newcomers)
        relief, freed_room = 0.0, 0  # seconds, and room for requests in the decode batch, that refusals free
        for position in np.flatnonzero(late > 0).tolist():
            while unseen and unseen[0] <= position:
                one = unseen.popleft()
                if self.lineup.at(one).promised_due < math.inf:
                    insort(before, one, key=self._newness)
            has_room = not found.waited[position]
            while position not in gone and (late.item(position) > relief if has_room else freed_room < 1):
                victim = next((one for one in reversed(before) if self._is_protected_from(position, one)), None)
                if victim is None:
                    break
                before.remove(victim)
                gone.add(victim)
                relief += found.prefill_seconds.item(victim)
                freed_room += 1
            if position not in gone and not has_room:
                freed_room -= 1
        return sorted(gone)

    def _newness(self, position: int) -> int:
        return self._screening_index[self.lineup.at(position)]

    def _is_protected_from(self, position: int, newcomer: int) -> bool:
        return self.admission.is_protected_from(self.lineup.at(position), self.lineup.at(newcomer))

    def _lateness(self, found: Forecast) -> Array:
        """Seconds by which each first token would be late; infinite if the prompt has no room in the decode batch.

        While a newcomer is prefilled, requests with less slack will arrive and go before it. As in a queue with
        priorities, its prefill takes 1 / (1 - load) times as long.
        """
        with np.errstate(invalid="ignore"):  # no room and no promise: inf - inf
            late = np.nan_to_num(
                found.latest_first_token - self.lineup.rows.promised_due,
                nan=-math.inf,
                posinf=math.inf,
                neginf=-math.inf,
            )
        positions = self.lineup.newcomers
        if len(self._loads) == 1:  # one tenant: the usual case
            load: float | Array = self.load_ahead
        else:
            load = np.array([self._loads[self.lineup.at(position).tenant] for position in positions])
        late[positions] += found.prefill_seconds[positions] * load / (1 - load)
        return late


class _TenantLoads:
    """Recent load of each tenant: seconds of prefill work that were accepted per second."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}
        self._at = 0.0  # seconds on the scheduler's clock

    def decay(self, now: float) -> None:
        factor = math.exp((self._at - now) / LOAD_WINDOW_S)
        self._at = now
        self._of = {tenant: load * factor for tenant, load in self._of.items() if load * factor > 1e-9}

    def add(self, tenant: str, seconds: float) -> None:
        self._of[tenant] = self.of(tenant) + seconds / LOAD_WINDOW_S

    def of(self, tenant: str) -> float:
        return self._of.get(tenant, 0.0)

    def ahead_of(self, tenant: str) -> float:
        """Load that is served before the next request of a tenant.

        The load of each other tenant counts up to the load of this one, because the least served tenant goes first.
        """
        most = self.of(tenant)
        return sum(min(load, most) for load in self._of.values())
