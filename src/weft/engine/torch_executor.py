"""TorchExecutor: runs plans with torch, on a CPU or with CUDA, in one forward pass over the mixed batch."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from weft.core import StepPlan
from weft.engine.executor import Lumps, StepInputs, StepMasks, StepResult
from weft.engine.pooling import Pooler
from weft.engine.sampling import Sampler
from weft.kernels.reference import ReferenceAttention
from weft.kv import KVPool
from weft.models import CausalLM

# Steps with prefill are padded to a multiple of this many tokens. The library compiles its products for each number of
# tokens (3 ms of 20 ms for a prompt of 100 tokens with the default model on two cores) and caches about a thousand of
# them. With 128 different numbers all stay cached; with 2,048 hardly any.
GRAIN = 16


class TorchExecutor:
    """Owns all device state: the model, the KV pool, and per slot the block table and the last sampled token.

    One worker thread runs the steps in order, so that `submit` returns at once and the next step can be planned.
    """

    lumps = Lumps(grain=GRAIN)

    def __init__(
        self,
        model: CausalLM,
        kv: KVPool,
        *,
        slots: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model = model
        self.kv = kv
        self.device = device
        self.clock = clock
        self.sampler = Sampler(slots, vocab_size, device)
        self.pooler = Pooler()
        self._tables = torch.zeros((slots, -(-max_model_len // kv.block_size)), dtype=torch.int64, device=device)
        self._last_token = torch.zeros(slots, dtype=torch.int64, device=device)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="weft-executor")

    def submit(self, plan: StepPlan, inputs: StepInputs, masks: StepMasks | None = None) -> Future[StepResult]:
        return self._worker.submit(self._run, plan, inputs, masks)

    def close(self) -> None:
        self._worker.shutdown()
        self.sampler.close()

    @torch.inference_mode()
    def _run(self, plan: StepPlan, inputs: StepInputs, masks: StepMasks | None) -> StepResult:
        started = self.clock()
        for setup in inputs.setups:
            self.sampler.setup(setup)
            self.pooler.setup(setup)
        slots = self._upload(plan.slots)
        self._update_tables(plan)
        hidden = self._forward(plan, inputs, slots)

        ends = np.cumsum(plan.count)
        rows = np.flatnonzero(plan.samples)
        logits = self.model.logits(hidden[self._upload(ends[rows] - 1)])
        sampling, positions = plan.slots[rows], plan.first[rows] + plan.count[rows]
        tokens = self.sampler.sample(logits, sampling, positions, masks)
        self._last_token[slots[self._upload(rows)]] = tokens
        asking = self.sampler.asking(sampling)
        index = self._upload(asking)
        described = self.sampler.describe(logits[index], tokens[index], sampling[asking]).read()
        prompt_logprobs = {
            row: self.sampler.describe_prompt(
                self.model.logits, hidden[ends[row] - plan.count[row] : ends[row]], slot, int(plan.first[row])
            ).read()
            for row, slot in enumerate(plan.slots.tolist())
            if row >= plan.num_decodes and self.sampler.wants_prompt(slot)
        }
        return StepResult(
            tokens=tokens.tolist(),
            started=started,
            finished=self.clock(),
            logprobs=dict(zip(rows[asking].tolist(), described, strict=True)),
            prompt_logprobs=prompt_logprobs,
            embeddings=self.pooler.take(plan, hidden).read() if self.pooler.pools(plan) else {},
        )

    def _forward(self, plan: StepPlan, inputs: StepInputs, slots: Tensor) -> Tensor:
        """Hidden states of all tokens of the step, decodes first."""
        token_ids = torch.cat(
            [self._last_token[slots[: plan.num_decodes]], self._upload(inputs.prefill_tokens.astype(np.int64))]
        )
        offsets = np.cumsum(plan.count) - plan.count
        positions = np.arange(plan.num_tokens) + np.repeat(plan.first - offsets, plan.count)
        where = self._upload(positions)
        size = self.kv.block_size
        filled = where
        if plan.num_tokens > plan.num_decodes:
            filled = F.pad(where, (0, -plan.num_tokens % GRAIN))
            token_ids = F.pad(token_ids, (0, -plan.num_tokens % GRAIN))
        row_of_token = self._upload(np.repeat(plan.slots, plan.count))
        places = self._tables[row_of_token, where // size] * size + where % size
        width = int((plan.first + plan.count).max() - 1) // size + 1  # blocks of the longest row
        attend = ReferenceAttention(
            self.kv, filled, places, self._tables[slots, :width], plan.first, plan.count, plan.num_decodes
        )
        return self.model.forward(token_ids, attend)

    def _update_tables(self, plan: StepPlan) -> None:
        if len(plan.new_blocks.slots):
            slots, columns, blocks = self._upload(np.stack(plan.new_blocks))
            self._tables[slots, columns] = blocks

    def _upload(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
