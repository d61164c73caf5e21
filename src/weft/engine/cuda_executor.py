"""CudaExecutor: runs batches on a GPU.

`submit` does not wait for the device, except if the device is three steps behind, or if the last `submit` failed.
`result` waits.

A step reads its inputs from pinned memory, runs all layers and samples one token per row. The token stays on the device
for the next step, and is also written to pinned memory for the host. A step of decodes alone is one CUDA graph. A step
with prompts is a piecewise graph, and the attention of the prompts runs between the pieces. A large step is launched
kernel by kernel.
"""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core import StepBatch
from weft.engine.executor import Bytes, DeviceMemory, StepInputs, StepMasks, StepResult
from weft.engine.executor_facts import facts_of
from weft.engine.graphs import (
    GRAPH_GRAIN,
    FullGraph,
    PiecewiseGraph,
    PromptAttention,
    decode_sizes,
    is_graph_faster,
    logits_sizes,
    mixed_sizes,
    sampling_sizes,
    warm_up,
)
from weft.engine.logprobs import PendingLogprobs
from weft.engine.pooling import PendingEmbeddings, Pooler
from weft.engine.sampling import Sampler, upload
from weft.engine.staging import NO_SLOT, NUM_BUFFERS, SampledRowInputs, StagingBuffer, TokenInputs, Uploader, pinned
from weft.kernels import flashinfer
from weft.kernels.attention import AttentionParams
from weft.kernels.cuda import CudaAttention, PlainPrefills, PrefillAttention, PromptKVTarget, SampledRows, sm_count
from weft.kernels.decode import Workspace, wanted_shares
from weft.kernels.draw import Noise, draw
from weft.kernels.shares import Shares, divide, most_shares
from weft.kernels.truncate import TruncationParams
from weft.kv.pool import KVPool
from weft.kv.spec import KVSpec
from weft.models import CausalLM

TORCH_ALLOCATION_BYTES = 2 << 20  # torch allocates GPU memory in multiples of this
COPY_CHUNK_BLOCKS = 16  # blocks that are copied at a time, to or from the host
COPY_BUFFERS = 3  # tensors as large as these blocks, while they are copied
GRAPH_BYTES = 1 << 19  # driver memory per graph, outside torch's memory: 0.45 MiB with CUDA 13 on an H200


