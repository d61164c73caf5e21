"""The queue: who waits, in lines by class and tenant, and whose turn it is to prefill."""

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from weft.core.cost import CostModel
from weft.core.promises import Source
from weft.core.request import Rank, Request, State
from weft.core.tenants import DEBT, INPUT_WEIGHT, Account

TURN = 1.0  # seconds by which a prompt is put back for each one of the same user that waits before it
PATIENCE = 10.0  # seconds after which a request without a promise goes before those promised a first token later


class Order(Protocol):
    """How a policy orders prefills."""

    fair: bool  # whether the tenant that was served least goes first
    overtakes: bool  # whether one that waits may go before one that is under way

    def rank(self, request: Request) -> Rank:
        """Class and precedence, then the order within them; it does not change while a request queues."""
        ...


class ByArrival:
    fair = False
    overtakes = False

    def rank(self, request: Request) -> Rank:
        # All tenants are in one line here, where one's own order must not count: so nobody's does.
        return (request.batch, request.priority, 0, request.arrival, request.id)


class BySlack:
    """The one that must start soonest goes first: due time minus its own work. So time spent waiting always counts.

    A user who sends many prompts at once is put back with all but the first, for a time, not for good.
    """

    fair = True
    overtakes = True

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def rank(self, request: Request) -> Rank:
        if request.due == math.inf:
            start = request.arrival + PATIENCE
        else:
            start = request.due - self.cost.coefficients.prefill_seconds(0, request.known)
            if request.ttft_source is Source.DEFAULT:  # what was promised goes first
                start += PATIENCE
        start += TURN * request.turn
        return (request.batch, request.priority, request.precedence, start, request.arrival, request.id)


class Line(NamedTuple):
    """Who waits for the same: one class and one tenant."""

    batch: bool
    priority: int
    account: Account


class Queue:
    """Those who wait. Each line is in order of rank; between lines, class and service decide."""

    def __init__(self) -> None:
        self.lines: dict[Line, list[Request]] = {}
        self.tokens = 0  # to compute, of all who wait
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for line in self.lines.values():
            yield from line

    def add(self, request: Request) -> None:
        insort(self.lines.setdefault(_line(request), []), request, key=_rank)
        self.tokens += request.known
        self._count += 1

    def remove(self, request: Request) -> None:
        key = _line(request)
        line = self.lines[key]
        line.remove(request)
        if not line:
            del self.lines[key]
        self.tokens -= request.known
        self._count -= 1

    def heads(self) -> list[Request]:
        return [line[0] for line in self.lines.values()]

    def check_integrity(self) -> None:
        assert all(line and sorted(line, key=_rank) == line for line in self.lines.values()), "a line is out of order"
        assert self._count == sum(1 for _ in self), "the queue miscounts its requests"
        assert self.tokens == sum(request.known for request in self), "the queue miscounts its tokens"


