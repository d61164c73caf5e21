"""Prompts through FlashInfer's paged prefill. It owns the wrappers and what they work with."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.attention import Heads
from weft.kv import KVPool

WORKSPACE = 128 << 20  # bytes
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)


def is_usable(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether FlashInfer is there and has a kernel for this."""
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        return False
    return head_dim in HEAD_DIMS and dtype in DTYPES


class _Kind(NamedTuple):
    """What a plan is for; layers of one kind share it."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None


class FlashInfer:
    """Two wrappers for each kind of layer, used in turn: planning a step writes into a pinned buffer from which the
    step before may still be copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[_Kind, int], Any] = {}
        self._turn = 0

    def prefills(
        self, kv: KVPool, first: NDArray[np.int64], count: NDArray[np.int64], blocks: Tensor
    ) -> "PlannedPrefills":
        """For prompts at these positions; `blocks` are their block tables, one behind the other, on the device."""
        self._turn ^= 1
        return PlannedPrefills(self, kv, first, count, blocks, self._turn)

    def wrapper(self, kind: _Kind, turn: int) -> Any:
        import flashinfer

        if (kind, turn) not in self._wrappers:
            self._wrappers[kind, turn] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        return self._wrappers[kind, turn]


class PlannedPrefills:
    """The prompts of one step, planned when the first layer of a kind asks."""

    def __init__(
        self,
        owner: FlashInfer,
        kv: KVPool,
        first: NDArray[np.int64],
        count: NDArray[np.int64],
        blocks: Tensor,
        turn: int,
    ) -> None:
        self.owner, self.kv, self.turn = owner, kv, turn
        end = first + count
        pages = -(-end // kv.block_size)
        self._queries = _offsets(count)
        self._pages = _offsets(pages)
        self._blocks = blocks
        self._last_page = torch.from_numpy((end - (pages - 1) * kv.block_size).astype(np.int32))
        self._planned: dict[_Kind, Any] = {}

    def attend(self, heads: Heads, q: Tensor, out: Tensor) -> None:
        kind = _Kind(heads.heads, heads.kv_heads, heads.head_dim, heads.scale, heads.window)
        if kind not in self._planned:
            self._planned[kind] = self._plan(kind, q.dtype)
        self._planned[kind].run(q, (self.kv.k[heads.layer], self.kv.v[heads.layer]), out=out)

    def _plan(self, kind: _Kind, dtype: torch.dtype) -> Any:
        wrapper = self.owner.wrapper(kind, self.turn)
        wrapper.plan(
            self._queries,
            self._pages,
            self._blocks,
            self._last_page,
            kind.heads,
            kind.kv_heads,
            kind.head_dim,
            self.kv.block_size,
            causal=True,
            sm_scale=kind.scale,
            window_left=-1 if kind.window is None else kind.window - 1,
            q_data_type=dtype,
        )
        return wrapper


def _offsets(lengths: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
