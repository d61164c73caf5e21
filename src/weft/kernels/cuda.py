"""Attention on a GPU: decodes through a kernel of our own, which needs no plan and so can be captured in a graph;
prompts through FlashInfer, or in plain torch where FlashInfer is absent or has no kernel for the type.
"""

import functools
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.attention import Heads, PlainHeads
from weft.kernels.decode import choose_splits, paged_decode
from weft.kernels.fused import norm_rope_write
from weft.kernels.reference import PrefillRow
from weft.kv import KVPool


class Prefills(Protocol):
    """The prompts of one step."""

    def attend(self, heads: Heads, q: Tensor, out: Tensor) -> None:
        """q [T, heads, head_dim] over what the cache holds of each prompt, their own tokens included."""
        ...


class CudaAttention:
    """One step's attention (an `Attend`). `slots` and `positions` are each token's, decodes first.

    `tables` [slots, blocks] holds the block table of every slot, so that a captured call reads what is in it later.
    """

    def __init__(
        self,
        kv: KVPool,
        tables: Tensor,
        slots: Tensor,
        positions: Tensor,
        num_decodes: int,
        workspace: Tensor,
        prefills: Prefills | None = None,
    ) -> None:
        self.kv, self.tables = kv, tables
        self.slots, self.positions, self.num_decodes = slots, positions, num_decodes
        self.workspace, self.prefills = workspace, prefills
        self._plain: PlainHeads | None = None

    def __call__(self, heads: Heads, qkv: Tensor) -> Tensor:
        q = self._write(heads, qkv)
        count = self.num_decodes
        out = q.new_empty(len(q), heads.heads * heads.head_dim)
        if count:
            paged_decode(
                q[:count],
                self.kv.k[heads.layer],
                self.kv.v[heads.layer],
                self.tables,
                self.slots[:count],
                self.positions[:count],
                heads.scale,
                heads.window,
                choose_splits(count, heads.kv_heads, sm_count(q.device)),
                self.workspace,
                out[:count],
            )
        if self.prefills is not None:
            self.prefills.attend(heads, q[count:], out[count:].view_as(q[count:]))
        return out

    def _write(self, heads: Heads, qkv: Tensor) -> Tensor:
        """Queries, normed and rotated; keys and values go to the cache."""
        norms = [norm for norm in (heads.q_norm, heads.k_norm) if norm is not None]
        if any(norm.weight is None for norm in norms) or qkv.dtype == torch.float64:
            return self._write_plainly(heads, qkv)
        return norm_rope_write(
            qkv,
            heads.q_norm.weight if heads.q_norm is not None else None,
            heads.k_norm.weight if heads.k_norm is not None else None,
            norms[0].eps if norms else 0.0,
            heads.rotation.table,
            self.kv.k[heads.layer],
            self.kv.v[heads.layer],
            self.tables,
            self.slots,
            self.positions,
            heads.heads,
            heads.kv_heads,
            heads.head_dim,
        )

    def _write_plainly(self, heads: Heads, qkv: Tensor) -> Tensor:
        """For norms that the kernel does not know."""
        if self._plain is None:
            self._plain = PlainHeads(self.positions)
            size = self.kv.block_size
            blocks = self.tables[self.slots.long(), (self.positions // size).long()].long()
            self._places = blocks * size + self.positions % size
        q, k, v = self._plain.split(heads, qkv)
        self.kv.write(heads.layer, self._places, k, v)
        return q.contiguous()


class PlainPrefills:
    """In plain torch, prompt by prompt."""

    def __init__(
        self, kv: KVPool, tables: Tensor, slots: NDArray[np.int64], first: NDArray[np.int64], count: NDArray[np.int64]
    ) -> None:
        self.kv = kv
        starts = np.cumsum(count) - count
        rows = zip(slots.tolist(), starts.tolist(), first.tolist(), count.tolist(), strict=True)
        self._rows = [PrefillRow(kv.block_size, tables[slot], *row) for slot, *row in rows]

    def attend(self, heads: Heads, q: Tensor, out: Tensor) -> None:
        for row in self._rows:
            span = slice(row.start, row.start + row.count)
            out[span] = row.attend(self.kv, heads.layer, q[span], heads.scale, heads.window)


@functools.cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
