"""The executor interface: what turns StepPlans into StepResults, on a device or in virtual time."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.core import StepPlan
from weft.engine.params import SamplingParams


class SlotSetup(NamedTuple):
    """What an executor must know of a request that takes a slot."""

    slot: int
    params: SamplingParams
    seed: int
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]  # sampled before a preemption
    stop_ids: tuple[int, ...]  # not to be sampled before min_tokens


class StepInputs(NamedTuple):
    """The values that go with a plan. Decode rows bring none: their input is what the device sampled last."""

    prefill_tokens: NDArray[np.int32]  # of the plan's prefill rows, one behind the other
    setups: list[SlotSetup]


class StepMasks(NamedTuple):
    """Which tokens grammars allow in a step. They go apart from the inputs: they depend on the tokens sampled last."""

    places: NDArray[np.int64]  # among the rows of the step that sample
    bits: NDArray[np.int32]  # [places, words], one bit a token, the lowest first


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position: of the token that is there, and of the most likely ones."""

    token: int
    logprob: float
    rank: int  # 1: the most likely
    top: dict[int, float]


@dataclass(slots=True)
class StepResult:
    tokens: list[int]  # one per row that samples, in row order
    started: float
    finished: float
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row, where asked for
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by row: for first+1, first+2, ...
    embeddings: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # by row, of prompts that are complete


class Lumps(NamedTuple):
    """In what amounts an executor takes its work, in tokens."""

    grain: int = 1  # a step with prefill takes as long as with the next multiple of so many
    wave: int = 0  # queries of a prefill slice that read its context together; 0: all


class PendingStep(Protocol):
    def result(self) -> StepResult:
        """Waits for the step. Raises what the step raised."""
        ...


class Executor(Protocol):
    def submit(self, plan: StepPlan, inputs: StepInputs, masks: StepMasks | None = None) -> PendingStep:
        """Returns before the result exists. Steps run in the order of submission. The results of all but the two before
        it have been asked for."""
        ...

    def close(self) -> None:
        """Lets go of threads and devices. Nothing is submitted afterwards."""
        ...
