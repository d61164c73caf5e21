"""Screening: decides which new requests enter the queue, and removes requests from it that cannot be on time."""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from weft.core.budget import StepLoad
from weft.core.forecast import FORECAST_GROUPS, PendingPrefill
from weft.core.kv_cache_manager import KVCacheManager
from weft.core.lineup import Lineup, line_up
from weft.core.policies import Policy
from weft.core.preemption import Preemption
from weft.core.promises import Source
from weft.core.queue import WaitingQueue
from weft.core.request import Request, State
from weft.core.running import RunningRequests

SCREENING_SHARE = 0.06  # time of screening in one plan, as a share of the longest step that keeps all gap targets
MOST_SCREENING_S = 0.0012  # upper bound of that time, in seconds
FEWEST_VISITS = 24  # queue entries that screening may visit in every plan, however slow the host is


@dataclass(slots=True, eq=False)
class UnscreenedRequests:
    """New requests wait here until a plan has decided on them. Accepted ones move to the WaitingQueue.

    A burst is screened in parts, so that no plan takes long.
    """

    policy: Policy
    queue: WaitingQueue
    running: RunningRequests
    kv: KVCacheManager
    preemption: Preemption
    tokens: int = 0  # tokens to prefill of all new requests
    _new: list[Request] = field(default_factory=list)  # in screening order
    _num_added: int = 0  # number of requests added so far

    def __len__(self) -> int:
        return len(self._new)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._new)

    def add(self, request: Request) -> None:
        self._num_added += 1
        request.arrival_index, request.due_at_arrival = self._num_added, request.due
        insort(self._new, request, key=_screening_key)
        self.tokens += request.num_tokens

    def remove(self, request: Request) -> bool:
        """Removes a request that is not screened yet. Returns False if it was screened already."""
        index = bisect_left(self._new, _screening_key(request), key=_screening_key)
        if index == len(self._new) or self._new[index] is not request:
            return False
        del self._new[index]
        self.tokens -= request.num_tokens
        return True

    def screen(self, load: StepLoad) -> Iterator[Request]:
        """Screens new requests, and queued requests that cannot be on time.

        Yields the refused ones. The caller ends each of them before it asks for the next one. A new request is refused
        if it would be late or make other requests late. Within a class, the earliest due time goes first.
        """
        visits = self._visits(load)
        while self._new and (visits > 0 or not (self.running or self.queue)):  # if idle, until one is accepted
            newcomers = _of_one_class(self._new[: max(1, visits - FORECAST_GROUPS)])
            del self._new[: len(newcomers)]
            visits -= len(newcomers) + FORECAST_GROUPS
            for request in newcomers:
                self._prepare(request)
            screened = self.policy.admission.screen(
                newcomers,
                partial(self._lineup, load.start),
                self._load_for(newcomers[0], load),
                max(visits, 0) + FORECAST_GROUPS,
            )
            for request in screened.accepted:
                self.tokens -= request.num_tokens
                self.queue.add(request)
            for request in screened.refused:
                self.tokens -= request.num_tokens
                yield request
            self._new[:0] = screened.undecided
        yield from self._remove_hopeless(load)

    def store_forecast_row(self, request: Request) -> None:
        """Stores the forecast row of a request that goes into the queue."""
        request.forecast_row = self._pending_prefill(request).pack()

    def _visits(self, load: StepLoad) -> int:
        """Queue entries that screening may visit in this plan (see SCREENING_SHARE)."""
        seconds = min(SCREENING_SHARE * min(load.promised_max_step, load.default_max_step), MOST_SCREENING_S)
        return max(FEWEST_VISITS, int(seconds / self.policy.host.visit))

    def _prepare(self, request: Request) -> None:
        """Looks up a new request in the prefix cache. Drops an operator's target that an idle machine would miss."""
        request.expected_cached_tokens = len(self.kv.cached_prefix(request)) * self.kv.block_size
        prefill = self._pending_prefill(request)
        if request.ttft_source is Source.OPERATOR and not self.policy.admission.is_possible(prefill):
            request.ttft_target = math.inf  # without a promise it is served behind promised requests
            request.order_key = self.policy.order.key(request)
        request.forecast_row = prefill.pack()

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
        """Whether a waiting request cannot be on time. A preempted request is never refused."""
        if request.preemptions:
            return False
        return self.policy.admission.is_hopeless(self._pending_prefill(request), self._load_for(request, load))

    def _load_for(self, request: Request, load: StepLoad) -> StepLoad:
        """The load for this request. A request that may preempt others does not wait for free memory."""
        return load._replace(free_tokens=math.inf) if self.preemption.has_possible_victims(request) else load

    def _lineup(self, now: float, newcomers: Sequence[Request]) -> Lineup:
        """All prompts that are not computed yet, with the newcomers; see `line_up`."""
        return line_up(self.queue, self.running.prefilling, newcomers, self._forecast_row, now)

    def _forecast_row(self, request: Request) -> bytes:
        return request.forecast_row or self._pending_prefill(request).pack()

    def _pending_prefill(self, request: Request) -> PendingPrefill:
        """The part of its prompt that is neither planned nor cached."""
        is_running = request.state is State.RUNNING
        done = int(self.running.slots.planned[request.slot]) if is_running else request.expected_cached_tokens
        return PendingPrefill(request, done, request.num_tokens - done)


def _of_one_class(requests: list[Request]) -> list[Request]:
    """The leading requests that have the same class as the first one."""
    class_key = requests[0].class_key
    return list(takewhile(lambda request: request.class_key == class_key, requests))


def _screening_key(request: Request) -> tuple[tuple[bool, int], float, int]:
    """Sort key: class, then due time of the first token at arrival, then order of arrival."""
    return request.class_key, request.due_at_arrival, request.arrival_index
