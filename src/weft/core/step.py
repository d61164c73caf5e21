"""The data of one step: for the executor (StepBatch), for the scheduler (PlannedStep), and the result (Outcome)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.request import Request
from weft.core.shape import StepShape

# What the first waiting request waits for: a seat, KV blocks, a share of the step's prefill budget, a decode step short
# enough for a promised gap, its tenant's share, or the mask of its grammar. "": all have started, or no plan got to it.
WaitsFor = Literal["", "seats", "blocks", "budget", "gap", "tenant", "grammar"]


class BlockUpdates(NamedTuple):
    """Block table entries that are new since the last batch: table[slot, column] = block. Block tables only append."""

    slots: NDArray[np.int64]
    columns: NDArray[np.int64]
    blocks: NDArray[np.int64]


@dataclass(slots=True)  # not frozen: that would take a microsecond a step
class StepBatch:
    """One forward pass, as numbers only: an executor in another process runs it as well.

    Each row is one request: first the decodes, then the prefill slices. A decode row has no token id: the executor
    keeps the token that was last sampled for the slot. Token ids of prompts are in `StepInputs`, masks of grammars in
    `StepMasks` (engine/executor.py).
    """

    number: int  # counts up from 1
    slots: NDArray[np.int64]
    first: NDArray[np.int64]  # position of the first token of each row
    count: NDArray[np.int64]  # tokens of each row (query length). A decode has one, as long as nothing speculates.
    is_sampled: NDArray[np.bool_]  # by row: whether a token is sampled after it
    num_decodes: int
    shape: StepShape  # input of the cost model
    new_blocks: BlockUpdates

    @property
    def num_tokens(self) -> int:
        return self.shape.tokens


class Plan(NamedTuple):
    """What `Scheduler.plan` returns."""

    batch: StepBatch | None  # None: nothing to run
    may_be_last: NDArray[np.bool_]  # by row: whether its token reaches max_tokens, unless a stop comes first
    new_requests: list[Request]  # requests that the executor does not know yet: they got a slot since the last batch
    refused: list[
        Request
    ]  # refused by this plan, because their targets cannot be met. (`Scheduler.add` rejects others.)


@dataclass(slots=True)
class PlannedStep:
    """What the scheduler keeps of a batch until it is committed. The executor does not see it."""

    batch: StepBatch
    requests: list[Request]  # by row
    prefill_limit: str  # what limited the prefill tokens; `reason` of the StepRecord
    predicted: float | None  # seconds; None: there is no cost model
    cached_tokens: int  # tokens taken from the prefix cache instead of computed
    preempted: list[Request]
    lost_tokens: int  # computed or cached tokens of the preempted requests
    starved: bool  # see StepRecord
    new_slots: list[tuple[int, Request]]  # see StepRecord
    waits_for: WaitsFor
    may_be_last: NDArray[np.bool_]  # see Plan

    def record(
        self,
        started: float,
        finished: float,
        *,
        decode_tokens: int,
        requests_finished: int,
        running: int,
        waiting: int,
        free_blocks: int,
    ) -> "StepRecord":
        return StepRecord(
            number=self.batch.number,
            started=started,
            finished=finished,
            predicted=self.predicted,
            reason=self.prefill_limit,
            decode_tokens=decode_tokens,
            prefill_tokens=self.batch.num_tokens - self.batch.num_decodes,
            cached_tokens=self.cached_tokens,
            preemptions=len(self.preempted),
            lost_tokens=self.lost_tokens,
            requests_finished=requests_finished,
            running=running,
            waiting=waiting,
            free_blocks=free_blocks,
            shape=self.batch.shape,
            starved=self.starved,
            batch=self.batch,
            new_slots=self.new_slots,
            preempted=self.preempted,
            waits_for=self.waits_for,
        )


@dataclass(slots=True)
class Outcome:
    """What the scheduler must know of a step's result. The loop derives it from the sampled tokens."""

    finished: list[tuple[Request, str]] = field(default_factory=list)  # request and finish reason
    filled: list[Request] = field(default_factory=list)  # requests with a new full block, already in `hashes`
    accepted: NDArray[np.int64] | None = None  # tokens of each row that count; None: all of them


class HostTimes(NamedTuple):
    """Seconds of host time for a step. Most of it overlaps with the previous step on the device."""

    plan: float = 0.0
    submit: float = 0.0  # includes building the step's inputs
    commit: float = 0.0  # from the result until the tokens can be sent out
    outside: float = 0.0  # between two iterations of the loop: sending tokens, receiving requests


NO_TIMES, NOTHING = HostTimes(), StepShape()


@dataclass(slots=True)
class StepRecord:
    """Measurements of a committed step. Times are seconds on the loop's clock."""

    number: int
    started: float
    finished: float
    predicted: float | None
    reason: str  # what limited the prefill tokens; the key in the step log
    decode_tokens: int
    prefill_tokens: int
    cached_tokens: int
    preemptions: int
    lost_tokens: int  # computed or cached tokens of preempted requests; recomputed unless the prefix cache keeps them
    requests_finished: int
    running: int
    waiting: int
    free_blocks: int
    shape: StepShape = NOTHING  # input of the cost model
    host: HostTimes = NO_TIMES  # set by the loop
    starved: bool = False  # a promised gap leaves prefills less than a quarter of the pace that `chunked` would give
    batch: StepBatch | None = None
    new_slots: Sequence[tuple[int, Request]] = ()  # slots that this step or a plan without a batch before it gave away
    preempted: Sequence[Request] = ()  # while this step was planned
    waits_for: WaitsFor = ""
