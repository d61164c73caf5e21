"""Norms, gates, rotations and writes to the cache against plain torch in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.device import DEVICE, NAN, assert_close, normal, permutation
from weft.kernels import fused

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")


def test_add_rms_norm(dtype: torch.dtype) -> None:
    for rows, size in ((1, 64), (3, 100), (5, 1024), (2, 896)):
        for with_residual in (True, False):
            x, weight = normal(dtype, rows, size), normal(dtype, size)
            residual = normal(dtype, rows, size) * 3 if with_residual else None
            total = x if residual is None else (x.float() + residual.float()).to(dtype)
            wide = total.double()
            expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
            normed, kept = fused.add_rms_norm(x.clone(), None if residual is None else residual.clone(), weight, 1e-6)
            assert torch.equal(kept, total)
            assert_close(normed, expected, dtype)


def test_silu_mul(dtype: torch.dtype) -> None:
    for rows, inner in ((1, 48), (3, 1000), (40, 96), (300, 7)):
        gate_up = normal(dtype, rows, 2 * inner) * 4
        gate, up = gate_up.double().chunk(2, dim=-1)
        assert_close(fused.silu_mul(gate_up), F.silu(gate) * up, dtype)


def test_norm_rope_write(dtype: torch.dtype) -> None:
    for heads, kv_heads, dim, rotary, norm, block_size in (
        (4, 2, 64, 64, (True, True), 16),
        (3, 1, 80, 32, (True, True), 16),
        (6, 2, 96, 96, (False, False), 7),
        (16, 8, 128, 128, (True, False), 1),
        (2, 2, 80, 40, (False, True), 16),
        (2, 1, 256, 64, (True, True), 5),
    ):
        tokens, slot_count, columns = 9, 5, 4
        tables = permutation(slot_count * columns).view(slot_count, columns).int()
        k_cache = torch.full((slot_count * columns, block_size, kv_heads, dim), NAN, dtype=dtype, device=DEVICE)
        v_cache = k_cache.clone()
        places = permutation(slot_count * columns * block_size)[:tokens]
        slots, positions = places // (columns * block_size), places % (columns * block_size)
        slots[0] = -1  # padding
        qkv = normal(dtype, tokens, (heads + 2 * kv_heads) * dim)
        angles = torch.rand(columns * block_size, rotary // 2, device=DEVICE) * 6
        table = torch.stack((angles.cos(), angles.sin()), 1)
        q_weight, k_weight = (normal(dtype, dim) if wanted else None for wanted in norm)
        rest = (k_cache, v_cache, tables, slots.int(), positions.int(), heads, kv_heads, dim)
        copied = slots[5:6].int()
        copy = torch.full((2, columns * block_size, kv_heads, dim), NAN, dtype=dtype, device=DEVICE)
        q = fused.norm_rope_write(qkv, q_weight, k_weight, 1e-6, table, *rest, copy=copy, copied=copied)
        q_in, k_in, v_in = torch.split(qkv.double().view(tokens, -1, dim), [heads, kv_heads, kv_heads], 1)
        cos, sin = (x[positions][:, None].double() for x in table.unbind(1))
        assert_close(q[1:], rotated(normed(q_in, q_weight), cos, sin)[1:], dtype)
        blocks = tables[slots[1:], positions[1:] // block_size].long()
        at = (blocks, positions[1:] % block_size)
        assert_close(k_cache[at], rotated(normed(k_in, k_weight), cos, sin)[1:], dtype)
        assert torch.equal(v_cache[at].double(), v_in[1:])
        for cache in (k_cache, v_cache):
            assert int((~cache.isnan()).sum()) == (tokens - 1) * kv_heads * dim, "written elsewhere too"
        mine = slots[1:] == copied
        assert int((~copy.isnan()).sum()) == 2 * int(mine.sum()) * kv_heads * dim, "another's was copied"
        for half, cache in zip(copy, (k_cache, v_cache), strict=True):
            assert torch.equal(half[positions[1:][mine]], cache[at][mine])
        copy.fill_(NAN)
        fused.norm_rope_write(qkv, q_weight, k_weight, 1e-6, table, *rest, copy=copy, copied=copied * 0 - 1)
        assert bool(copy.isnan().all()), "padding was copied"


def test_copy_tokens(dtype: torch.dtype) -> None:
    for kv_heads, head_dim, tokens, begin in ((2, 16, 50, 0), (8, 64, 33, 17), (3, 20, 40, 39), (2, 16, 10, 10)):
        k, v = (torch.randn(10, 16, kv_heads, head_dim, dtype=dtype, device=DEVICE) for _ in range(2))
        places = torch.randperm(160, device=DEVICE)[:tokens]
        found = torch.zeros((2, 64, kv_heads, head_dim), dtype=dtype, device=DEVICE)
        fused.copy_tokens(k, v, places.int(), begin, found)
        expected = torch.zeros_like(found)
        for half, cache in enumerate((k, v)):
            expected[half, begin:tokens] = cache.flatten(0, 1)[places[begin:]]
        assert torch.equal(found, expected)


def normed(x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU may have it")
def test_kernels_do_not_overlap_without_a_gpu() -> None:
    assert fused.dependent(DEVICE) == {"PDL": False}
