"""CpuExecutor: runs batches with plain torch on a CPU, in one forward pass over all rows."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from weft.core import StepBatch
from weft.engine.cgroup_memory import available_memory
from weft.engine.executor import Bytes, DeviceMemory, StepInputs, StepMasks, StepResult
from weft.engine.executor_facts import facts_of
from weft.engine.pooling import Pooler
from weft.engine.sampling import Sampler
from weft.kernels.reference import ReferenceAttention
from weft.kv.pool import KVPool
from weft.kv.spec import KVSpec
from weft.models import CausalLM

# Steps with prefill are padded to a multiple of this many tokens. The library compiles its products for each number of
# tokens (3 ms of 20 ms for a prompt of 100 tokens with the default model on two cores) and caches about a thousand of
# them. With 128 different numbers all stay cached; with 2,048 hardly any.
CPU_GRAIN = 16


class CpuExecutor:
    """Owns all device state: the model, the KV pool, and per slot the block table and the last sampled token.

    One worker thread runs the steps in order, so that `submit` returns at once and the next step can be planned.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        block_size: int,
        slots: int,
        max_model_len: int,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        config = model.config
        self.model = model
        self.device = device
        self.clock = clock
        self.facts = facts_of(model, device, block_size, grain=CPU_GRAIN)
        self.kv = KVPool(KVSpec(self.facts.layout, 0), device)  # until `allocate_kv_cache`
        self.sampler = Sampler(slots, config.vocab_size, device)
        self.pooler = Pooler()
        self._max_model_len = max_model_len
        self._block_tables = torch.zeros((slots, 0), dtype=torch.int64, device=device)  # until `allocate_kv_cache`
        self._last_token = torch.zeros(slots, dtype=torch.int64, device=device)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="weft-executor")

    def measure_memory(self) -> DeviceMemory:
        free = available_memory()
        return DeviceMemory(total=free, free=free, reserved=0)

    def allocate_kv_cache(self, spec: KVSpec) -> None:
        self.kv = KVPool(spec, self.device)
        blocks = min(spec.num_blocks, -(-self._max_model_len // spec.layout.block_size))  # of the longest request
        self._block_tables = self._block_tables.new_zeros((len(self._block_tables), blocks))

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Does nothing: the first steps on a CPU take hardly longer than others."""

    def submit(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None = None) -> Future[StepResult]:
        return self._worker.submit(self._run, batch, inputs, masks)

    def read_blocks(self, blocks: Sequence[int]) -> Future[Bytes]:
        return self._worker.submit(self._read, blocks)

    def write_blocks(self, blocks: Sequence[int], data: Bytes) -> Future[None]:
        return self._worker.submit(self._write, blocks, data)

    def fill_kv_cache_with_noise(self) -> None:
        self.kv.fill_with_noise()

    def close(self) -> None:
        self._worker.shutdown()
        self.sampler.close()

    @torch.inference_mode()
    def _read(self, blocks: Sequence[int]) -> Bytes:
        found: Bytes = self.kv.read_blocks(torch.tensor(blocks, dtype=torch.int64)).numpy()
        return found

    @torch.inference_mode()
    def _write(self, blocks: Sequence[int], data: Bytes) -> None:
        self.kv.write_blocks(torch.tensor(blocks, dtype=torch.int64), torch.from_numpy(data))

    @torch.inference_mode()
    def _run(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None) -> StepResult:
        started = self.clock()
        for setup in inputs.setups:
            self.sampler.setup(setup)
            self.pooler.setup(setup)
        slots = self._upload(batch.slots)
        self._update_block_tables(batch)
        hidden = self._forward(batch, inputs, slots)

        ends = np.cumsum(batch.count)
        rows = np.flatnonzero(batch.is_sampled)
        logits = self.model.logits(hidden[self._upload(ends[rows] - 1)])
        sampling, positions = batch.slots[rows], batch.first[rows] + batch.count[rows]
        tokens = self.sampler.sample(logits, sampling, positions, masks)
        self._last_token[slots[self._upload(rows)]] = tokens
        with_logprobs = self.sampler.rows_with_logprobs(sampling)
        index = self._upload(with_logprobs)
        logprobs = self.sampler.compute_logprobs(logits[index], tokens[index], sampling[with_logprobs]).read()
        prompt_logprobs = {
            row: self.sampler.compute_prompt_logprobs(
                self.model.logits, hidden[ends[row] - batch.count[row] : ends[row]], slot, int(batch.first[row])
            ).read()
            for row, slot in enumerate(batch.slots.tolist())
            if row >= batch.num_decodes and self.sampler.wants_prompt_logprobs(slot)
        }
        return StepResult(
            tokens=tokens.tolist(),
            started=started,
            finished=self.clock(),
            logprobs=dict(zip(rows[with_logprobs].tolist(), logprobs, strict=True)),
            prompt_logprobs=prompt_logprobs,
            embeddings=self.pooler.pool(batch, hidden).read() if self.pooler.has_pooling(batch) else {},
        )

    def _forward(self, batch: StepBatch, inputs: StepInputs, slots: Tensor) -> Tensor:
        """Hidden states of all tokens of the step, decodes first."""
        token_ids = torch.cat(
            [self._last_token[slots[: batch.num_decodes]], self._upload(inputs.prefill_tokens.astype(np.int64))]
        )
        offsets = np.cumsum(batch.count) - batch.count
        positions = np.arange(batch.num_tokens) + np.repeat(batch.first - offsets, batch.count)
        where = self._upload(positions)
        size = self.kv.block_size
        padded = where
        if batch.num_tokens > batch.num_decodes:
            padded = F.pad(where, (0, -batch.num_tokens % CPU_GRAIN))
            token_ids = F.pad(token_ids, (0, -batch.num_tokens % CPU_GRAIN))
        slot_of_token = self._upload(np.repeat(batch.slots, batch.count))
        kv_indices = self._block_tables[slot_of_token, where // size] * size + where % size
        width = int((batch.first + batch.count).max() - 1) // size + 1  # blocks of the longest row
        attend = ReferenceAttention(
            self.kv, padded, kv_indices, self._block_tables[slots, :width], batch.first, batch.count, batch.num_decodes
        )
        return self.model.forward(token_ids, attend)

    def _update_block_tables(self, batch: StepBatch) -> None:
        if len(batch.new_blocks.slots):
            slots, columns, blocks = self._upload(np.stack(batch.new_blocks))
            self._block_tables[slots, columns] = blocks

    def _upload(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
