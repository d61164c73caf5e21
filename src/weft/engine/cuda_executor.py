"""CudaExecutor: runs batches on a GPU. In service, only `result` waits for the device.

(`submit` waits too if the device is three steps behind, or if the submit before it failed.)

A step reads its inputs from pinned memory, runs all layers and draws one token per row. The token stays on the device
for the next step, and is also written to pinned memory for the host. A step of decodes alone is one captured graph. In
a step with prompts, the layers are captured in pieces, and the attention of the prompts runs between the pieces. A
large step is launched kernel by kernel.
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
from weft.engine.device import facts_of
from weft.engine.executor import Bytes, DeviceMemory, StepInputs, StepMasks, StepResult
from weft.engine.graphs import (
    GRAIN,
    Cut,
    Pieces,
    Whole,
    decode_sizes,
    draw_sizes,
    is_worth_it,
    mixed_sizes,
    score_sizes,
    warm_up,
)
from weft.engine.logprobs import Described
from weft.engine.pooling import Pooled, Pooler
from weft.engine.sampling import Sampler, upload
from weft.engine.staging import DEPTH, NO_SLOT, Rows, StagingBuffer, Tokens, Uploader, pinned
from weft.kernels import flashinfer
from weft.kernels.attention import Heads
from weft.kernels.cuda import CudaAttention, PlainPrefills, PrefillAttention, PromptKeyTarget, SampledRows, sm_count
from weft.kernels.decode import Workspace, wanted_shares
from weft.kernels.draw import Noise, draw
from weft.kernels.shares import Shares, divide, most_shares
from weft.kernels.truncate import Cuts
from weft.kv.pool import KVPool
from weft.kv.spec import KVSpec
from weft.models import CausalLM

TORCH_PAGE = 2 << 20  # bytes: torch allocates GPU memory in multiples of this
COPIED_BLOCKS = 16  # at a time, to or from the host
COPY_TENSORS = 3  # as large as these blocks, while they are copied
GRAPH_BYTES = 1 << 19  # driver memory per graph, outside torch's memory: 0.45 MiB with CUDA 13 on an H200


class Limits(NamedTuple):
    """Limits of a step and the number of slots."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    slots: int


