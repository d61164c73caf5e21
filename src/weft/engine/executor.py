"""Executor: the protocol of a worker that runs steps, on a device, in another process or in virtual time.

Its life: `measure_memory`, `allocate_kv_cache`, `warm_up`, `submit` steps and copy blocks, `close`. Everything that
crosses this boundary is numbers, names and bytes, so that it can be sent (engine/wire.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.core import StepBatch
from weft.engine.params import SamplingParams
from weft.kv.spec import KVLayout, KVSpec

Bytes = NDArray[np.uint8]


class SlotSetup(NamedTuple):
    """What an executor must know about a request that gets a slot: for the first time, or after a preemption."""

    slot: int
    params: SamplingParams
    seed: int
    prompt: NDArray[np.int32]
    output: NDArray[np.int32]  # sampled before a preemption
    stop_ids: tuple[int, ...]  # banned before min_tokens


class StepInputs(NamedTuple):
    """The token ids for a batch. Decode rows have none: their input is the last sampled token, on the device."""

    prefill_tokens: NDArray[np.int32]  # of the batch's prefill rows, concatenated
    setups: list[SlotSetup]  # of requests that got a slot since the batch before


class StepMasks(NamedTuple):
    """Tokens that grammars allow in a step. Not part of StepInputs, as they depend on the last sampled tokens."""

    rows: NDArray[np.int64]  # which of the step's sampled rows have a mask
    bits: NDArray[np.int32]  # [rows, words], one bit per token, lowest bit first


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position: of its token, and of the most likely tokens (`top`)."""

    token: int
    logprob: float
    rank: int  # 1: the most likely
    top: dict[int, float]


@dataclass(slots=True)
class StepResult:
    tokens: list[int]  # one for each row that samples and was accepted, in row order
    started: float  # seconds on the executor's clock
    finished: float
    accepted: NDArray[np.int64] | None = None  # tokens of each row that count as computed; None: all of the batch
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row, where requested
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by row: for first+1, first+2, ...
    embeddings: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # by row, of completed prompts


class ExecutorFacts(NamedTuple):
    """Constant properties of an executor."""

    device: str  # its name
    device_type: str  # "cpu", "cuda" or "virtual"
    layout: KVLayout  # of its KV cache
    vocab_size: int
    dtypes: str  # of the model's numbers
    prepares_ahead: bool = False  # can prepare a step while the step before runs
    grain: int = 1  # steps with prefill are padded to a multiple of this many tokens
    wave: int = 0  # queries of a prefill slice that read the context in one pass; 0: all


class DeviceMemory(NamedTuple):
    """Bytes of memory of an executor's device."""

    total: int
    free: int  # left after loading the weights and running the largest step
    reserved: int  # the part of `free` that the KV cache must not use, because the executor allocates it later


class PendingStep(Protocol):
    def result(self) -> StepResult:
        """Waits for the step and returns its result. Raises the step's exception, if any."""
        ...


class PendingRead(Protocol):
    def result(self) -> Bytes:
        """Waits for the copy. Returns one row of bytes for each block (see KVLayout)."""
        ...


class PendingWrite(Protocol):
    def result(self) -> None:
        """Waits until the blocks are written."""
        ...


class Executor(Protocol):
    @property
    def facts(self) -> ExecutorFacts: ...

    def measure_memory(self) -> DeviceMemory:
        """Returns the memory that the KV cache can be allocated from.

        On a GPU, runs the largest possible step first, to find its peak memory."""
        ...

    def allocate_kv_cache(self, spec: KVSpec) -> None:
        """Allocates the KV cache. It replaces an earlier one, and the contents of that are lost."""
        ...

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Prepares everything that would delay the first steps. Calls progress(done, total) after each part."""
        ...

    def submit(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None = None) -> PendingStep:
        """Starts a step and returns before its result exists. Steps run in the order of submission.

        At most two earlier steps may still wait for their `result` call."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> PendingRead:
        """Starts a copy of blocks to the host. It sees all steps that were submitted before."""
        ...

    def write_blocks(self, blocks: Sequence[int], data: Bytes) -> PendingWrite:
        """Starts a copy of bytes from `read_blocks` into blocks. Steps that are submitted later see them."""
        ...

    def fill_kv_cache_with_noise(self) -> None:
        """Fills the KV cache with random numbers, for measurements that read blocks which no step has written."""
        ...

    def close(self) -> None:
        """Releases threads and devices. Nothing may be called afterwards."""
        ...
