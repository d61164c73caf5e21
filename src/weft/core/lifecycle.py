"""RequestLifecycle: every change of a request's state. It starts, grows, is preempted, and ends."""

from dataclasses import dataclass

from weft.core.batch_builder import BatchBuilder
from weft.core.kv_cache_manager import KVCacheManager
from weft.core.preemption import Preemption
from weft.core.queue import WaitingQueue
from weft.core.request import Request, State
from weft.core.running import RunningRequests
from weft.core.screening import Screening
from weft.core.tenants import INPUT_WEIGHT, Tenants
from weft.core.turnover import Turnover


@dataclass(slots=True, eq=False)
class RequestLifecycle:
    """Keeps seats, blocks, queue and accounts consistent when a request changes its state."""

    queue: WaitingQueue
    running: RunningRequests
    kv: KVCacheManager
    screening: Screening
    preemption: Preemption
    tenants: Tenants
    builder: BatchBuilder
    turnover: Turnover

    def start(self, request: Request) -> None:
        """Moves a waiting request from the queue to a seat."""
        self.queue.remove(request)
        self.running.take_seat(request)
        if request.service_at_start is None:  # charge the whole prompt at once, and only once
            request.account.uncount_prompt(request.batch, request.user, request.sibling)
            request.service_at_start = request.account.service
            request.account.charge(INPUT_WEIGHT * (request.known - request.expected_hits))
        self.builder.joined.append(request)

    def grow(self, request: Request, count: int) -> bool:
        """Gives a request `count` more blocks; preempts other requests if needed. Returns whether it succeeded."""
        while self.kv.pool.num_free < count:
            victim = self.preemption.victim_for_blocks(request)
            if victim is None:
                return False
            self.preempt(victim)
        self.kv.grow(request, count)
        return True

    def preempt(self, request: Request) -> None:
        """Takes the seat and the blocks of a request. It is queued again, to recompute all its known tokens."""
        slots, slot = self.running.slots, request.slot
        request.known = int(slots.known[slot])
        request.held = bool(slots.held[slot])
        lost = int(slots.computed[slot])
        request.lost_tokens += lost
        request.preemptions += 1
        self.builder.preemptions += 1
        self.builder.lost_tokens += lost
        self._unseat(request)
        request.state = State.WAITING
        self.screening.pack(request)
        self.queue.add(request)

    def take_back(self, request: Request, tokens: int) -> None:
        """Forgets the last known tokens of a preempted request: the step that should have sampled them did not."""
        self.queue.remove(request)
        request.known -= tokens
        request.held = False
        self.screening.pack(request)
        self.queue.add(request)

    def finish(self, request: Request, reason: str, now: float | None) -> None:
        """Ends a waiting or running request."""
        if request.state is State.RUNNING:
            self._leave(request)
        elif not self.screening.remove(request):
            self.queue.remove(request)
        self._end(request, reason, now)

    def refuse(self, request: Request, now: float) -> None:
        """Ends a request that screening has refused."""
        self._end(request, "refused", now)

    def _unseat(self, request: Request) -> None:
        """Frees the blocks and the seat at once. The slot is freed later, when no step in flight uses it."""
        self.running.leave_seat(request)
        self.builder.forget(request)
        self.kv.free(request)

    def _leave(self, request: Request) -> None:
        """Removes a running request for good, and records its output length and the blocks that it freed."""
        free = self.kv.pool.num_free
        written = int(self.running.slots.known[request.slot]) - request.prompt_tokens
        self._unseat(request)
        self.turnover.ended((self.kv.pool.num_free - free) * self.kv.block_size, written)

    def _end(self, request: Request, reason: str, now: float | None) -> None:
        request.state = State.FINISHED
        request.finish_reason = reason
        request.finished = now
        if request.service_at_start is None:
            request.account.uncount_prompt(request.batch, request.user, request.sibling)
        self.tenants.leave(request.account, request.batch)
