"""The scheduler: two passes make a plan (decodes, then prefills as the policy ranks them), one commit takes it back in.

It is a pure function of what it is told. The loop calls `plan`, hands the plan to an executor, and calls `commit` with
what came of it, in the same order; when a plan is made, at most one earlier one is uncommitted.
"""

import math
from bisect import insort

import numpy as np
from numpy.typing import NDArray

from weft.core.blocks import BlockPool
from weft.core.cost import StepShape, slice_pairs
from weft.core.policies import Budget, Policy, Prefill, StepLoad
from weft.core.prefix import PrefixCache
from weft.core.request import Request, State
from weft.core.slots import Slots
from weft.core.step import BlockUpdates, Outcome, StepPlan, StepRecord
from weft.errors import RequestError

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
    ) -> None:
        self.policy = policy
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._steps = 0  # plans made
        self.reset()

    def reset(self) -> None:
        """Starts over with nothing queued, running, in flight or cached: after a step that failed."""
        self.pool = BlockPool(self.num_blocks)
        self.cache = PrefixCache(self.pool, self.enable_prefix_caching)
        self.slots = Slots(self.max_num_seqs)
        self.waiting: list[Request] = []  # in the policy's order
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
        return bool(self._fresh or self.waiting or self.running)

    @property
    def num_waiting(self) -> int:
        return len(self._fresh) + len(self.waiting)

    def add(self, request: Request) -> None:
        """Queues a request; refuses one that could never finish."""
        if request.prompt_tokens < 1:
            raise RequestError("the prompt is empty: at least one token is needed to predict the next one")
        # The last token is sampled, never computed, so it needs no room.
        if self._blocks_for(request.limit - 1) > self.pool.num_blocks:
            raise RequestError(
                f"the request may grow to {request.limit} tokens, but the KV cache holds "
                f"{self.pool.num_blocks * self.block_size}: lower max_tokens, shorten the prompt or enlarge the cache"
            )
        request.rank = self.policy.rank(request)
        self._fresh.append(request)

    def abort(self, request: Request, reason: str = "abort", now: float | None = None) -> None:
        """Ends a request at any moment. What a step in flight still computes for it is thrown away."""
        if request.state is State.WAITING:
            (self._fresh if request in self._fresh else self.waiting).remove(request)
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
        decodes = NO_SLOTS if self.policy.prefills_first else self._plan_decodes()
        load = self._load(decodes, now)
        self._screen(load, now)
        budget = self.policy.budget(load)
        self._plan_prefills(budget, load)
        if self.policy.prefills_first and not draft.prefills:
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
        for request in outcome.filled:
            if request.state is State.RUNNING:
                self._name_blocks(request, len(request.hashes))
        for request, finish_reason in outcome.finished:
            if request.state is State.WAITING:  # preempted while this step was in flight
                self.waiting.remove(request)
            else:
                self._unseat(request)
            self._end(request, finish_reason, finished)
        self._retire_slots()
        self.policy.observe(plan.predicted, finished - started)
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
        assert all(not request.blocks for request in [*self.waiting, *self._leaving]), "a seatless request holds blocks"
        taken = len(self.running) + len(self._leaving)
        assert self.slots.num_free == self.slots.size - taken, "a slot is neither free nor taken"
        assert sorted(self.waiting, key=_rank) == self.waiting, "the queue is out of order"
        assert len(self.running) <= self.max_num_seqs, "more run than there are seats"

    # The passes

    def _plan_decodes(self) -> NDArray[np.int64]:
        """Slots of every request that can decode; blocks for those that need one, the oldest first."""
        slots = self.slots
        ready = np.flatnonzero(slots.decoding & (slots.known < slots.limit))
        short = ready[slots.planned[ready] == slots.capacity[ready]]
        if not len(short):
            return ready
        for request in sorted((self._occupant(slot) for slot in short.tolist()), key=_age):
            if request.state is State.RUNNING and not self._grow(request, 1):
                self._preempt(request)  # the youngest of all makes room for its elders
        return ready[slots.decoding[ready]]

    def _plan_prefills(self, budget: Budget, load: StepLoad) -> None:
        """Slices of prefills under way and of waiting requests, in the policy's order, until the budget is spent.

        A waiting request that does not fit ends the admission of others: none is overtaken for being large.
        """
        started = sorted(self._prefilling, key=_rank)
        admitting = True
        while started or (admitting and self.waiting):
            newcomer = self.waiting[0] if admitting and self.waiting else None
            if newcomer is None or (started and not self.policy.overtakes(newcomer, started[0])):
                request = started.pop(0)
                if request.state is not State.RUNNING:
                    continue  # became a victim on the way
            else:
                if budget.room(0, 1) < 1 or not self._admit(newcomer, load):
                    admitting = False
                    continue
                request = newcomer
            if not self._plan_prefill(request, budget):
                return
            if request.first_token is None and self.slots.planned[request.slot] == self.slots.known[request.slot]:
                budget.tighten(request.due - load.start)

    def _admit(self, request: Request, load: StepLoad) -> bool:
        """Seats a waiting request if there is a seat, room for its whole prompt, and a decode step that can take it."""
        if request.slot >= 0 or len(self.running) >= self.max_num_seqs or not self.slots.num_free:
            return False
        if not self._fits(request) or not self._joins(request, load):
            return False
        self.waiting.pop(0)
        self._seat(request)
        return True

    def _joins(self, request: Request, load: StepLoad) -> bool:
        """Whether the decode step with all prefills under way and this one in it still keeps every promise."""
        if not self.running:
            return True
        prefills = [*self._prefilling, request]
        decodes = load.shape.decodes + len(prefills)
        context = load.shape.context + sum(r.known for r in prefills)
        gap = min(load.gap, min(r.gap_target for r in prefills))
        return self.policy.may_join(request, StepShape(decodes, 0.0, 0, decodes, context), gap)

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

    def _fits(self, request: Request) -> bool:
        """Whether the whole uncached prompt fits beside what runs, with room for the others to grow."""
        if not self.running:
            return True
        claimed = sum(self._blocks_for(int(self.slots.known[r.slot])) - len(r.blocks) for r in self._prefilling)
        growth_reserve = len(self.running)  # one block each
        free = self.pool.num_free - claimed - growth_reserve
        if free < 1:  # at least its last block is always its own: no need to look the others up
            return False
        hits = self.cache.match(
            request.hashes, 0, (request.known - 1) // self.block_size if request.reuse_prefix else 0
        )
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

    def _append_blocks(self, request: Request, blocks: list[int]) -> None:
        index = len(request.blocks)
        request.blocks += blocks
        self.slots.capacity[request.slot] = len(request.blocks) * self.block_size
        self._draft.blocks += [(request.slot, index + i, block) for i, block in enumerate(blocks)]

    def _victim(self, claimant: Request) -> Request | None:
        """The youngest running request younger than the claimant, unless this step already prefills for it."""
        youngest = max(self.running - self._draft.prefilled, key=_age, default=None)
        return youngest if youngest is not None and _age(youngest) > _age(claimant) else None

    def _queue(self, request: Request) -> None:
        insort(self.waiting, request, key=_rank)

    def _screen(self, load: StepLoad, now: float) -> None:
        """Refuses newcomers that would be late, or make others late, and those whose time has run out in the queue."""
        for request in self._fresh:
            hits = self.cache.match(request.hashes, 0, self._shareable(request))
            request.expected_hits = len(hits) * self.block_size
            self._queue(request)
            if not self.policy.screen(request, self._prefills, load):
                self._refuse(request, now)
        self._fresh.clear()
        while self.waiting and self.policy.is_hopeless(self._left_of(self.waiting[0]), load):
            if self.waiting[0].first_token is not None or self.waiting[0].slot >= 0:
                break  # preempted: it has its first token already, or may get it yet
            self._refuse(self.waiting[0], now)

    def _refuse(self, request: Request, now: float) -> None:
        self.waiting.remove(request)
        self._end(request, "refused", now)
        self.refused.append(request)

    def _prefills(self) -> list[Prefill]:
        """All prompts that are not computed yet, in the policy's order."""
        return [self._left_of(request) for request in sorted([*self._prefilling, *self.waiting], key=_rank)]

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
        request.lost_tokens += int(self.slots.computed[slot])
        request.preemptions += 1
        self._draft.preemptions += 1
        self._unseat(request)
        request.state = State.WAITING
        self._queue(request)

    def _seat(self, request: Request) -> None:
        self.slots.take(request)
        request.state = State.RUNNING
        self.running.add(request)
        self._prefilling.append(request)
        self._draft.joined.append(request)

    def _unseat(self, request: Request) -> None:
        """Frees blocks and seat at once; the slot follows when no plan names it any more."""
        self.running.remove(request)
        if request in self._prefilling:
            self._prefilling.remove(request)
        self.slots.decoding[request.slot] = False
        self.pool.release(request.blocks, keep=self.cache.holds)
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

    def _name_blocks(self, request: Request, stop: int) -> None:
        """Offers the request's full blocks up to `stop` to the prefix cache, as far as their hashes are known."""
        for index in range(request.named, min(stop, len(request.hashes))):
            self.cache.insert(request.hashes[index], request.blocks[index])
            request.named = index + 1

    def _seal(self, decodes: NDArray[np.int64], reason: str) -> StepPlan:
        """Turns the draft into arrays, and counts what the step will compute and sample as planned and known."""
        draft, slots = self._draft, self.slots
        prefills = draft.prefills
        rows = np.concatenate([decodes, np.array([r.slot for r, _, _ in prefills], np.int64)])
        first = np.concatenate([slots.planned[decodes], np.array([first for _, first, _ in prefills], np.int64)])
        count = np.concatenate([np.ones(len(decodes), np.int64), np.array([count for *_, count in prefills], np.int64)])
        samples = first + count == slots.known[rows]
        slots.planned[decodes] += 1
        slots.known[rows[samples]] += 1
        slots.in_flight[rows] += 1
        for row, (request, _, _) in enumerate(prefills, start=len(decodes)):
            if samples[row]:
                slots.decoding[request.slot] = True
                self._prefilling.remove(request)
        self._steps += 1
        shape = StepShape(
            tokens=len(decodes) + sum(count for *_, count in prefills),
            pairs=sum(slice_pairs(first, count) for _, first, count in prefills),
            slices=len(prefills),
            decodes=len(decodes),
            context=int(slots.planned[decodes].sum()),
        )
        return StepPlan(
            number=self._steps,
            requests=[self._occupant(slot) for slot in rows.tolist()],
            slots=rows,
            first=first,
            count=count,
            samples=samples,
            last=samples & (slots.known[rows] >= slots.limit[rows]),
            num_decodes=len(decodes),
            shape=shape,
            joined=draft.joined,
            new_blocks=BlockUpdates(*np.array(draft.blocks, np.int64).reshape(-1, 3).T),
            cached_tokens=draft.cached_tokens,
            preemptions=draft.preemptions,
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
        self.joined: list[Request] = []
        self.blocks: list[tuple[int, int, int]] = []  # slot, column, block
        self.cached_tokens = 0
        self.preemptions = 0


def _rank(request: Request) -> tuple[float, ...]:
    return request.rank


def _age(request: Request) -> tuple[int, float, str]:
    return request.age_key


def _note_times(request: Request, samples: bool, started: float, finished: float) -> None:
    if request.started is None:
        request.started = started
    if samples and request.first_token is None:
        request.first_token = finished
