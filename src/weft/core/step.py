"""What crosses the step boundary (StepBatch), what the scheduler keeps of a step, and what comes back."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.request import Request
from weft.core.shape import StepShape


class BlockUpdates(NamedTuple):
    """Block table entries that are new since the last batch: table[slot, column] = block. Block tables only append."""

    slots: NDArray[np.int64]
    columns: NDArray[np.int64]
    blocks: NDArray[np.int64]


@dataclass(slots=True)  # not frozen: that would take a microsecond a step
class StepBatch:
    """One forward pass, as numbers only: an executor in another process runs it as well.

    Each row is one request: first the decodes, then the prefill slices. The first input of a decode is the last token
    that was sampled for its slot; the executor keeps that token. Token values that the executor does not have come
    beside the batch (engine/executor.py), and so do the masks of grammars.
    """

    number: int  # counts up from 1
    slots: NDArray[np.int64]
    first: NDArray[np.int64]  # position of a row's first token
    count: NDArray[np.int64]  # query length: tokens of a row. Decodes have one each as long as nothing speculates.
    samples: NDArray[np.bool_]  # whether a token is sampled after the row
    num_decodes: int
    shape: StepShape  # input of the cost model
    new_blocks: BlockUpdates

    @property
    def num_tokens(self) -> int:
        return self.shape.tokens


class Plan(NamedTuple):
    """What `Scheduler.plan` returns."""

    batch: StepBatch | None  # None: nothing to run
    last: NDArray[np.bool_]  # by row of the batch: whether its token may reach the request's limit
    joined: list[Request]  # requests that got a slot since the last batch
    refused: list[Request]  # requests that this plan has refused, because their targets cannot be met


@dataclass(slots=True)
class PlannedStep:
    """What the scheduler keeps of a batch until it is committed. It never leaves core."""

    batch: StepBatch
    requests: list[Request]  # by row
    reason: str  # what limited the prefill tokens
    predicted: float | None  # seconds; None: there is no cost model
    cached_tokens: int  # tokens taken from the prefix cache instead of computed
    preemptions: int
    lost_tokens: int  # computed or cached tokens of the preempted requests
    starved: bool  # a promised gap leaves prefills less than a quarter of the pace that `chunked` would give
    last: NDArray[np.bool_]  # see Plan

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
            reason=self.reason,
            decode_tokens=decode_tokens,
            prefill_tokens=self.batch.num_tokens - self.batch.num_decodes,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            lost_tokens=self.lost_tokens,
            requests_finished=requests_finished,
            running=running,
            waiting=waiting,
            free_blocks=free_blocks,
            shape=self.batch.shape,
            starved=self.starved,
        )

    def slices(self) -> "Iterator[Slice]":
        batch = self.batch
        for row, request in enumerate(self.requests):
            yield Slice(request, int(batch.first[row]), int(batch.count[row]), bool(batch.samples[row]))


@dataclass(frozen=True, slots=True)
class Slice:
    """One request's part of a step, in readable form."""

    request: Request
    first: int  # position of its first token
    count: int
    samples: bool  # whether a token is sampled after it


@dataclass(slots=True)
class Outcome:
    """Results of a step that the scheduler needs. The loop finds them in the sampled tokens."""

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
    reason: str
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
