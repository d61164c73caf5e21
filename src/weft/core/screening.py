"""Screening: new requests from their arrival until a plan has kept or refused them, and late requests in the queue."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from weft.core.budget import StepLoad
from weft.core.forecast import GROUPS, PendingPrefill
from weft.core.kv_cache_manager import KVCacheManager
from weft.core.lineup import Lineup, line_up
from weft.core.policies import Policy
from weft.core.preemption import Preemption
from weft.core.promises import Source
from weft.core.queue import WaitingQueue, class_of
from weft.core.request import Rank, Request, State
from weft.core.running import RunningRequests

TARGET_SHARE = 0.06  # share of the tightest gap target that screening may take in one plan
MOST_SECONDS = 0.0012  # seconds that screening may take in one plan
FEWEST_VISITS = 24  # queue entries that a plan may always visit for screening, however slow the host is


@dataclass(slots=True, eq=False)
class Screening:
    """Owns the new requests, which no plan has screened yet. Puts those that are kept into the queue.

    A burst is screened in parts, so that no plan takes long.
    """

    policy: Policy
    queue: WaitingQueue
    running: RunningRequests
    kv: KVCacheManager
    preemption: Preemption
    tokens: int = 0  # tokens to prefill of all new requests
    _new: list[Request] = field(default_factory=list)  # in screening order
    _added: int = 0  # number of requests added so far

    def __len__(self) -> int:
        return len(self._new)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._new)

    def add(self, request: Request) -> None:
        self._added += 1
        request.number, request.screened_by = self._added, request.due
        insort(self._new, request, key=_order)
        self.tokens += request.known

    def remove(self, request: Request) -> bool:
        """Removes a request that is not screened yet. Returns False if it was screened already."""
        place = bisect_left(self._new, _order(request), key=_order)
        if place == len(self._new) or self._new[place] is not request:
            return False
        del self._new[place]
        self.tokens -= request.known
        return True

    def screen(self, load: StepLoad) -> Iterator[Request]:
        """Screens new requests, and queued requests that cannot be on time.

        Yields the refused ones. The caller ends each before it asks for the next one. New requests are refused if they
        would be late or make others late. Within a class, the earliest due time goes first.
        """
        visits = self._visits(load)
        while self._new and (visits > 0 or not (self.running or self.queue)):  # if idle, until one is queued
            newcomers = _of_one_class(self._new[: max(1, visits - GROUPS)])
            del self._new[: len(newcomers)]
            visits -= len(newcomers) + GROUPS
            for request in newcomers:
                self._prepare(request)
            screened = self.policy.admission.screen(
                newcomers,
                partial(self._lineup, load.start),
                self._load_for(newcomers[0], load),
                max(visits, 0) + GROUPS,
            )
            for request in screened.kept:
                self.tokens -= request.known
                self.queue.add(request)
            for request in screened.refused:
                self.tokens -= request.known
                yield request
            self._new[:0] = screened.left
        yield from self._remove_hopeless(load)

    def pack(self, request: Request) -> None:
        """Stores the forecast row of a request that goes into the queue."""
        request.packed = self._left_of(request).pack()

    def _visits(self, load: StepLoad) -> int:
        """Queue entries that this plan may visit for screening, in a small share of the tightest gap target."""
        seconds = min(TARGET_SHARE * min(load.gap, load.soft_gap), MOST_SECONDS)
        return max(FEWEST_VISITS, int(seconds / self.policy.host.visit))

    def _prepare(self, request: Request) -> None:
        """Looks up a new request in the prefix cache. Drops an operator's target that an idle machine would miss."""
        request.expected_hits = len(self.kv.cached_prefix(request)) * self.kv.block_size
        left = self._left_of(request)
        if request.ttft_source is Source.OPERATOR and not self.policy.admission.is_possible(left):
            request.ttft_target = math.inf  # served behind requests with a promise
            request.rank = self.policy.order.rank(request)
        request.packed = left.pack()

    def _remove_hopeless(self, load: StepLoad) -> Iterator[Request]:
        """Removes requests from the queue that cannot be on time, and yields them."""
        for _ in range(FEWEST_VISITS):
            hopeless = [request for request in self.queue.heads() if self._is_hopeless(request, load)]
            if not hopeless:
                return
            for request in hopeless:
                self.queue.remove(request)
                yield request

    def _is_hopeless(self, request: Request, load: StepLoad) -> bool:
        """Whether a waiting request cannot be on time. A preempted request is never refused: it runs to its end."""
        if request.preemptions:
            return False
        return self.policy.admission.is_hopeless(self._left_of(request), self._load_for(request, load))

    def _load_for(self, request: Request, load: StepLoad) -> StepLoad:
        """The load for this request. If others may be preempted for it, it does not wait for memory."""
        return load._replace(free=math.inf) if self.preemption.may_help(request) else load

    def _lineup(self, now: float, newcomers: Sequence[Request]) -> Lineup:
        """All prompts that are not computed yet, with the newcomers; see `line_up`."""
        return line_up(self.queue, self.running.prefilling, newcomers, self._packed, now)

    def _packed(self, request: Request) -> bytes:
        return request.packed or self._left_of(request).pack()

    def _left_of(self, request: Request) -> PendingPrefill:
        is_running = request.state is State.RUNNING
        done = int(self.running.slots.planned[request.slot]) if is_running else request.expected_hits
        return PendingPrefill(request, done, request.known - done)


def _of_one_class(requests: list[Request]) -> list[Request]:
    """The leading requests that have the same class as the first one."""
    own = class_of(requests[0])
    return list(takewhile(lambda request: class_of(request) == own, requests))


def _order(request: Request) -> tuple[Rank, float, int]:
    """Sort key: class, then due time of the first token at arrival, then order of arrival."""
    return class_of(request), request.screened_by, request.number