class Limits(NamedTuple):
    """Limits of a step and the number of slots."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    slots: int


class SamplingGraphs(NamedTuple):
    """Two CUDA graphs that sample one token per row with top_k, top_p and min_p. Each stands for many kernels."""

    from_logits: FullGraph
    from_edited_logits: FullGraph  # for steps where a bias, ban, penalty or grammar of some row edits the logits


class CudaExecutor:
    """Owns all device state: the model, the KV pool, and per slot the block table and the last sampled token."""

    def __init__(
        self,
        model: CausalLM,
        limits: Limits,
        *,
        block_size: int,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.limits, self.device, self.clock = model, limits, device, clock
        config = model.config
        self.sampler = Sampler(limits.slots, config.vocab_size, device)
        self.pooler = Pooler()
        self._blocks_per_slot = -(-limits.max_model_len // block_size)
        self._block_tables = torch.zeros((limits.slots, self._blocks_per_slot), dtype=torch.int32, device=device)
        self._host_block_tables = np.zeros((limits.slots, self._blocks_per_slot), np.int32)  # the host's copy
        self._last_token = torch.zeros(limits.slots, dtype=torch.int32, device=device)
        # Buffers at fixed addresses: the logits of the sampled rows, and a float32 copy for steps that edit logits.
        self._logits, self._edited_logits = (
            torch.empty((limits.max_num_seqs, config.vocab_size), dtype=dtype, device=device)
            for dtype in (model.logits_dtype, torch.float32)
        )
        self._layer_parameters = sum(parameter.numel() for parameter in model.layers[-1].parameters())
        self._mixed_sizes = mixed_sizes(limits.max_num_batched_tokens, self._layer_parameters)
        most = max(self._mixed_sizes, default=0)
        self._wanted_shares = wanted_shares(config.num_kv_heads, sm_count(device))
        windows = list({*config.layer_windows})
        shares = (Shares.padding(), most_shares(limits.max_num_seqs, self._wanted_shares))
        rows, tokens = (SampledRowInputs.padding(), limits.max_num_seqs), (TokenInputs.padding(), most)
        copy_slot = ((NO_SLOT,), 1)
        layouts = [rows, tokens, copy_slot, shares, *(shares for _ in windows)]
        self._staging = StagingBuffer(layouts, self._block_tables)
        self._staged_rows, self._staged_tokens, self._staged_copy_slot, self._sampled_shares, *by_window = (
            self._staging.arrays
        )
        self._decode_shares = dict(zip(windows, by_window, strict=True))
        self._row_inputs = SampledRowInputs.of(self._staged_rows.numbers)
        self._token_inputs = TokenInputs(*self._staged_tokens.numbers)
        self._uploader = Uploader(device)
        width = config.num_heads * config.head_dim
        self._queries = torch.empty((most, width), dtype=model.dtypes.activations, device=device)
        self._attended = torch.empty_like(self._queries)
        sizes = (limits.max_num_seqs, config.num_heads, config.num_kv_heads, config.head_dim)
        self._workspace = Workspace.of(*sizes, self._wanted_shares, device)
        self._flashinfer: flashinfer.FlashInfer | None = None
        self._prompt_kv_target: PromptKVTarget | None = None
        if flashinfer.is_usable(config.head_dim, model.dtypes.kv_cache):
            sizes = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
            self._flashinfer = flashinfer.FlashInfer(
                *sizes, model.dtypes.kv_cache, limits.max_model_len, device, self._uploader.upload
            )
            if self._flashinfer.prompt_copy.capacity:
                copy_slot_on_device = self._staged_copy_slot.numbers[0]
                self._prompt_kv_target = PromptKVTarget(self._flashinfer.prompt_copy.copy, copy_slot_on_device)
        self._decode_graphs: dict[int, FullGraph] = {}
        self._sampling_graphs: dict[int, SamplingGraphs] = {}
        self._mixed_graphs: dict[int, PiecewiseGraph] = {}
        wave = 0 if self._flashinfer is None else self._flashinfer.wave
        grain = GRAPH_GRAIN if model.can_be_captured else 1
        self.facts = facts_of(model, device, block_size, prepares_ahead=True, grain=grain, wave=wave)
        self._sampled_tokens_pinned = pinned(NUM_BUFFERS, limits.max_num_seqs)
        self._replace_kv_pool(KVSpec(self.facts.layout, 1))  # until `allocate_kv_cache`

    def measure_memory(self) -> DeviceMemory:
        """Runs the largest step and captures the largest graphs first, so that memory cannot run out later."""
        self.profile_run()
        self.capture(largest=True)
        free, total = torch.cuda.mem_get_info(self.device)
        blocks = COPY_BUFFERS * COPY_CHUNK_BLOCKS + 1  # plus the block for the writes of padding
        reserved = self.later_bytes + blocks * self.facts.layout.block_bytes + TORCH_ALLOCATION_BYTES
        return DeviceMemory(total, free, reserved)

    def allocate_kv_cache(self, spec: KVSpec) -> None:
        """Allocates the KV cache, with one more block at its end for the writes of padding."""
        self._replace_kv_pool(spec._replace(num_blocks=spec.num_blocks + 1))

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Captures the graphs and allocates the memory of the largest step."""
        self.capture(progress=progress)
        self.allocate_step_memory()

    def fill_kv_cache_with_noise(self) -> None:
        self.kv.fill_with_noise()

    def _replace_kv_pool(self, spec: KVSpec) -> None:
        """Allocates another KV pool. Frees the previous one first, and the graphs that were captured with it."""
        if self._flashinfer is not None:
            self._flashinfer.prompt_copy.forget()
        self._decode_graphs.clear()
        self._sampling_graphs.clear()
        self._mixed_graphs.clear()
        self.kv = KVPool(spec._replace(num_blocks=0), self.device)
        torch.cuda.empty_cache()
        self.kv = KVPool(spec, self.device)

    def close(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
        finally:
            self._decode_graphs.clear()
            self._sampling_graphs.clear()
            self._mixed_graphs.clear()
            self._flashinfer = self._prompt_kv_target = None
            # The next engine needs this memory, even while something still references this executor.
            del self.model, self.kv, self._logits, self._edited_logits
            self.sampler.close()

    @torch.inference_mode()
    def submit(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None = None) -> "CudaPending":
        for setup in inputs.setups:
            self.sampler.setup(setup)
            self.pooler.setup(setup)
            if self._flashinfer is not None:
                self._flashinfer.prompt_copy.forget(setup.slot)
        cuda_stream = torch.cuda.current_stream(self.device)  # looked up once, because the call is slow
        started = _event()
        started.record(cuda_stream)
        self._staging.begin_step()
        rows = np.flatnonzero(batch.is_sampled)
        sampled_tokens = self._sampled_tokens_pinned[self._staging.buffer_index]
        pending = CudaPending(self, rows, batch.slots[rows], started, sampled_tokens)
        self._write_block_updates(batch)
        if (
            batch.num_decodes == len(batch.slots)
            and (size := _smallest_fitting(self._decode_graphs, len(rows))) is not None
        ):
            self._write_rows(batch, rows, size)
            self._decode_graphs[size].replay()
            self._sample(pending, batch, masks, is_sampled=True)
        else:
            self._write_rows(batch, rows, self.limits.max_num_seqs)
            prefills = batch.slots[batch.num_decodes :].tolist()
            has_prompt_logprobs = any(self.sampler.wants_prompt_logprobs(slot) for slot in prefills)
            if has_prompt_logprobs or self.pooler.needs_all_tokens(batch):
                hidden = self._forward(batch, inputs, all_rows=True)
                self._compute_prompt_logprobs(pending, batch, hidden)
                pending.embeddings = self.pooler.pool(batch, hidden).copied_to_host()
                hidden = hidden.index_select(0, self._row_inputs.token_indices[: self._padded_logits_rows(len(rows))])
            else:
                hidden = self._forward(batch, inputs)[: self._padded_logits_rows(len(rows))]
                if self.pooler.has_pooling(batch):
                    pending.embeddings = self.pooler.pool_last_tokens(batch, hidden).copied_to_host()
            if len(rows):
                self.model.raw_logits(hidden, self._logits[: len(hidden)])
                self._sample(pending, batch, masks, is_sampled=False)
        pending.ended.record(cuda_stream)
        self._staging.end_step(pending.ended)
        return pending

    @torch.inference_mode()
    def read_blocks(self, blocks: Sequence[int]) -> "CudaRead":
        host = torch.empty(
            (len(blocks), self.facts.layout.block_bytes), dtype=torch.uint8, pin_memory=self.device.type == "cuda"
        )
        for chunk in _chunks(len(blocks)):
            index = upload(np.array(blocks[chunk], np.int64), self.device)
            host[chunk].copy_(self.kv.read_blocks(index), non_blocking=True)
        return CudaRead(host)

    @torch.inference_mode()
    def write_blocks(self, blocks: Sequence[int], data: Bytes) -> "CudaWrite":
        for chunk in _chunks(len(blocks)):
            index = upload(np.array(blocks[chunk], np.int64), self.device)
            self.kv.write_blocks(index, upload(data[chunk], self.device))
        return CudaWrite()

    def _sample(self, pending: "CudaPending", batch: StepBatch, masks: StepMasks | None, *, is_sampled: bool) -> None:
        """Samples one token per row, to the device and to pinned memory. Starts computing log probabilities.

        `is_sampled`: the decode graph has already sampled, but without top_k, top_p, min_p and edits. Samples again if
        a row uses one of them."""
        sampler, slots, rows = self.sampler, pending.slots, pending.rows
        logits, positions = self._logits[: len(rows)], batch.first[rows] + batch.count[rows]
        truncates, size = sampler.uses_truncation(slots), _smallest_fitting(self._sampling_graphs, len(rows))
        if masks is not None or sampler.edits(slots, positions):
            edited = sampler.edit(logits, slots, positions, masks, self._edited_logits[: len(rows)])
            if size is not None:
                self._sampling_graphs[size].from_edited_logits.replay()
            else:
                self._launch_sampling(edited, truncates=truncates)
            sampler.note_tokens(slots, self._new_tokens(len(rows)))
        elif truncates and size is not None:
            self._sampling_graphs[size].from_logits.replay()
        elif truncates or not is_sampled:
            self._launch_sampling(logits, truncates=truncates)
        with_logprobs = sampler.rows_with_logprobs(slots)
        if len(with_logprobs):
            index = upload(with_logprobs, self.device)
            tokens = self._new_tokens(len(rows)).index_select(0, index)
            pending.logprobs = sampler.compute_logprobs(logits.index_select(0, index), tokens, slots[with_logprobs])
            pending.with_logprobs = with_logprobs

    def _padded_logits_rows(self, rows: int) -> int:
        """`rows` padded to the next number of rows that the warm-up computed logits for.

        cuBLAS has a different kernel every few rows. CUDA loads a kernel at its first use and waits until the device is
        idle, which would stop all streams for two steps.
        """
        return _smallest_fitting(logits_sizes(self.limits.max_num_seqs), rows) or rows

    def _new_tokens(self, rows: int) -> Tensor:
        return self._last_token.index_select(0, self._row_inputs.slots[:rows])

    def _launch_sampling(self, logits: Tensor, *, truncates: bool = False) -> None:
        """Launches the kernels that sample one token per row: from all tokens, or with top_k, top_p and min_p."""
        rows = SampledRowInputs(*(field[: len(logits)] for field in self._row_inputs))
        noise = Noise(rows.seed_low, rows.seed_high, rows.positions)
        truncation = TruncationParams(rows.top_k, rows.top_p, rows.log_min_p) if truncates else None
        pinned_tokens = (self._sampled_tokens_pinned.view(-1), rows.output_indices)
        draw(logits, rows.temperature, noise, self._last_token, rows.slots, *pinned_tokens, truncation)

    def _compute_prompt_logprobs(self, pending: "CudaPending", batch: StepBatch, hidden: Tensor) -> None:
        ends = np.cumsum(batch.count).tolist()
        for row in range(batch.num_decodes, len(batch.slots)):
            slot, first, count = int(batch.slots[row]), int(batch.first[row]), int(batch.count[row])
            if self.sampler.wants_prompt_logprobs(slot):
                part = hidden[ends[row] - count : ends[row]]
                logprobs = self.sampler.compute_prompt_logprobs(self.model.logits, part, slot, first)
                pending.prompt_logprobs[row] = logprobs

    def _write_block_updates(self, batch: StepBatch) -> None:
        """Updates the block tables, on the host and on the device."""
        new = batch.new_blocks
        if len(new.slots):
            self._host_block_tables[new.slots, new.columns] = new.blocks
            indices = new.slots * self._blocks_per_slot + new.columns
            if not self._staging.put_block_updates(indices, new.blocks):
                self._uploader.scatter(indices, new.blocks, self._block_tables.view(-1))

    def _write_rows(self, batch: StepBatch, rows: NDArray[np.int64], padded: int) -> None:
        """Writes the inputs of the sampled rows, padded to `padded` rows, and the shares of their contexts."""
        slots = batch.slots[rows]
        positions = batch.first[rows] + batch.count[rows] - 1
        token_indices = np.cumsum(batch.count)[rows] - 1
        output_indices = np.arange(len(rows)) + self._staging.buffer_index * self.limits.max_num_seqs
        fields = [slots, positions, token_indices, output_indices, *self.sampler.kernel_params[:, slots]]
        sampled = max(padded, _smallest_fitting(self._sampling_graphs, len(rows)) or 0)  # its graph may have more rows
        self._staged_rows.write(fields, sampled)
        decodes, shares = batch.num_decodes, most_shares(padded, self._wanted_shares)
        for window, staged in self._decode_shares.items():
            staged.write(divide(slots[:decodes], positions[:decodes], window, self._wanted_shares), shares)
        if decodes < len(batch.slots):
            last_window = self.model.config.layer_windows[-1]
            self._sampled_shares.write(divide(slots, positions, last_window, self._wanted_shares), shares)

    # Steps with prompts

    def _forward(self, batch: StepBatch, inputs: StepInputs, *, all_rows: bool = False) -> Tensor:
        """Runs a step that has prompts, or that fits no decode graph.

        Returns the hidden states of the sampled rows, followed by padding, or (`all_rows`) those of all tokens."""
        tokens, decodes = self._token_arrays(batch, inputs), batch.num_decodes
        prefills = self._prefills(batch) if decodes < len(batch.slots) else None
        copy_slot = NO_SLOT if self._flashinfer is None or prefills is None else self._flashinfer.prompt_copy.writing
        self._staged_copy_slot.write([np.array([copy_slot])], 1)
        size = _smallest_fitting(self._mixed_graphs, batch.num_tokens)
        is_faster = size is not None and is_graph_faster(size, batch.num_tokens, self._layer_parameters)
        if size is not None and is_faster and prefills is not None and not all_rows:
            self._staged_tokens.write(tokens, size)
            self._staging.fetch()
            planned, span = prefills, slice(decodes, batch.num_tokens)
            return self._mixed_graphs[size].replay(lambda params, q, out: planned.attend(params, q[span], out[span]))
        self._staging.fetch()
        views = TokenInputs(*self._uploader.upload(*tokens))
        if decodes:
            views.ids[:decodes] = self._last_token.index_select(0, views.slots[:decodes])
        sampled_rows = None  # then all tokens are returned; in a step of decodes alone, all are sampled from
        if prefills is not None and not all_rows:
            sampled_rows = self._sampled_rows(self._padded_logits_rows(int(batch.is_sampled.sum())))
        where = (views.slots, views.positions, decodes)
        return self.model.forward(views.ids, self._attention(*where, prefills, sampled_rows, self._prompt_kv_target))

    def _attention(
        self,
        slots: Tensor,
        positions: Tensor,
        decodes: int,
        prefills: PrefillAttention | None = None,
        sampled_rows: SampledRows | None = None,
        prompt_copy: PromptKVTarget | None = None,
    ) -> CudaAttention:
        most = most_shares(decodes, self._wanted_shares)
        shares = {window: staged.numbers[:, :most] for window, staged in self._decode_shares.items()}
        where = (self.kv, self._block_tables, slots, positions)
        return CudaAttention(*where, decodes, shares, self._workspace, prefills, sampled_rows, prompt_copy)

    def _sampled_rows(self, rows: int) -> SampledRows:
        shares = self._sampled_shares.numbers[:, : most_shares(rows, self._wanted_shares)]
        return SampledRows(self._row_inputs.token_indices[:rows], shares)

    def _token_arrays(self, batch: StepBatch, inputs: StepInputs) -> list[NDArray[np.int64] | NDArray[np.int32]]:
        """The fields of `TokenInputs`, as host arrays."""
        count, decodes = batch.count, batch.num_decodes
        slots = np.repeat(batch.slots, count)
        positions = np.arange(batch.num_tokens) + np.repeat(batch.first - (np.cumsum(count) - count), count)
        ids = np.concatenate([np.zeros(decodes, np.int32), inputs.prefill_tokens])
        decode_slots = np.full(batch.num_tokens, NO_SLOT, np.int64)
        decode_slots[:decodes] = slots[:decodes]
        return [slots, positions, ids, decode_slots]

    def _prefills(self, batch: StepBatch) -> PrefillAttention:
        prompts = slice(batch.num_decodes, None)
        slots, first, count = (field[prompts] for field in (batch.slots, batch.first, batch.count))
        if self._flashinfer is None:
            return PlainPrefills(self.kv, self._block_tables, slots, first, count)
        blocks = (-(-(first + count) // self.kv.block_size)).tolist()
        tables = [self._host_block_tables[slot, :used] for slot, used in zip(slots.tolist(), blocks, strict=True)]
        slices = flashinfer.PrefillSlices(slots, first, count, batch.is_sampled[prompts], tables)
        return self._flashinfer.prefills(self.kv, slices)

    # Graphs

    @torch.inference_mode()
    def capture(self, *, largest: bool = False, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Captures graphs of all sizes, or only of the `largest`. Largest first: the others then fit into its memory.

        Decode graphs come last. If they are captured before the graphs of sampling or of large steps with prompts,
        their kernels do not overlap as they should: on an H200 gaps are 0.5 us instead of 0.2 us, which costs 2.5% of
        a step of one row of Llama-3-8B.
        """
        if not self.model.can_be_captured:
            return
        pool, done, most = torch.cuda.graph_pool_handle(), 0, self.num_graphs
        with _no_garbage_collection():
            for size in self._mixed_sizes[::-1][: 1 if largest else None]:
                self._mixed_graphs[size] = self._capture_piecewise(size, pool)
                progress(done := done + 1, most)
            for size in sampling_sizes(self.limits.max_num_seqs)[::-1][: 1 if largest else None]:
                buffers = (self._logits[:size], self._edited_logits[:size])
                steps = (partial(self._launch_sampling, logits, truncates=True) for logits in buffers)
                self._sampling_graphs[size] = SamplingGraphs(*(self._capture_full(step, pool) for step in steps))
                progress(done := done + 1, most)
            for size in decode_sizes(self.limits.max_num_seqs)[::-1][: 1 if largest else None]:
                with self._outside_step():  # for the fetch in the warm-up; the captured fetch is not run
                    self._decode_graphs[size] = self._capture_full(partial(self._decode_step, size), pool)
                progress(done := done + 1, most)
        torch.cuda.synchronize(self.device)

    @property
    def num_graphs(self) -> int:
        most = self.limits.max_num_seqs
        return len(self._mixed_sizes) + len(decode_sizes(most)) + len(sampling_sizes(most))

    @property
    def later_bytes(self) -> int:
        """Bytes allocated later: driver memory for graphs, and state that the first request with penalties needs."""
        most = self.limits.max_num_seqs
        graphs = (
            len(self._mixed_sizes) * len(self.model.layers) + 2 * len(sampling_sizes(most)) + len(decode_sizes(most))
        )
        return self.sampler.later_bytes + GRAPH_BYTES * (graphs if self.model.can_be_captured else 0)

    def _decode_step(self, rows: int) -> None:
        """A whole step of decodes, with sampling. It reads only fixed addresses and the next pinned buffer of the ring,
        so that it can be captured."""
        sampled = _smallest_fitting(sampling_sizes(self.limits.max_num_seqs), rows) or rows
        self._staging.fetch(max(most_shares(rows, self._wanted_shares), sampled))
        slots, positions = self._row_inputs.slots[:rows], self._row_inputs.positions[:rows]
        ids = self._last_token.index_select(0, slots.clamp(min=0))
        hidden = self.model.forward(ids, self._attention(slots, positions, rows))
        self._launch_sampling(self.model.raw_logits(hidden, self._logits[:rows]))

    def _capture_full(self, step: Callable[[], None], pool: object) -> FullGraph:
        """Warms a step up on a few layers, then captures it with all layers."""
        with self.model.abridged():
            warm_up(step)
        return FullGraph(step, pool)

    @contextmanager
    def _outside_step(self) -> Iterator[None]:
        """Allows one fetch outside of a step, before the first step: begins and ends a step of the staging buffer, so
        that the indices of host and device stay equal. Nothing is copied unless something is written.

        After an error, the next `begin_step` resets both indices."""
        self._staging.begin_step()
        yield
        was_read = _event()
        was_read.record()
        self._staging.end_step(was_read)

    def _capture_piecewise(self, size: int, pool: object) -> PiecewiseGraph:
        """Captures a mixed step of `size` tokens, of which any number may be decodes."""
        tokens = TokenInputs(*(field[:size] for field in self._token_inputs))
        most = min(size, self.limits.max_num_seqs)  # rows that can be decodes, or that can sample

        def forward(split: PromptAttention) -> Tensor:
            where = (tokens.slots, tokens.positions, most)
            sampled_rows = self._sampled_rows(most)
            attention = self._attention(*where, sampled_rows=sampled_rows, prompt_copy=self._prompt_kv_target)

            def attend(params: AttentionParams, qkv: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
                if params.is_last_layer:
                    return attention(params, qkv, residual)
                shape, out = (size, params.num_heads, params.head_dim), self._attended[:size]
                q = attention.write(params, qkv, self._queries[:size].view(shape))
                attention.decode(params, q, out)
                split(params, q, out.view(shape))
                return out, residual

            last = self._last_token.index_select(0, tokens.decode_slots.clamp(min=0))
            return self.model.forward(torch.where(tokens.decode_slots < 0, tokens.ids, last), attend)

        with self.model.abridged():
            warm_up(lambda: forward(lambda params, q, out: None))
        return PiecewiseGraph(forward, pool)

    @torch.inference_mode()
    def profile_run(self) -> None:
        """Runs the largest step and four small ones on dummy rows: allocates peak memory and loads kernels before
        service. (vLLM: profile_run.)

        The small ones are: a whole prompt; the first slice of a longer prompt; a slice after a cached prefix; a slice
        after a long context. The pool may be tiny: block tables name the same block many times."""
        longest = self._longest_prompt
        self._run_largest_step()
        few = min(self.limits.max_num_batched_tokens, longest, 16)
        behind = min(flashinfer.LONG_CONTEXT, longest - few)
        with self.model.abridged():
            if self.limits.max_num_batched_tokens > longest:  # a prompt alone in its step may use another kernel
                self._run_dummy_step([longest])
            for first, is_last in ((0, True), (0, False), (few, False), (behind, True)):
                self._run_dummy_step([few], first=min(first, longest - few), is_last=is_last)
        self._uploader.scatter(np.zeros(1, np.int64), np.zeros(1, np.int32), self._block_tables.view(-1))
        with self._outside_step():
            self._staged_copy_slot.write([np.array([NO_SLOT])], 1)
            self._staging.fetch()
        torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def allocate_step_memory(self) -> None:
        """Allocates the memory of the largest step again, which `allocate_kv_cache` freed. In service it would be
        allocated bit by bit, and the device waits for each allocation."""
        with self.model.abridged():
            self._run_largest_step()
        size = (self.limits.max_num_seqs, self.model.config.hidden_size)
        hidden = torch.zeros(size, dtype=self.model.dtypes.activations, device=self.device)
        for rows in logits_sizes(self.limits.max_num_seqs):
            self.model.raw_logits(hidden[:rows], self._logits[:rows])
        torch.cuda.synchronize(self.device)

    def _run_largest_step(self) -> None:
        """Runs the largest step: as many prompts of the greatest length as fit, and a sample for every seat."""
        longest = self._longest_prompt
        most = min(self.limits.max_num_batched_tokens, longest * self.limits.max_num_seqs)
        prompts, rest = divmod(most, longest)
        hidden = self._run_dummy_step([longest] * prompts + [rest] * (rest > 0))
        self._edited_logits.copy_(
            self.model.raw_logits(hidden.expand(self.limits.max_num_seqs, -1).contiguous(), self._logits)
        )
        for logits in (self._logits, self._edited_logits):
            self._launch_sampling(logits)
            self._launch_sampling(logits, truncates=True)
        self.sampler.warm_up_kernels(self._edited_logits)

    @property
    def _longest_prompt(self) -> int:
        return max(1, self.limits.max_model_len - 1)

    def _run_dummy_step(self, counts: list[int], *, first: int = 0, is_last: bool = True) -> Tensor:
        """Runs one step of dummy slices with `counts` tokens each, which start at position `first`, without sampling.
        Returns the hidden state of one token, [1, hidden].

        `is_last`: they are the last slices of their prompts."""
        device = self.device
        slots, count = np.zeros(len(counts), np.int64), np.array(counts)
        firsts, are_last = np.full_like(count, first), np.full(len(counts), is_last)
        prefills: PrefillAttention = PlainPrefills(self.kv, self._block_tables, slots, firsts, count)
        if self._flashinfer is not None:
            self._flashinfer.prompt_copy.forget()
            tables = [np.zeros(-(-end // self.kv.block_size), np.int32) for end in (firsts + count).tolist()]
            slices = flashinfer.PrefillSlices(slots, firsts, count, are_last, tables)
            prefills = self._flashinfer.prefills(self.kv, slices)
        positions = torch.cat([torch.arange(first, first + tokens, dtype=torch.int32) for tokens in counts]).to(device)
        ids = torch.zeros_like(positions)
        no_slots = torch.full_like(ids, NO_SLOT)
        attention = self._attention(no_slots, positions, 0, prefills, prompt_copy=self._prompt_kv_target)
        return self.model.forward(ids, attention)[:1]


class CudaPending:
    """A submitted step (a `PendingStep`)."""

    def __init__(
        self,
        owner: CudaExecutor,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        started: torch.cuda.Event,
        sampled_tokens: Tensor,
    ) -> None:
        self.rows, self.slots = rows, slots  # of the step's sampled rows
        self.tokens = sampled_tokens[: len(rows)]  # in pinned memory; the device writes them there
        self.with_logprobs = np.empty(0, np.int64)  # indices into `rows` that want log probabilities
        self.logprobs = PendingLogprobs([])  # their log probabilities
        self.prompt_logprobs: dict[int, PendingLogprobs] = {}  # by row
        self.embeddings = PendingEmbeddings([], [])
        self.ended = _event()
        self._owner, self._started = owner, started
        self._result: StepResult | None = None

    def result(self) -> StepResult:
        if self._result is None:
            self.ended.synchronize()
            finished = self._owner.clock()
            self._result = StepResult(
                tokens=self.tokens.tolist(),
                started=finished - self._started.elapsed_time(self.ended) / 1000,
                finished=finished,
                logprobs=dict(zip(self.rows[self.with_logprobs].tolist(), self.logprobs.read(), strict=True)),
                prompt_logprobs={row: logprobs.read() for row, logprobs in self.prompt_logprobs.items()},
                embeddings=self.embeddings.read(),
            )
        return self._result


class CudaRead:
    """Blocks on their way to the host (a `PendingRead`)."""

    def __init__(self, host: Tensor) -> None:
        self._host, self._ended = host, _event()
        self._ended.record()

    def result(self) -> Bytes:
        self._ended.synchronize()
        found: Bytes = self._host.numpy().copy()  # pinned memory is scarce
        return found


class CudaWrite:
    """Blocks on their way to the device (a `PendingWrite`)."""

    def __init__(self) -> None:
        self._ended = _event()
        self._ended.record()

    def result(self) -> None:
        self._ended.synchronize()


def _chunks(blocks: int) -> list[slice]:
    """Parts of a copy of blocks. A copy of all at once would take as much device memory as the blocks."""
    return [slice(begin, begin + COPY_CHUNK_BLOCKS) for begin in range(0, blocks, COPY_CHUNK_BLOCKS)]


def _smallest_fitting(sizes: Iterable[int], count: int) -> int | None:
    """The smallest size that holds `count`, or None."""
    return min((size for size in sizes if size >= count), default=None)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disables garbage collection: a tensor that is collected during a capture would break it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
