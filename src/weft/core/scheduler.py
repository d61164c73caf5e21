"""The scheduler: `plan` builds a step in two passes, `commit` applies its result.

The first pass plans decodes, the second plans prefills in the policy's order. The scheduler is pure: its state depends
only on its inputs. The loop calls `plan`, gives the batch to an executor, and calls `commit` with the outcome. Batches
are committed in the order in which they were made. At most one earlier batch is uncommitted when a plan is made.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from weft.core.batch_builder import BatchBuilder
from weft.core.budget import StepLoad
from weft.core.decode_batch import DecodeBatch
from weft.core.kv_cache_manager import KVCacheManager
from weft.core.lifecycle import RequestLifecycle
from weft.core.policies import Policy
from weft.core.preemption import Preemption
from weft.core.prefill_pass import PrefillPass
from weft.core.prefix import BeforeReuse
from weft.core.queue import QueueLimits, WaitingQueue, service_of
from weft.core.request import Request, State
from weft.core.running import RunningRequests
from weft.core.screening import UnscreenedRequests
from weft.core.step import Outcome, Plan, PlannedStep, StepBatch, StepRecord
from weft.core.tenants import OUTPUT_WEIGHT, Tenants
from weft.core.turnover import Turnover
from weft.errors import EMPTY_PROMPT, RequestError

NO_ROWS: NDArray[np.bool_] = np.empty(0, np.bool_)


class Scheduler:
    """Plans and commits steps. The parts (queue, running requests, KV blocks, passes) are objects of their own."""

    def __init__(
        self,
        *,
        policy: Policy,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        enable_prefix_caching: bool = True,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
        tenant_weights: Mapping[str, float] | None = None,
        wave: int = 0,
        before_reuse: BeforeReuse | None = None,
    ) -> None:
        """`before_reuse` is called before cached blocks are overwritten, so that their contents can be copied first.

        The batch that is being planned overwrites them, or a transfer (`KVCacheManager.reserve_incoming`). A copy that
        is submitted before that still reads the old contents.
        """
        self._policy = policy
        self._before_reuse = before_reuse
        self.wave = wave  # queries of a prefill slice that read the context together (see Coefficients); 0: all queries
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._limits = QueueLimits(max_queued_requests, max_queued_tokens)
        self.tenant_weights = tenant_weights or {}  # relative shares; the default is 1
        self._steps = 0  # plans made
        self.reset()

    def reset(self) -> None:
        """Drops everything that is queued, running, in flight or cached. Used after a step failed."""
        policy = self._policy
        self.tenants = Tenants(self.max_num_seqs, self.num_blocks, self.tenant_weights)
        self.queue = WaitingQueue()
        self.running = running = RunningRequests(self.max_num_seqs)
        self.slots = running.slots
        self.kv = kv = KVCacheManager(
            self.num_blocks, self.block_size, running, self.enable_prefix_caching, self._before_reuse
        )
        self._turnover = Turnover()
        self._builder = builder = BatchBuilder()
        self._decodes = decodes = DecodeBatch(policy, running)
        self._preemption = preemption = Preemption(policy, running, kv, decodes, self.tenants, builder)
        self.unscreened = UnscreenedRequests(policy, self.queue, running, kv, preemption)
        self._lifecycle = RequestLifecycle(
            self.queue, running, kv, self.unscreened, preemption, self.tenants, builder, self._turnover
        )
        self._prefills = PrefillPass(
            policy, self.queue, running, kv, decodes, preemption, self._lifecycle, self.tenants, builder
        )
        self.steps_in_flight: deque[PlannedStep] = deque()  # batches that are not committed yet
        self._last_predicted = 0.0  # seconds that the last plan is predicted to take
        self._device_free = -math.inf  # when the last plan is predicted to end
        self._is_idle = True  # no step is in flight

    @property
    def policy(self) -> Policy:
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        """Another policy, from the next plan on. Waiting requests keep their order key."""
        self._policy = policy
        self._decodes.policy = self._preemption.policy = self.unscreened.policy = self._prefills.policy = policy

    @property
    def has_work(self) -> bool:
        """Whether a plan can do something, now or after the commit of the steps in flight."""
        return bool(self.unscreened or self.queue or self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.unscreened) + len(self.queue)

    @property
    def num_free_seats(self) -> int:
        return max(0, self.max_num_seqs - len(self.running))

    @property
    def num_unscreened(self) -> int:
        """New requests that later plans will screen."""
        return len(self.unscreened)

    @property
    def queued_tokens(self) -> int:
        """Tokens to prefill of all waiting requests."""
        return self.queue.tokens + self.unscreened.tokens

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError if it can never finish, QueueFullError if the queue is full."""
        if request.prompt_tokens < 1:
            raise RequestError(EMPTY_PROMPT)
        # The last token is sampled but never computed, so it needs no KV memory.
        if self.kv.blocks_for(request.limit - 1) > self.num_blocks:
            raise RequestError(
                f"the request may grow to {request.limit} tokens, but the KV cache holds "
                f"{self.num_blocks * self.block_size}: lower max_tokens, shorten the prompt or enlarge the cache"
            )
        self._limits.check(request, self.num_waiting - self.num_free_seats, self.queued_tokens)
        name = request.tenant if self.policy.order.fair else ""
        request.tenant_account = self.tenants.enter(name, request.flex, self._levels(), request.arrival)
        request.user_prompts_ahead = request.account.count_prompt(request.flex, request.user, request.sibling)
        request.order_key = self.policy.order.key(request)
        self.unscreened.add(request)

    def abort(self, request: Request, reason: str = "abort", now: float | None = None) -> None:
        """Ends a request at any time. Results of a step in flight for it are discarded."""
        if request.state is not State.FINISHED:
            self._lifecycle.finish(request, reason, now)
            self.running.retire_slots()

    def release(self, request: Request) -> None:
        """Lets plans sample for a constrained request again, because the mask of its next token is ready."""
        request.awaits_mask = False
        if request.state is State.RUNNING:
            self.slots.awaits_mask[request.slot] = False

    def plan(self, now: float) -> Plan:
        """Plans the next forward pass. There is none if the scheduler is idle, or if all requests wait for a commit."""
        if self._is_idle and now > self._device_free > -math.inf:
            self.policy.note_idle(now - self._device_free)
            self._device_free = now
        start = max(now, self._device_free)
        prefills_first = self.policy.budget_policy.prefills_first
        self._decodes.clear()
        if not prefills_first:
            self._plan_decodes()
        load = self._decodes.step_load(start)
        if min(load.promised_max_step, load.default_max_step) < math.inf:
            load = self._preempt_flex(load)
        refused = self._screen(load, now)
        prefill_limit = self._prefills.plan(load)
        if prefills_first and not self._builder.prefills:
            self._plan_decodes()
        # The prefill pass may have preempted requests that were already chosen to decode.
        decodes = self._decodes.slots()
        self.running.retire_slots()
        if not len(decodes) and not self._builder.prefills:
            # Requests that got a slot but no slice stay in `new_requests`, for the next batch.
            return Plan(None, NO_ROWS, [], refused)
        new_requests = self._builder.new_requests
        step = self._build_step(decodes, prefill_limit, load)
        self.steps_in_flight.append(step)
        self._last_predicted = step.predicted or 0.0
        self._device_free = load.start + self._last_predicted
        self._is_idle = False
        return Plan(step.batch, step.may_be_last, new_requests, refused)

    def commit(self, batch: StepBatch, outcome: Outcome, started: float, finished: float) -> StepRecord:
        """Applies the outcome of the oldest batch in flight: progress, finished requests, blocks that became full."""
        assert self.steps_in_flight[0].batch.number == batch.number, "batches are committed in order"
        step = self.steps_in_flight.popleft()
        batch, slots = step.batch, self.slots
        slots.num_in_flight[batch.slots] -= 1
        if outcome.accepted is None:
            slots.computed[batch.slots] = batch.first + batch.count
            sampled = batch.is_sampled
        else:
            self._accept(batch, outcome.accepted)
            sampled = batch.is_sampled & (outcome.accepted > 0)
        for row in range(batch.num_decodes, len(step.requests)):
            step.requests[row].note_times(started, finished, is_sampled=bool(batch.is_sampled[row]))
        if self.tenants.has_several:
            for row in np.flatnonzero(sampled).tolist():
                step.requests[row].account.charge(OUTPUT_WEIGHT)
        for request in outcome.filled:
            if request.state is State.RUNNING:
                self.kv.cache_full_blocks(request, int(slots.computed[request.slot]) // self.block_size)
        for request, finish_reason in outcome.finished:
            self._lifecycle.finish(request, finish_reason, finished)
        self._turnover.note_step(finished - started, batch.num_decodes, self.kv.free_share)
        self.running.retire_slots()
        self.policy.observe(batch.shape, step.predicted, finished - started)
        self._is_idle = not self.steps_in_flight
        self._device_free = finished if self._is_idle else finished + self._last_predicted  # the next step begins now
        return step.record(
            started,
            finished,
            decode_tokens=int(np.count_nonzero(sampled[: batch.num_decodes])),
            requests_finished=len(outcome.finished),
            running=len(self.running),
            waiting=self.num_waiting,
            free_blocks=self.kv.block_pool.num_free,
        )

    # The passes

    def _plan_decodes(self) -> None:
        """Chooses all requests that can decode. Allocates a block for each request that needs one.

        If blocks are short, the most senior request (class, then arrival) gets its block first.
        """
        short = self._decodes.choose()
        if not len(short):
            return
        if len(short) <= self.kv.block_pool.num_free:
            self.kv.allocate_block_each(short)
            return
        for request in sorted(map(self.running.at, short.tolist()), key=lambda request: request.age_key):
            if request.state is State.RUNNING and not self._lifecycle.allocate_blocks(request, 1):
                self._lifecycle.preempt(request)  # no other request can be preempted for it

    def _preempt_flex(self, load: StepLoad) -> StepLoad:
        """Preempts flex requests until the decode step is short enough for the standard requests (see `has_slack`)."""
        victims = self._decodes.flex_requests()
        if not victims:
            return load
        for victim in sorted(victims, key=self._preemption.victim_key):
            if self._decodes.has_slack(load):
                break
            self._lifecycle.preempt(victim)
        return self._decodes.step_load(load.start)

    def _screen(self, load: StepLoad, now: float) -> list[Request]:
        """Screens new requests. Ends and returns the refused ones."""
        if not self.num_waiting:
            return []
        free_tokens = self.kv.free_tokens() if self.running else math.inf
        refused = []
        standard_load = self._decodes.standard_load(load, free_tokens, self._turnover)
        for request in self.unscreened.screen(standard_load):
            self._lifecycle.refuse(request, now)
            refused.append(request)
        return refused

    def _build_step(self, decodes: NDArray[np.int64], prefill_limit: str, load: StepLoad) -> PlannedStep:
        """Builds the batch, and clears the builder for the next one."""
        builder, slots = self._builder, self.slots
        self._steps += 1
        batch = builder.build(self._steps, decodes, self.running, self.kv.pop_updates(), self.wave)
        has_waiting = bool(self.running.prefilling or self.queue)
        step = PlannedStep(
            batch=batch,
            requests=self.running.at_all(batch.slots),
            prefill_limit=prefill_limit,
            predicted=self.policy.predict(batch.shape),
            cached_tokens=builder.cached_tokens,
            preempted=builder.preempted,
            lost_tokens=builder.lost_tokens,
            starved=has_waiting and self.policy.budget_policy.starves(load),
            may_be_last=batch.is_sampled & (slots.num_tokens[batch.slots] >= slots.limit[batch.slots]),
            new_slots=[(request.slot, request) for request in builder.new_requests],
            waits_for=builder.waits_for,
        )
        builder.clear()
        return step

    def _accept(self, batch: StepBatch, accepted: NDArray[np.int64]) -> None:
        """Applies a result in which the executor left out some decodes. They are planned again.

        If a later batch is in flight, its positions for these rows are too high by the missing tokens. They are
        corrected here. The executor corrects its own copy.
        """
        slots, missing = self.slots, batch.count - accepted
        assert not missing[batch.num_decodes :].any(), "a prefill row was left out; other requests may share its blocks"
        assert batch.count[: batch.num_decodes].max(initial=1) == 1, "nothing plans several tokens for a decode yet"
        slots.computed[batch.slots] = batch.first + accepted
        slots.planned[batch.slots] -= missing
        slots.num_tokens[batch.slots] -= missing
        slots.awaits_mask[batch.slots[missing > 0]] = False  # their masks are still valid
        for row in np.flatnonzero(missing).tolist():
            request = self.running.at(int(batch.slots[row]))
            if request.state is State.WAITING:  # preempted while this step was in flight
                self._lifecycle.drop_last_tokens(request, int(missing[row]))
        if self.steps_in_flight:
            later = self.steps_in_flight[0]
            by_slot = np.zeros(slots.size, np.int64)
            by_slot[batch.slots] = missing
            moved = replace(later.batch, first=later.batch.first - by_slot[later.batch.slots])
            self.steps_in_flight[0] = replace(later, batch=moved)

    def _levels(self) -> Iterator[float]:
        """Service that each tenant with prompts to compute has received."""
        for line in self.queue.lines:
            yield line.account.service
        for request in [*self.unscreened, *self.running.prefilling]:
            yield service_of(request)

    # Checks

    def check_integrity(self) -> None:
        """Raises AssertionError if the state is inconsistent. Takes O(blocks) time: for tests and idle times."""
        self.running.check_integrity()
        self.kv.check_integrity()
        self.queue.check_integrity()
        assert all(not request.blocks for request in self.queue), "a request without a seat holds blocks"
        waiting = [*self.unscreened, *self.queue]
        for account in {request.account for request in [*waiting, *self.running]}:
            seated = [request for request in self.running if request.account is account]
            assert account.seats == len(seated), "a tenant's seats are miscounted"
            new = [one for one in waiting if one.account is account and one.service_at_start is None]
            users = Counter((one.flex, one.user) for one in new if one.user and not one.sibling)
            assert account.waiting == users, "a user's prompts are miscounted"
            assert account.blocks == sum(len(request.blocks) for request in seated), "a tenant's blocks are miscounted"
