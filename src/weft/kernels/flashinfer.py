"""FlashInfer: prefill attention on a GPU, through the library of that name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.attention import AttentionParams
from weft.kernels.cuda import sm_count
from weft.kernels.fused import copy_tokens
from weft.kv.pool import KVPool

WORKSPACE_BYTES = 256 << 20
MOST_GATHERED = 1 << 16  # tokens of the contexts that one step may gather
PROMPT_COPY_MEMORY = 1 / 32  # share of the device's memory for the copy of the prompt that is being prefilled
GATHER_QUERIES = 20_000  # queries, counted per head, that must read a key before copying it pays off
LONG_CONTEXT = 2048  # tokens of context from which dividing it pays off, if few queries read it
QUERY_TILE = 128  # queries of one head per program, which reads the whole context; a multiprocessor holds one program
USABLE_HEAD_DIMS = (64, 128, 256)
USABLE_DTYPES = (torch.float16, torch.bfloat16)
# "divided" and "divided_end" do the same. A wrapper holds one plan, and a step may have short slices with long contexts
# both at its start and at its end, so there are two wrappers.
_Way = Literal["paged", "gathered", "copied", "divided", "divided_end"]


def is_usable(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether FlashInfer is installed and has a kernel for this head size and type."""
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        return False
    return head_dim in USABLE_HEAD_DIMS and dtype in USABLE_DTYPES


