"""Attention of decodes against plain torch in float64."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE, NAN, assert_close, normal, permutation
from weft.kernels import decode, shares

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")


def test_decode(dtype: torch.dtype) -> None:
    for heads, kv_heads, dim, block_size, window, wanted, positions in (
        (4, 1, 64, 16, None, 1, (0, 15, 16, 63, 64, 200)),
        (8, 4, 128, 16, None, 24, (0, 5, 63, 64, 129, 300)),
        (3, 1, 80, 7, None, 4, (130, 1)),
        (6, 2, 96, 1, None, 9, (77, 64, 63)),
        (4, 2, 64, 16, 40, 1, (0, 39, 40, 63, 64, 170)),
        (4, 2, 64, 16, 100, 20, (0, 99, 100, 290, 130)),
        (2, 2, 256, 32, 1, 16, (64, 0)),
        (40, 2, 32, 16, None, 16, (100,)),
        (4, 2, 64, 16, None, 3, (2000, 10, 30, 60)),
    ):
        _assert_attends(dtype, heads, kv_heads, dim, block_size, window, wanted, positions)
    if DEVICE.type == "cuda":
        many = torch.randint(0, 5000, (40,)).tolist()
        _assert_attends(dtype, 32, 8, 128, 16, None, 320, many)
        _assert_attends(dtype, 16, 8, 128, 16, 1024, 1, many)
        _assert_attends(dtype, 16, 8, 128, 16, None, 66, [60_000, *many])


def test_decode_tilings(dtype: torch.dtype) -> None:
    for tiling in decode.candidates(dtype, 128):
        _assert_attends(dtype, 8, 2, 128, 16, None, 16, (0, 127, 128, 500), tiling)


def test_decode_merges(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """More splits than are read at once."""
    monkeypatch.setattr(decode, "MERGED_NUMBERS", 512)
    _assert_attends(dtype, 4, 2, 64, 16, None, 48, (0, 64, 700))
    _assert_attends(dtype, 3, 1, 80, 16, 90, 16, (300, 20))


def _assert_attends(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int | None,
    wanted: int,
    positions: Sequence[int],
    tiling: decode.Tiling | None = None,
) -> None:
    """A cache that holds what each row may see and NaN everywhere else; the last row is padding."""
    batch, columns = len(positions) + 1, max(positions) // block_size + 2
    blocks = permutation(batch * columns)
    tables = torch.full((batch + 3, columns + 1), batch * columns, dtype=torch.int32, device=DEVICE)
    shape = (batch * columns + 1, block_size, kv_heads, dim)
    k_cache, v_cache = (torch.full(shape, NAN, dtype=dtype, device=DEVICE) for _ in range(2))
    slots = permutation(batch + 3)[:batch]
    q = normal(dtype, batch, heads, dim)
    expected = torch.zeros(batch, heads, dim, dtype=torch.float64, device=DEVICE)
    for row, position in enumerate(positions):
        first = 0 if window is None else max(0, position + 1 - window)
        seen = torch.arange(first, position + 1, device=DEVICE)
        tables[slots[row], :columns] = blocks[row * columns : (row + 1) * columns].int()
        at = (tables[slots[row], seen // block_size].long(), seen % block_size)
        k, v = (normal(dtype, len(seen), kv_heads, dim) for _ in range(2))
        k_cache[at], v_cache[at] = k, v
        k, v = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        weights = torch.softmax(torch.einsum("hd,thd->ht", q[row].double(), k) * 0.2, -1)
        expected[row] = torch.einsum("ht,thd->hd", weights, v)
    work = _shares(slots[:-1], positions, window, wanted)
    workspace = decode.Workspace.of(batch, heads, kv_heads, dim, wanted, DEVICE)
    for part in workspace[:2]:
        part.fill_(NAN)
    out = torch.full((batch, heads * dim), 7.0, dtype=dtype, device=DEVICE)
    inputs = (q, k_cache, v_cache, tables, work, 0.2, workspace)
    decode.paged_decode(*inputs, out, tiling=tiling)
    assert (out[-1] == 7).all(), "a row without a share was written"
    assert_close(out[:-1].view(-1, heads, dim), expected[:-1], dtype, scale=2.0)
    assert not workspace.ended.any()
    if DEVICE.type == "cuda":  # where programs end in another order each time
        for _ in range(3):
            again = decode.paged_decode(*inputs, tiling=tiling)
            assert torch.equal(again[:-1], out[:-1]), "not reproducible"


def _shares(slots: Tensor, positions: Sequence[int], window: int | None, wanted: int) -> Tensor:
    """For `paged_decode`, with padding's behind them."""
    found = shares.divide(slots.cpu().numpy().astype(np.int64), np.array(positions, np.int64), window, wanted)
    work = torch.tensor(shares.Shares.padding(), dtype=torch.int32)[:, None]
    work = work.repeat(1, shares.most_shares(len(positions), wanted))
    work[:, : len(found.row)] = torch.from_numpy(np.stack(found))
    return work.to(DEVICE)
