"""Admission: which requests are refused at once, before anything is computed for them, and which may start now."""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from weft.core.budget import BATCH_DELAY, BATCH_JOINS, BATCH_SHARE, Allowance, StepLoad
from weft.core.cost import CostModel, StepShape
from weft.core.forecast import Array, Forecast, Prefill, Rows, expect, forecast
from weft.core.lineup import Lineup
from weft.core.request import Request

MEMORY = 10.0  # seconds over which the load is averaged
MOST_LOAD = 0.6  # more than this is not believed
SURELY = 4.0  # times its work: a prompt that is given so long is read in time by an idle machine
HOPE = 2.0  # times as fast as of late memory may come free; who would be late even so is hopeless


MakeLineup = Callable[[Sequence[Request]], Lineup]  # with these newcomers in it


class Screened(NamedTuple):
    """What became of newcomers."""

    kept: Sequence[Request]
    refused: Sequence[Request] = ()
    left: Sequence[Request] = ()  # for the next plan: this one has looked at enough


class Admission(Protocol):
    def screen(self, newcomers: Sequence[Request], lineup: MakeLineup, load: StepLoad, visits: int) -> Screened:
        """Decides on newcomers, all of one class, in their order. `lineup` gives all prompts that are not computed yet,
        the newcomers included, in the order of service. The cost model is asked about `visits` of them or few more."""
        ...

    def is_hopeless(self, prefill: Prefill, load: StepLoad) -> bool:
        """Whether a request that has not started could not keep its promise even if it were the next."""
        ...

    def may_join(self, after: StepShape, gap: float) -> bool:
        """Whether a prefill may start, given the decode step that it will later be part of."""
        ...

    def has_slack(self, after: StepShape, alone: StepShape, gap: float, soft_gap: float, joins: bool) -> bool:
        """Whether batch requests may be in a decode step: `after` is the step with them, `alone` the one without.

        `joins`: one of them is about to start.
        """
        ...

    def is_possible(self, prefill: Prefill) -> bool:
        """Whether an idle machine could bring this request's first token in time."""
        ...


class AdmitAll:
    """No request is refused, however long the queue."""

    def screen(self, newcomers: Sequence[Request], lineup: MakeLineup, load: StepLoad, visits: int) -> Screened:
        return Screened(newcomers)

    def is_hopeless(self, prefill: Prefill, load: StepLoad) -> bool:
        return False

    def may_join(self, after: StepShape, gap: float) -> bool:
        return True

    def has_slack(self, after: StepShape, alone: StepShape, gap: float, soft_gap: float, joins: bool) -> bool:
        return True

    def is_possible(self, prefill: Prefill) -> bool:
        return True


class DeadlineAdmission:
    """Keeps the requests whose first token can be promised in time without breaking an earlier promise."""

    def __init__(self, cost: CostModel, allowance: Allowance) -> None:
        self.cost = cost
        self.allowance = allowance
        self._loads = _Loads()

    def screen(self, newcomers: Sequence[Request], lineup: MakeLineup, load: StepLoad, visits: int) -> Screened:
        """Forecasts the queue with all newcomers in it. Where a promise would be broken, the newest of the newcomers
        that are served before it are refused, as many as it takes, and the rest is forecast again.
        """
        if newcomers[0].batch:  # the batch class is promised nothing, and goes behind all that are
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
        if victims:  # whether the others can be kept is not proved yet
            return Screened([], refused, screening.newcomers)
        for place in screening.lineup.newcomers:
            request = screening.lineup.at(place)
            if request.due < math.inf:
                self._loads.add(request.tenant, float(found.seconds[place]))
                if not (refused or found.waited.any()):
                    request.predicted_ttft = float(found.expected[place]) - request.arrival
        return Screened(screening.newcomers, refused)

    def _predict(self, lineup: Lineup, refused: Sequence[Request], load: StepLoad, busy: float) -> None:
        """Notes when the newcomers' first tokens will come, and those of the refused would have, each without the
        others that are refused with it."""
        gone = set(refused)
        left_out = np.zeros(len(lineup.order), np.bool_)
        left_out[[place for place in lineup.newcomers if lineup.at(place) in gone]] = True
        expected = expect(self.cost, self.allowance, load, lineup.rows, busy, left_out)
        for place in lineup.newcomers:
            request = lineup.at(place)
            if request.due < math.inf:
                request.predicted_ttft = float(expected[place]) - request.arrival

    def minds(self, request: Request, newcomer: Request) -> bool:
        """Whether a newcomer must not make this one late. It may, where that one's tenant loads the device more."""
        if request is newcomer:
            return True
        if request.batch or request.rank[:2] > newcomer.rank[:2] or request.first_token is not None:
            return False
        return request.tenant == newcomer.tenant or self._loads.of(request.tenant) <= self._loads.of(newcomer.tenant)

    def busy(self, tenant: str) -> float:
        """The load that a tenant's next request meets."""
        return min(self._loads.before(tenant), MOST_LOAD)

    def is_hopeless(self, prefill: Prefill, load: StepLoad) -> bool:
        request, first, count = prefill
        if request.deadline == math.inf:
            return False
        pace = self.allowance.pace(self.cost, load.beside, first)
        seconds = self.cost.coefficients.prefill_seconds(first, count) * self.cost.bias
        wait = 0.0  # for memory
        if load.freed is not None and not request.sibling:  # completions of one prompt share it
            wait = max(0.0, count - load.free) / load.freed / HOPE
        end = load.start + wait + (seconds / pace if pace > 0 else seconds)  # decodes that fill the step now may end
        if end <= request.deadline:
            return False
        request.predicted_ttft = end - request.arrival
        return True

    def may_join(self, after: StepShape, gap: float) -> bool:
        return self.cost.predict(after) * self.cost.decode.tail <= gap

    def has_slack(self, after: StepShape, alone: StepShape, gap: float, soft_gap: float, joins: bool) -> bool:
        if min(gap, soft_gap) == math.inf:
            return True
        seconds = self.cost.predict(after) / (BATCH_JOINS if joins else 1.0)
        late = seconds * self.cost.decode.tail
        if late > BATCH_SHARE * gap:
            return False
        # A default target that the others miss without the batch class does not keep it out for ever.
        return late <= BATCH_SHARE * soft_gap or seconds <= BATCH_DELAY * self.cost.predict(alone)

    def is_possible(self, prefill: Prefill) -> bool:
        request, first, left = prefill
        if SURELY * self.cost.coefficients.prefill_seconds(first, left) * self.cost.bias < request.ttft_target:
            return True  # most prompts: no need for a forecast
        idle = StepLoad(prefill.request.arrival, StepShape(), math.inf)
        alone = forecast(self.cost, self.allowance, idle, Rows.of([prefill.pack()]), 0.0)
        return bool(alone.ends[0] <= prefill.request.deadline)


