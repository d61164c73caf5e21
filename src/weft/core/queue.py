"""The queue: who waits, in lines by class and tenant, and whose turn it is to prefill."""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.core.cost import CostModel
from weft.core.promises import Source
from weft.core.request import Rank, Request, State
from weft.core.tenants import DEBT, Account

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


class LineKey(NamedTuple):
    """One class and one tenant."""

    batch: bool
    priority: int
    account: Account


class Line:
    """The requests of one class and tenant that wait, in order of rank."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.rows = bytearray()  # `packed` of each, in the same order

    def add(self, request: Request) -> None:
        place = bisect_left(self.requests, request.rank, key=rank_of)
        self.requests.insert(place, request)
        offset = place * len(request.packed)
        self.rows[offset:offset] = request.packed

    def remove(self, request: Request) -> None:
        place = bisect_left(self.requests, request.rank, key=rank_of)
        while self.requests[place] is not request:
            place += 1
        del self.requests[place]
        size = len(request.packed)
        del self.rows[place * size : (place + 1) * size]


class Queue:
    """The requests that wait. Between lines, class and service decide."""

    def __init__(self) -> None:
        self.lines: dict[LineKey, Line] = {}
        self.tokens = 0  # to compute, of all who wait
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for line in self.lines.values():
            yield from line.requests

    def add(self, request: Request) -> None:
        self.lines.setdefault(line_of(request), Line()).add(request)
        self.tokens += request.known
        self._count += 1

    def remove(self, request: Request) -> None:
        key = line_of(request)
        line = self.lines[key]
        line.remove(request)
        if not line.requests:
            del self.lines[key]
        self.tokens -= request.known
        self._count -= 1

    def heads(self) -> list[Request]:
        return [line.requests[0] for line in self.lines.values()]

    def check_integrity(self) -> None:
        for line in self.lines.values():
            assert line.requests == sorted(line.requests, key=rank_of), "a line is out of order"
            assert line.rows == b"".join(request.packed for request in line.requests), "a line's rows are out of order"
        assert self._count == sum(1 for _ in self), "the queue miscounts its requests"
        assert self.tokens == sum(request.known for request in self), "the queue miscounts its tokens"


class Turns:
    """Whose turn it is, slice after slice, in the making of one plan that begins at `now`."""

    def __init__(self, started: list[Request], queue: Queue, overtakes: bool, now: float) -> None:
        self._queue = queue
        self._overtakes = overtakes
        self._admitting = True
        self._started = _by_line(started)
        self._passed: Counter[LineKey] = Counter()  # in each line of the queue, how many were passed over
        self._closed: set[LineKey] = set()
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
            if request is self._head(line_of(request)):
                return request
            self._replace(line_of(request))  # became a victim on the way, or is not to be admitted any more
        return None

    def served(self, request: Request) -> None:
        """It had its slice; one that waited has left the queue for it."""
        line = line_of(request)
        if request in self._started.get(line, ()):
            self._started[line].remove(request)
        self._replace(line)

    def pass_over(self, request: Request) -> None:
        """One that waits cannot start now, through no fault of those behind it."""
        self._passed[line_of(request)] += 1
        self._replace(line_of(request))

    def close_line(self, request: Request) -> None:
        """Nobody of this one's line is admitted in this step; the others' are."""
        self._closed.add(line_of(request))
        self._replace(line_of(request))

    def close(self) -> None:
        """Nobody who waits is admitted in this step."""
        self._admitting = False

    def _head(self, line: LineKey) -> Request | None:
        """Who is next in a line: of those under way and those who wait the one with the smaller rank."""
        started = self._started.get(line)
        while started and started[0].state is not State.RUNNING:
            started.popleft()  # became a victim on the way
        under_way = started[0] if started else None
        waits = None
        if self._admitting and line not in self._closed:
            queued = self._queue.lines.get(line)
            waiting = queued.requests if queued is not None else []
            place = self._passed[line]
            waits = waiting[place] if place < len(waiting) else None
        if under_way is None or waits is None:
            return under_way or waits
        return waits if self._overtakes and waits.rank < under_way.rank else under_way

    def _replace(self, line: LineKey) -> None:
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
        return -1.0 if self._is_starved(_account(request)) else min(service, self._most)

    def of_all(self, account: Account, service: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for several requests of one tenant, each with what it was served by then."""
        return np.full(len(service), -1.0) if self._is_starved(account) else np.minimum(service, self._most)

    def _is_starved(self, account: Account) -> bool:
        return self._now - account.unserved_since > PATIENCE


def _by_line(requests: Iterable[Request]) -> dict[LineKey, deque[Request]]:
    lines: dict[LineKey, deque[Request]] = {}
    for request in sorted(requests, key=rank_of):
        lines.setdefault(line_of(request), deque()).append(request)
    return lines


def service_of(request: Request) -> float:
    """What a request's tenant was served; before its own prompt was charged, if that has been."""
    return _account(request).service if request.tag is None else request.tag


def _account(request: Request) -> Account:
    assert request.account is not None, "only requests that were added have an account"
    return request.account


def line_of(request: Request) -> LineKey:
    return LineKey(request.batch, request.priority, _account(request))


def rank_of(request: Request) -> Rank:
    return request.rank
