"""PrefillPass: the second pass of a plan. It gives slices to prompts, in the policy's order, within the budget."""

import math
from dataclasses import dataclass

from weft.core.batch_builder import BatchBuilder
from weft.core.budget import Budget, StepLoad
from weft.core.decode_batch import DecodeBatch
from weft.core.kv_cache_manager import KVCacheManager
from weft.core.lifecycle import RequestLifecycle
from weft.core.policies import Policy
from weft.core.preemption import Preemption
from weft.core.queue import PrefillOrder, WaitingQueue
from weft.core.request import Request, State
from weft.core.running import RunningRequests
from weft.core.tenants import Tenants


@dataclass(slots=True, eq=False)
class PrefillPass:
    """Starts waiting requests and plans slices of their prompts."""

    policy: Policy
    queue: WaitingQueue
    running: RunningRequests
    kv: KVCacheManager
    decodes: DecodeBatch
    preemption: Preemption
    lifecycle: RequestLifecycle
    tenants: Tenants
    builder: BatchBuilder

    def plan(self, load: StepLoad) -> str:
        """Plans slices of running prefills and of waiting requests until the budget is spent.

        Returns what limited the prefill tokens.
        """
        budget = self._budget(load)
        if not self.running.prefilling and not self.queue:
            return budget.reason
        builder, slots = self.builder, self.running.slots
        order = PrefillOrder(self.running.prefilling, self.queue, self.policy.order.overtakes, load.start)
        while (request := order.next()) is not None:
            if request.batch:
                budget.limit_batch()
            if request.state is State.WAITING:
                preemptions = builder.preemptions
                if not self._start(request, budget, load, order):
                    continue
                if builder.preemptions > preemptions and not builder.prefills:
                    load = self.decodes.load(load.start)  # the victims' targets no longer count
                    budget = self._budget(load)
            order.served(request)
            if not self._plan_slice(request, budget):
                if budget.room(0, 1) < 1:
                    break
                continue
            request.account.unserved_since = load.start
            if request.first_token is None and slots.planned[request.slot] == slots.known[request.slot]:
                budget.tighten(request.due - load.start, is_promised=request.deadline < math.inf)
        return budget.reason

    def _budget(self, load: StepLoad) -> Budget:
        if self.running.has_wishes:
            load = load._replace(wish=self.decodes.tightest_wish())
        return self.policy.allowance.budget(load)

    def _start(self, request: Request, budget: Budget, load: StepLoad, order: PrefillOrder) -> bool:
        """Gives a waiting request a seat if there is room. Returns whether it did.

        If a request does not fit, no smaller request overtakes it. If its tenant has used its share, requests of other
        tenants go on. A request is passed over if the decode step would then break a promised gap, until that step is
        shorter. A held request is passed over until it is released.
        """
        if request.held:
            order.pass_over(request)
            return False
        if request.slot >= 0 or budget.room(0, 1) < 1 or not self.running.slots.num_free:
            order.close()
            return False
        blocks = self.kv.blocks_for(request.known)
        if self.tenants.is_over(request.account, batch=request.batch, seats=1, blocks=blocks):
            order.close_line(request)
            return False
        for victim in self.preemption.victims_for_start(request, load):
            self.lifecycle.preempt(victim)
        if not self.preemption.has_room(request):
            order.close()
            return False
        if not self.decodes.may_join(request, load):
            if request.batch:  # thousands may wait behind it, and they find no slack either
                order.close_line(request)
            else:
                order.pass_over(request)
            return False
        self.lifecycle.start(request)
        return True

    def _plan_slice(self, request: Request, budget: Budget) -> int:
        """Plans the request's next slice. Returns its length; 0 if the budget is spent or blocks are lacking."""
        slots, slot = self.running.slots, request.slot
        self._take_cached(request)
        first, known = int(slots.planned[slot]), int(slots.known[slot])
        count = budget.room(first, known - first)
        if count < 1 or not self.lifecycle.grow(request, self.kv.blocks_for(first + count) - len(request.blocks)):
            return 0
        budget.take(first, count)
        self.builder.add(request, first, count)
        slots.planned[slot] = first + count
        # Insert the blocks into the prefix cache now, so that an equal prompt in the same step shares them. This is
        # safe: executors run batches in order, and a forward pass writes all its keys and values before it reads any.
        self.kv.name_blocks(request, (first + count) // self.kv.block_size)
        return count

    def _take_cached(self, request: Request) -> None:
        """Appends cached blocks that other requests have computed or planned since the last call."""
        gained = self.kv.take_cached(request)
        self.builder.cached_tokens += gained
        if not request.preemptions:
            request.cached_tokens += gained
