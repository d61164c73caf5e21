"""The scheduler: two passes make a plan (decodes, then prefills as the policy ranks them), one commit takes it back in.

It is a pure function of what it is told. The loop calls `plan`, hands the plan to an executor, and calls `commit` with
what came of it, in the same order; when a plan is made, at most one earlier one is uncommitted.
"""

import math
from collections.abc import Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from weft.core.admission import Prefill
from weft.core.blocks import BlockPool
from weft.core.budget import Budget, StepLoad
from weft.core.cost import StepShape, slice_pairs
from weft.core.policies import Policy
from weft.core.prefix import PrefixCache
from weft.core.queue import Queue, Turns, line_up
from weft.core.request import Request, State
from weft.core.slots import Slots
from weft.core.step import BlockUpdates, Outcome, StepPlan, StepRecord
from weft.core.tenants import INPUT_WEIGHT, OUTPUT_WEIGHT, Account, Tenants
from weft.errors import QueueFullError, RequestError

NO_SLOTS: NDArray[np.int64] = np.empty(0, np.int64)


class Scheduler:
    """Owns the queue, the seats and the blocks."""

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
    ) -> None:
        self.policy = policy
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.max_queued_requests = max_queued_requests
        self.max_queued_tokens = max_queued_tokens
        self.tenant_weights = tenant_weights or {}  # shares, relative to 1
        self._steps = 0  # plans made
        self.reset()

    def reset(self) -> None:
        """Starts over with nothing queued, running, in flight or cached: after a step that failed."""
        self.pool = BlockPool(self.num_blocks)
        self.cache = PrefixCache(self.pool, self.enable_prefix_caching)
        self.slots = Slots(self.max_num_seqs)
        self.tenants = Tenants(self.max_num_seqs, self.num_blocks, self.tenant_weights)
        self.queue = Queue()
        self.running: set[Request] = set()
        self._prefilling: list[Request] = []  # of those running, the ones with prompt left to plan
        self._leaving: list[Request] = []  # gave up their seat; their slot is still named by a plan
        self._last_predicted = 0.0  # seconds of the last plan
        self._device_free = -math.inf  # when the last plan is predicted to end
        self._fresh: list[Request] = []  # came since the last plan, to be screened by the next
        self.refused: list[Request] = []  # since the owner last looked; it empties the list
        self._draft = _Draft()

    @property
    def has_work(self) -> bool:
        """Whether another plan could do something, now or after the commit of what is in flight."""
        return bool(self._fresh or self.queue or self.running)

    @property
    def num_waiting(self) -> int:
        return len(self._fresh) + len(self.queue)

    def add(self, request: Request) -> None:
        """Queues a request; refuses one that could never finish, or that finds the queue full."""
        if request.prompt_tokens < 1:
            raise RequestError("the prompt is empty: at least one token is needed to predict the next one")
        # The last token is sampled, never computed, so it needs no room.
        if self._blocks_for(request.limit - 1) > self.pool.num_blocks:
            raise RequestError(
                f"the request may grow to {request.limit} tokens, but the KV cache holds "
                f"{self.pool.num_blocks * self.block_size}: lower max_tokens, shorten the prompt or enlarge the cache"
            )
        self._check_queue(request)
        request.rank = self.policy.order.rank(request)
        request.account = self.tenants.enter(request.tenant if self.policy.order.fair else "")
        self._fresh.append(request)

    def abort(self, request: Request, reason: str = "abort", now: float | None = None) -> None:
        """Ends a request at any moment. What a step in flight still computes for it is thrown away."""
        if request.state is State.WAITING:
            (self._fresh if request in self._fresh else self.queue).remove(request)
            self._end(request, reason, now)
        elif request.state is State.RUNNING:
            self._unseat(request)
            self._end(request, reason, now)
            self._retire_slots()

    def clear_cache(self) -> None:
        """Forgets all cached content. Running requests keep theirs, unnamed."""
        self.cache.clear()
        for request in self.running:
            request.named = len(request.blocks)

    def plan(self, now: float) -> StepPlan | None:
        """The next forward pass, or None where nothing can be done (idle, or all waits for a commit)."""
        draft = self._draft = _Draft()
        prefills_first = self.policy.allowance.prefills_first
        decodes = NO_SLOTS if prefills_first else self._plan_decodes()
        draft.decodes = decodes
        load = self._load(decodes, now)
        self._screen(load, now)
        budget = self.policy.allowance.budget(load)
        self._plan_prefills(budget, load)
        if prefills_first and not draft.prefills:
            decodes = self._plan_decodes()
        # A victim of the prefills may be among the decodes that were settled before.
        decodes = decodes[self.slots.decoding[decodes]]
        self._retire_slots()
        if not len(decodes) and not draft.prefills:
            return None
        plan = self._seal(decodes, budget.reason)
        self._last_predicted = plan.predicted or 0.0
        self._device_free = load.start + self._last_predicted
        return plan

    def commit(self, plan: StepPlan, outcome: Outcome, started: float, finished: float) -> StepRecord:
        """Takes a step's outcome in: progress, finishes, blocks that became full."""
        slots = self.slots
        slots.in_flight[plan.slots] -= 1
        slots.computed[plan.slots] = plan.first + plan.count
        for row in range(plan.num_decodes, len(plan.requests)):
            _note_times(plan.requests[row], bool(plan.samples[row]), started, finished)
        if self.tenants.several:
            for row in np.flatnonzero(plan.samples).tolist():
                _account(plan.requests[row]).charge(OUTPUT_WEIGHT)
        for request in outcome.filled:
            if request.state is State.RUNNING:
                self._name_blocks(request, len(request.hashes))
        for request, finish_reason in outcome.finished:
            if request.state is State.WAITING:  # preempted while this step was in flight
                self.queue.remove(request)
            else:
                self._unseat(request)
            self._end(request, finish_reason, finished)
        self._retire_slots()
        self.policy.observe(plan.shape, plan.predicted, finished - started)
        if plan.predicted is not None and plan.number == self._steps - 1:  # the one behind it begins now
            self._device_free = finished + self._last_predicted
        return StepRecord(
            number=plan.number,
            started=started,
            finished=finished,
            predicted=plan.predicted,
            reason=plan.reason,
            decode_tokens=plan.num_decodes,
            prefill_tokens=plan.num_tokens - plan.num_decodes,
            cached_tokens=plan.cached_tokens,
            preemptions=plan.preemptions,
            lost_tokens=plan.lost_tokens,
            requests_finished=len(outcome.finished),
            running=len(self.running),
            waiting=self.num_waiting,
            free_blocks=self.pool.num_free,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError where the books do not balance. Costs O(blocks): for tests and idle moments."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        refs = [0] * self.pool.num_blocks
        for request in self.running:
            assert request.state is State.RUNNING, "a request sits without running"
            assert self.slots.occupant[request.slot] is request, "a slot has two owners"
            assert self.slots.capacity[request.slot] == len(request.blocks) * self.block_size
            for block in request.blocks:
                refs[block] += 1
        assert refs == self.pool.refs, "references and block tables disagree"
        assert all(not request.blocks for request in [*self.queue, *self._leaving]), "a seatless request holds blocks"
        taken = len(self.running) + len(self._leaving)
        assert self.slots.num_free == self.slots.size - taken, "a slot is neither free nor taken"
        self.queue.check_integrity()
        self._check_accounts()
        assert len(self.running) <= self.max_num_seqs, "more run than there are seats"

    def _check_accounts(self) -> None:
        for account in {_account(request) for request in [*self._fresh, *self.queue, *self.running]}:
            seated = [request for request in self.running if request.account is account]
            assert account.seats == len(seated), "a tenant's seats are miscounted"
            assert account.blocks == sum(len(request.blocks) for request in seated), "a tenant's blocks are miscounted"

    # The passes

    def _plan_decodes(self) -> NDArray[np.int64]:
        """Slots of every request that can decode; blocks for those that need one, the oldest first."""
        slots = self.slots
        ready = np.flatnonzero(slots.decoding & (slots.known < slots.limit))
        short = ready[slots.planned[ready] == slots.capacity[ready]]
        if not len(short):
            return ready
        if len(short) <= self.pool.num_free:
            self._grow_all(short)
            return ready
        for request in sorted((self._occupant(slot) for slot in short.tolist()), key=_age):
            if request.state is State.RUNNING and not self._grow(request, 1):
                self._preempt(request)  # the youngest of all makes room for its elders
        return ready[slots.decoding[ready]]

    def _plan_prefills(self, budget: Budget, load: StepLoad) -> None:
        """Slices of prefills under way and of waiting requests, in the policy's order, until the budget is spent."""
        if not self._prefilling and not self.queue:
            return
        turns = Turns(self._prefilling, self.queue, self.policy.order.overtakes)
        while (request := turns.next()) is not None:
            if request.state is State.RUNNING:
                turns.served(request)
            elif not self._admit(request, budget, load, turns):
                continue
            if not self._plan_prefill(request, budget):
                return
            if request.first_token is None and self.slots.planned[request.slot] == self.slots.known[request.slot]:
                budget.tighten(request.due - load.start)

    def _admit(self, request: Request, budget: Budget, load: StepLoad, turns: Turns) -> bool:
        """Seats a waiting request if there is room for it, or ends the admission of those behind it in this step.

        One that does not fit is not overtaken for being large; one whose tenant has its share keeps up its tenant only.
        """
        if self._is_over_share(request):
            turns.close(request)
            return False
        if request.slot >= 0 or budget.room(0, 1) < 1 or not self._make_room(request, load):
            turns.close_all()
            return False
        self.queue.remove(request)
        self._seat(request)
        return True

    def _make_room(self, request: Request, load: StepLoad) -> bool:
        """Whether there is a seat, room for the whole prompt, and a decode step that can take it.

        Those of a lower class, or of a tenant that holds more than its share, give way if that helps.
        """
        if self._has_room(request, load, frozenset()):
            return True
        givers = [other for other in self.running - self._draft.prefilled if self._gives_way(other, request)]
        if not givers or not self._has_room(request, load, frozenset(givers)):
            return False
        for victim in sorted(givers, key=self._loss):
            if self._gives_way(victim, request):  # its tenant may be within its share by now
                self._preempt(victim)
            if self._has_room(request, load, frozenset()):
                return True
        return False

    def _has_room(self, request: Request, load: StepLoad, gone: frozenset[Request]) -> bool:
        """Whether a request could start if those in `gone` were not there."""
        seats = len(self.running) - len(gone)
        if seats >= self.max_num_seqs or not self.slots.num_free:
            return False
        return self._fits(request, gone) and self._joins(request, load, gone)

    def _joins(self, request: Request, load: StepLoad, gone: frozenset[Request]) -> bool:
        """Whether the decode step with all prefills under way and this one in it still keeps every promise."""
        if len(self.running) == len(gone):
            return True
        decodes = self._draft.decodes[self.slots.decoding[self._draft.decodes]]
        if gone:
            decodes = decodes[~np.isin(decodes, [other.slot for other in gone])]
        shape, gap = self._load(decodes, load.start)[1:]
        prefills = [other for other in self._prefilling if other not in gone] + [request]
        count = shape.decodes + len(prefills)
        context = shape.context + sum(other.known for other in prefills)
        gap = min(gap, min(other.gap_target for other in prefills))
        return self.policy.admission.may_join(StepShape(count, 0.0, 0, count, context), gap)

    # Parts of the passes

    def _plan_prefill(self, request: Request, budget: Budget) -> int:
        """The request's next slice; returns its length, 0 where the budget is spent or no block could be had."""
        slots, slot = self.slots, request.slot
        self._take_cached(request)
        first, known = int(slots.planned[slot]), int(slots.known[slot])
        count = budget.room(first, known - first)
        if count < 1 or not self._grow(request, self._blocks_for(first + count) - len(request.blocks)):
            return 0
        budget.take(first, count)
        if self.tenants.several and not request.preemptions:  # what was lost is not theirs to pay for
            _account(request).charge(INPUT_WEIGHT * count)
        self._draft.prefills.append((request, first, count))
        self._draft.prefilled.add(request)
        slots.planned[slot] = first + count
        # Named now, so that an equal prompt in this very step shares them: executors run plans in order, and a forward
        # pass writes the keys and values of all its slices before it reads any.
        self._name_blocks(request, (first + count) // self.block_size)
        return count

    def _load(self, decodes: NDArray[np.int64], now: float) -> StepLoad:
        count = len(decodes)
        context = int(self.slots.planned[decodes].sum()) + count
        gap = float(self.slots.gap_target[decodes].min()) if count else math.inf
        return StepLoad(max(now, self._device_free), StepShape(count, 0.0, 0, count, context), gap)

    def _take_cached(self, request: Request) -> None:
        """Appends the blocks that others have computed (or have planned to) since the last look."""
        slots, slot = self.slots, request.slot
        planned = int(slots.planned[slot])
        if not request.reuse_prefix or planned != slots.capacity[slot]:
            return
        # The last known token is always computed: its output is what the next one is sampled from.
        stop = (int(slots.known[slot]) - 1) // self.block_size
        blocks = self.cache.match(request.hashes, len(request.blocks), stop)
        for block in blocks:
            self.pool.retain(block)
        self._append_blocks(request, blocks)
        request.named = len(request.blocks)
        gained = len(blocks) * self.block_size
        slots.planned[slot] += gained
        self._draft.cached_tokens += gained
        if not request.preemptions:
            request.cached_tokens += gained

    def _fits(self, request: Request, gone: frozenset[Request]) -> bool:
        """Whether the whole uncached prompt fits beside what runs, with room for the others to grow."""
        if len(self.running) == len(gone):
            return True
        claimed = sum(
            self._blocks_for(int(self.slots.known[other.slot])) - len(other.blocks)
            for other in self._prefilling
            if other not in gone
        )
        growth_reserve = len(self.running) - len(gone)  # one block each
        freed = sum(len(other.blocks) for other in gone)  # at most: some may be shared
        free = self.pool.num_free + freed - claimed - growth_reserve
        if free < 1:  # at least its last block is always its own: no need to look the others up
            return False
        hits = self.cache.match(request.hashes, 0, self._shareable(request))
        unused_hits = sum(self.pool.refs[block] == 0 for block in hits)
        return self._blocks_for(request.known) - len(hits) + unused_hits <= free

    def _grow(self, request: Request, count: int) -> bool:
        """Gives a request `count` more blocks, preempting younger ones if it must."""
        while self.pool.num_free < count:
            victim = self._victim(request)
            if victim is None:
                return False
            self._preempt(victim)
        self._append_blocks(request, self.pool.allocate(max(0, count)))
        return True

    def _grow_all(self, short: NDArray[np.int64]) -> None:
        """One block more for each of these slots, all at once: the common case of a decode step."""
        blocks = self.pool.allocate(len(short))
        slots = short.tolist()
        for slot, block in zip(slots, blocks, strict=True):
            request = self._occupant(slot)
            request.blocks.append(block)
            _account(request).blocks += 1
        draft = self._draft
        draft.block_slots += slots
        draft.block_columns += (self.slots.capacity[short] // self.block_size).tolist()
        draft.blocks += blocks
        self.slots.capacity[short] += self.block_size

    def _append_blocks(self, request: Request, blocks: list[int]) -> None:
        index = len(request.blocks)
        request.blocks += blocks
        _account(request).blocks += len(blocks)
        self.slots.capacity[request.slot] = len(request.blocks) * self.block_size
        draft = self._draft
        draft.block_slots += [request.slot] * len(blocks)
        draft.block_columns += range(index, index + len(blocks))
        draft.blocks += blocks

    def _victim(self, claimant: Request) -> Request | None:
        """Of those who must give way to the claimant the one whose loss costs least; None where nobody must.

        One that this step already prefills for is never taken.
        """
        others = self.running - self._draft.prefilled
        givers = [other for other in others if self._gives_way(other, claimant) or self._is_junior(other, claimant)]
        return min(givers, key=self._loss, default=None)

    def _gives_way(self, request: Request, claimant: Request) -> bool:
        """The lower class to the higher; within a class, the tenant above its share to the one within."""
        if request.age_key[:2] != claimant.age_key[:2]:
            return request.age_key[:2] > claimant.age_key[:2]
        return self._is_over(request) and not self._is_over(claimant)

    def _is_junior(self, request: Request, claimant: Request) -> bool:
        """The younger to the elder of its class, unless that one's tenant is above its share and its own is not."""
        if request.age_key <= claimant.age_key:
            return False
        return self._is_over(request) or not self._is_over(claimant)

    def _is_over(self, request: Request) -> bool:
        return self.tenants.is_over(_account(request))

    def _loss(self, request: Request) -> tuple[bool, int, bool, float, float]:
        """Smaller is easier to give up: the lowest class, then one that is promised nothing, then the least work."""
        work = self.policy.work(int(self.slots.computed[request.slot]))
        return not request.batch, -request.priority, request.gap_target < math.inf, work, -request.arrival

    def _is_over_share(self, request: Request) -> bool:
        if not self.tenants.several:
            return False
        return self.tenants.is_over(_account(request), seats=1, blocks=self._blocks_for(request.known))

    def _check_queue(self, request: Request) -> None:
        waiting = self.num_waiting
        if self.max_queued_requests is not None and waiting >= self.max_queued_requests:
            raise QueueFullError(
                f"{waiting} requests wait already, max_queued_requests={self.max_queued_requests}: try again later"
            )
        tokens = self.queue.tokens + sum(fresh.known for fresh in self._fresh)
        if self.max_queued_tokens is not None and tokens + request.known > self.max_queued_tokens:
            raise QueueFullError(
                f"{tokens} tokens of prompts wait already; with {request.known} more they would exceed "
                f"max_queued_tokens={self.max_queued_tokens}: try again later"
            )

    def _screen(self, load: StepLoad, now: float) -> None:
        """Refuses newcomers that would be late, or make others late, and those whose time has run out in the queue."""
        admission = self.policy.admission
        for request in self._fresh:
            hits = self.cache.match(request.hashes, 0, self._shareable(request))
            request.expected_hits = len(hits) * self.block_size
            self.queue.add(request)
            if not admission.screen(request, self._prefills, load):
                self._refuse(request, now)
        self._fresh.clear()
        while hopeless := [request for request in self.queue.heads() if self._is_hopeless(request, load)]:
            for request in hopeless:
                self._refuse(request, now)

    def _is_hopeless(self, request: Request, load: StepLoad) -> bool:
        """One that has started already is carried to its end."""
        return not request.preemptions and self.policy.admission.is_hopeless(self._left_of(request), load)

    def _refuse(self, request: Request, now: float) -> None:
        self.queue.remove(request)
        self._end(request, "refused", now)
        self.refused.append(request)

    def _prefills(self) -> list[Prefill]:
        """All prompts that are not computed yet, in the policy's order."""
        order = line_up(self._prefilling, self.queue, self.policy.order.overtakes, lambda r: self._left_of(r).left)
        return [self._left_of(request) for request in order]

    def _left_of(self, request: Request) -> Prefill:
        done = int(self.slots.planned[request.slot]) if request.state is State.RUNNING else request.expected_hits
        return Prefill(request, done, request.known - done)

    def _shareable(self, request: Request) -> int:
        """Blocks of a request that may come from the prefix cache: its last token is always computed."""
        return (request.known - 1) // self.block_size if request.reuse_prefix else 0

    def _preempt(self, request: Request) -> None:
        """Takes seat and blocks away; the request queues again with all tokens it knows, to be computed anew."""
        slot = request.slot
        request.known = int(self.slots.known[slot])
        lost = int(self.slots.computed[slot])
        request.lost_tokens += lost
        request.preemptions += 1
        self._draft.preemptions += 1
        self._draft.lost_tokens += lost
        self._unseat(request)
        request.state = State.WAITING
        self.queue.add(request)

    def _seat(self, request: Request) -> None:
        self.slots.take(request)
        request.state = State.RUNNING
        self.running.add(request)
        _account(request).seats += 1
        self._prefilling.append(request)
        self._draft.joined.append(request)

    def _unseat(self, request: Request) -> None:
        """Frees blocks and seat at once; the slot follows when no plan names it any more."""
        self.running.remove(request)
        if request in self._prefilling:
            self._prefilling.remove(request)
        self.slots.decoding[request.slot] = False
        account = _account(request)
        account.seats -= 1
        account.blocks -= len(request.blocks)
        self.pool.release(request.blocks, keep=self.cache.named)
        request.blocks = []
        request.named = 0
        self._leaving.append(request)

    def _retire_slots(self) -> None:
        """Slots given up in the making of a plan are reused only by later ones, and only when no step names them."""
        if self._leaving:
            staying = [request for request in self._leaving if self.slots.in_flight[request.slot]]
            for request in self._leaving:
                if not self.slots.in_flight[request.slot]:
                    self.slots.give_back(request)
            self._leaving = staying

    def _end(self, request: Request, reason: str, now: float | None) -> None:
        request.state = State.FINISHED
        request.finish_reason = reason
        request.finished = now
        self.tenants.leave(_account(request))

    def _name_blocks(self, request: Request, stop: int) -> None:
        """Offers the request's full blocks up to `stop` to the prefix cache, as far as their hashes are known."""
        start, stop = request.named, min(stop, len(request.hashes))
        if stop > start:
            self.cache.insert(request.hashes[start:stop], request.blocks[start:stop])
            request.named = stop

    def _seal(self, decodes: NDArray[np.int64], reason: str) -> StepPlan:
        """Turns the draft into arrays, and counts what the step will compute and sample as planned and known."""
        draft, slots = self._draft, self.slots
        prefills = draft.prefills
        num_decodes = len(decodes)
        rows, first = decodes, slots.planned[decodes]
        context = int(first.sum()) + num_decodes
        count = np.ones(num_decodes + len(prefills), np.int64)
        samples = np.ones(num_decodes + len(prefills), np.bool_)
        slots.planned[decodes] += 1
        if prefills:  # most steps have none, and need not pay for them
            rows = np.concatenate([rows, _ints([request.slot for request, _, _ in prefills])])
            first = np.concatenate([first, _ints([first for _, first, _ in prefills])])
            count[num_decodes:] = [count for _, _, count in prefills]
            samples = first + count == slots.known[rows]
        known = slots.known[rows] + samples
        slots.known[rows] = known
        slots.in_flight[rows] += 1
        for row, (request, _, _) in enumerate(prefills, start=num_decodes):
            if samples[row]:
                slots.decoding[request.slot] = True
                self._prefilling.remove(request)
        self._steps += 1
        shape = StepShape(
            tokens=num_decodes + sum(count for _, _, count in prefills),
            pairs=sum(slice_pairs(first, count) for _, first, count in prefills),
            slices=len(prefills),
            decodes=num_decodes,
            context=context,
            reach=sum(first + count for _, first, count in prefills),
        )
        return StepPlan(
            number=self._steps,
            requests=cast(list[Request], list(map(slots.occupant.__getitem__, rows.tolist()))),
            slots=rows,
            first=first,
            count=count,
            samples=samples,
            last=samples & (known >= slots.limit[rows]),
            num_decodes=num_decodes,
            shape=shape,
            joined=draft.joined,
            new_blocks=BlockUpdates(_ints(draft.block_slots), _ints(draft.block_columns), _ints(draft.blocks)),
            cached_tokens=draft.cached_tokens,
            preemptions=draft.preemptions,
            lost_tokens=draft.lost_tokens,
            reason=reason,
            predicted=self.policy.predict(shape),
        )

    def _occupant(self, slot: int) -> Request:
        request = self.slots.occupant[slot]
        assert request is not None, f"slot {slot} is empty"
        return request

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


class _Draft:
    """A plan in the making."""

    def __init__(self) -> None:
        self.prefills: list[tuple[Request, int, int]] = []  # request, first, count
        self.prefilled: set[Request] = set()  # who they are for
        self.decodes = NO_SLOTS
        self.joined: list[Request] = []
        self.block_slots: list[int] = []  # entries of block tables that are new
        self.block_columns: list[int] = []
        self.blocks: list[int] = []
        self.cached_tokens = 0
        self.preemptions = 0
        self.lost_tokens = 0  # by those


def _account(request: Request) -> Account:
    assert request.account is not None, "only requests that were added have an account"
    return request.account


def _ints(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64) if values else NO_SLOTS


def _age(request: Request) -> tuple[bool, int, float, str]:
    return request.age_key


def _note_times(request: Request, samples: bool, started: float, finished: float) -> None:
    if request.started is None:
        request.started = started
    if samples and request.first_token is None:
        request.first_token = finished
