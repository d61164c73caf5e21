"""Attention on a GPU. Decodes use weft's kernel, which needs no plan and so can be captured in a graph. Prefills use
FlashInfer, or plain torch if FlashInfer is not installed or has no kernel for the type.
"""

import functools
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.attention import AttentionParams, PlainNormRope
from weft.kernels.decode import Workspace, paged_decode
from weft.kernels.fused import norm_rope_write
from weft.kernels.reference import PrefillRow
from weft.kv.pool import KVPool


class PrefillAttention(Protocol):
    """The prefill slices of one step."""

    def attend(self, params: AttentionParams, q: Tensor, out: Tensor) -> None:
        """q [T, heads, head_dim] over the cached tokens of each prompt, including the tokens of the slice."""
        ...


class SampledRows(NamedTuple):
    """The last token of each row that is sampled from."""

    token_indices: Tensor  # [R] int32: indices of these tokens in the step
    shares: Tensor  # `Shares` of their contexts


class PromptKVTarget(NamedTuple):
    """Where the write kernel stores a second copy of one prompt's keys and values: each token at its position."""

    copy: Tensor  # [layers, 2, L, kv_heads, head_dim]; the last entry of L receives writes that are never read
    slot: Tensor  # [1] int32: slot of that prompt; negative: none


class CudaAttention:
    """Attention of one step (an `Attend`). `slots` and `positions` have one entry per token, decodes first. `shares`
    are the shares of the decodes' contexts, by window.

    `block_tables` [slots, blocks] has the block table of every slot, so that a captured call reads later entries too.

    With `sampled_rows`, the last layer returns only these. There, after all keys and values are written to the cache,
    the last token of each prompt is computed with the decode kernel, and the other prompt tokens are skipped.
    """

    def __init__(
        self,
        kv: KVPool,
        block_tables: Tensor,
        slots: Tensor,
        positions: Tensor,
        num_decodes: int,
        shares: dict[int | None, Tensor],
        workspace: Workspace,
        prefills: PrefillAttention | None = None,
        sampled_rows: SampledRows | None = None,
        prompt_copy: PromptKVTarget | None = None,
    ) -> None:
        self.kv, self.block_tables = kv, block_tables
        self.slots, self.positions = slots, positions
        self.num_decodes, self.shares, self.workspace = num_decodes, shares, workspace
        self.prefills, self.sampled_rows, self.prompt_copy = prefills, sampled_rows, prompt_copy
        self._plain: PlainNormRope | None = None

    def __call__(self, params: AttentionParams, qkv: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        q = self.write(params, qkv)
        if self.sampled_rows is not None and params.is_last_layer:
            q, residual = (x.index_select(0, self.sampled_rows.token_indices) for x in (q, residual))
            out = q.new_empty(len(q), params.num_heads * params.head_dim)
            self._decode(params, q, self.sampled_rows.shares, out)
            return out, residual
        out = q.new_empty(len(q), params.num_heads * params.head_dim)
        self.decode(params, q, out)
        if self.prefills is not None:
            count = self.num_decodes
            self.prefills.attend(params, q[count:], out[count:].view_as(q[count:]))
        return out, residual

    def decode(self, params: AttentionParams, q: Tensor, out: Tensor) -> None:
        """The attention of the decodes."""
        if self.num_decodes:
            count = self.num_decodes
            self._decode(params, q[:count], self.shares[params.window], out[:count])

    def _decode(self, params: AttentionParams, q: Tensor, shares: Tensor, out: Tensor) -> None:
        k, v = self.kv.k[params.layer], self.kv.v[params.layer]
        paged_decode(q, k, v, self.block_tables, shares, params.scale, self.workspace, out)

    def write(self, params: AttentionParams, qkv: Tensor, q: Tensor | None = None) -> Tensor:
        """Writes keys and values to the cache. Returns the normed and rotated queries, in `q` if given."""
        norms = [norm for norm in (params.q_norm, params.k_norm) if norm is not None]
        if any(norm.weight is None for norm in norms):
            found = self._write_plainly(params, qkv)
            return found if q is None else q.copy_(found)
        return norm_rope_write(
            qkv,
            params.q_norm.weight if params.q_norm is not None else None,
            params.k_norm.weight if params.k_norm is not None else None,
            norms[0].eps if norms else 0.0,
            params.rotation.table,
            self.kv.k[params.layer],
            self.kv.v[params.layer],
            self.block_tables,
            self.slots,
            self.positions,
            params.num_heads,
            params.num_kv_heads,
            params.head_dim,
            q,
            *(self.prompt_copy.copy[params.layer], self.prompt_copy.slot) if self.prompt_copy is not None else (),
        )

    def _write_plainly(self, params: AttentionParams, qkv: Tensor) -> Tensor:
        """`write` in plain torch, for norms that the kernel does not know."""
        if self._plain is None:
            self._plain = PlainNormRope(self.positions)
            size = self.kv.block_size
            blocks = self.block_tables[self.slots.clamp(min=0).long(), (self.positions // size).long()].long()
            # Padding tokens are written to the last entry of the pool, which is never read.
            kv_indices = blocks * size + self.positions % size
            self._kv_indices = torch.where(self.slots < 0, self.kv.num_blocks * size - 1, kv_indices)
            if self.prompt_copy is not None:
                is_copied = (self.slots == self.prompt_copy.slot) & (self.slots >= 0)
                last = self.prompt_copy.copy.shape[2] - 1
                self._copy_positions = torch.where(is_copied, self.positions, last).long()
        q, k, v = self._plain.split(params, qkv)
        self.kv.write(params.layer, self._kv_indices, k, v)
        if self.prompt_copy is not None:
            for target, numbers in zip(self.prompt_copy.copy[params.layer], (k, v), strict=True):
                target.index_copy_(0, self._copy_positions, numbers.to(target.dtype))
        return q.contiguous()


class PlainPrefills:
    """Prefill slices in plain torch, one by one."""

    def __init__(
        self,
        kv: KVPool,
        block_tables: Tensor,
        slots: NDArray[np.int64],
        first: NDArray[np.int64],
        count: NDArray[np.int64],
    ) -> None:
        self.kv = kv
        starts = np.cumsum(count) - count
        rows = zip(slots.tolist(), starts.tolist(), first.tolist(), count.tolist(), strict=True)
        self._rows = [PrefillRow(kv.block_size, block_tables[slot], *row) for slot, *row in rows]

    def attend(self, params: AttentionParams, q: Tensor, out: Tensor) -> None:
        for row in self._rows:
            span = slice(row.start, row.start + row.count)
            out[span] = row.attend(self.kv, params.layer, q[span], params.scale, params.window)


@functools.cache
def sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
