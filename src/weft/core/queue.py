"""The queue: who waits, in lines by class and tenant, and whose turn it is to prefill."""

from bisect import insort
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from weft.core.cost import CostModel
from weft.core.request import Rank, Request, State
from weft.core.tenants import INPUT_WEIGHT, Account

PATIENCE = 10.0  # seconds after which a request without a promise goes before those promised a first token later


class Order(Protocol):
    """How a policy orders prefills."""

    fair: bool  # whether the tenant that was served least goes first
    overtakes: bool  # whether one that waits may go before one that is under way

    def rank(self, request: Request) -> Rank:
        """The order within a class and a tenant; it does not change while a request queues."""
        ...


class ByArrival:
    fair = False
    overtakes = False

    def rank(self, request: Request) -> Rank:
        return (request.batch, request.priority, request.arrival, request.id)


class BySlack:
    """The one that must start soonest goes first: due time minus its own work. So time spent waiting always counts."""

    fair = True
    overtakes = True

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def rank(self, request: Request) -> Rank:
        if request.batch or request.ttft_target > 1e9:
            start = request.arrival + PATIENCE
        else:
            start = request.due - self.cost.coefficients.prefill_seconds(0, request.known)
        return (request.batch, request.priority, start, request.arrival, request.id)


class Line(NamedTuple):
    batch: float
    priority: float
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
    """Whose turn it is, slice after slice, in the making of one plan."""

    def __init__(self, started: list[Request], queue: Queue, overtakes: bool) -> None:
        self._started: dict[Line, list[Request]] = {}
        for request in sorted(started, key=_rank):
            self._started.setdefault(_line(request), []).append(request)
        self._queue = queue
        self._overtakes = overtakes
        self._closed: set[Line] = set()
        self._admitting = True

    def next(self) -> Request | None:
        heads = []
        for line in self._started.values():
            while line and line[0].state is not State.RUNNING:
                line.pop(0)  # became a victim on the way
            heads += line[:1]
        if self._admitting:
            heads += [line[0] for key, line in self._queue.lines.items() if key not in self._closed]
        return min(heads, key=self._key, default=None)

    def served(self, request: Request) -> None:
        """One that was under way had its slice."""
        self._started[_line(request)].remove(request)

    def close(self, request: Request) -> None:
        """Nobody of this one's line is admitted in this step; the others' are."""
        self._closed.add(_line(request))

    def close_all(self) -> None:
        self._admitting = False

    def _key(self, request: Request) -> tuple[bool, Rank, float, Rank]:
        behind = request.state is State.WAITING and not self._overtakes
        return behind, request.rank[:2], _service(request), request.rank[2:]


def line_up(started: list[Request], queue: Queue, overtakes: bool, left: Callable[[Request], int]) -> list[Request]:
    """All prefills in the order in which they would be served if nothing else came."""
    everybody = sorted([*started, *queue], key=_rank)
    if not overtakes:
        everybody.sort(key=_waits)
    if len({request.account for request in everybody}) <= 1:
        return everybody
    lines: dict[Line, list[Request]] = {}
    for request in reversed(everybody):
        lines.setdefault(_line(request), []).append(request)
    service = {line.account: line.account.service for line in lines}
    order = []
    while lines:
        line = min(lines, key=lambda line: (line.batch, line.priority, service[line.account], lines[line][-1].rank))
        request = lines[line].pop()
        if not lines[line]:
            del lines[line]
        service[line.account] += INPUT_WEIGHT * left(request) / line.account.weight
        order.append(request)
    return order


def _line(request: Request) -> Line:
    assert request.account is not None, "only requests that were added have an account"
    return Line(request.batch, request.priority, request.account)


def _service(request: Request) -> float:
    return request.account.service if request.account is not None else 0.0


def _rank(request: Request) -> Rank:
    return request.rank


def _waits(request: Request) -> bool:
    return request.state is State.WAITING