class _Screening:
    """Newcomers among the prompts that are not computed yet, in the order of service."""

    def __init__(self, admission: DeadlineAdmission, newcomers: Sequence[Request], lineup: Lineup) -> None:
        self.admission = admission
        self.lineup = lineup
        self.newcomers = list(newcomers)
        self._number = {request: number for number, request in enumerate(newcomers)}  # the last is the newest
        self._loads = {tenant: admission.busy(tenant) for tenant in {request.tenant for request in newcomers}}
        self.busy = max(self._loads.values(), default=0.0)

    def remove(self, places: Sequence[int]) -> list[Request]:
        """Takes newcomers out of the line-up; returns them."""
        gone = [self.lineup.at(place) for place in places]
        self.lineup = self.lineup.without(places)
        left_out = set(gone)
        self.newcomers = [request for request in self.newcomers if request not in left_out]
        return gone

    def victims(self, found: Forecast) -> list[int]:
        """The places of newcomers to refuse: the newest of those before a promise that would be broken.

        A prompt that is late needs their time; one that finds no room among the decodes needs the place of one.
        """
        late = self._lateness(found)
        gone: set[int] = set()
        before: list[int] = []  # places of newcomers up to here that may be refused, the newest last
        unseen = deque(self.lineup.newcomers)
        relief, freed = 0.0, 0  # seconds and places among the decodes that refusals have given back
        for place in np.flatnonzero(late > 0).tolist():
            while unseen and unseen[0] <= place:
                one = unseen.popleft()
                if self.lineup.at(one).deadline < math.inf:
                    insort(before, one, key=self._newness)
            has_room = not found.waited[place]
            while place not in gone and (late[place] > relief if has_room else freed < 1):
                victim = next((one for one in reversed(before) if self._minds(place, one)), None)
                if victim is None:
                    break
                before.remove(victim)
                gone.add(victim)
                relief += float(found.seconds[victim])
                freed += 1
            if place not in gone and not has_room:
                freed -= 1
        return sorted(gone)

    def _newness(self, place: int) -> int:
        return self._number[self.lineup.at(place)]

    def _minds(self, place: int, newcomer: int) -> bool:
        return self.admission.minds(self.lineup.at(place), self.lineup.at(newcomer))

    def _lateness(self, found: Forecast) -> Array:
        """Seconds by which each first token would be late; infinite where it finds no room.

        While a newcomer is read, others will come with less slack and go before it: as in a queue with priorities, its
        own work takes 1 / (1 - load) times as long.
        """
        with np.errstate(invalid="ignore"):  # no room, and no promise either
            late = np.nan_to_num(
                found.ends - self.lineup.rows.deadline, nan=-math.inf, posinf=math.inf, neginf=-math.inf
            )
        for place in self.lineup.newcomers:
            busy = self._loads[self.lineup.at(place).tenant]
            late[place] += found.seconds[place] * busy / (1 - busy)
        return late


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
