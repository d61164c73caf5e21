"""Attention on a GPU. Decodes use weft's kernel, which needs no plan and so can be captured in a graph. Prefills use
FlashInfer, or plain torch if FlashInfer is not installed or has no kernel for the type.
"""

import functools
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.attention import Heads, PlainHeads
from weft.kernels.decode import Workspace, paged_decode
from weft.kernels.fused import norm_rope_write
from weft.kernels.reference import PrefillRow
from weft.kv.pool import KVPool


class PrefillAttention(Protocol):
    """The prefill slices of one step."""

    def attend(self, heads: Heads, q: Tensor, out: Tensor) -> None:
        """q [T, heads, head_dim] over the cached tokens of each prompt, including the tokens of the slice."""
        ...


class SampledRows(NamedTuple):
    """The last tokens of the rows that sample."""

    places: Tensor  # [R] int32: indices of these tokens in the step
    shares: Tensor  # `Shares` of their contexts


class PromptKeyTarget(NamedTuple):
    """Where the write kernel stores a second copy of one prompt's keys and values: each token at its position."""

    copy: Tensor  # [layers, 2, L, kv_heads, head_dim]; the last place receives writes that are never read
    slot: Tensor  # [1] int32: slot of that prompt; negative: none


class CudaAttention:
    """Attention of one step (an `Attend`). `slots` and `positions` have one entry per token, decodes first. `shares`
    are the shares of the decodes' contexts, by window.

    `tables` [slots, blocks] holds the block table of every slot, so that a captured call reads later entries too.

    With `ends`, the last layer returns only these rows. Once its keys and values are in the cache, the last token of a
    prompt is attended to like a decode, and the other rows are never read.
    """

    def __init__(
        self,
        kv: KVPool,
        tables: Tensor,
        slots: Tensor,
        positions: Tensor,
        num_decodes: int,
        shares: dict[int | None, Tensor],
        workspace: Workspace,
        prefills: PrefillAttention | None = None,
        ends: SampledRows | None = None,
        key_target: PromptKeyTarget | None = None,
    ) -> None:
        self.kv, self.tables = kv, tables
        self.slots, self.positions = slots, positions
        self.num_decodes, self.shares, self.workspace = num_decodes, shares, workspace
        self.prefills, self.ends, self.key_target = prefills, ends, key_target
        self._plain: PlainHeads | None = None

    def __call__(self, heads: Heads, qkv: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        q = self.write(heads, qkv)
        if self.ends is not None and heads.last:
            q, stream = (x.index_select(0, self.ends.places) for x in (q, stream))
            out = q.new_empty(len(q), heads.heads * heads.head_dim)
            self._decode(heads, q, self.ends.shares, out)
            return out, stream
        out = q.new_empty(len(q), heads.heads * heads.head_dim)
        self.decode(heads, q, out)
        if self.prefills is not None:
            count = self.num_decodes
            self.prefills.attend(heads, q[count:], out[count:].view_as(q[count:]))
        return out, stream

    def decode(self, heads: Heads, q: Tensor, out: Tensor) -> None:
        """The attention of the decodes."""
        if self.num_decodes:
            count = self.num_decodes
            self._decode(heads, q[:count], self.shares[heads.window], out[:count])

    def _decode(self, heads: Heads, q: Tensor, shares: Tensor, out: Tensor) -> None:
        k, v = self.kv.k[heads.layer], self.kv.v[heads.layer]
        paged_decode(q, k, v, self.tables, shares, heads.scale, self.workspace, out)

    def write(self, heads: Heads, qkv: Tensor, q: Tensor | None = None) -> Tensor:
        """Writes keys and values to the cache. Returns the normed and rotated queries, in `q` if given."""
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
            *(self.key_target.copy[heads.layer], self.key_target.slot) if self.key_target is not None else (),
        )

    def _write_plainly(self, heads: Heads, qkv: Tensor) -> Tensor:
        """`write` in plain torch, for norms that the kernel does not know."""
        if self._plain is None:
            self._plain = PlainHeads(self.positions)
            size = self.kv.block_size
            blocks = self.tables[self.slots.clamp(min=0).long(), (self.positions // size).long()].long()
            # Padding tokens are written to the last place of the pool, which is never read.
            places = blocks * size + self.positions % size
            self._places = torch.where(self.slots < 0, self.kv.num_blocks * size - 1, places)
            if self.key_target is not None:
                is_kept = (self.slots == self.key_target.slot) & (self.slots >= 0)
                last = self.key_target.copy.shape[2] - 1
                self._kept_places = torch.where(is_kept, self.positions, last).long()
        q, k, v = self._plain.split(heads, qkv)
        self.kv.write(heads.layer, self._places, k, v)
        if self.key_target is not None:
            for target, numbers in zip(self.key_target.copy[heads.layer], (k, v), strict=True):
                target.index_copy_(0, self._kept_places, numbers.to(target.dtype))
        return q.contiguous()


class PlainPrefills:
    """Prefill slices in plain torch, one by one."""

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
