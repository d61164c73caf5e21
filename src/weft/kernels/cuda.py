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
from weft.kernels.decode import choose_splits, paged_decode, workspace_size
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
        q = self.write(heads, qkv)
        out = q.new_empty(len(q), heads.heads * heads.head_dim)
        count = self.num_decodes
        if count:
            self.decode(heads, q, out, self.slots)
        if self.prefills is not None:
            self.prefills.attend(heads, q[count:], out[count:].view_as(q[count:]))
        return out

    def decode(self, heads: Heads, q: Tensor, out: Tensor, slots: Tensor) -> None:
        """The attention of the decodes; a row whose slot is negative is none, and gets zeros."""
        count = self.num_decodes
        paged_decode(
            q[:count],
            self.kv.k[heads.layer],
            self.kv.v[heads.layer],
            self.tables,
            slots[:count],
            self.positions[:count],
            heads.scale,
            heads.window,
            splits(count, heads.kv_heads, q.device, some=slots is not self.slots),
            self.workspace,
            out[:count],
        )

    def write(self, heads: Heads, qkv: Tensor, q: Tensor | None = None) -> Tensor:
        """Queries, normed and rotated (into `q`, where it is given); keys and values go to the cache."""
        norms = [norm for norm in (heads.q_norm, heads.k_norm) if norm is not None]
        if any(norm.weight is None for norm in norms):
            found = self._write_plainly(heads, qkv)
            return found if q is None else q.copy_(found)
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
            q,
        )

    def _write_plainly(self, heads: Heads, qkv: Tensor) -> Tensor:
        """For norms that the kernel does not know."""
        if self._plain is None:
            self._plain = PlainHeads(self.positions)
            size = self.kv.block_size
            blocks = self.tables[self.slots.clamp(min=0).long(), (self.positions // size).long()].long()
            # A token that is nobody's is written where nobody reads: the last place of the pool.
            places = blocks * size + self.positions % size
            self._places = torch.where(self.slots < 0, self.kv.num_blocks * size - 1, places)
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


SOME = 8  # splits where only some of the rows are decodes


def splits(rows: int, kv_heads: int, device: torch.device, *, some: bool = False) -> int:
    """Among how many programs a row's context is divided."""
    found = choose_splits(rows, kv_heads, sm_count(device))
    return max(found, SOME) if some else found


def decode_workspace(max_num_seqs: int, heads: int, head_dim: int, device: torch.device) -> Tensor:
    """Room for what the programs of any step's decodes leave for each other."""
    sizes = range(1, max_num_seqs + 1)
    most = max(workspace_size(size, heads, head_dim, splits(size, 1, device, some=True)) for size in sizes)
    return torch.empty(most, dtype=torch.float32, device=device)


@functools.cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
