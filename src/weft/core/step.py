"""Data that scheduler, loop and executor exchange for one forward pass."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.cost import StepShape
from weft.core.request import Request


@dataclass(frozen=True, slots=True)
class Slice:
    """One request's part of a step, in readable form. Plans store arrays instead."""

    request: Request
    first: int  # position of its first token
    count: int
    samples: bool  # whether a token is sampled after it


class BlockUpdates(NamedTuple):
    """Block table entries that are new since the last plan: table[slot, column] = block. Block tables only append."""

    slots: NDArray[np.int64]
    columns: NDArray[np.int64]
    blocks: NDArray[np.int64]


@dataclass(slots=True)
class StepPlan:
    """One forward pass. Each row is one request: first the decodes (one token each), then the prefill slices."""

    number: int
    requests: list[Request]
    slots: NDArray[np.int64]
    first: NDArray[np.int64]
    count: NDArray[np.int64]
    samples: NDArray[np.bool_]
    last: NDArray[np.bool_]  # the sampled token reaches the request's limit
    num_decodes: int
    shape: StepShape  # input of the cost model
    joined: list[Request]  # requests that got a slot since the last plan
    new_blocks: BlockUpdates
    cached_tokens: int  # tokens taken from the prefix cache instead of computed
    preemptions: int
    lost_tokens: int  # computed or cached tokens of the preempted requests
    reason: str  # what limited the prefill tokens
    predicted: float | None = None  # seconds; None: there is no cost model
    starved: bool = False  # a promised gap leaves prefills less than a quarter of the pace that `chunked` would give

    @property
    def num_tokens(self) -> int:
        return self.shape.tokens

    def slices(self) -> Iterator[Slice]:
        for row, request in enumerate(self.requests):
            yield Slice(request, int(self.first[row]), int(self.count[row]), bool(self.samples[row]))


@dataclass(slots=True)
class Outcome:
    """Results of a step that the scheduler needs. The loop finds them in the sampled tokens."""

    finished: list[tuple[Request, str]] = field(default_factory=list)  # request and finish reason
    filled: list[Request] = field(default_factory=list)  # requests with a new full block, already in `hashes`


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
