"""What passes between scheduler, loop and executor for one forward pass."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.cost import StepShape
from weft.core.request import Request


@dataclass(frozen=True, slots=True)
class Slice:
    """One request's part of a step, for people; plans keep arrays."""

    request: Request
    first: int  # position of its first token
    count: int
    samples: bool  # whether a token is sampled behind it


class BlockUpdates(NamedTuple):
    """Block table entries that are new since the last plan: table[slot, column] = block. Tables only ever append."""

    slots: NDArray[np.int64]
    columns: NDArray[np.int64]
    blocks: NDArray[np.int64]


@dataclass(slots=True)
class StepPlan:
    """One forward pass. Rows are slices: first the decodes (one token each), then the prefills."""

    number: int
    requests: list[Request]
    slots: NDArray[np.int64]
    first: NDArray[np.int64]
    count: NDArray[np.int64]
    samples: NDArray[np.bool_]
    last: NDArray[np.bool_]  # the token sampled here reaches the request's limit
    num_decodes: int
    shape: StepShape  # what its time depends on
    joined: list[Request]  # took their slot with this plan
    new_blocks: BlockUpdates
    cached_tokens: int  # taken from the prefix cache instead of computed
    preemptions: int
    lost_tokens: int  # that these had computed
    reason: str  # what bounded the prefill tokens
    predicted: float | None = None  # seconds; None: nobody predicted
    starved: bool = False  # a promised gap leaves prompts less than a quarter of the pace that `chunked` would give

    @property
    def num_tokens(self) -> int:
        return self.shape.tokens

    def slices(self) -> Iterator[Slice]:
        for row, request in enumerate(self.requests):
            yield Slice(request, int(self.first[row]), int(self.count[row]), bool(self.samples[row]))


@dataclass(slots=True)
class Outcome:
    """What the loop learned from the tokens of a step and core needs to know."""

    finished: list[tuple[Request, str]] = field(default_factory=list)  # with the reason
    filled: list[Request] = field(default_factory=list)  # a block of theirs became full, and has its entry in `hashes`


class HostTimes(NamedTuple):
    """Seconds that the host took for a step, mostly while the device ran the step before."""

    plan: float = 0.0
    submit: float = 0.0  # making the step's inputs included
    commit: float = 0.0  # from when the result was there until the tokens could be handed out
    outside: float = 0.0  # between two turns of the loop: handing tokens out, taking requests in


NO_TIMES, NOTHING = HostTimes(), StepShape()


@dataclass(slots=True)
class StepRecord:
    """What really happened. Times are seconds on the loop's clock."""

    number: int
    started: float
    finished: float
    predicted: float | None
    reason: str
    decode_tokens: int
    prefill_tokens: int
    cached_tokens: int
    preemptions: int
    lost_tokens: int  # computed by those who were preempted, to be computed anew unless the prefix cache keeps them
    requests_finished: int
    running: int
    waiting: int
    free_blocks: int
    shape: StepShape = NOTHING  # what its time depends on
    host: HostTimes = NO_TIMES  # the loop fills it in
    starved: bool = False  # a promised gap leaves prompts less than a quarter of the pace that `chunked` would give
