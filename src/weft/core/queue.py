"""WaitingQueue: waiting requests in one line per class and tenant. PrefillOrder: which request prefills next."""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.order import QUEUE_PATIENCE_S
from weft.core.request import OrderKey, Request, State
from weft.core.tenants import MOST_LEAD, Account
from weft.errors import QueueFullError


class LineKey(NamedTuple):
    """One class (flex, priority) and one tenant."""

    flex: bool
    priority: int
    account: Account

    @property
    def class_key(self) -> tuple[bool, int]:
        return self.flex, self.priority


class QueueLine:
    """Waiting requests of one class and tenant, in the order of their keys."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.rows = bytearray()  # `forecast_row` of each request, in the same order

    def add(self, request: Request) -> None:
        index = bisect_left(self.requests, request.order_key, key=order_key_of)
        self.requests.insert(index, request)
        offset = index * len(request.forecast_row)
        self.rows[offset:offset] = request.forecast_row

    def remove(self, request: Request) -> None:
        index = bisect_left(self.requests, request.order_key, key=order_key_of)
        while self.requests[index] is not request:
            index += 1
        del self.requests[index]
        size = len(request.forecast_row)
        del self.rows[index * size : (index + 1) * size]


class WaitingQueue:
    """All waiting requests. Lines are ordered by class, then by the service of the tenant."""

    def __init__(self) -> None:
        self.lines: dict[LineKey, QueueLine] = {}
        self.tokens = 0  # tokens to compute of all waiting requests
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Request]:
        for line in self.lines.values():
            yield from line.requests

    def add(self, request: Request) -> None:
        self.lines.setdefault(line_of(request), QueueLine()).add(request)
        self.tokens += request.num_tokens
        self._count += 1

    def remove(self, request: Request) -> None:
        key = line_of(request)
        line = self.lines[key]
        line.remove(request)
        if not line.requests:
            del self.lines[key]
        self.tokens -= request.num_tokens
        self._count -= 1

    def heads(self) -> list[Request]:
        return [line.requests[0] for line in self.lines.values()]

    def check_integrity(self) -> None:
        for line in self.lines.values():
            assert line.requests == sorted(line.requests, key=order_key_of), "a line is out of order"
            assert line.rows == b"".join(request.forecast_row for request in line.requests), (
                "a line's rows are out of order"
            )
        assert self._count == sum(1 for _ in self), "the queue miscounts its requests"
        assert self.tokens == sum(request.num_tokens for request in self), "the queue miscounts its tokens"


class QueueLimits(NamedTuple):
    """Bounds of the queue. None: no bound."""

    requests: int | None
    tokens: int | None  # of prompts

    def check(self, request: Request, waiting: int, tokens: int) -> None:
        """Raises QueueFullError if the queue has no room for this request.

        `waiting` requests, with `tokens` to prefill, are in it. Requests that will get a free seat do not count:
        they will not wait long.
        """
        if self.requests is not None and waiting >= self.requests:
            raise QueueFullError(
                f"{waiting} requests wait already, max_queued_requests={self.requests}: try again later"
            )
        if self.tokens is not None and tokens and tokens + request.num_tokens > self.tokens:
            raise QueueFullError(
                f"{tokens} tokens of prompts wait already; with {request.num_tokens} more they would exceed "
                f"max_queued_tokens={self.tokens}: try again later"
            )


class PrefillOrder:
    """The order in which requests get prefill slices in one plan, which begins at `now`."""

    def __init__(self, started: list[Request], queue: WaitingQueue, overtakes: bool, now: float) -> None:
        self._queue = queue
        self._overtakes = overtakes
        self._may_start = True
        self._started = _by_line(started)
        self._passed: Counter[LineKey] = Counter()  # by line: number of waiting requests that were passed over
        self._closed: set[LineKey] = set()  # lines from which no further request starts
        lines = dict.fromkeys((*self._started, *queue.lines))
        heads = [head for line in lines if (head := self._head(line)) is not None]
        self._levels = Levels(heads, now)
        # One head per line. After a charge, only the served line gets a new key. The tenant's lines in other classes
        # keep their old keys. That is harmless, because the class is compared first.
        self._heads = [(self._key(head), head) for head in heads]
        heapify(self._heads)

    def next(self) -> Request | None:
        """The next request. The caller must then call `served`, `pass_over`, `close_line` or `close`."""
        while self._heads:
            request = self._heads[0][1]
            if request is self._head(line_of(request)):
                return request
            self._replace(line_of(request))  # not valid any more: preempted by this plan, or its line was closed
        return None

    def served(self, request: Request) -> None:
        """The caller has tried to give the request a slice. If it waited, it has left the queue already."""
        line = line_of(request)
        if request in self._started.get(line, ()):
            self._started[line].remove(request)
        self._replace(line)

    def pass_over(self, request: Request) -> None:
        """Skips a waiting request that cannot start now. Requests behind it in its line may start."""
        self._passed[line_of(request)] += 1
        self._replace(line_of(request))

    def close_line(self, request: Request) -> None:
        """No further request of this line starts in this step. Other lines go on."""
        self._closed.add(line_of(request))
        self._replace(line_of(request))

    def close(self) -> None:
        """No further request starts in this step. Running prefills go on."""
        self._may_start = False

    def _head(self, line: LineKey) -> Request | None:
        """The next request of a line: a running prefill or a waiting request.

        A waiting request goes before a running prefill only if the policy allows that and its key is smaller.
        """
        started = self._started.get(line)
        while started and started[0].state is not State.RUNNING:
            started.popleft()  # preempted by this plan
        running = started[0] if started else None
        waiting = None
        if self._may_start and line not in self._closed:
            queued = self._queue.lines.get(line)
            requests = queued.requests if queued is not None else []
            index = self._passed[line]
            waiting = requests[index] if index < len(requests) else None
        if running is None or waiting is None:
            return running or waiting
        return waiting if self._overtakes and waiting.order_key < running.order_key else running

    def _replace(self, line: LineKey) -> None:
        heappop(self._heads)
        head = self._head(line)
        if head is not None:
            heappush(self._heads, (self._key(head), head))

    def _key(self, request: Request) -> tuple[bool, tuple[bool, int], float, OrderKey]:
        behind = request.state is State.WAITING and not self._overtakes
        # Precedence (order_key[2]) is left out: it counts only within the line of a tenant.
        return behind, request.class_key, self._levels.of(request, service_of(request)), request.order_key[3:]


class Levels:
    """Sort keys of tenants: service received, at most MOST_LEAD above the least served tenant."""

    def __init__(self, heads: list[Request], now: float) -> None:
        self._most = min(map(service_of, heads), default=0.0) + MOST_LEAD
        self._now = now

    def of(self, request: Request, service: float) -> float:
        """Level of a request; smaller goes first. A tenant without a slice for QUEUE_PATIENCE_S goes first."""
        return -1.0 if self._is_starved(request.account) else min(service, self._most)

    def of_all(self, account: Account, service: NDArray[np.float64]) -> NDArray[np.float64]:
        """Levels of several requests of one tenant, each with the service that the tenant has received by then."""
        return np.full(len(service), -1.0) if self._is_starved(account) else np.minimum(service, self._most)

    def _is_starved(self, account: Account) -> bool:
        return self._now - account.unserved_since > QUEUE_PATIENCE_S


def _by_line(requests: Iterable[Request]) -> dict[LineKey, deque[Request]]:
    lines: dict[LineKey, deque[Request]] = {}
    for request in sorted(requests, key=order_key_of):
        lines.setdefault(line_of(request), deque()).append(request)
    return lines


def service_of(request: Request) -> float:
    """Service of a request's tenant. If the request has started: service before its prompt was charged."""
    return request.account.service if request.service_at_start is None else request.service_at_start


def line_of(request: Request) -> LineKey:
    return LineKey(request.flex, request.priority, request.account)


def order_key_of(request: Request) -> OrderKey:
    return request.order_key
