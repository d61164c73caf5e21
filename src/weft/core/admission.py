"""Admission: which requests are refused before any work is done for them, and which may start now."""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from weft.core.budget import BATCH_DELAY, BATCH_JOINS, BATCH_SHARE, Allowance, StepLoad
from weft.core.cost import CostModel
from weft.core.forecast import Array, Forecast, PendingPrefill, PromptRows, expect, forecast
from weft.core.lineup import Lineup
from weft.core.request import Request
from weft.core.shape import StepShape

MEMORY = 10.0  # seconds over which the load is averaged
MOST_LOAD = 0.6  # upper bound of the load; a higher estimate is not trusted
SURELY = 4.0  # times its prefill time: with a longer target, an idle machine is surely on time
HOPE = 2.0  # times the recent rate at which memory is freed; a request that is late even so is hopeless


MakeLineup = Callable[[Sequence[Request]], Lineup]  # builds the line-up with these new requests


class Screened(NamedTuple):
    """Result of screening new requests."""

    kept: Sequence[Request]
    refused: Sequence[Request] = ()
    left: Sequence[Request] = ()  # undecided; left for the next plan to limit the time of this one


class Admission(Protocol):
    def screen(self, newcomers: Sequence[Request], lineup: MakeLineup, load: StepLoad, visits: int) -> Screened:
        """Decides on new requests. They are all of one class and in screening order.

        `lineup` returns all prompts that are not computed yet, with the newcomers, in the order of service. The cost
        model is asked about `visits` of them or a few more.
        """
        ...

    def is_hopeless(self, prefill: PendingPrefill, load: StepLoad) -> bool:
        """Whether a request that has not started would miss its promise even if it were served next."""
        ...

    def may_join(self, after: StepShape, gap: float) -> bool:
        """Whether a prefill may start. `after` is the decode step that it will join later, `gap` the promised gap."""
        ...

    def has_slack(self, after: StepShape, alone: StepShape, gap: float, soft_gap: float, joins: bool) -> bool:
        """Whether batch requests may be in a decode step. `after` is the step with them, `alone` the step without.

        `joins`: one of them is about to start.
        """
        ...

    def is_possible(self, prefill: PendingPrefill) -> bool:
        """Whether an idle machine could give this request's first token in time."""
        ...


class AdmitAll:
    """Refuses no request, however long the queue is."""

    def screen(self, newcomers: Sequence[Request], lineup: MakeLineup, load: StepLoad, visits: int) -> Screened:
        return Screened(newcomers)

    def is_hopeless(self, prefill: PendingPrefill, load: StepLoad) -> bool:
        return False

    def may_join(self, after: StepShape, gap: float) -> bool:
        return True

    def has_slack(self, after: StepShape, alone: StepShape, gap: float, soft_gap: float, joins: bool) -> bool:
        return True

    def is_possible(self, prefill: PendingPrefill) -> bool:
        return True


class DeadlineAdmission:
    """Admits a request if its first token will be on time and no earlier promise is broken."""

    def __init__(self, cost: CostModel, allowance: Allowance) -> None:
        self.cost = cost
        self.allowance = allowance
        self._loads = _Loads()

    def screen(self, newcomers: Sequence[Request], lineup: MakeLineup, load: StepLoad, visits: int) -> Screened:
        """Forecasts the queue with all newcomers, and refuses some if a promise would be broken.

        It refuses newcomers that are served before the broken promise, the last in screening order first, as many as
        needed. Then it forecasts the rest again.
        """
        if newcomers[0].batch:  # batch requests have no promise and are served last
            return Screened(newcomers)
        self._loads.decay(load.start)
        everything = lineup(newcomers)
        screening = _Screening(self, newcomers, everything)
        refused: list[Request] = []
        while True:
            found = forecast(self.cost, self.allowance, load, screening.lineup.rows, screening.busy)
            victims = screening.victims(found)
            refused += screening.remove(victims)
            visits -= found.visits
            if not victims or visits < 0:
                break
        if refused or found.waited.any():
            self._predict(everything, refused, load, screening.busy)
        if victims:  # not known yet whether the remaining ones are on time
            return Screened([], refused, screening.newcomers)
        for place in screening.lineup.newcomers:
            request = screening.lineup.at(place)
            if request.due < math.inf:
                self._loads.add(request.tenant, float(found.seconds[place]))
                if not (refused or found.waited.any()):
                    request.predicted_ttft = float(found.expected[place]) - request.arrival
        return Screened(screening.newcomers, refused)

    def _predict(self, lineup: Lineup, refused: Sequence[Request], load: StepLoad, busy: float) -> None:
        """Sets `predicted_ttft` of all newcomers. For a refused one, the other refused ones are left out."""
        gone = set(refused)
        left_out = np.zeros(len(lineup.order), np.bool_)
        left_out[[place for place in lineup.newcomers if lineup.at(place) in gone]] = True
        expected = expect(self.cost, self.allowance, load, lineup.rows, busy, left_out)
        for place in lineup.newcomers:
            request = lineup.at(place)
            if request.due < math.inf:
                request.predicted_ttft = float(expected[place]) - request.arrival

    def minds(self, request: Request, newcomer: Request) -> bool:
        """Whether `newcomer` must not make `request` late.

        It may if `request` is a batch request, is of a lower class or has its first token already. It also may if the
        tenant of `request` loads the device more than the tenant of `newcomer`.
        """
        if request is newcomer:
            return True
        if request.batch or request.rank[:2] > newcomer.rank[:2] or request.first_token is not None:
            return False
        return request.tenant == newcomer.tenant or self._loads.of(request.tenant) <= self._loads.of(newcomer.tenant)

    def busy(self, tenant: str) -> float:
        """Load that the next request of a tenant will meet, at most MOST_LOAD."""
        return min(self._loads.before(tenant), MOST_LOAD)

    def is_hopeless(self, prefill: PendingPrefill, load: StepLoad) -> bool:
        request, first, count = prefill
        if request.deadline == math.inf:
            return False
        pace = self.allowance.pace(self.cost, load.beside, first)
        seconds = self.cost.prefill_seconds(first, count) * self.cost.bias
        wait = 0.0  # seconds until there is memory
        if load.freed is not None and not request.sibling:  # completions of one prompt share its memory
            wait = max(0.0, count - load.free) / load.freed / HOPE
        end = load.start + wait + (seconds / pace if pace > 0 else seconds)  # decodes that fill the step may end
        if end <= request.deadline:
            return False
        request.predicted_ttft = end - request.arrival
        return True

    def may_join(self, after: StepShape, gap: float) -> bool:
        return self.cost.tail(after) <= gap

    def has_slack(self, after: StepShape, alone: StepShape, gap: float, soft_gap: float, joins: bool) -> bool:
        if min(gap, soft_gap) == math.inf:
            return True
        seconds = self.cost.predict(after) / (BATCH_JOINS if joins else 1.0)
        late = seconds * self.cost.decode.tail
        if late > BATCH_SHARE * gap:
            return False
        # A default target that is missed even without batch requests must not keep them out for ever.
        return late <= BATCH_SHARE * soft_gap or seconds <= BATCH_DELAY * self.cost.predict(alone)

    def is_possible(self, prefill: PendingPrefill) -> bool:
        request, first, left = prefill
        if SURELY * self.cost.prefill_seconds(first, left) * self.cost.bias < request.ttft_target:
            return True  # most prompts need no forecast
        idle = StepLoad(prefill.request.arrival, StepShape(), math.inf)
        alone = forecast(self.cost, self.allowance, idle, PromptRows.of([prefill.pack()]), 0.0)
        return bool(alone.ends[0] <= prefill.request.deadline)


