"""RequestLifecycle: every change of a request's state: it starts, gets blocks, is preempted, and ends."""

from dataclasses import dataclass

from weft.core.batch_builder import BatchBuilder
from weft.core.kv_cache_manager import KVCacheManager
from weft.core.preemption import Preemption
from weft.core.queue import WaitingQueue
from weft.core.request import Request, State
from weft.core.running import RunningRequests
from weft.core.screening import UnscreenedRequests
from weft.core.tenants import INPUT_WEIGHT, Tenants
from weft.core.turnover import Turnover


@dataclass(slots=True, eq=False)
class RequestLifecycle:
    """Updates seats, blocks, queue and accounts together when a request changes its state."""

    queue: WaitingQueue
    running: RunningRequests
    kv: KVCacheManager
    unscreened: UnscreenedRequests
    preemption: Preemption
    tenants: Tenants
    builder: BatchBuilder
    turnover: Turnover

    def start(self, request: Request) -> None:
        """Moves a waiting request from the queue to a seat."""
        self.queue.remove(request)
        self.running.add(request)
        if request.service_at_start is None:  # charge the whole prompt at once, and only once
            request.account.uncount_prompt(request.flex, request.user, request.sibling)
            request.service_at_start = request.account.service
            request.account.charge(INPUT_WEIGHT * (request.num_tokens - request.expected_cached_tokens))
        self.builder.new_requests.append(request)

    def allocate_blocks(self, request: Request, count: int) -> bool:
        """Gives a request `count` more blocks; preempts other requests if needed. Returns whether it succeeded."""
        while self.kv.block_pool.num_free < count:
            victim = self.preemption.victim_for_blocks(request)
            if victim is None:
                return False
            self.preempt(victim)
        self.kv.allocate_blocks(request, count)
        return True

    def preempt(self, request: Request) -> None:
        """Takes the seat and the blocks of a request away. It is queued again, to recompute all its tokens."""
        slots, slot = self.running.slots, request.slot
        request.num_tokens = int(slots.num_tokens[slot])
        request.awaits_mask = bool(slots.awaits_mask[slot])
        lost = int(slots.computed[slot])
        request.lost_tokens += lost
        request.preemptions += 1
        self.builder.preempted.append(request)
        self.builder.lost_tokens += lost
        self._unseat(request)
        request.state = State.WAITING
        self.unscreened.store_forecast_row(request)
        self.queue.add(request)

    def drop_last_tokens(self, request: Request, tokens: int) -> None:
        """Removes the last tokens of a preempted request: the step that should have sampled them did not."""
        self.queue.remove(request)
        request.num_tokens -= tokens
        request.awaits_mask = False
        self.unscreened.store_forecast_row(request)
        self.queue.add(request)

    def finish(self, request: Request, reason: str, now: float | None) -> None:
        """Ends a waiting or running request."""
        if request.state is State.RUNNING:
            self._remove_running(request)
        elif not self.unscreened.remove(request):
            self.queue.remove(request)
        self._end(request, reason, now)

    def refuse(self, request: Request, now: float) -> None:
        """Ends a request that screening has refused."""
        self._end(request, "refused", now)

    def _unseat(self, request: Request) -> None:
        """Frees the blocks and the seat at once. The slot is freed later, when no step in flight uses it."""
        self.running.remove(request)
        self.builder.forget(request)
        self.kv.free(request)

    def _remove_running(self, request: Request) -> None:
        """Removes a running request for good, and records its output length and the blocks that it freed."""
        free = self.kv.block_pool.num_free
        output_tokens = int(self.running.slots.num_tokens[request.slot]) - request.prompt_tokens
        self._unseat(request)
        self.turnover.note_finished((self.kv.block_pool.num_free - free) * self.kv.block_size, output_tokens)

    def _end(self, request: Request, reason: str, now: float | None) -> None:
        request.state = State.FINISHED
        request.finish_reason = reason
        request.finished = now
        if request.service_at_start is None:
            request.account.uncount_prompt(request.flex, request.user, request.sibling)
        self.tenants.leave(request.account, request.flex)
