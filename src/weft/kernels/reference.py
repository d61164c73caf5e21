"""Attention in plain torch. It runs everywhere, and faster backends are tested against it."""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.attention import AttentionParams, PlainNormRope
from weft.kv.pool import KVPool


class ReferenceAttention:
    """Attention of one step (an `Attend`). Decode rows are padded and run together, prefill rows run one by one.

    `positions` and `kv_indices` (block * block_size + offset) have one entry per token. Positions without an index are
    padding, and their results are ignored. `block_tables` holds the block table of each row. `first` and `count` give
    the positions of each row. The first `num_decodes` rows are decodes of one token.
    """

    def __init__(
        self,
        kv: KVPool,
        positions: Tensor,
        kv_indices: Tensor,
        block_tables: Tensor,
        first: NDArray[np.int64],
        count: NDArray[np.int64],
        num_decodes: int,
    ) -> None:
        self.kv = kv
        self._norm_rope = PlainNormRope(positions)
        self.kv_indices = kv_indices
        self.num_decodes = num_decodes
        self._decodes = [
            _PaddedDecodes(kv.block_size, block_tables, rows, first[rows])
            for rows in _similar_lengths(first[:num_decodes], kv.block_size)
        ]
        starts = np.cumsum(count) - count
        self._prefills = [
            PrefillRow(kv.block_size, block_tables[row], int(starts[row]), int(first[row]), int(count[row]))
            for row in range(num_decodes, len(count))
        ]

    def __call__(self, params: AttentionParams, qkv: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        layer, scale, window = params.layer, params.scale, params.window
        q, k, v = self._norm_rope.split(params, qkv)
        tokens = len(self.kv_indices)  # the rows after them are padding
        self.kv.write(layer, self.kv_indices, k[:tokens], v[:tokens])
        out = torch.empty_like(q)
        out[tokens:] = 0
        for group in self._decodes:
            out[group.rows] = group.attend(self.kv, layer, q[group.rows], scale, window)
        for prefill in self._prefills:
            span = slice(prefill.start, prefill.start + prefill.count)
            out[span] = prefill.attend(self.kv, layer, q[span], scale, window)
        return out.flatten(1), residual


class _PaddedDecodes:
    """Decode rows of similar context length, padded to the longest."""

    def __init__(
        self, block_size: int, block_tables: Tensor, rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> None:
        device = block_tables.device
        blocks = int(positions.max()) // block_size + 1
        self.rows = torch.from_numpy(rows).to(device)
        self.block_tables = block_tables[self.rows, :blocks]
        self._position = torch.from_numpy(positions).to(device)[:, None]
        self._key_position = torch.arange(blocks * block_size, device=device)[None]
        # Padding: these entries hold keys of other requests, or were never written.
        self._foreign = (self._key_position > self._position)[:, :, None, None]
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, kv: KVPool, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        if window not in self._masks:
            self._masks[window] = _visible(self._position, self._key_position, window)[:, None, None]
        k, v = (x.masked_fill_(self._foreign, 0) for x in kv.gather(layer, self.block_tables))
        out = F.scaled_dot_product_attention(
            q[:, :, None],
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=self._masks[window],
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[2],
        )
        return out[:, :, 0]


class PrefillRow:
    """Attention of one prefill slice over all tokens before it and, causally, over itself."""

    def __init__(self, block_size: int, table: Tensor, start: int, first: int, count: int) -> None:
        self.start, self.first, self.count = start, first, count
        self.end = first + count  # number of keys that the slice sees
        self.table = table[None, : -(-self.end // block_size)]
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, kv: KVPool, layer: int, q: Tensor, scale: float, window: int | None) -> Tensor:
        k, v = kv.gather(layer, self.table)
        plain = self.first == 0 and (window is None or window >= self.end)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k[:, : self.end].transpose(1, 2),
            v[:, : self.end].transpose(1, 2),
            attn_mask=None if plain else self._mask(window),
            is_causal=plain,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[2],
        )
        return out[0].transpose(0, 1)

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            positions = torch.arange(self.first, self.end, device=self.table.device)[:, None]
            keys = torch.arange(self.end, device=self.table.device)[None]
            self._masks[window] = _visible(positions, keys, window)
        return self._masks[window]


def _visible(position: Tensor, key_position: Tensor, window: int | None) -> Tensor:
    seen = key_position <= position
    return seen if window is None else seen & (key_position > position - window)


def _similar_lengths(positions: NDArray[np.int64], block_size: int) -> list[NDArray[np.int64]]:
    """Row numbers in groups. Contexts in a group differ at most by a factor of two: padding wastes less than half."""
    if not len(positions):
        return []
    bucket = np.log2(positions // block_size + 1).astype(np.int64)
    return [np.flatnonzero(bucket == value) for value in np.unique(bucket)]