class Draws(NamedTuple):
    """Graphs that draw one token per row after top_k, top_p and min_p. Each launches many kernels at once."""

    scores: Whole  # from unedited logits
    edited: Whole  # from logits that a bias, ban, penalty or grammar of some row has edited


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
        self._columns = -(-limits.max_model_len // block_size)
        self._tables = torch.zeros((limits.slots, self._columns), dtype=torch.int32, device=device)
        self._blocks = np.zeros((limits.slots, self._columns), np.int32)  # copy on the host
        self._last_token = torch.zeros(limits.slots, dtype=torch.int32, device=device)
        # Logits of a step's rows, from a graph or not; and a float32 copy for steps that edit logits.
        self._scores, self._edited_scores = (
            torch.empty((limits.max_num_seqs, config.vocab_size), dtype=kind, device=device)
            for kind in (model.score_dtype, torch.float32)
        )
        self._layer_parameters = sum(parameter.numel() for parameter in model.layers[-1].parameters())
        self._mixed_sizes = mixed_sizes(limits.max_num_batched_tokens, self._layer_parameters)
        most = max(self._mixed_sizes, default=0)
        self._wanted = wanted_shares(config.num_kv_heads, sm_count(device))
        windows = list({*config.layer_windows})
        shares = (Shares.padding(), most_shares(limits.max_num_seqs, self._wanted))
        rows, tokens, kept = (Rows.padding(), limits.max_num_seqs), (Tokens.padding(), most), ((NO_SLOT,), 1)
        kinds = [rows, tokens, kept, shares, *(shares for _ in windows)]
        self._staging = StagingBuffer(kinds, self._tables)
        self._row_table, self._token_table, self._kept_table, self._end_shares, *others = self._staging.step_tables
        self._shares = dict(zip(windows, others, strict=True))
        self._rows, self._tokens = Rows.of(self._row_table.numbers), Tokens(*self._token_table.numbers)
        self._uploader = Uploader(device)
        width = config.num_heads * config.head_dim
        self._queries = torch.empty((most, width), dtype=model.dtypes.activations, device=device)
        self._attended = torch.empty_like(self._queries)
        sizes = (limits.max_num_seqs, config.num_heads, config.num_kv_heads, config.head_dim)
        self._workspace = Workspace.of(*sizes, self._wanted, device)
        self._flashinfer: flashinfer.FlashInfer | None = None
        self._key_target: PromptKeyTarget | None = None
        if flashinfer.is_usable(config.head_dim, model.dtypes.kv_cache):
            kind = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, model.dtypes.kv_cache)
            self._flashinfer = flashinfer.FlashInfer(*kind, limits.max_model_len, device, self._uploader.send)
            if self._flashinfer.kept.capacity:
                self._key_target = PromptKeyTarget(self._flashinfer.kept.copy, self._kept_table.numbers[0])
        self._decodes: dict[int, Whole] = {}
        self._draws: dict[int, Draws] = {}
        self._mixed: dict[int, Pieces] = {}
        wave = 0 if self._flashinfer is None else self._flashinfer.wave
        grain = GRAIN if model.can_be_captured else 1
        self.facts = facts_of(model, device, block_size, ahead=True, grain=grain, wave=wave)
        self._returns = pinned(DEPTH, limits.max_num_seqs)
        self._use(KVSpec(self.facts.layout, 1))  # until `allocate`

    def measure(self) -> DeviceMemory:
        """Runs the largest step and captures the largest graphs first, so that memory cannot run out later."""
        self.rehearse()
        self.capture(largest=True)
        free, total = torch.cuda.mem_get_info(self.device)
        each = self.facts.layout.block_bytes
        blocks = 1 + COPY_TENSORS * COPIED_BLOCKS  # the first takes the writes of padding
        reserved = self.untaken + blocks * each + TORCH_PAGE
        return DeviceMemory(total, free, reserved)

    def allocate(self, spec: KVSpec) -> None:
        """Allocates the KV cache, with one more block: the last one takes the writes of padding."""
        self._use(spec._replace(num_blocks=spec.num_blocks + 1))

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Captures the graphs and takes the memory of the largest step."""
        self.capture(progress=progress)
        self.take_memory()

    def fill(self) -> None:
        self.kv.fill()

    def _use(self, spec: KVSpec) -> None:
        """Switches to another pool. Frees the previous pool first, and the graphs captured for it."""
        if self._flashinfer is not None:
            self._flashinfer.kept.forget()
        self._decodes.clear()
        self._draws.clear()
        self._mixed.clear()
        self.kv = KVPool(spec._replace(num_blocks=0), self.device)
        torch.cuda.empty_cache()
        self.kv = KVPool(spec, self.device)

    def close(self) -> None:
        try:
            torch.cuda.synchronize(self.device)
        finally:
            self._decodes.clear()
            self._draws.clear()
            self._mixed.clear()
            self._flashinfer = self._key_target = None
            # The next engine needs this memory, even while something still references this executor.
            del self.model, self.kv, self._scores, self._edited_scores
            self.sampler.close()

    @torch.inference_mode()
    def submit(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None = None) -> "CudaPending":
        for setup in inputs.setups:
            self.sampler.setup(setup)
            self.pooler.setup(setup)
            if self._flashinfer is not None:
                self._flashinfer.kept.forget(setup.slot)
        stream = torch.cuda.current_stream(self.device)  # looked up once, because the call is slow
        started = _event()
        started.record(stream)
        self._staging.open()
        rows = np.flatnonzero(batch.is_sampled)
        pending = CudaPending(self, rows, batch.slots[rows], started, self._returns[self._staging.page_index])
        self._write_blocks(batch)
        if batch.num_decodes == len(batch.slots) and (size := _fitting(self._decodes, len(rows))) is not None:
            self._write_rows(batch, rows, size)
            self._decodes[size].replay()
            self._choose(pending, batch, masks, is_drawn=True)
        else:
            self._write_rows(batch, rows, self.limits.max_num_seqs)
            prefills = batch.slots[batch.num_decodes :].tolist()
            if self.pooler.sums(batch) or any(self.sampler.wants_prompt(slot) for slot in prefills):
                hidden = self._forward(batch, inputs, all_rows=True)
                self._describe_prompts(pending, batch, hidden)
                pending.pooled = self.pooler.take(batch, hidden).sent()
                hidden = hidden.index_select(0, self._rows.ends[: self._score_rows(len(rows))])
            else:
                hidden = self._forward(batch, inputs)[: self._score_rows(len(rows))]
                if self.pooler.pools(batch):
                    pending.pooled = self.pooler.take_last(batch, hidden).sent()
            if len(rows):
                self.model.scores(hidden, self._scores[: len(hidden)])
                self._choose(pending, batch, masks, is_drawn=False)
        pending.ended.record(stream)
        self._staging.close(pending.ended)
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

    def _choose(self, pending: "CudaPending", batch: StepBatch, masks: StepMasks | None, *, is_drawn: bool) -> None:
        """Draws one token per row, kept on the device and copied to the host; adds log probabilities to `pending`.

        `is_drawn`: a graph has already drawn from all tokens with unedited logits; draw again only where needed."""
        sampler, slots, rows = self.sampler, pending.slots, pending.rows
        scores, positions = self._scores[: len(rows)], batch.first[rows] + batch.count[rows]
        cuts, size = sampler.cuts(slots), _fitting(self._draws, len(rows))
        if masks is not None or sampler.edits(slots, positions):
            edited = sampler.edit(scores, slots, positions, masks, self._edited_scores[: len(rows)])
            if size is not None:
                self._draws[size].edited.replay()
            else:
                self._draw(edited, cuts=cuts)
            sampler.note(slots, self._drawn(len(rows)))
        elif cuts and size is not None:
            self._draws[size].scores.replay()
        elif cuts or not is_drawn:
            self._draw(scores, cuts=cuts)
        asking = sampler.asking(slots)
        if len(asking):
            index = upload(asking, self.device)
            tokens = self._drawn(len(rows)).index_select(0, index)
            pending.described = sampler.describe(scores.index_select(0, index), tokens, slots[asking])
            pending.asking = asking

    def _score_rows(self, rows: int) -> int:
        """`rows` padded to the next number of rows that the warm-up computed logits for.

        cuBLAS has a different kernel every few rows. CUDA loads a kernel at its first use and waits until the device is
        idle, which would stop all streams for two steps.
        """
        return _fitting(score_sizes(self.limits.max_num_seqs), rows) or rows

    def _drawn(self, rows: int) -> Tensor:
        return self._last_token.index_select(0, self._rows.slots[:rows])

    def _draw(self, scores: Tensor, *, cuts: bool = False) -> None:
        """Draws one token per row, from all tokens or (`cuts`) after top_k, top_p and min_p."""
        rows = Rows(*(field[: len(scores)] for field in self._rows))
        noise, left = Noise(rows.low, rows.high, rows.positions), Cuts(rows.top_k, rows.top_p, rows.floor)
        returns = (self._returns.view(-1), rows.places)
        draw(scores, rows.temperature, noise, self._last_token, rows.slots, *returns, left if cuts else None)

    def _describe_prompts(self, pending: "CudaPending", batch: StepBatch, hidden: Tensor) -> None:
        ends = np.cumsum(batch.count).tolist()
        for row in range(batch.num_decodes, len(batch.slots)):
            slot, first, count = int(batch.slots[row]), int(batch.first[row]), int(batch.count[row])
            if self.sampler.wants_prompt(slot):
                part = hidden[ends[row] - count : ends[row]]
                pending.prompts[row] = self.sampler.describe_prompt(self.model.logits, part, slot, first)

    def _write_blocks(self, batch: StepBatch) -> None:
        """Updates the block tables, on the host and on the device."""
        new = batch.new_blocks
        if len(new.slots):
            self._blocks[new.slots, new.columns] = new.blocks
            places = new.slots * self._columns + new.columns
            if not self._staging.put_block_updates(places, new.blocks):
                self._uploader.post(places, new.blocks, self._tables.view(-1))

    def _write_rows(self, batch: StepBatch, rows: NDArray[np.int64], padded: int) -> None:
        slots = batch.slots[rows]
        positions = batch.first[rows] + batch.count[rows] - 1
        ends = np.cumsum(batch.count)[rows] - 1
        returns = np.arange(len(rows)) + self._staging.page_index * self.limits.max_num_seqs
        drawn = max(padded, _fitting(self._draws, len(rows)) or 0)  # draw graphs may have more rows
        self._row_table.write([slots, positions, ends, returns, *self.sampler.drawing[:, slots]], drawn)
        decodes, places = batch.num_decodes, most_shares(padded, self._wanted)
        for window, step_table in self._shares.items():
            step_table.write(divide(slots[:decodes], positions[:decodes], window, self._wanted), places)
        if decodes < len(batch.slots):
            self._end_shares.write(divide(slots, positions, self.model.config.layer_windows[-1], self._wanted), places)

    # Steps with prompts

    def _forward(self, batch: StepBatch, inputs: StepInputs, *, all_rows: bool = False) -> Tensor:
        """Hidden states of a step that no decode graph can run: it has prompts, or no graph fits its decodes.

        Of the rows that sample, followed by padding; or of all tokens (`all_rows`)."""
        tokens, decodes = self._tokens_of(batch, inputs), batch.num_decodes
        prefills = self._prefills(batch) if decodes < len(batch.slots) else None
        kept = NO_SLOT if self._flashinfer is None or prefills is None else self._flashinfer.kept.writing
        self._kept_table.write([np.array([kept])], 1)
        size = _fitting(self._mixed, batch.num_tokens)
        worth_it = size is not None and is_worth_it(size, batch.num_tokens, self._layer_parameters)
        if size is not None and worth_it and prefills is not None and not all_rows:
            self._token_table.write(tokens, size)
            self._staging.fetch()
            planned, span = prefills, slice(decodes, batch.num_tokens)
            return self._mixed[size].replay(lambda heads, q, out: planned.attend(heads, q[span], out[span]))
        self._staging.fetch()
        views = Tokens(*self._uploader.send(*tokens))
        if decodes:
            views.ids[:decodes] = self._last_token.index_select(0, views.slots[:decodes])
        # A step of decodes alone, which fits no graph, needs no ends: every token samples.
        ends = None if all_rows or prefills is None else self._ends(self._score_rows(int(batch.is_sampled.sum())))
        where = (views.slots, views.positions, decodes)
        return self.model.forward(views.ids, self._attention(*where, prefills, ends, self._key_target))

    def _attention(
        self,
        slots: Tensor,
        positions: Tensor,
        decodes: int,
        prefills: PrefillAttention | None = None,
        ends: SampledRows | None = None,
        key_target: PromptKeyTarget | None = None,
    ) -> CudaAttention:
        places = most_shares(decodes, self._wanted)
        shares = {window: step_table.numbers[:, :places] for window, step_table in self._shares.items()}
        where = (self.kv, self._tables, slots, positions)
        return CudaAttention(*where, decodes, shares, self._workspace, prefills, ends, key_target)

    def _ends(self, rows: int) -> SampledRows:
        return SampledRows(self._rows.ends[:rows], self._end_shares.numbers[:, : most_shares(rows, self._wanted)])

    def _tokens_of(self, batch: StepBatch, inputs: StepInputs) -> list[NDArray[np.int64] | NDArray[np.int32]]:
        """The fields of `Tokens`, as host arrays."""
        count, decodes = batch.count, batch.num_decodes
        slots = np.repeat(batch.slots, count)
        positions = np.arange(batch.num_tokens) + np.repeat(batch.first - (np.cumsum(count) - count), count)
        decoding = np.full(batch.num_tokens, NO_SLOT, np.int64)
        decoding[:decodes] = slots[:decodes]
        return [slots, positions, np.concatenate([np.zeros(decodes, np.int32), inputs.prefill_tokens]), decoding]

    def _prefills(self, batch: StepBatch) -> PrefillAttention:
        prompts = slice(batch.num_decodes, None)
        slots, first, count = (field[prompts] for field in (batch.slots, batch.first, batch.count))
        if self._flashinfer is None:
            return PlainPrefills(self.kv, self._tables, slots, first, count)
        pages = (-(-(first + count) // self.kv.block_size)).tolist()
        tables = [self._blocks[slot, :used] for slot, used in zip(slots.tolist(), pages, strict=True)]
        return self._flashinfer.prefills(
            self.kv, flashinfer.Slices(slots, first, count, batch.is_sampled[prompts], tables)
        )

    # Graphs

    @torch.inference_mode()
    def capture(self, *, largest: bool = False, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Captures graphs of all sizes, or only of the `largest`. Largest first: the others then fit into its memory.

        Decode graphs come last. If they are captured before the graphs of draws or of large steps with prompts, their
        kernels do not overlap as they should: on an H200 gaps are 0.5 us instead of 0.2 us, which costs 2.5% of a step
        of one row of Llama-3-8B.
        """
        if not self.model.can_be_captured:
            return
        pool, done, most = torch.cuda.graph_pool_handle(), 0, self.num_graphs
        with _no_collection():
            for size in self._mixed_sizes[::-1][: 1 if largest else None]:
                self._mixed[size] = self._pieces(size, pool)
                progress(done := done + 1, most)
            for size in draw_sizes(self.limits.max_num_seqs)[::-1][: 1 if largest else None]:
                places = (self._scores[:size], self._edited_scores[:size])
                steps = (partial(self._draw, place, cuts=True) for place in places)
                self._draws[size] = Draws(*(self._whole(step, pool) for step in steps))
                progress(done := done + 1, most)
            for size in decode_sizes(self.limits.max_num_seqs)[::-1][: 1 if largest else None]:
                with self._trial():  # for the fetch in the warm-up; the captured fetch is not run
                    self._decodes[size] = self._whole(partial(self._decode, size), pool)
                progress(done := done + 1, most)
        torch.cuda.synchronize(self.device)

    @property
    def num_graphs(self) -> int:
        most = self.limits.max_num_seqs
        return len(self._mixed_sizes) + len(decode_sizes(most)) + len(draw_sizes(most))

    @property
    def untaken(self) -> int:
        """Bytes allocated later: driver memory for graphs, and state that the first request with penalties needs."""
        most = self.limits.max_num_seqs
        graphs = len(self._mixed_sizes) * len(self.model.layers) + 2 * len(draw_sizes(most)) + len(decode_sizes(most))
        return self.sampler.untaken + GRAPH_BYTES * (graphs if self.model.can_be_captured else 0)

    def _decode(self, rows: int) -> None:
        """A whole step of decodes, with drawing. It reads only fixed addresses and the next page of the staging
        buffer, so that it can be captured."""
        drawn = _fitting(draw_sizes(self.limits.max_num_seqs), rows) or rows
        self._staging.fetch(max(most_shares(rows, self._wanted), drawn))
        slots, positions = self._rows.slots[:rows], self._rows.positions[:rows]
        ids = self._last_token.index_select(0, slots.clamp(min=0))
        hidden = self.model.forward(ids, self._attention(slots, positions, rows))
        self._draw(self.model.scores(hidden, self._scores[:rows]))

    def _whole(self, step: Callable[[], None], pool: object) -> Whole:
        """Warms a step up on a few layers, then captures it with all layers."""
        with self.model.abridged():
            warm_up(step)
        return Whole(step, pool)

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Allows one fetch outside of a step, before the first step. Its page is empty unless something is written.

        It keeps the page counters of host and device equal. After an error the staging buffer stays open; the next
        `open` resets both counters."""
        self._staging.open()
        yield
        done = _event()
        done.record()
        self._staging.close(done)

    def _pieces(self, size: int, pool: object) -> Pieces:
        """Captures a mixed step of `size` tokens, of which any number may be decodes."""
        tokens = Tokens(*(field[:size] for field in self._tokens))
        most = min(size, self.limits.max_num_seqs)  # rows that can be decodes, or that can sample

        def forward(cut: Cut) -> Tensor:
            where = (tokens.slots, tokens.positions, most)
            attention = self._attention(*where, ends=self._ends(most), key_target=self._key_target)

            def attend(heads: Heads, qkv: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
                if heads.last:
                    return attention(heads, qkv, stream)
                shape, out = (size, heads.heads, heads.head_dim), self._attended[:size]
                q = attention.write(heads, qkv, self._queries[:size].view(shape))
                attention.decode(heads, q, out)
                cut(heads, q, out.view(shape))
                return out, stream

            last = self._last_token.index_select(0, tokens.decodes.clamp(min=0))
            return self.model.forward(torch.where(tokens.decodes < 0, tokens.ids, last), attend)

        with self.model.abridged():
            warm_up(lambda: forward(lambda heads, q, out: None))
        return Pieces(forward, pool)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Runs the largest step and small ones on dummy rows: allocates peak memory and loads kernels before service.

        The small ones are a slice at the start of a prompt that ends there or continues, a slice after a cached prefix,
        and a slice after a long context. The pool may be tiny: block tables name the same block many times."""
        longest = self._longest_prompt
        self._rehearse_largest()
        few = min(self.limits.max_num_batched_tokens, longest, 16)
        behind = min(flashinfer.LONG, longest - few)
        with self.model.abridged():
            if self.limits.max_num_batched_tokens > longest:  # a prompt alone in its step may use another kernel
                self._rehearse([longest])
            for first, is_end in ((0, True), (0, False), (few, False), (behind, True)):
                self._rehearse([few], first=min(first, longest - few), are_ends=is_end)
        self._uploader.post(np.zeros(1, np.int64), np.zeros(1, np.int32), self._tables.view(-1))
        with self._trial():
            self._kept_table.write([np.array([NO_SLOT])], 1)
            self._staging.fetch()
        torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def take_memory(self) -> None:
        """Allocates the memory of the largest step again, which `allocate` freed. In service it would be allocated bit
        by bit, and the device waits for each allocation."""
        with self.model.abridged():
            self._rehearse_largest()
        size = (self.limits.max_num_seqs, self.model.config.hidden_size)
        hidden = torch.zeros(size, dtype=self.model.dtypes.activations, device=self.device)
        for rows in score_sizes(self.limits.max_num_seqs):
            self.model.scores(hidden[:rows], self._scores[:rows])
        torch.cuda.synchronize(self.device)

    def _rehearse_largest(self) -> None:
        """Runs the largest step: as many prompts of the greatest length as fit."""
        longest = self._longest_prompt
        most = min(self.limits.max_num_batched_tokens, longest * self.limits.max_num_seqs)
        prompts, rest = divmod(most, longest)
        self._rehearse([longest] * prompts + [rest] * (rest > 0))

    @property
    def _longest_prompt(self) -> int:
        return max(1, self.limits.max_model_len - 1)

    def _rehearse(self, counts: list[int], *, first: int = 0, are_ends: bool = True) -> None:
        """Runs one step of dummy prompts with `counts` tokens each, which start at position `first`."""
        limits, device = self.limits, self.device
        slots, count = np.zeros(len(counts), np.int64), np.array(counts)
        firsts, ends = np.full_like(count, first), np.full(len(counts), are_ends)
        prefills: PrefillAttention = PlainPrefills(self.kv, self._tables, slots, firsts, count)
        if self._flashinfer is not None:
            self._flashinfer.kept.forget()
            tables = [np.zeros(-(-end // self.kv.block_size), np.int32) for end in (firsts + count).tolist()]
            prefills = self._flashinfer.prefills(self.kv, flashinfer.Slices(slots, firsts, count, ends, tables))
        positions = torch.cat([torch.arange(first, first + tokens, dtype=torch.int32) for tokens in counts]).to(device)
        ids = torch.zeros_like(positions)
        attention = self._attention(torch.full_like(ids, NO_SLOT), positions, 0, prefills, key_target=self._key_target)
        hidden = self.model.forward(ids, attention)
        self._edited_scores.copy_(
            self.model.scores(hidden[:1].expand(limits.max_num_seqs, -1).contiguous(), self._scores)
        )
        for given in (self._scores, self._edited_scores):
            self._draw(given)
            self._draw(given, cuts=True)
        self.sampler.rehearse(self._edited_scores)


class CudaPending:
    """A submitted step (a `PendingStep`)."""

    def __init__(
        self,
        owner: CudaExecutor,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        started: torch.cuda.Event,
        returns: Tensor,
    ) -> None:
        self.rows, self.slots = rows, slots
        self.tokens = returns[: len(rows)]  # in pinned memory; the device writes them there
        self.asking = np.empty(0, np.int64)  # indices into `rows` that want log probabilities
        self.described = Described([])  # their log probabilities
        self.prompts: dict[int, Described] = {}
        self.pooled = Pooled([], [])
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
                logprobs=dict(zip(self.rows[self.asking].tolist(), self.described.read(), strict=True)),
                prompt_logprobs={row: described.read() for row, described in self.prompts.items()},
                embeddings=self.pooled.read(),
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
    return [slice(begin, begin + COPIED_BLOCKS) for begin in range(0, blocks, COPIED_BLOCKS)]


def _fitting(sizes: Iterable[int], count: int) -> int | None:
    """The smallest size that holds `count`, or None."""
    return min((size for size in sizes if size >= count), default=None)


@contextmanager
def _no_collection() -> Iterator[None]:
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
