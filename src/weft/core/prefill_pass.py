"""PrefillPass: the second pass of a plan. It plans prefill slices in the policy's order, within the budget."""

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
from weft.core.step import WaitsFor
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
        self.builder.waits_for = ""  # a plan without a batch may have left another
        budget = self._budget(load)
        if not self.running.prefilling and not self.queue:
            return budget.prefill_limit
        builder, slots = self.builder, self.running.slots
        order = PrefillOrder(self.running.prefilling, self.queue, self.policy.order.overtakes, load.start)
        while (request := order.next()) is not None:
            if request.flex:
                budget.limit_flex()
            if request.state is State.WAITING:
                preemptions = len(builder.preempted)
                if waits_for := self._start(request, budget, load, order):
                    builder.waits_for = builder.waits_for or waits_for
                    continue
                if len(builder.preempted) > preemptions and not builder.prefills:
                    load = self.decodes.step_load(load.start)  # without the targets of the victims
                    budget = self._budget(load)
            order.served(request)
            if not self._plan_slice(request, budget):
                if budget.room(0, 1) < 1:
                    break
                continue
            request.account.unserved_since = load.start
            if request.first_token is None and slots.planned[request.slot] == slots.num_tokens[request.slot]:
                budget.tighten(request.due - load.start, is_promised=request.promised_due < math.inf)
        return budget.prefill_limit

    def _budget(self, load: StepLoad) -> Budget:
        if self.running.has_wishes:
            load = load._replace(wished_max_step=self.decodes.wished_max_step())
        return self.policy.budget_policy.budget(load)

    def _start(self, request: Request, budget: Budget, load: StepLoad, order: PrefillOrder) -> WaitsFor:
        """Gives a waiting request a seat if it may start now. Returns what it waits for; "" if it has started.

        Otherwise one of three things follows for the requests behind it in this step:
        - no seat, slot, memory or budget: no further request starts, so that no smaller request overtakes it (`close`)
        - the tenant is over its share, or a flex request finds no slack: its line stops (`close_line`)
        - the decode step would break a promised gap, or its grammar mask is not ready: only it waits (`pass_over`)
        """
        if request.awaits_mask:
            order.pass_over(request)
            return "grammar"
        if request.slot >= 0 or budget.room(0, 1) < 1:
            order.close()
            return "budget"
        if not self.running.slots.num_free:
            order.close()
            return "seats"
        blocks = self.kv.blocks_for(request.num_tokens)
        if self.tenants.is_over(request.account, flex=request.flex, seats=1, blocks=blocks):
            order.close_line(request)
            return "tenant"
        for victim in self.preemption.victims_for_start(request, load):
            self.lifecycle.preempt(victim)
        if not self.preemption.has_room(request):
            order.close()
            return "blocks" if len(self.running) < self.running.max_num_seqs else "seats"
        if not self.decodes.fits_decode_step(request, load):
            if request.flex:  # thousands may wait behind it; they would find no slack either
                order.close_line(request)
            else:
                order.pass_over(request)
            return "gap"
        self.lifecycle.start(request)
        return ""

    def _plan_slice(self, request: Request, budget: Budget) -> int:
        """Plans the request's next slice. Returns its tokens; 0 if the budget is spent or blocks are short."""
        slots, slot = self.running.slots, request.slot
        self._reuse_cached_blocks(request)
        first, num_tokens = int(slots.planned[slot]), int(slots.num_tokens[slot])
        count = budget.room(first, num_tokens - first)
        new_blocks = self.kv.blocks_for(first + count) - len(request.blocks)
        if count < 1 or not self.lifecycle.allocate_blocks(request, new_blocks):
            return 0
        budget.spend(first, count)
        self.builder.add(request, first, count)
        slots.planned[slot] = first + count
        # Insert the blocks into the prefix cache now, so that an equal prompt in the same step shares them. This is
        # safe: executors run batches in order, and a forward pass writes all its keys and values before it reads any.
        self.kv.cache_full_blocks(request, (first + count) // self.kv.block_size)
        return count

    def _reuse_cached_blocks(self, request: Request) -> None:
        """Appends cached blocks that other requests have computed or planned by now."""
        cached_tokens = self.kv.reuse_cached_blocks(request)
        self.builder.cached_tokens += cached_tokens
        if not request.preemptions:
            request.cached_tokens += cached_tokens
