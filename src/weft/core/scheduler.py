"""The scheduler: `plan` builds a step in two passes, `commit` applies its result.

The first pass plans decodes, the second plans prefills in the policy's order.
It is pure: its state depends only on its inputs. The loop calls `plan`, gives the batch to an executor, and calls
`commit` with the outcome. Batches are committed in the order in which they were made. At most one earlier batch is
uncommitted when a plan is made.
"""

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import cast

import numpy as np
from numpy.typing import NDArray

from weft.core.blocks import BlockPool
from weft.core.budget import Budget, StepLoad
from weft.core.draft import NO_SLOTS, Draft, ints
from weft.core.forecast import GROUPS, Prefill
from weft.core.lineup import Lineup, line_up
from weft.core.policies import Policy
from weft.core.prefix import BeforeReuse, NamedBlocks, PrefixCache
from weft.core.promises import CONSTRAINED_STEPS, Source
from weft.core.queue import Queue, Turns, service_of
from weft.core.request import Rank, Request, State
from weft.core.shape import StepShape, decodes_alone, step_shape
from weft.core.slots import Slots
from weft.core.step import BlockUpdates, Outcome, Plan, PlannedStep, StepBatch, StepRecord
from weft.core.tenants import INPUT_WEIGHT, OUTPUT_WEIGHT, Account, Tenants
from weft.core.turnover import Lengths, Turnover
from weft.errors import QueueFullError, RequestError

NO_ROWS: NDArray[np.bool_] = np.empty(0, np.bool_)
NOBODY: frozenset[Request] = frozenset()
SCREENING_SHARE = 0.06  # share of the tightest gap target that screening may take in one plan
MOST_SCREENING = 0.0012  # seconds that screening may take in one plan
MOST_INCOMING = 0.5  # share of all blocks that may be reserved for contents from elsewhere
FEWEST_VISITS = 24  # queue entries that a plan may always visit for screening, however slow the host is


