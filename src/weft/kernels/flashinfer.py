"""Prefill attention through FlashInfer. Owns the wrappers and their buffers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.attention import Heads
from weft.kernels.cuda import sm_count
from weft.kernels.fused import copy_tokens
from weft.kv.pool import KVPool

WORKSPACE = 256 << 20  # bytes
MOST_GATHERED = 1 << 16  # tokens
MOST_KEPT = 1 / 32  # share of the device's memory for the copy of the prompt that is being prefilled
WORTH = 20_000  # queries, counted per head, that must read a key before copying it pays off
LONG = 2048  # tokens of context from which dividing it pays off, if few queries read it
TILE = 128  # queries of one head per program, which reads the whole context; a multiprocessor holds one program
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
_Way = Literal["paged", "gathered", "kept", "divided", "after"]  # "after": also divided, for slices at the step's end


def is_usable(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether FlashInfer is installed and has a kernel for this head size and type."""
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        return False
    return head_dim in HEAD_DIMS and dtype in DTYPES


class PlanKey(NamedTuple):
    """What a plan depends on. Layers of the same kind share one plan."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None

    @classmethod
    def of(cls, heads: Heads) -> "PlanKey":
        return cls(heads.heads, heads.kv_heads, heads.head_dim, heads.scale, heads.window)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.heads, self.kv_heads, self.head_dim

    @property
    def options(self) -> dict[str, Any]:
        return {"sm_scale": self.scale, "window_left": -1 if self.window is None else self.window - 1}


@dataclass(frozen=True)
class Slices:
    """Prefill slices of a step: one entry per slice in each field."""

    slots: NDArray[np.int64]
    first: NDArray[np.int64]  # position of its first token
    count: NDArray[np.int64]  # tokens
    ends: NDArray[np.bool_]  # whether it is the last slice of its prompt
    tables: list[NDArray[np.int32]]  # block table up to its last token

    @property
    def end(self) -> NDArray[np.int64]:
        return self.first + self.count

    def part(self, low: int, high: int) -> "Slices":
        some = slice(low, high)
        return Slices(self.slots[some], self.first[some], self.count[some], self.ends[some], self.tables[some])


class FlashInfer:
    """Owns two wrappers for each kind of layer and each way. Steps use the two in turn, because planning a step writes
    into a pinned buffer that the step before may still be copied from.

    On a Hopper GPU there are several ways. The usual way reads keys page by page ("paged"). Attention is 16% to 20%
    faster on an H200 if keys are contiguous. So the keys of a prompt that is prefilled in slices are also kept in a
    contiguous copy until its prefill ends ("kept"). Where many queries read the same keys, it pays off to copy all keys
    into a contiguous buffer, layer by layer ("gathered"). Where few queries read a long context, the kernel for older
    GPUs is faster, because it divides contexts ("divided" and "after"). The kernel for Hopper would leave most
    multiprocessors idle (16 queries of 32 heads behind 100,000 tokens: 118 us instead of 1,343 us).
    """

    def __init__(
        self,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        longest: int,
        device: torch.device,
        send: Callable[[NDArray[np.int32]], list[Tensor]],
    ) -> None:
        """`longest` is the longest context in tokens. `send` copies numbers to the device."""
        self.heads, self.send = heads, send
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._is_hopper = torch.cuda.get_device_capability(device)[0] == 9
        self._all = TILE * sm_count(device)  # queries, counted per head, that the device processes at once
        tokens = min(longest, MOST_GATHERED) if self._is_hopper else 0
        self._gathered = torch.empty((2, tokens, kv_heads, head_dim), dtype=dtype, device=device)
        memory = torch.cuda.get_device_properties(device).total_memory
        kept = min(tokens, int(MOST_KEPT * memory / (2 * layers * kv_heads * head_dim * dtype.itemsize)))
        self.kept = PromptKeyCache(torch.empty((layers, 2, kept + 1, kv_heads, head_dim), dtype=dtype, device=device))
        self._wrappers: dict[tuple[PlanKey, _Way], list[Any]] = {}
        self._turn = 0

    @property
    def wave(self) -> int:
        """Queries of a slice that read its context together; 0: the time grows evenly with the number of queries."""
        return max(TILE, self._all // self.heads // TILE * TILE) if self._is_hopper else 0

    def prefills(self, kv: KVPool, slices: "Slices") -> "StepPrefills":
        """Attention of a step's prefill slices."""
        self._turn ^= 1
        self.kept.writing = -1
        parts: list[Part] = []
        starts = np.concatenate([[0], np.cumsum(slices.count)])
        begin, end = self._few(slices)
        runs: list[tuple[int, int, _Way | None]] = [
            (0, begin, "divided"),
            (begin, end, None),
            (end, len(slices.count), "after"),
        ]
        for low, high, way in runs:
            if low < high:
                some = slices.part(low, high)
                planned: PagedPrefills | GatheredPrefills
                if way is not None:
                    planned = PagedPrefills(self, way, kv, some)
                elif high - low == 1 and self.kept.take(some):
                    planned = GatheredPrefills(self, kv, some, self.kept)
                else:
                    planned = self._many(kv, some)
                parts.append(Part(slice(int(starts[low]), int(starts[high])), planned))
        return StepPrefills(parts)

    def _few(self, slices: "Slices") -> tuple[int, int]:
        """Begin and end of the slices that are not divided. The slices before them have few queries together, and at
        least one of them a long context, such as the last tokens of a long prompt. So have the slices after them.
        """
        if not self._is_hopper:
            return 0, len(slices.count)

        def leading(end: NDArray[np.int64], count: NDArray[np.int64]) -> int:
            fits = int((2 * self.heads * np.cumsum(count) <= self._all).sum())
            return fits if (end[:fits] >= LONG).any() else 0

        begin = leading(slices.end, slices.count)
        return begin, len(slices.count) - leading(slices.end[begin:][::-1], slices.count[begin:][::-1])

    def _many(self, kv: KVPool, slices: "Slices") -> "PagedPrefills | GatheredPrefills":
        reach = int(slices.end.sum())
        read = self.heads * float((slices.count * (slices.first + slices.count / 2)).sum())
        if reach <= self._gathered.shape[1] and read >= WORTH * reach:
            return GatheredPrefills(self, kv, slices, Passing(self._gathered[:, :reach]))
        return PagedPrefills(self, "paged", kv, slices)

    def wrapper(self, kind: PlanKey, way: _Way) -> Any:
        """The wrapper for the current step."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

        if (kind, way) not in self._wrappers:
            make = BatchPrefillWithRaggedKVCacheWrapper if way == "gathered" else BatchPrefillWithPagedKVCacheWrapper
            ways: tuple[_Way, ...] = ("divided", "after") if way in ("divided", "after") else (way,)
            for one in ways:  # creates both now, so that the second is not created while serving
                backend = "fa2" if len(ways) > 1 else "auto"
                self._wrappers[kind, one] = [make(self._workspace, "NHD", backend=backend) for _ in range(2)]
        return self._wrappers[kind, way][self._turn]


class Part(NamedTuple):
    """Consecutive prefill slices of a step that take the same way."""

    rows: slice  # range of the step's prefill tokens
    prefills: "PagedPrefills | GatheredPrefills"


class StepPrefills:
    """All prefill slices of one step."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts

    @property
    def ways(self) -> list[_Way]:
        return [part.prefills.way for part in self._parts]

    def attend(self, heads: Heads, q: Tensor, out: Tensor) -> None:
        for rows, prefills in self._parts:
            prefills.attend(heads, q[rows], out[rows])