class Turns:
    """Whose turn it is, slice after slice, in the making of one plan that begins at `now`."""

    def __init__(self, started: list[Request], queue: Queue, overtakes: bool, now: float) -> None:
        self._queue = queue
        self._overtakes = overtakes
        self._admitting = True
        self._started = _by_line(started)
        self._passed: Counter[Line] = Counter()  # in each line of the queue, how many were passed over
        self._closed: set[Line] = set()
        lines = dict.fromkeys((*self._started, *queue.lines))
        heads = [head for line in lines if (head := self._head(line)) is not None]
        self._levels = Levels(heads, now)
        # One head a line. A key may be out of date when its tenant was charged meanwhile, but only in another class.
        self._heads = [(self._key(head), head) for head in heads]
        heapify(self._heads)

    def next(self) -> Request | None:
        """The request whose turn it is; it has to be served or passed over, or admission to be closed."""
        while self._heads:
            request = self._heads[0][1]
            if request is self._head(_line(request)):
                return request
            self._replace(_line(request))  # became a victim on the way, or is not to be admitted any more
        return None

    def served(self, request: Request) -> None:
        """It had its slice; one that waited has left the queue for it."""
        line = _line(request)
        if request in self._started.get(line, ()):
            self._started[line].remove(request)
        self._replace(line)

    def pass_over(self, request: Request) -> None:
        """One that waits cannot start now, through no fault of those behind it."""
        self._passed[_line(request)] += 1
        self._replace(_line(request))

    def close_line(self, request: Request) -> None:
        """Nobody of this one's line is admitted in this step; the others' are."""
        self._closed.add(_line(request))
        self._replace(_line(request))

    def close(self) -> None:
        """Nobody who waits is admitted in this step."""
        self._admitting = False

    def _head(self, line: Line) -> Request | None:
        """Who is next in a line: of those under way and those who wait the one with the smaller rank."""
        started = self._started.get(line)
        while started and started[0].state is not State.RUNNING:
            started.popleft()  # became a victim on the way
        under_way = started[0] if started else None
        waits = None
        if self._admitting and line not in self._closed:
            waiting = self._queue.lines.get(line, ())
            place = self._passed[line]
            waits = waiting[place] if place < len(waiting) else None
        if under_way is None or waits is None:
            return under_way or waits
        return waits if self._overtakes and waits.rank < under_way.rank else under_way

    def _replace(self, line: Line) -> None:
        heappop(self._heads)
        head = self._head(line)
        if head is not None:
            heappush(self._heads, (self._key(head), head))

    def _key(self, request: Request) -> tuple[bool, Rank, float, Rank]:
        behind = request.state is State.WAITING and not self._overtakes
        # Precedence orders a tenant's own line and counts for nothing between tenants.
        return behind, request.rank[:2], self._levels.of(request, service_of(request)), request.rank[3:]


class Levels:
    """How tenants are ordered: by what they were served, within bounds."""

    def __init__(self, heads: list[Request], now: float) -> None:
        self._most = min(map(service_of, heads), default=0.0) + DEBT
        self._now = now

    def of(self, request: Request, service: float) -> float:
        """Smaller goes first. A tenant that waits and waits while others come and go gets its turn after PATIENCE."""
        starved = self._now - _account(request).unserved_since > PATIENCE
        return -1.0 if starved else min(service, self._most)


def line_up(
    waiting: Iterable[Request], started: list[Request], overtakes: bool, left: Callable[[Request], int], now: float
) -> list[Request]:
    """All prefills in the order in which they would be served if nothing else came."""
    everybody = sorted([*waiting, *started], key=_rank)  # the queue is in order: sorting it again is quick
    if not overtakes:
        everybody.sort(key=_waits)
    if len({request.account for request in everybody}) <= 1:
        return everybody
    lines = _by_line(everybody)
    levels = Levels([line[0] for line in lines.values()], now)
    service = {line.account: line.account.service for line in lines}

    def head(line: Line) -> tuple[Rank, float, Rank, Line]:
        request = lines[line][0]
        served = service[line.account] if request.tag is None else request.tag
        return (line.batch, line.priority), levels.of(request, served), request.rank[3:], line

    heads = [head(line) for line in lines]
    heapify(heads)
    order = []
    while heads:
        *_, line = heappop(heads)
        request = lines[line].popleft()
        order.append(request)
        if request.tag is None:  # those who have started were charged
            service[line.account] += INPUT_WEIGHT * left(request) / line.account.weight
        if lines[line]:
            heappush(heads, head(line))
    return order


def _by_line(requests: Iterable[Request]) -> dict[Line, deque[Request]]:
    lines: dict[Line, deque[Request]] = {}
    for request in sorted(requests, key=_rank):
        lines.setdefault(_line(request), deque()).append(request)
    return lines


def service_of(request: Request) -> float:
    """What a request's tenant was served; before its own prompt was charged, if that has been."""
    return _account(request).service if request.tag is None else request.tag


def _account(request: Request) -> Account:
    assert request.account is not None, "only requests that were added have an account"
    return request.account


def _line(request: Request) -> Line:
    return Line(request.batch, request.priority, _account(request))


def _rank(request: Request) -> Rank:
    return request.rank


def _waits(request: Request) -> bool:
    return request.state is State.WAITING
