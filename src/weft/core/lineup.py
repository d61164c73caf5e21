"""The line-up: all prompts that are not computed yet, in the order of service if no other request arrives.

It is computed on arrays. Each line of the queue keeps its requests in order, together with their forecast rows. So a
queue of thousands of requests costs a plan less than a millisecond.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.forecast import PromptRows
from weft.core.queue import Levels, LineKey, WaitingQueue, line_of, order_key_of
from weft.core.request import Request
from weft.core.tenants import INPUT_WEIGHT, Account

Indices = NDArray[np.int64]


class Lineup(NamedTuple):
    """Requests with prompts that are not computed yet. A position is an index in the order of service."""

    requests: Sequence[Request]  # in no particular order
    order: Indices  # by position: the request's index in `requests`
    rows: PromptRows  # by position
    newcomers: list[int]  # positions of the new requests, ascending

    def at(self, position: int) -> Request:
        return self.requests[int(self.order[position])]

    def without(self, positions: Sequence[int]) -> "Lineup":
        """The line-up without the requests at these positions. Later requests move up."""
        stay = np.ones(len(self.order), np.bool_)
        stay[positions] = False
        moved = np.cumsum(stay) - 1
        newcomers = [int(moved[position]) for position in self.newcomers if stay[position]]
        return Lineup(self.requests, self.order[stay], self.rows.select(stay), newcomers)


def line_up(
    queue: WaitingQueue,
    started: Sequence[Request],
    newcomers: Sequence[Request],
    row: Callable[[Request], bytes],
    now: float,
) -> Lineup:
    """Builds the line-up of running prefills (`started`), the queue and `newcomers`.

    The newcomers are all of one class and not in the queue yet. `row` returns the forecast row of a started or new
    request. Lower classes are left out, since they are served after all newcomers.
    """
    lowest = newcomers[0].class_key
    lines = {key: line for key, line in queue.lines.items() if key.class_key <= lowest}
    others = [*(request for request in started if request.class_key <= lowest), *newcomers]
    requests = [*chain.from_iterable(line.requests for line in lines.values()), *others]
    rows = PromptRows.of([*(line.rows for line in lines.values()), *map(row, others)])
    members: dict[LineKey, Indices] = {}
    begin = 0
    for key, line in lines.items():
        members[key] = np.arange(begin, begin + len(line.requests))
        begin += len(line.requests)
    by_line = _by_line(requests, range(begin, len(requests)))
    for key, indices in by_line.items():
        waiting = lines[key].requests if key in lines else []
        before = [bisect_left(waiting, requests[index].order_key, key=order_key_of) for index in indices]
        members[key] = np.insert(members.get(key, np.empty(0, np.int64)), before, indices)
    first = [requests[indices[0]] for indices in by_line.values()]  # of each line, the request with the smallest key
    order = _served(rows, members, _levels(queue, [*started, *first], now))
    positions = np.flatnonzero(order >= len(requests) - len(newcomers)).tolist()
    return Lineup(requests, order, rows.select(order), positions)


def _by_line(requests: Sequence[Request], indices: range) -> dict[LineKey, list[int]]:
    lines: dict[LineKey, list[int]] = {}
    for index in sorted(indices, key=lambda index: requests[index].order_key):
        lines.setdefault(line_of(requests[index]), []).append(index)
    return lines


def _levels(queue: WaitingQueue, others: Sequence[Request], now: float) -> Levels:
    """Levels from the heads of all lines, lower classes included, as in `PrefillOrder`."""
    heads: dict[LineKey, Request] = {}
    for request in [*queue.heads(), *others]:
        head = heads.setdefault(line_of(request), request)
        if request.order_key < head.order_key:
            heads[line_of(request)] = request
    return Levels(list(heads.values()), now)


def _served(rows: PromptRows, members: Mapping[LineKey, Indices], levels: Levels) -> Indices:
    """Indices of requests in the order of service: class by class, within a class the least served tenant first."""
    service = {key.account: key.account.service for key in members}
    classes: dict[tuple[bool, int], list[LineKey]] = {}
    for key in sorted(members, key=lambda key: key.class_key):
        classes.setdefault(key.class_key, []).append(key)
    parts = [_by_service(rows, {key: members[key] for key in keys}, levels, service) for keys in classes.values()]
    return np.concatenate(parts)


def _by_service(
    rows: PromptRows, lines: Mapping[LineKey, Indices], levels: Levels, service: dict[Account, float]
) -> Indices:
    """Merges the lines of one class in the order of service. Adds the charges of their prompts to `service`."""
    levels_of = []  # by line: the level of each of its requests
    for key, indices in lines.items():
        at_start = rows.service[indices]  # service of the tenant when the request started; NaN: not started
        charge = np.where(np.isnan(at_start), INPUT_WEIGHT * rows.remaining[indices] / key.account.weight, 0.0)
        served = np.cumsum(np.concatenate([[service[key.account]], charge]))  # before each request, and after the last
        service[key.account] = float(served[-1])
        levels_of.append(levels.of_all(key.account, np.where(np.isnan(at_start), served[:-1], at_start)))
    if len(lines) == 1:
        return next(iter(lines.values()))
    # A request waits for earlier requests of its line. So it takes their level and start if its own are smaller.
    level = [np.maximum.accumulate(one) for one in levels_of]
    start = np.unique(rows.start_key[np.concatenate(list(lines.values()))], return_inverse=True)[1]
    line_number = np.repeat(np.arange(len(lines)), [len(one) for one in level])
    for number, (single, highest) in enumerate(zip(levels_of, level, strict=True)):
        run = len(start) * np.concatenate([[0], np.cumsum(np.diff(highest) > 0)])  # one offset per level
        waits = np.where(single < highest, 0, start[line_number == number])
        start[line_number == number] = np.maximum.accumulate(waits + run) - run
    by_position = line_number[np.lexsort((start, np.concatenate(level)))]  # the line whose next request is served
    order = np.empty(len(by_position), np.int64)
    for number, indices in enumerate(lines.values()):
        order[by_position == number] = indices
    return order