class _Screening:
    """One screening: new requests among all prompts that are not computed yet, in the order of service."""

    def __init__(self, admission: DeadlineAdmission, newcomers: Sequence[Request], lineup: Lineup) -> None:
        self.admission = admission
        self.lineup = lineup
        self.newcomers = list(newcomers)
        self._number = {request: number for number, request in enumerate(newcomers)}  # screening order
        self._loads = {tenant: admission.busy(tenant) for tenant in {request.tenant for request in newcomers}}
        self.busy = max(self._loads.values(), default=0.0)

    def remove(self, places: Sequence[int]) -> list[Request]:
        """Removes the newcomers at these positions from the line-up. Returns them."""
        gone = [self.lineup.at(place) for place in places]
        self.lineup = self.lineup.without(places)
        left_out = set(gone)
        self.newcomers = [request for request in self.newcomers if request not in left_out]
        return gone

    def victims(self, found: Forecast) -> list[int]:
        """Positions of newcomers to refuse: at or before a promise that would be broken.

        The last in screening order is refused first. A late prompt needs the prefill time of refused newcomers. A
        prompt without room in the decode batch needs the place of one of them.
        """
        late = self._lateness(found)
        gone: set[int] = set()
        before: list[int] = []  # positions of newcomers up to here that may be refused, in screening order
        unseen = deque(self.lineup.newcomers)
        relief, freed = 0.0, 0  # seconds and places in the decode batch that refusals free
        for place in np.flatnonzero(late > 0).tolist():
            while unseen and unseen[0] <= place:
                one = unseen.popleft()
                if self.lineup.at(one).deadline < math.inf:
                    insort(before, one, key=self._newness)
            has_room = not found.waited[place]
            while place not in gone and (late.item(place) > relief if has_room else freed < 1):
                victim = next((one for one in reversed(before) if self._minds(place, one)), None)
                if victim is None:
                    break
                before.remove(victim)
                gone.add(victim)
                relief += found.seconds.item(victim)
                freed += 1
            if place not in gone and not has_room:
                freed -= 1
        return sorted(gone)

    def _newness(self, place: int) -> int:
        return self._number[self.lineup.at(place)]

    def _minds(self, place: int, newcomer: int) -> bool:
        return self.admission.minds(self.lineup.at(place), self.lineup.at(newcomer))

    def _lateness(self, found: Forecast) -> Array:
        """Seconds by which each first token would be late; infinite if the prompt finds no room.

        While a newcomer is prefilled, requests with less slack will arrive and go before it. As in a queue with
        priorities, its prefill takes 1 / (1 - load) times as long.
        """
        with np.errstate(invalid="ignore"):  # no room and no promise: inf - inf
            late = np.nan_to_num(
                found.ends - self.lineup.rows.deadline, nan=-math.inf, posinf=math.inf, neginf=-math.inf
            )
        places = self.lineup.newcomers
        if len(self._loads) == 1:  # one tenant: the usual case
            busy: float | Array = self.busy
        else:
            busy = np.array([self._loads[self.lineup.at(place).tenant] for place in places])
        late[places] += found.seconds[places] * busy / (1 - busy)
        return late


class _Loads:
    """Recent load of each tenant: seconds of prefill work accepted per second."""

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
        """Load that the next request of a tenant will meet.

        The load of each other tenant counts up to the load of this one, since the least served tenant goes first.
        """
        own = self.of(tenant)
        return sum(min(load, own) for load in self._of.values())