class PlanKey(NamedTuple):
    """What a plan depends on. Layers of the same kind share one plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None

    @classmethod
    def of(cls, params: AttentionParams) -> "PlanKey":
        return cls(params.num_heads, params.num_kv_heads, params.head_dim, params.scale, params.window)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def options(self) -> dict[str, Any]:
        return {"sm_scale": self.scale, "window_left": -1 if self.window is None else self.window - 1}


@dataclass(frozen=True)
class PrefillSlices:
    """Prefill slices of a step, in its order. Each field has one entry per slice."""

    slots: NDArray[np.int64]
    first: NDArray[np.int64]  # position of its first token
    count: NDArray[np.int64]  # tokens
    is_last: NDArray[np.bool_]  # whether it is the last slice of its prompt
    block_tables: list[NDArray[np.int32]]  # up to the slice's last token

    @property
    def end(self) -> NDArray[np.int64]:
        """Tokens of the context, including the slice."""
        return self.first + self.count

    def part(self, low: int, high: int) -> "PrefillSlices":
        some = slice(low, high)
        spans = (self.slots[some], self.first[some], self.count[some])
        return PrefillSlices(*spans, self.is_last[some], self.block_tables[some])


class FlashInfer:
    """Owns FlashInfer's wrappers and their buffers: two wrappers for each kind of layer and each way to read keys.
    Steps use the two in turn, because planning a step writes into a pinned buffer that the step before may still be
    copied from.

    On a Hopper GPU there are several ways to read keys and values:

    - "paged": page by page, from the cache. This is the usual way.
    - "copied": from a contiguous copy of one prompt, which is kept until its prefill ends. Attention to contiguous keys
      is 16% to 20% faster on an H200. For a prompt that is prefilled in slices.
    - "gathered": from a contiguous buffer, which is filled from the cache in each layer. It pays off where many queries
      read the same keys.
    - "divided": with the kernel for older GPUs, which divides contexts among programs. It is faster where few queries
      read a long context: the kernel for Hopper would leave most multiprocessors idle (16 queries of 32 heads behind
      100,000 tokens: 118 us instead of 1,343 us).
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        max_model_len: int,
        device: torch.device,
        upload: Callable[[NDArray[np.int32]], list[Tensor]],
    ) -> None:
        """`upload` copies numbers to the device."""
        self.num_heads, self.upload = num_heads, upload
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._is_hopper = torch.cuda.get_device_capability(device)[0] == 9
        self._queries_at_once = QUERY_TILE * sm_count(device)  # counted per head
        tokens = min(max_model_len, MOST_GATHERED) if self._is_hopper else 0
        self._gathered = torch.empty((2, tokens, num_kv_heads, head_dim), dtype=dtype, device=device)
        memory = torch.cuda.get_device_properties(device).total_memory
        token_bytes = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
        copied = min(tokens, int(PROMPT_COPY_MEMORY * memory / token_bytes))
        copy = torch.empty((num_layers, 2, copied + 1, num_kv_heads, head_dim), dtype=dtype, device=device)
        self.prompt_copy = PromptKVCopy(copy)
        self._wrappers: dict[tuple[PlanKey, _Way], list[Any]] = {}
        self._wrapper_index = 0  # which of the two wrappers the current step uses

    @property
    def wave(self) -> int:
        """Queries of a slice that read its context in one pass; 0: the time grows evenly with the number of queries."""
        return (
            max(QUERY_TILE, self._queries_at_once // self.num_heads // QUERY_TILE * QUERY_TILE)
            if self._is_hopper
            else 0
        )

    def prefills(self, kv: KVPool, slices: "PrefillSlices") -> "StepPrefills":
        """Attention of a step's prefill slices: chooses how each of them reads its keys."""
        self._wrapper_index ^= 1
        self.prompt_copy.writing = -1
        parts: list[SliceGroup] = []
        starts = np.concatenate([[0], np.cumsum(slices.count)])
        begin, end = self._not_divided(slices)
        runs: list[tuple[int, int, _Way | None]] = [
            (0, begin, "divided"),
            (begin, end, None),
            (end, len(slices.count), "divided_end"),
        ]
        for low, high, way in runs:
            if low < high:
                some = slices.part(low, high)
                planned: PagedPrefills | GatheredPrefills
                if way is not None:
                    planned = PagedPrefills(self, way, kv, some)
                elif high - low == 1 and self.prompt_copy.claim(some):
                    planned = GatheredPrefills(self, kv, some, self.prompt_copy)
                else:
                    planned = self._gathered_or_paged(kv, some)
                parts.append(SliceGroup(slice(int(starts[low]), int(starts[high])), planned))
        return StepPrefills(parts)

    def _not_divided(self, slices: "PrefillSlices") -> tuple[int, int]:
        """Begin and end of the slices that are not "divided". Slices before and after them are divided if they have few
        queries together and at least one has a long context: the last tokens of a long prompt, for example.
        """
        if not self._is_hopper:
            return 0, len(slices.count)

        def leading(end: NDArray[np.int64], count: NDArray[np.int64]) -> int:
            few = int((2 * self.num_heads * np.cumsum(count) <= self._queries_at_once).sum())
            return few if (end[:few] >= LONG_CONTEXT).any() else 0

        begin = leading(slices.end, slices.count)
        return begin, len(slices.count) - leading(slices.end[begin:][::-1], slices.count[begin:][::-1])

    def _gathered_or_paged(self, kv: KVPool, slices: "PrefillSlices") -> "PagedPrefills | GatheredPrefills":
        tokens = int(slices.end.sum())
        key_reads = self.num_heads * float((slices.count * (slices.first + slices.count / 2)).sum())
        if tokens <= self._gathered.shape[1] and key_reads >= GATHER_QUERIES * tokens:
            return GatheredPrefills(self, kv, slices, LayerKVBuffer(self._gathered[:, :tokens]))
        return PagedPrefills(self, "paged", kv, slices)

    def wrapper(self, kind: PlanKey, way: _Way) -> Any:
        """The wrapper for the current step."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

        if (kind, way) not in self._wrappers:
            make = BatchPrefillWithRaggedKVCacheWrapper if way == "gathered" else BatchPrefillWithPagedKVCacheWrapper
            both: tuple[_Way, ...] = ("divided", "divided_end")
            ways = both if way in both else (way,)
            for one in ways:  # creates both in the warm-up, so that the second is not created while serving
                backend = "fa2" if len(ways) > 1 else "auto"
                self._wrappers[kind, one] = [make(self._workspace, "NHD", backend=backend) for _ in range(2)]
        return self._wrappers[kind, way][self._wrapper_index]


class SliceGroup(NamedTuple):
    """Consecutive prefill slices of a step that read their keys in the same way."""

    rows: slice  # range of the step's prefill tokens
    prefills: "PagedPrefills | GatheredPrefills"


class StepPrefills:
    """All prefill slices of one step."""

    def __init__(self, parts: list[SliceGroup]) -> None:
        self._parts = parts

    @property
    def ways(self) -> list[_Way]:
        return [part.prefills.way for part in self._parts]

    def attend(self, params: AttentionParams, q: Tensor, out: Tensor) -> None:
        for rows, prefills in self._parts:
            prefills.attend(params, q[rows], out[rows])


class PagedPrefills:
    """Prefill slices that read the paged cache. The first layer of each kind makes the plan."""

    def __init__(self, owner: FlashInfer, way: _Way, kv: KVPool, slices: PrefillSlices) -> None:
        self.owner, self.way, self.kv = owner, way, kv
        pages = -(-slices.end // kv.block_size)
        (self._blocks,) = owner.upload(np.concatenate(slices.block_tables))
        self._queries, self._pages = _offsets(slices.count), _offsets(pages)
        self._last_page = torch.from_numpy((slices.end - (pages - 1) * kv.block_size).astype(np.int32))
        self._planned: dict[PlanKey, Any] = {}

    def attend(self, params: AttentionParams, q: Tensor, out: Tensor) -> None:
        kind = PlanKey.of(params)
        if kind not in self._planned:
            self._planned[kind] = self._plan(kind, q.dtype)
        self._planned[kind].run(q, (self.kv.k[params.layer], self.kv.v[params.layer]), out=out)

    def _plan(self, kind: PlanKey, dtype: torch.dtype) -> Any:
        wrapper = self.owner.wrapper(kind, self.way)
        lengths = (self._queries, self._pages, self._blocks, self._last_page)
        wrapper.plan(*lengths, *kind.sizes, self.kv.block_size, causal=True, q_data_type=dtype, **kind.options)
        return wrapper


class GatheredPrefills:
    """Prefill slices that read contiguous keys and values of a layer. The first layer of each kind makes the plan."""

    def __init__(
        self, owner: FlashInfer, kv: KVPool, slices: PrefillSlices, store: "LayerKVBuffer | PromptKVCopy"
    ) -> None:
        self.owner, self.kv = owner, kv
        self.way: _Way = store.way
        self._queries, self._keys = _offsets(slices.count), _offsets(slices.end)
        self._slices, self._store = slices, store
        self._planned: dict[PlanKey, Any] = {}
        self._kv_indices: Tensor | None = None

    def attend(self, params: AttentionParams, q: Tensor, out: Tensor) -> None:
        kind = PlanKey.of(params)
        if kind not in self._planned:
            self._planned[kind] = self._plan(kind, q.dtype)
        k, v = self._store.gather(self.kv, params.layer, self.kv_indices)
        self._planned[kind].run(q, k, v, out=out)

    def kv_indices(self) -> Tensor:
        """block * block_size + offset of all tokens up to each slice's end."""
        if self._kv_indices is None:
            offsets = np.arange(self.kv.block_size, dtype=np.int32)
            tables = zip(self._slices.block_tables, self._slices.end.tolist(), strict=True)
            indices = [(table[:, None] * self.kv.block_size + offsets).ravel()[:end] for table, end in tables]
            (self._kv_indices,) = self.owner.upload(np.concatenate(indices))
        return self._kv_indices

    def _plan(self, kind: PlanKey, dtype: torch.dtype) -> Any:
        wrapper = self.owner.wrapper(kind, "gathered")
        wrapper.plan(self._queries, self._keys, *kind.sizes, causal=True, q_data_type=dtype, **kind.options)
        return wrapper


class LayerKVBuffer:
    """A contiguous buffer for the keys and values of one layer, filled anew for each layer."""

    way: _Way = "gathered"

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer  # [2, tokens, kv_heads, head_dim]

    def gather(self, kv: KVPool, layer: int, kv_indices: Callable[[], Tensor]) -> Tensor:
        for cache, target in zip((kv.k, kv.v), self._buffer, strict=True):
            # As integers of eight bytes, because torch copies one element at a time.
            source = cache[layer].flatten(0, 1).flatten(1).view(torch.int64)
            torch.index_select(source, 0, kv_indices(), out=target.flatten(1).view(torch.int64))
        return self._buffer


class PromptKVCopy:
    """A contiguous copy of all keys and values of the prompt that is being prefilled. It grows with each slice.

    The kernel that writes keys and values to the cache also writes them here for slot `writing` (see
    `PromptKVTarget`). Tokens that were cached before, or were prefilled in steps that did not use this copy, are
    copied from the cache.
    """

    way: _Way = "copied"

    def __init__(self, copy: Tensor) -> None:
        self.copy = copy  # [layers, 2, tokens + 1, kv_heads, head_dim]
        self.writing = -1  # slot of the slice that claimed this copy in the current step; -1: none
        self._slot = -1  # slot of the prompt in this copy
        self._first, self._end = 0, 0  # positions of the last slice that claimed it: its first token, and one past it
        self._copied_tokens = [0] * len(copy)  # by layer: not every step attends in every layer

    @property
    def capacity(self) -> int:
        """Tokens that fit. One more entry after them receives writes that are never read."""
        return self.copy.shape[2] - 1

    def forget(self, slot: int | None = None) -> None:
        """Drops the copy if it is of this slot, which now has another request. Without a slot: drops it in any case,
        because the contents of the cache have changed.
        """
        if slot is None or slot == self._slot:
            self._slot, self._end = -1, 0

    def claim(self, slices: PrefillSlices) -> bool:
        """Decides whether a slice uses this copy, and if so claims it for the slice.

        True if the slice continues the prompt in this copy, or if it can start a new copy because its prompt has more
        slices to come.
        """
        slot, first, end = int(slices.slots[0]), int(slices.first[0]), int(slices.end[0])
        continues = slot == self._slot and first >= self._end
        if end > self.capacity or not (continues or not slices.is_last[0]):
            return False
        if not continues:
            self._copied_tokens = [0] * len(self._copied_tokens)
        self.writing = self._slot = slot
        self._first, self._end = first, end
        return True

    def gather(self, kv: KVPool, layer: int, kv_indices: Callable[[], Tensor]) -> Tensor:
        if self._copied_tokens[layer] < self._first:
            before = kv_indices()[: self._first]
            copy_tokens(kv.k[layer], kv.v[layer], before, self._copied_tokens[layer], self.copy[layer])
        self._copied_tokens[layer] = self._end
        return self.copy[layer, :, : self._end]


def _offsets(lengths: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