class Scheduler:
    """Owns the queue, the seats (at most `max_num_seqs` running requests) and the KV blocks."""

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
        """`before_reuse` is called with cached blocks that will be overwritten: by the batch that is being planned, or
        by a transfer (`expect_blocks`). Their contents can still be copied, by a copy that is submitted before that."""
        self.policy = policy
        self._before_reuse = before_reuse
        self.wave = wave  # queries of a prefill slice that read the context together; 0: all queries
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.max_queued_requests = max_queued_requests
        self.max_queued_tokens = max_queued_tokens
        self.tenant_weights = tenant_weights or {}  # relative shares; the default is 1
        self._steps = 0  # plans made
        self.reset()

    def reset(self) -> None:
        """Drops everything that is queued, running, in flight or cached. Used after a step failed."""
        self.pool = BlockPool(self.num_blocks)
        self.cache = PrefixCache(self.pool, self.enable_prefix_caching, self._before_reuse)
        self.incoming: list[NamedBlocks] = []  # blocks whose contents are on their way in; no request can use them
        self.slots = Slots(self.max_num_seqs)
        self.tenants = Tenants(self.max_num_seqs, self.num_blocks, self.tenant_weights)
        self.queue = Queue()
        self.running: set[Request] = set()
        self._classes: Counter[tuple[bool, int]] = Counter()  # running requests per class (batch, priority)
        self._wishing = 0  # running requests with a gap wish below their gap target
        self._prefilling: list[Request] = []  # running requests with prompt tokens left to plan
        self._leaving: list[Request] = []  # without a seat; a step in flight may still use their slot
        self._last_predicted = 0.0  # seconds that the last plan is predicted to take
        self._device_free = -math.inf  # when the last plan is predicted to end
        self._is_idle = True  # no step is in flight
        self._fresh: list[Request] = []  # requests that are not screened yet, in screening order
        self._added = 0  # number of requests added so far
        self._fresh_tokens = 0
        self.in_flight: deque[PlannedStep] = deque()  # batches that are not committed yet
        self._refused: list[Request] = []  # by the plan that is being made
        self._draft = Draft()
        self._turnover = Turnover()
        self._lengths = Lengths()

    @property
    def has_work(self) -> bool:
        """Whether a plan can do something, now or after the commit of the steps in flight."""
        return bool(self._fresh or self.queue or self.running)

    @property
    def num_waiting(self) -> int:
        return len(self._fresh) + len(self.queue)

    @property
    def num_unscreened(self) -> int:
        """Number of new requests that later plans will screen."""
        return len(self._fresh)

    @property
    def queued_tokens(self) -> int:
        """Tokens to prefill of all waiting requests."""
        return self.queue.tokens + self._fresh_tokens

    def add(self, request: Request) -> None:
        """Queues a request. Raises RequestError if it can never finish, QueueFullError if the queue is full."""
        if request.prompt_tokens < 1:
            raise RequestError("the prompt is empty: at least one token is needed to predict the next one")
        # The last token is sampled but never computed, so it needs no KV memory.
        if self._blocks_for(request.limit - 1) > self.pool.num_blocks:
            raise RequestError(
                f"the request may grow to {request.limit} tokens, but the KV cache holds "
                f"{self.pool.num_blocks * self.block_size}: lower max_tokens, shorten the prompt or enlarge the cache"
            )
        self._check_queue(request)
        name = request.tenant if self.policy.order.fair else ""
        request.account = self.tenants.enter(name, request.batch, self._levels(), request.arrival)
        if request.user and not request.sibling:
            request.turn = request.account.line_up(request.batch, request.user)
        elif request.user:
            request.turn = max(0, request.account.waiting[request.batch, request.user] - 1)
        request.rank = self.policy.order.rank(request)
        self._added += 1
        request.number, request.screened_by = self._added, request.due
        insort(self._fresh, request, key=_screening_order)
        self._fresh_tokens += request.known

    def abort(self, request: Request, reason: str = "abort", now: float | None = None) -> None:
        """Ends a request at any time. Results of a step in flight for it are discarded."""
        if request.state is State.WAITING:
            if not self._take_fresh(request):
                self.queue.remove(request)
            self._end(request, reason, now)
        elif request.state is State.RUNNING:
            self._leave(request)
            self._end(request, reason, now)
            self._retire_slots()

    def release(self, request: Request) -> None:
        """Lets plans sample for a constrained request again: the mask of its next token is ready."""
        request.held = False
        if request.state is State.RUNNING:
            self.slots.held[request.slot] = False

    def clear_cache(self) -> None:
        """Empties the prefix cache. Running requests keep their blocks, but these are no longer in the cache."""
        self.cache.clear()
        for request in self.running:
            request.named = len(request.blocks)

    def expect_blocks(self, names: Sequence[Hashable]) -> NamedBlocks | None:
        """Reserves blocks for contents that come from elsewhere, without the first ones that are cached already.

        None if running requests leave no room for them, or if more than MOST_INCOMING of all blocks would be reserved.
        Ask `is_expected` on the loop's thread before each write to the blocks.
        """
        names = names[len(self.cache.match(names, 0, len(names))) :]
        reserved = sum(len(one.blocks) for one in self.incoming) + len(names)
        if len(names) > self._unclaimed(NOBODY) or reserved > MOST_INCOMING * self.num_blocks:
            return None
        expected = NamedBlocks(list(names), self.pool.allocate(len(names)))
        self.incoming.append(expected)
        return expected

    def is_expected(self, expected: NamedBlocks) -> bool:
        """Whether blocks are still reserved. After a reset they may belong to requests."""
        return any(one is expected for one in self.incoming)

    def end_transfer(self, expected: NamedBlocks, *, arrived: bool) -> bool:
        """Puts blocks that have arrived into the prefix cache, or frees blocks that will not.

        Nothing may write to the blocks afterwards. Returns False if they are not expected any more, after a reset.
        """
        if not self.is_expected(expected):
            return False
        self.incoming = [one for one in self.incoming if one is not expected]
        if arrived:
            self.cache.insert(expected.names, expected.blocks)
        self.pool.release(expected.blocks, keep=self.cache.named)
        return True

    def plan(self, now: float) -> Plan:
        """Plans the next forward pass. There is none if the scheduler is idle, or if all requests wait for a commit."""
        self._refused = []
        if self._is_idle and now > self._device_free > -math.inf:
            self.policy.rest(now - self._device_free)
            self._device_free = now
        draft = self._draft
        prefills_first = self.policy.allowance.prefills_first
        draft.decodes = NO_SLOTS if prefills_first else self._plan_decodes()
        load = self._load(draft.decodes, now)
        if min(load.gap, load.soft_gap) < math.inf:
            load = self._trim_batch(load, now)
        self._screen(load, now)
        reason = self._plan_prefills(load)
        if prefills_first and not draft.prefills:
            draft.decodes = self._plan_decodes()
        # The prefill pass may have preempted requests that were already chosen to decode.
        decodes = self._still_decoding()
        self._retire_slots()
        if not len(decodes) and not draft.prefills:
            # A request with a seat but no slice stays in the draft: the next batch tells the executor of it.
            return Plan(None, NO_ROWS, [], self._refused)
        joined = self._draft.joined
        step = self._seal(decodes, reason, load)
        self._draft = Draft()
        self.in_flight.append(step)
        self._last_predicted = step.predicted or 0.0
        self._device_free = load.start + self._last_predicted
        self._is_idle = False
        return Plan(step.batch, step.last, joined, self._refused)

    def commit(self, batch: StepBatch, outcome: Outcome, started: float, finished: float) -> StepRecord:
        """Applies the outcome of the oldest batch in flight: progress, finished requests, blocks that became full."""
        assert self.in_flight[0].batch.number == batch.number, "batches are committed in order"
        step = self.in_flight.popleft()
        batch, slots = step.batch, self.slots
        slots.in_flight[batch.slots] -= 1
        if outcome.accepted is None:
            slots.computed[batch.slots] = batch.first + batch.count
        else:
            self._accept(batch, outcome.accepted)
        for row in range(batch.num_decodes, len(step.requests)):
            _note_times(step.requests[row], bool(batch.samples[row]), started, finished)
        sampled = batch.samples if outcome.accepted is None else batch.samples & (outcome.accepted > 0)
        if self.tenants.several:
            for row in np.flatnonzero(sampled).tolist():
                _account(step.requests[row]).charge(OUTPUT_WEIGHT)
        for request in outcome.filled:
            if request.state is State.RUNNING:
                self._name_blocks(request, int(slots.computed[request.slot]) // self.block_size)
        for request, finish_reason in outcome.finished:
            if request.state is State.WAITING:  # preempted while this step was in flight
                self.queue.remove(request)
            else:
                self._leave(request)
            self._end(request, finish_reason, finished)
        self._turnover.step(finished - started, batch.num_decodes, self.pool.num_free / self.pool.num_blocks)
        self._retire_slots()
        self.policy.observe(batch.shape, step.predicted, finished - started)
        if not self.in_flight:
            self._device_free = finished
            self._is_idle = True
        else:  # the next step begins now
            self._device_free = finished + self._last_predicted
        return StepRecord(
            number=batch.number,
            started=started,
            finished=finished,
            predicted=step.predicted,
            reason=step.reason,
            decode_tokens=int(np.count_nonzero(sampled[: batch.num_decodes])),
            prefill_tokens=batch.num_tokens - batch.num_decodes,
            cached_tokens=step.cached_tokens,
            preemptions=step.preemptions,
            lost_tokens=step.lost_tokens,
            requests_finished=len(outcome.finished),
            running=len(self.running),
            waiting=self.num_waiting,
            free_blocks=self.pool.num_free,
            shape=batch.shape,
            starved=step.starved,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError if the state is inconsistent. Takes O(blocks) time: for tests and idle times."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        refs = [0] * self.pool.num_blocks
        for request in self.running:
            assert request.state is State.RUNNING, "a request sits without running"
            assert self.slots.occupant[request.slot] is request, "a slot has two owners"
            assert self.slots.capacity[request.slot] == len(request.blocks) * self.block_size
            for block in request.blocks:
                refs[block] += 1
        for expected in self.incoming:
            for block in expected.blocks:
                refs[block] += 1
                assert block not in self.cache.named, "a block is in the cache before its contents have arrived"
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
            waiting = [one for one in [*self._fresh, *self.queue] if one.account is account and one.tag is None]
            users = Counter((one.batch, one.user) for one in waiting if one.user and not one.sibling)
            assert account.waiting == users, "a user's prompts are miscounted"
            assert account.blocks == sum(len(request.blocks) for request in seated), "a tenant's blocks are miscounted"

    # The passes

    def _plan_decodes(self) -> NDArray[np.int64]:
        """Slots of all requests that can decode. Allocates a block for each request that needs one.

        If blocks are short, the most senior request (class, then arrival) gets its block first.
        """
        slots = self.slots
        ready = np.flatnonzero(slots.decoding & (slots.known < slots.limit))
        self._draft.held = NO_SLOTS
        if slots.held.any():
            held = slots.held[ready]
            self._draft.held, ready = ready[held], ready[~held]
        short = ready[slots.planned[ready] == slots.capacity[ready]]
        if not len(short):
            return ready
        if len(short) <= self.pool.num_free:
            self._grow_all(short)
            return ready
        for request in sorted((self._occupant(slot) for slot in short.tolist()), key=_age):
            if request.state is State.RUNNING and not self._grow(request, 1):
                self._preempt(request)  # no other request can be preempted for it
        return ready[slots.decoding[ready]]

    def _plan_prefills(self, load: StepLoad) -> str:
        """Plans slices of running prefills and of waiting requests, in the policy's order, until the budget is spent.

        Returns what limited the prefill tokens.
        """
        budget = self._budget(load)
        if not self._prefilling and not self.queue:
            return budget.reason
        turns = Turns(self._prefilling, self.queue, self.policy.order.overtakes, load.start)
        while (request := turns.next()) is not None:
            if request.batch:
                budget.limit_batch()
            if request.state is State.WAITING:
                victims = self._draft.preemptions
                if not self._admit(request, budget, load, turns):
                    continue
                if self._draft.preemptions > victims and not self._draft.prefills:
                    load = self._load(self._still_decoding(), load.start)  # the victims' targets no longer count
                    budget = self._budget(load)
            turns.served(request)
            if not self._plan_prefill(request, budget):
                if budget.room(0, 1) < 1:
                    break
                continue
            _account(request).unserved_since = load.start
            if request.first_token is None and self.slots.planned[request.slot] == self.slots.known[request.slot]:
                budget.tighten(request.due - load.start, is_promised=request.deadline < math.inf)
        return budget.reason

    def _budget(self, load: StepLoad) -> Budget:
        if self._wishing:
            load = load._replace(wish=float(self.slots.gap_wish[self._still_decoding()].min(initial=math.inf)))
        return self.policy.allowance.budget(load)

    def _admit(self, request: Request, budget: Budget, load: StepLoad, turns: Turns) -> bool:
        """Gives a waiting request a seat if there is room. Returns whether it did.

        If a request does not fit, no smaller request overtakes it. If its tenant has used its share, requests of other
        tenants go on. A request is passed over if the decode step would then break a promised gap, until that step is
        shorter. A held request is passed over until it is released.
        """
        if request.held:
            turns.pass_over(request)
            return False
        if request.slot >= 0 or budget.room(0, 1) < 1 or not self.slots.num_free:
            turns.close()
            return False
        if self._would_exceed_share(request):
            turns.close_line(request)
            return False
        for victim in self._who_makes_room(request, load):
            self._preempt(victim)
        if not self._has_room(request, NOBODY):
            turns.close()
            return False
        if not self._joins(request, load, NOBODY):
            if request.batch:  # thousands may wait behind it, and they find no slack either
                turns.close_line(request)
            else:
                turns.pass_over(request)
            return False
        self.queue.remove(request)
        self._seat(request)
        return True

    def _who_makes_room(self, request: Request, load: StepLoad) -> list[Request]:
        """Victims to preempt so that a request can start, cheapest first. Empty if they would not be enough.

        For a seat and blocks, victims are requests of lower classes and of tenants above their share. For time in the
        decode step, victims are batch requests only.
        """
        fits, joins = self._has_room(request, NOBODY), self._joins(request, load, NOBODY)
        if (fits and joins) or not self._somebody_may_give_way(request):
            return []
        chosen: list[Request] = []
        given: dict[Account, tuple[int, int]] = {}  # seats and blocks that the chosen victims free
        for other in sorted(self.running - self._draft.prefilled, key=self._loss):
            if (fits and joins) or (fits and not other.batch):
                break
            account = _account(other)
            seats, blocks = given.get(account, (0, 0))
            if self._gives_way(other, request, seats, blocks):
                chosen.append(other)
                given[account] = seats + 1, blocks + len(other.blocks)
                gone = frozenset(chosen)
                fits, joins = self._has_room(request, gone), self._joins(request, load, gone)
        return chosen if fits and joins else []

    def _somebody_may_give_way(self, request: Request) -> bool:
        own = request.age_key[:2]
        return self.tenants.several or any(other > own for other, count in self._classes.items() if count)

    def _has_room(self, request: Request, gone: frozenset[Request]) -> bool:
        """Whether there is a seat and room for the whole prompt, without the requests in `gone`."""
        return len(self.running) - len(gone) < self.max_num_seqs and self._fits(request, gone)

    def _joins(self, request: Request, load: StepLoad, gone: frozenset[Request]) -> bool:
        """Whether a decode step with all running prefills and this request would still keep every promised gap."""
        if len(self.running) == len(gone):
            return True
        decodes = self._decoding()
        if gone:
            decodes = decodes[~np.isin(decodes, [other.slot for other in gone])]
        prefills = [other for other in self._prefilling if other not in gone] + [request]
        prefills = [other for other in prefills if other.known + 1 < other.limit]  # drops requests that never decode
        if not prefills:
            return True
        if request.batch:
            return self._has_slack(decodes, prefills, load, joins=True)
        gap = min(self._load(decodes, load.start).gap, min(other.firm_gap for other in prefills))
        return self.policy.admission.may_join(self._decode_shape(decodes, prefills), gap)

    def _has_slack(
        self, decodes: NDArray[np.int64], prefills: Sequence[Request], load: StepLoad, *, joins: bool
    ) -> bool:
        """Whether the batch requests among these may share a decode step with the other requests."""
        others = [request for request in prefills if not request.batch]
        alone = self._decode_shape(decodes[~self.slots.batch[decodes]], others)
        _, _, gap, soft_gap, *_ = self._load(decodes, load.start)
        gap = min(gap, min((request.firm_gap for request in others), default=math.inf))
        soft_gap = min(soft_gap, min((request.soft_gap for request in others), default=math.inf))
        after = self._decode_shape(decodes, prefills)
        return self.policy.admission.has_slack(after, alone, gap, soft_gap, joins)

    def _decode_shape(self, decodes: NDArray[np.int64], prefills: Sequence[Request]) -> StepShape:
        """Shape of the step in which all of these requests decode."""
        context = int(self.slots.planned[decodes].sum()) + len(decodes) + sum(request.known for request in prefills)
        return decodes_alone(len(decodes) + len(prefills), context)

    def _trim_batch(self, load: StepLoad, now: float) -> StepLoad:
        """Preempts batch requests until the decode step is short enough for the other requests (see `has_slack`)."""
        decodes = self._draft.decodes
        slots = decodes[self.slots.batch[decodes]]
        if not len(slots):
            return load
        for victim in sorted((self._occupant(slot) for slot in slots.tolist()), key=self._loss):
            if self._has_slack(self._still_decoding(), (), load, joins=False):
                break
            self._preempt(victim)
        return self._load(self._still_decoding(), now)

    def _still_decoding(self) -> NDArray[np.int64]:
        """Slots of the chosen decodes, without requests that were preempted since."""
        decodes = self._draft.decodes
        return decodes[self.slots.decoding[decodes]]

    def _decoding(self) -> NDArray[np.int64]:
        """Slots of the decodes of this step and of held requests, which skip it."""
        decodes, held = self._still_decoding(), self._draft.held
        return np.concatenate([decodes, held[self.slots.decoding[held]]]) if len(held) else decodes

    def _accept(self, batch: StepBatch, accepted: NDArray[np.int64]) -> None:
        """Applies a result in which some decodes were left out. They are planned again.

        A later batch in flight has planned its rows behind tokens that do not exist. It is moved back as well; the
        executor, which knows the true positions, has done the same.
        """
        slots, missing = self.slots, batch.count - accepted
        assert not missing[batch.num_decodes :].any(), "a prompt was left out, whose blocks others may share already"
        assert batch.count[: batch.num_decodes].max(initial=1) == 1, "nothing plans several tokens for a decode yet"
        slots.computed[batch.slots] = batch.first + accepted
        slots.planned[batch.slots] -= missing
        slots.known[batch.slots] -= missing
        slots.held[batch.slots[missing > 0]] = False  # the masks that they had are still the next
        for row in np.flatnonzero(missing).tolist():
            request = self._occupant(int(batch.slots[row]))
            if request.state is State.WAITING:  # preempted while this step was in flight
                self.queue.remove(request)
                request.known -= int(missing[row])
                request.held = False
                request.packed = self._left_of(request).pack()
                self.queue.add(request)
        if self.in_flight:
            later = self.in_flight[0]
            by_slot = np.zeros(slots.size, np.int64)
            by_slot[batch.slots] = missing
            moved = replace(later.batch, first=later.batch.first - by_slot[later.batch.slots])
            self.in_flight[0] = replace(later, batch=moved)

    # Parts of the passes

    def _plan_prefill(self, request: Request, budget: Budget) -> int:
        """Plans the request's next slice. Returns its length; 0 if the budget is spent or blocks are lacking."""
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
        # Insert the blocks into the prefix cache now, so that an equal prompt in the same step shares them. This is
        # safe: executors run batches in order, and a forward pass writes all its keys and values before it reads any.
        self._name_blocks(request, (first + count) // self.block_size)
        return count

    def _load(self, decodes: NDArray[np.int64], now: float) -> StepLoad:
        count = len(decodes)
        context = int(self.slots.planned[decodes].sum()) + count
        held = self._draft.held  # held requests wait for this step as well
        waiting = np.concatenate([decodes, held]) if len(held) else decodes
        gap = float(self.slots.gap_target[waiting].min(initial=math.inf))
        soft_gap = float(self.slots.soft_gap[waiting].min(initial=math.inf))
        return StepLoad(max(now, self._device_free), decodes_alone(count, context), gap, soft_gap)

    def _firm_load(self, load: StepLoad) -> StepLoad:
        """The load without batch requests (they can be preempted), with free memory and when the others end."""
        decodes = self._decoding()
        firm = decodes[~self.slots.batch[decodes]]
        found = self._load(firm, load.start)
        slots = self.slots
        known = slots.known[firm]
        gap = slots.gap_target[firm] * np.where(slots.constrained[firm], CONSTRAINED_STEPS, 1)  # seconds between tokens
        return found._replace(
            ends=self._lengths.expect(known - slots.prompt[firm], slots.limit[firm] - known, gap, slots.planned[firm]),
            crowded=len(firm) < len(decodes),
            free=self._unclaimed(NOBODY) * self.block_size if self.running else math.inf,
            freed=self._turnover.rate,
        )

    def _take_cached(self, request: Request) -> None:
        """Appends cached blocks that other requests have computed or planned since the last call."""
        slots, slot = self.slots, request.slot
        planned = int(slots.planned[slot])
        if not request.reuse_prefix or planned != slots.capacity[slot]:
            return
        # The last known token is always computed: the next token is sampled from its output.
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
        """Whether the uncached part of the prompt fits into free blocks, with room for running requests to grow."""
        if len(self.running) == len(gone):
            return True
        free = self._unclaimed(gone)
        if free < 1:  # its last block is never shared, so it needs at least one: skip the lookup
            return False
        hits = self.cache.match(request.hashes, 0, self._shareable(request))
        unused_hits = sum(self.pool.refs[block] == 0 for block in hits)
        return self._blocks_for(request.known) - len(hits) + unused_hits <= free

    def _unclaimed(self, gone: frozenset[Request]) -> int:
        """Free blocks plus blocks of the requests in `gone`, minus blocks that other running requests need soon."""
        claimed = sum(
            self._blocks_for(int(self.slots.known[other.slot])) - len(other.blocks)
            for other in self._prefilling
            if other not in gone
        )
        growth_reserve = len(self.running) - len(gone)  # one block per request
        freed = sum(len(other.blocks) for other in gone)  # an upper bound: some may be shared
        return self.pool.num_free + freed - claimed - growth_reserve

    def _grow(self, request: Request, count: int) -> bool:
        """Gives a request `count` more blocks; preempts other requests if needed. Returns whether it succeeded."""
        while self.pool.num_free < count:
            victim = self._victim(request)
            if victim is None:
                return False
            self._preempt(victim)
        self._append_blocks(request, self.pool.allocate(max(0, count)))
        return True

    def _grow_all(self, short: NDArray[np.int64]) -> None:
        """Adds one block to each of these slots at once: the common case of a decode step."""
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
        """The cheapest request to preempt for `claimant`, or None.

        A request with a prefill slice in this plan is never preempted.
        """
        others = self.running - self._draft.prefilled
        givers = [other for other in others if self._gives_way(other, claimant) or self._is_junior(other, claimant)]
        return min(givers, key=self._loss, default=None)

    def _gives_way(self, request: Request, claimant: Request, seats: int = 0, blocks: int = 0) -> bool:
        """Whether `request` may be preempted for `claimant` because of class or tenant share.

        A lower class is preempted for a higher one. Within a class, a tenant above its share is preempted for a tenant
        within its share. `seats` and `blocks` are already counted as given up by the tenant of `request`.
        """
        if request.age_key[:2] != claimant.age_key[:2]:
            return request.age_key[:2] > claimant.age_key[:2]
        over = self.tenants.is_over(_account(request), batch=request.batch, seats=-seats, blocks=-blocks)
        return over and not self._is_over(claimant)

    def _is_junior(self, request: Request, claimant: Request) -> bool:
        """Whether `request` may be preempted for `claimant` because it is younger.

        Not if the tenant of `claimant` is above its share and the tenant of `request` is not.
        """
        if request.age_key <= claimant.age_key:
            return False
        return self._is_over(request) or not self._is_over(claimant)

    def _is_over(self, request: Request) -> bool:
        return self.tenants.is_over(_account(request), batch=request.batch)

    def _would_exceed_share(self, request: Request) -> bool:
        blocks = self._blocks_for(request.known)
        return self.tenants.is_over(_account(request), batch=request.batch, seats=1, blocks=blocks)

    def _levels(self) -> Iterator[float]:
        """Service that each tenant with prompts to compute has received."""
        for line in self.queue.lines:
            yield line.account.service
        for request in [*self._fresh, *self._prefilling]:
            yield service_of(request)

    def _loss(self, request: Request) -> tuple[bool, int, bool, float, float, str]:
        """Sort key of victims, cheapest first: lowest class, no promise, least work lost, latest arrival."""
        work = self.policy.work(int(self.slots.computed[request.slot]))
        promised = request.firm_gap < math.inf or request.deadline < math.inf
        return not request.batch, -request.priority, promised, work, -request.arrival, request.id

    def _check_queue(self, request: Request) -> None:
        # Requests for which a seat is free do not count: they will not wait long.
        waiting = self.num_waiting - max(0, self.max_num_seqs - len(self.running))
        if self.max_queued_requests is not None and waiting >= self.max_queued_requests:
            raise QueueFullError(
                f"{waiting} requests wait already, max_queued_requests={self.max_queued_requests}: try again later"
            )
        tokens = self.queued_tokens
        if self.max_queued_tokens is not None and tokens and tokens + request.known > self.max_queued_tokens:
            raise QueueFullError(
                f"{tokens} tokens of prompts wait already; with {request.known} more they would exceed "
                f"max_queued_tokens={self.max_queued_tokens}: try again later"
            )

    def _screen(self, load: StepLoad, now: float) -> None:
        """Refuses new requests that would be late or make others late, and queued requests that cannot be on time.

        A burst is screened in parts, so that no plan takes long. Within a class, the earliest due time goes first.
        """
        if not self._fresh and not self.queue:
            return
        load = self._firm_load(load)
        visits = self._visits(load)
        while self._fresh and (visits > 0 or not (self.running or self.queue)):  # if idle, until one is queued
            newcomers = _of_one_class(self._fresh[: max(1, visits - GROUPS)])
            del self._fresh[: len(newcomers)]
            visits -= len(newcomers) + GROUPS
            for request in newcomers:
                self._meet(request)
            screened = self.policy.admission.screen(
                newcomers,
                partial(self._lineup, load.start),
                self._load_for(newcomers[0], load),
                max(visits, 0) + GROUPS,
            )
            for request in screened.kept:
                self._fresh_tokens -= request.known
                self.queue.add(request)
            for request in screened.refused:
                self._fresh_tokens -= request.known
                self._refuse(request, now)
            self._fresh[:0] = screened.left
        self._refuse_hopeless(load, now)

    def _take_fresh(self, request: Request) -> bool:
        """Removes a request that is not screened yet. Returns False if it was screened already."""
        place = bisect_left(self._fresh, _screening_order(request), key=_screening_order)
        if place == len(self._fresh) or self._fresh[place] is not request:
            return False
        del self._fresh[place]
        self._fresh_tokens -= request.known
        return True

    def _visits(self, load: StepLoad) -> int:
        """Queue entries that this plan may visit for screening, in a small share of the tightest gap target."""
        seconds = min(SCREENING_SHARE * min(load.gap, load.soft_gap), MOST_SCREENING)
        return max(FEWEST_VISITS, int(seconds / self.policy.host.visit))

    def _meet(self, request: Request) -> None:
        """Looks up a new request in the prefix cache. Drops an operator's target that an idle machine would miss."""
        hits = self.cache.match(request.hashes, 0, self._shareable(request))
        request.expected_hits = len(hits) * self.block_size
        left = self._left_of(request)
        if request.ttft_source is Source.OPERATOR and not self.policy.admission.is_possible(left):
            request.ttft_target = math.inf  # served behind requests with a promise
            request.rank = self.policy.order.rank(request)
        request.packed = left.pack()

    def _refuse_hopeless(self, load: StepLoad, now: float) -> None:
        for _ in range(FEWEST_VISITS):
            hopeless = [request for request in self.queue.heads() if self._is_hopeless(request, load)]
            if not hopeless:
                return
            for request in hopeless:
                self.queue.remove(request)
                self._refuse(request, now)

    def _is_hopeless(self, request: Request, load: StepLoad) -> bool:
        """Whether a waiting request cannot be on time. A preempted request is never refused: it runs to its end."""
        if request.preemptions:
            return False
        return self.policy.admission.is_hopeless(self._left_of(request), self._load_for(request, load))

    def _load_for(self, request: Request, load: StepLoad) -> StepLoad:
        """The load for this request. If others may be preempted for it, it does not wait for memory."""
        return load._replace(free=math.inf) if self._somebody_may_give_way(request) else load

    def _refuse(self, request: Request, now: float) -> None:
        self._end(request, "refused", now)
        self._refused.append(request)

    def _lineup(self, now: float, newcomers: Sequence[Request]) -> Lineup:
        """All prompts that are not computed yet, with the newcomers; see `line_up`."""
        return line_up(self.queue, self._prefilling, newcomers, self._packed, now)

    def _packed(self, request: Request) -> bytes:
        return request.packed or self._left_of(request).pack()

    def _left_of(self, request: Request) -> Prefill:
        done = int(self.slots.planned[request.slot]) if request.state is State.RUNNING else request.expected_hits
        return Prefill(request, done, request.known - done)

    def _shareable(self, request: Request) -> int:
        """Most blocks that a request may take from the prefix cache. Its last token is always computed."""
        return (request.known - 1) // self.block_size if request.reuse_prefix else 0

    def _preempt(self, request: Request) -> None:
        """Takes the seat and the blocks of a request. It is queued again, to recompute all its known tokens."""
        slot = request.slot
        request.known = int(self.slots.known[slot])
        request.held = bool(self.slots.held[slot])
        lost = int(self.slots.computed[slot])
        request.lost_tokens += lost
        request.preemptions += 1
        self._draft.preemptions += 1
        self._draft.lost_tokens += lost
        self._unseat(request)
        request.state = State.WAITING
        request.packed = self._left_of(request).pack()
        self.queue.add(request)

    def _seat(self, request: Request) -> None:
        self.slots.take(request)
        request.state = State.RUNNING
        request.packed = b""  # not kept while running: it changes with every slice
        self.running.add(request)
        account = _account(request)
        account.seats += 1
        self._classes[request.age_key[:2]] += 1
        self._wishing += request.wishes_more
        if request.tag is None:  # charge the whole prompt at once, and only once
            if request.user and not request.sibling:
                account.step_out(request.batch, request.user)
            request.tag = account.service
            account.charge(INPUT_WEIGHT * (request.known - request.expected_hits))
        self._prefilling.append(request)
        self._draft.joined.append(request)

    def _unseat(self, request: Request) -> None:
        """Frees the blocks and the seat at once. The slot is freed later, when no step in flight uses it."""
        self.running.remove(request)
        if request in self._prefilling:
            self._prefilling.remove(request)
        self.slots.decoding[request.slot] = False
        self._draft.forget(request)
        account = _account(request)
        account.seats -= 1
        self._classes[request.age_key[:2]] -= 1
        self._wishing -= request.wishes_more
        account.blocks -= len(request.blocks)
        self.pool.release(request.blocks, keep=self.cache.named)
        request.blocks = []
        request.named = 0
        self._leaving.append(request)

    def _leave(self, request: Request) -> None:
        """Removes a running request for good, and records its output length and the blocks that it freed."""
        free = self.pool.num_free
        written = int(self.slots.known[request.slot]) - request.prompt_tokens
        self._unseat(request)
        if written > 0:  # a request that was aborted before its first token is no sample
            self._lengths.ended(written)
        self._turnover.ended((self.pool.num_free - free) * self.block_size)

    def _retire_slots(self) -> None:
        """Frees slots of requests without a seat, once no step in flight uses them.

        A slot that is given up while a plan is made is reused only by a later plan.
        """
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
        if request.user and request.tag is None and not request.sibling:
            _account(request).step_out(request.batch, request.user)
        self.tenants.leave(_account(request), request.batch)

    def _name_blocks(self, request: Request, stop: int) -> None:
        """Inserts the request's full blocks up to `stop` into the prefix cache, as far as their hashes are known."""
        start, stop = request.named, min(stop, len(request.hashes))
        if stop > start:
            self.cache.insert(request.hashes[start:stop], request.blocks[start:stop])
            request.named = stop

    def _seal(self, decodes: NDArray[np.int64], reason: str, load: StepLoad) -> PlannedStep:
        """Turns the draft into a batch. Updates `planned` and `known` with what the step computes and samples."""
        draft, slots = self._draft, self.slots
        prefills = draft.prefills
        num_decodes = len(decodes)
        rows, first = decodes, slots.planned[decodes]
        count = np.ones(num_decodes + len(prefills), np.int64)
        samples = np.ones(num_decodes + len(prefills), np.bool_)
        slots.planned[decodes] += 1
        shape = step_shape(first, [(first, count) for _, first, count in prefills], self.wave)
        if prefills:  # most steps have none and skip this cost
            rows = np.concatenate([rows, ints([request.slot for request, _, _ in prefills])])
            first = np.concatenate([first, ints([first for _, first, _ in prefills])])
            count[num_decodes:] = [count for _, _, count in prefills]
            samples = first + count == slots.known[rows]
        known = slots.known[rows] + samples
        slots.known[rows] = known
        if slots.constrained.any():  # held until the loop has the token and the next mask
            slots.held[rows] |= samples & slots.constrained[rows]
        slots.in_flight[rows] += 1
        for row, (request, _, _) in enumerate(prefills, start=num_decodes):
            if samples[row]:
                slots.decoding[request.slot] = True
                self._prefilling.remove(request)
        self._steps += 1
        updates = BlockUpdates(ints(draft.block_slots), ints(draft.block_columns), ints(draft.blocks))
        return PlannedStep(
            batch=StepBatch(self._steps, rows, first, count, samples, num_decodes, shape, updates),
            requests=cast(list[Request], list(map(slots.occupant.__getitem__, rows.tolist()))),
            reason=reason,
            predicted=self.policy.predict(shape),
            cached_tokens=draft.cached_tokens,
            preemptions=draft.preemptions,
            lost_tokens=draft.lost_tokens,
            starved=bool(self._prefilling or self.queue) and self.policy.allowance.starves(load),
            last=samples & (known >= slots.limit[rows]),
        )

    def _occupant(self, slot: int) -> Request:
        request = self.slots.occupant[slot]
        assert request is not None, f"slot {slot} is empty"
        return request

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def _account(request: Request) -> Account:
    assert request.account is not None, "only requests that were added have an account"
    return request.account


def _of_one_class(requests: list[Request]) -> list[Request]:
    """The leading requests that have the same class as the first one."""
    own = _class(requests[0])
    return list(takewhile(lambda request: _class(request) == own, requests))


def _screening_order(request: Request) -> tuple[Rank, float, int]:
    """Sort key: class, then due time of the first token at arrival, then order of arrival."""
    return _class(request), request.screened_by, request.number


def _class(request: Request) -> Rank:
    return request.rank[:2]


def _age(request: Request) -> tuple[bool, int, float, str]:
    return request.age_key


def _note_times(request: Request, samples: bool, started: float, finished: float) -> None:
    if request.started is None:
        request.started = started
    if samples and request.first_token is None:
        request.first_token = finished
