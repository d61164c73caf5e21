"""The executor interface: turns StepPlans into StepResults, on a device or in virtual time."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.core import StepPlan
from weft.engine.params import SamplingParams


class SlotSetup(NamedTuple):
    """What an executor must know about a request that takes a slot."""

    slot: int
    params: SamplingParams
    seed: int
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]  # sampled before a preemption
    stop_ids: tuple[int, ...]  # banned before min_tokens


class StepInputs(NamedTuple):
    """The token values for a plan. Decode rows have none: their input is the last sampled token, on the device."""

    prefill_tokens: NDArray[np.int32]  # of the plan's prefill rows, concatenated
    setups: list[SlotSetup]


class StepMasks(NamedTuple):
    """Tokens that grammars allow in a step. Not part of StepInputs, as they depend on the last sampled tokens."""

    places: NDArray[np.int64]  # indices into the rows of the step that sample
    bits: NDArray[np.int32]  # [places, words], one bit per token, lowest bit first


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position: of its token, and of the most likely tokens (`top`)."""

    token: int
    logprob: float
    rank: int  # 1: the most likely
    top: dict[int, float]


@dataclass(slots=True)
class StepResult:
    tokens: list[int]  # one per row that samples, in row order
    started: float
    finished: float
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row, where requested
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by row: for first+1, first+2, ...
    embeddings: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # by row, of completed prompts


class Lumps(NamedTuple):
    """Granularity of an executor's work, in tokens. Step times grow in these units."""

    grain: int = 1  # a step with prefill takes as long as one padded to the next multiple of this
    wave: int = 0  # queries of a prefill slice that read the context in one pass; 0: all


class PendingStep(Protocol):
    def result(self) -> StepResult:
        """Waits for the step and returns its result. Raises the step's exception, if any."""
        ...


class Executor(Protocol):
    def submit(self, plan: StepPlan, inputs: StepInputs, masks: StepMasks | None = None) -> PendingStep:
        """Starts a step and returns before its result exists. Steps run in the order of submission.

        The caller must have called `result` on all earlier steps but the last two."""
        ...

    def close(self) -> None:
        """Releases threads and devices. No step may be submitted afterwards."""
        ...
