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
from weft.core.queue import Levels, LineKey, WaitingQueue, line_of, rank_of
from weft.core.request import Request
from weft.core.tenants import INPUT_WEIGHT, Account

Places = NDArray[np.int64]


class Lineup(NamedTuple):
    requests: Sequence[Request]  # in no particular order
    order: Places  # per position: the request's index in `requests`
    rows: PromptRows  # per position
    newcomers: list[int]  # positions of the new requests, ascending

    def at(self, place: int) -> Request:
        return self.requests[int(self.order[place])]

    def without(self, places: Sequence[int]) -> "Lineup":
        """The line-up without the requests at these positions. Later requests move up."""
        stay = np.ones(len(self.order), np.bool_)
        stay[places] = False
        moved = np.cumsum(stay) - 1
        newcomers = [int(moved[place]) for place in self.newcomers if stay[place]]
        return Lineup(self.requests, self.order[stay], self.rows.take(stay), newcomers)


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
    lowest = newcomers[0].rank[:2]
    lines = {key: line for key, line in queue.lines.items() if key[:2] <= lowest}
    others = [*(request for request in started if request.rank[:2] <= lowest), *newcomers]
    requests = [*chain.from_iterable(line.requests for line in lines.values()), *others]
    rows = PromptRows.of([*(line.rows for line in lines.values()), *map(row, others)])
    members: dict[LineKey, Places] = {}
    begin = 0
    for key, line in lines.items():
        members[key] = np.arange(begin, begin + len(line.requests))
        begin += len(line.requests)
    by_line = _by_line(requests, range(begin, len(requests)))
    for key, indices in by_line.items():
        waiting = lines[key].requests if key in lines else []
        places = [bisect_left(waiting, requests[index].rank, key=rank_of) for index in indices]
        members[key] = np.insert(members.get(key, np.empty(0, np.int64)), places, indices)
    first = [requests[indices[0]] for indices in by_line.values()]  # by rank; the others of their lines do not matter
    order = _served(rows, members, _levels(queue, [*started, *first], now))
    places = np.flatnonzero(order >= len(requests) - len(newcomers)).tolist()
    return Lineup(requests, order, rows.take(order), places)


def _by_line(requests: Sequence[Request], indices: range) -> dict[LineKey, list[int]]:
    lines: dict[LineKey, list[int]] = {}
    for index in sorted(indices, key=lambda index: requests[index].rank):
        lines.setdefault(line_of(requests[index]), []).append(index)
    return lines


def _levels(queue: WaitingQueue, others: Sequence[Request], now: float) -> Levels:
    """Levels from the heads of all lines, lower classes included, as in `Turns`."""
    heads: dict[LineKey, Request] = {}
    for request in [*queue.heads(), *others]:
        head = heads.setdefault(line_of(request), request)
        if request.rank < head.rank:
            heads[line_of(request)] = request
    return Levels(list(heads.values()), now)


def _served(rows: PromptRows, members: Mapping[LineKey, Places], levels: Levels) -> Places:
    """Indices of requests in the order of service: class by class, within a class the least served tenant first."""
    service = {key.account: key.account.service for key in members}
    classes: dict[tuple[bool, int], list[LineKey]] = {}
    for key in sorted(members, key=lambda key: key[:2]):
        classes.setdefault(key[:2], []).append(key)
    parts = [_by_service(rows, {key: members[key] for key in keys}, levels, service) for keys in classes.values()]
    return np.concatenate(parts)


def _by_service(
    rows: PromptRows, lines: Mapping[LineKey, Places], levels: Levels, service: dict[Account, float]
) -> Places:
    """Merges the lines of one class in the order of service. Adds their charges to `service`."""
    reached = []
    for key, indices in lines.items():
        tag = rows.service[indices]
        charge = np.where(np.isnan(tag), INPUT_WEIGHT * rows.left[indices] / key.account.weight, 0.0)
        served = np.cumsum(np.concatenate([[service[key.account]], charge]))  # before each request, and after the last
        service[key.account] = float(served[-1])
        reached.append(levels.of_all(key.account, np.where(np.isnan(tag), served[:-1], tag)))
    if len(lines) == 1:
        return next(iter(lines.values()))
    # A request waits for earlier requests of its line. So it takes their level and start if its own are smaller.
    level = [np.maximum.accumulate(one) for one in reached]
    start = np.unique(rows.start[np.concatenate(list(lines.values()))], return_inverse=True)[1]
    number = np.repeat(np.arange(len(lines)), [len(one) for one in level])
    for place, (own, highest) in enumerate(zip(reached, level, strict=True)):
        run = len(start) * np.concatenate([[0], np.cumsum(np.diff(highest) > 0)])  # one offset per level
        found = np.where(own < highest, 0, start[number == place])
        start[number == place] = np.maximum.accumulate(found + run) - run
    turns = number[np.lexsort((start, np.concatenate(level)))]
    order = np.empty(len(turns), np.int64)
    for place, indices in enumerate(lines.values()):
        order[turns == place] = indices
    return order