class PagedPrefills:
    """Prefill slices that read the paged cache. The first layer of each kind makes the plan."""

    def __init__(self, owner: FlashInfer, way: _Way, kv: KVPool, slices: Slices) -> None:
        self.owner, self.way, self.kv = owner, way, kv
        pages = -(-slices.end // kv.block_size)
        (self._blocks,) = owner.send(np.concatenate(slices.tables))
        self._queries, self._pages = _offsets(slices.count), _offsets(pages)
        self._last_page = torch.from_numpy((slices.end - (pages - 1) * kv.block_size).astype(np.int32))
        self._planned: dict[PlanKey, Any] = {}

    def attend(self, heads: Heads, q: Tensor, out: Tensor) -> None:
        kind = PlanKey.of(heads)
        if kind not in self._planned:
            self._planned[kind] = self._plan(kind, q.dtype)
        self._planned[kind].run(q, (self.kv.k[heads.layer], self.kv.v[heads.layer]), out=out)

    def _plan(self, kind: PlanKey, dtype: torch.dtype) -> Any:
        wrapper = self.owner.wrapper(kind, self.way)
        lengths = (self._queries, self._pages, self._blocks, self._last_page)
        wrapper.plan(*lengths, *kind.sizes, self.kv.block_size, causal=True, q_data_type=dtype, **kind.options)
        return wrapper


class GatheredPrefills:
    """Prefill slices that read contiguous keys and values of a layer. The first layer of each kind makes the plan."""

    def __init__(self, owner: FlashInfer, kv: KVPool, slices: Slices, store: "Passing | PromptKeyCache") -> None:
        self.owner, self.kv = owner, kv
        self.way: _Way = store.way
        self._queries, self._keys = _offsets(slices.count), _offsets(slices.end)
        self._slices, self._store = slices, store
        self._planned: dict[PlanKey, Any] = {}
        self._places: Tensor | None = None

    def attend(self, heads: Heads, q: Tensor, out: Tensor) -> None:
        kind = PlanKey.of(heads)
        if kind not in self._planned:
            self._planned[kind] = self._plan(kind, q.dtype)
        k, v = self._store.gather(self.kv, heads.layer, self.places)
        self._planned[kind].run(q, k, v, out=out)

    def places(self) -> Tensor:
        """block * block_size + offset of all tokens up to each slice's end."""
        if self._places is None:
            within = np.arange(self.kv.block_size, dtype=np.int32)
            tables = zip(self._slices.tables, self._slices.end.tolist(), strict=True)
            places = [(table[:, None] * self.kv.block_size + within).ravel()[:end] for table, end in tables]
            (self._places,) = self.owner.send(np.concatenate(places))
        return self._places

    def _plan(self, kind: PlanKey, dtype: torch.dtype) -> Any:
        wrapper = self.owner.wrapper(kind, "gathered")
        wrapper.plan(self._queries, self._keys, *kind.sizes, causal=True, q_data_type=dtype, **kind.options)
        return wrapper


class Passing:
    """A contiguous buffer for the keys and values of one layer, filled anew for each layer."""

    way: _Way = "gathered"

    def __init__(self, place: Tensor) -> None:
        self._place = place  # [2, tokens, kv_heads, head_dim]

    def gather(self, kv: KVPool, layer: int, places: Callable[[], Tensor]) -> Tensor:
        for cache, place in zip((kv.k, kv.v), self._place, strict=True):
            # As integers of eight bytes, because torch copies one element at a time.
            source = cache[layer].flatten(0, 1).flatten(1).view(torch.int64)
            torch.index_select(source, 0, places(), out=place.flatten(1).view(torch.int64))
        return self._place


class PromptKeyCache:
    """A contiguous copy of all keys and values of the prompt that is being prefilled. It grows with each slice.

    The kernel that writes keys and values to the cache also writes them here for slot `writing` (see
    `PromptKeyTarget`). Tokens that were cached before, or were prefilled in steps that did not use this copy, are
    copied from the cache.
    """

    way: _Way = "kept"

    def __init__(self, copy: Tensor) -> None:
        self.copy = copy  # [layers, 2, tokens + 1, kv_heads, head_dim]
        self.writing = -1  # slot of the slice that this step reads from here; -1: none
        self._slot, self._next, self._first = -1, 0, 0
        self._known = [0] * len(copy)  # tokens copied so far, by layer: not every step attends in every layer

    @property
    def capacity(self) -> int:
        """Tokens that fit. One more place after them receives writes that are never read."""
        return self.copy.shape[2] - 1

    def forget(self, slot: int | None = None) -> None:
        """Drops the copy if it is of this slot, which now has another request. Without a slot: drops it in any case,
        because the contents of the cache have changed.
        """
        if slot is None or slot == self._slot:
            self._slot, self._next = -1, 0

    def take(self, slices: Slices) -> bool:
        """Whether to read a slice from here: it continues the prompt in this copy, or it starts a new copy and its
        prompt has more slices to come.
        """
        slot, first, end = int(slices.slots[0]), int(slices.first[0]), int(slices.end[0])
        goes_on = slot == self._slot and first >= self._next
        if end > self.capacity or not (goes_on or not slices.ends[0]):
            return False
        if not goes_on:
            self._known = [0] * len(self._known)
        self.writing = self._slot = slot
        self._first, self._next = first, end
        return True

    def gather(self, kv: KVPool, layer: int, places: Callable[[], Tensor]) -> Tensor:
        if self._known[layer] < self._first:
            before = places()[: self._first]
            copy_tokens(kv.k[layer], kv.v[layer], before, self._known[layer], self.copy[layer])
        self._known[layer] = self._next
        return self.copy[layer, :, : self._next]


def _offsets(lengths: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
