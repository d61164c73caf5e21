"""CudaExecutor: runs plans on a GPU. Nothing here waits for the device but `result`.

A step is: its numbers packed into one pinned buffer and copied at once; decodes alone replay a captured graph, anything
else runs layer by layer; one token a row is drawn and stays on the device, where the next step finds it; a copy of the
tokens travels back while the next step is planned.
"""

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.core import StepPlan
from weft.engine.executor import StepInputs, StepResult, TokenLogprobs
from weft.engine.sampling import Sampler, hashed_uniform
from weft.engine.staging import DEPTH, Rows, Staging, TokenViews, pinned
from weft.kernels import decode, flashinfer
from weft.kernels.cuda import CudaAttention, PlainPrefills, Prefills
from weft.kernels.draw import draw
from weft.kv import KVPool
from weft.models import CausalLM

NOTHING = np.empty(0, np.int32)
BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1


class Limits(NamedTuple):
    """The largest step that there can be."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    slots: int


class CudaExecutor:
    """Owns what is on the device: the model, the KV pool, and per slot the block table and the last sampled token."""

    def __init__(
        self,
        model: CausalLM,
        kv: KVPool,
        limits: Limits,
        *,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.limits, self.device, self.clock = model, limits, device, clock
        config = model.config
        self.sampler = Sampler(limits.slots, config.vocab_size, device)
        self._columns = -(-limits.max_model_len // kv.block_size)
        # One row more than there are slots: a graph's rows that nobody uses read and write the pool's last block.
        self._tables = torch.zeros((limits.slots + 1, self._columns), dtype=torch.int32, device=device)
        self._blocks = np.zeros((limits.slots, self._columns), np.int32)  # the same, for the host
        self._last_token = torch.zeros(limits.slots + 1, dtype=torch.int32, device=device)
        self._staging = Staging(limits.max_num_seqs, limits.slots, device)
        self._workspace = decode.workspace(limits.max_num_seqs, config.num_heads, config.head_dim, device)
        usable = flashinfer.is_usable(config.head_dim, model.dtype)
        self._flashinfer = flashinfer.FlashInfer(device) if usable else None
        self._graphs: dict[int, Graph] = {}
        self._tokens = cycle([pinned(limits.max_num_seqs) for _ in range(DEPTH)])
        self._pending: CudaPending | None = None
        self.use(kv)

    def use(self, kv: KVPool) -> None:
        """Takes another pool. Its last block belongs to nobody."""
        self.kv = kv
        self._graphs.clear()
        self._tables.zero_()
        self._tables[-1] = kv.num_blocks - 1

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._graphs.clear()
        self.sampler.close()

    @torch.inference_mode()
    def submit(self, plan: StepPlan, inputs: StepInputs) -> "CudaPending":
        if self._pending is not None and self.sampler.has_masks(self._pending.slots):
            self._pending.result()  # what a grammar allows next depends on the token that it got last
        for setup in inputs.setups:
            self.sampler.setup(setup)
        started = _event()
        started.record()
        rows = np.flatnonzero(plan.samples)
        alone = plan.num_decodes == len(plan.requests)
        size = self._graph_size(plan.num_decodes) if alone else None
        tokens = self._stage(plan, inputs, rows, size)
        numbers = self._staging.rows.first(len(rows))
        pending = CudaPending(self, rows, plan.slots[rows], started)
        if size is not None:
            self._draw(pending, plan, self._graphs[size].replay()[: len(rows)], numbers)
        else:
            hidden = self._forward(plan, tokens)
            if len(rows):
                self._draw(pending, plan, self.model.scores(hidden.index_select(0, numbers.ends)), numbers)
            self._describe_prompts(pending, plan, hidden)
        pending.ended.record()
        self._pending = pending
        return pending

    def _draw(self, pending: "CudaPending", plan: StepPlan, scores: Tensor, numbers: Rows) -> None:
        """One token a row, which stays on the device, and a copy of it on its way to the host."""
        rows, slots = pending.rows, pending.slots
        if self.sampler.is_plain(slots):
            tokens = draw(scores, numbers.temperature, numbers.uniform, self._last_token, numbers.slots)
        else:
            logits = self.model.widened(scores)
            chosen = self.sampler.sample(logits, slots, plan.first[rows] + plan.count[rows])
            tokens = chosen.int()
            self._last_token.index_copy_(0, numbers.slots.long(), tokens)
            pending.logprobs = self.sampler.describe(logits, chosen, slots)
        pending.carry(tokens, next(self._tokens))

    def _describe_prompts(self, pending: "CudaPending", plan: StepPlan, hidden: Tensor) -> None:
        ends = np.cumsum(plan.count).tolist()
        for row in range(plan.num_decodes, len(plan.requests)):
            slot, first, count = int(plan.slots[row]), int(plan.first[row]), int(plan.count[row])
            if self.sampler.wants_prompt(slot):
                part = hidden[ends[row] - count : ends[row]]
                pending.prompt_logprobs[row] = self.sampler.describe_prompt(self.model.logits, part, slot, first)

    def _stage(self, plan: StepPlan, inputs: StepInputs, rows: NDArray[np.int64], padded: int | None) -> TokenViews:
        """Sends a step's numbers to the device; those of its tokens only where it is not `padded` for a graph."""
        slots, new = plan.slots[rows], plan.new_blocks
        uniform = hashed_uniform(self.sampler.seed[slots], plan.first[rows] + plan.count[rows])
        numbers = [
            slots,
            plan.first[rows],
            np.cumsum(plan.count)[rows] - 1,
            self.sampler.temperature[slots],
            np.minimum(uniform, BELOW_ONE),
        ]
        self._blocks[new.slots, new.columns] = new.blocks
        tokens = self._tokens_of(plan, inputs) if padded is None else [NOTHING] * 4
        others = [new.slots * self._columns + new.columns, new.blocks, *tokens]
        places, blocks, *views = self._staging.send(numbers, padded or len(rows), others)
        if len(places):
            self._tables.view(-1).index_copy_(0, places.long(), blocks)
        return TokenViews(*views)

    def _tokens_of(self, plan: StepPlan, inputs: StepInputs) -> list[NDArray[Any]]:
        """Each token's slot, position and id (a decode's is on the device), and the block tables of the prompts."""
        count, decodes = plan.count, plan.num_decodes
        offsets = np.cumsum(count) - count
        positions = np.arange(plan.num_tokens) + np.repeat(plan.first - offsets, count)
        pages = (-(-(plan.first + count) // self.kv.block_size)).tolist()
        tables = [self._blocks[slot, : pages[row]] for row, slot in enumerate(plan.slots.tolist()) if row >= decodes]
        return [
            np.repeat(plan.slots, count),
            positions,
            np.concatenate([np.zeros(decodes, np.int32), inputs.prefill_tokens]),
            np.concatenate([NOTHING, *tables]),
        ]

    def _forward(self, plan: StepPlan, tokens: TokenViews) -> Tensor:
        """Hidden states of all tokens of a step that is not only decodes (or has more of them than any graph)."""
        slots, positions, ids, blocks = tokens
        decodes = plan.num_decodes
        if decodes:
            ids[:decodes] = self._last_token.index_select(0, slots[:decodes])
        prefills = self._prefills(plan, blocks) if decodes < len(plan.slots) else None
        attend = CudaAttention(self.kv, self._tables, slots, positions, decodes, self._workspace, prefills)
        return self.model.forward(ids, attend)

    def _prefills(self, plan: StepPlan, blocks: Tensor) -> Prefills:
        first, count = plan.first[plan.num_decodes :], plan.count[plan.num_decodes :]
        if self._flashinfer is not None:
            return self._flashinfer.prefills(self.kv, first, count, blocks)
        return PlainPrefills(self.kv, self._tables, plan.slots[plan.num_decodes :], first, count)

    # Graphs

    @torch.inference_mode()
    def capture(self, sizes: list[int], progress: Callable[[int], None] = lambda done: None) -> None:
        """Captures decode steps of these many rows, the largest first: the others fit into its memory."""
        if not self.model.can_be_captured:
            return
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(sorted(sizes, reverse=True), start=1):
            self._graphs[size] = Graph(self._decode, size, pool)
            progress(done)
        torch.cuda.synchronize(self.device)

    def _graph_size(self, rows: int) -> int | None:
        return min((size for size in self._graphs if size >= rows), default=None)

    def _decode(self, rows: int) -> Tensor:
        """Scores of a step of decodes alone. All that it reads lies where it always lies."""
        numbers = self._staging.rows.first(rows)
        slots = numbers.slots
        attend = CudaAttention(self.kv, self._tables, slots, numbers.positions, rows, self._workspace)
        return self.model.scores(self.model.forward(self._last_token.index_select(0, slots), attend))

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Runs the largest step of each kind, with nobody's numbers, on the pool's last block."""
        limits = self.limits
        tokens = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
        rows = limits.max_num_seqs
        first, count = np.zeros(1, np.int64), np.array([tokens])
        ids = torch.zeros(tokens, dtype=torch.int32, device=self.device)
        slots = torch.full_like(ids, limits.slots)
        positions = torch.arange(tokens, dtype=torch.int32, device=self.device)
        prefills: Prefills
        if self._flashinfer is not None:
            blocks = torch.full((-(-tokens // self.kv.block_size),), self.kv.num_blocks - 1, dtype=torch.int32)
            prefills = self._flashinfer.prefills(self.kv, first, count, blocks.to(self.device))
        else:
            prefills = PlainPrefills(self.kv, self._tables, np.array([limits.slots]), first, count)
        attend = CudaAttention(self.kv, self._tables, slots, positions, 0, self._workspace, prefills)
        hidden = self.model.forward(ids, attend)
        scores = self.model.scores(hidden[:1].expand(rows, -1).contiguous())
        self.model.widened(scores)
        temperature = torch.ones(rows, device=self.device)
        draw(scores, temperature, temperature / 2, self._last_token, slots[:1].expand(rows).contiguous())
        torch.cuda.synchronize(self.device)


class Graph:
    """A captured step."""

    def __init__(self, step: Callable[[int], Tensor], size: int, pool: Any) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(size)  # kernels are compiled and libraries set up outside of the capture
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._result = step(size)

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._result


class CudaPending:
    """A step on its way (a `PendingStep`)."""

    def __init__(
        self, owner: CudaExecutor, rows: NDArray[np.int64], slots: NDArray[np.int64], started: torch.cuda.Event
    ) -> None:
        self.rows, self.slots = rows, slots
        self.logprobs: dict[int, TokenLogprobs] = {}  # by place in `rows`
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.ended = _event()
        self._owner, self._started = owner, started
        self._tokens: Tensor | None = None
        self._result: StepResult | None = None

    def carry(self, tokens: Tensor, pinned: Tensor) -> None:
        self._tokens = pinned[: len(tokens)]
        self._tokens.copy_(tokens, non_blocking=True)

    def result(self) -> StepResult:
        if self._result is None:
            self.ended.synchronize()
            finished = self._owner.clock()
            tokens = [] if self._tokens is None else self._tokens.tolist()
            self._owner.sampler.advance(self.slots, tokens)
            self._result = StepResult(
                tokens=tokens,
                started=finished - self._started.elapsed_time(self.ended) / 1000,
                finished=finished,
                logprobs={int(self.rows[index]): found for index, found in self.logprobs.items()},
                prompt_logprobs=self.prompt_logprobs,
            )
        return self._result


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture decode steps for: close together where a row more costs most."""
    return sorted({*_ladder(max_num_seqs), max_num_seqs})


def _ladder(most: int) -> Iterator[int]:
    for low, high, step in ((1, 2, 1), (2, 4, 2), (4, 8, 4), (8, 256, 8), (256, 512, 32), (512, most + 1, 64)):
        yield from range(low, min(high, most + 1), step)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
