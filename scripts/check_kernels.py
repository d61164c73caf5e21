"""Checks every Triton kernel against plain torch in float64, then times it.

    PYTHONPATH=src python scripts/check_kernels.py [--quick] [--only PART ...]

Needs a GPU; tests/kernels runs the same checks in Triton's interpreter. Parts: check (or check_decode and so on alone),
pdl (chains of kernels that overlap against the same one by one), chain (the time of a layer), matvec64 (17 to
64 rows), fused, decode, draw, matvec. What matvec, matvec64 and chain print is to be copied to weft/kernels/matvec.py.
"""

import argparse
import contextlib
import functools
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from weft.engine.sampling import hashed_uniform
from weft.kernels import decode, draw, fetch, fused, matvec, ops, shares

Check = Callable[[torch.device, torch.dtype], None]
NAN = float("nan")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5}  # of one result, and some more


def check_add_rms_norm(device: torch.device, dtype: torch.dtype) -> None:
    for rows, size in ((1, 64), (3, 100), (5, 1024), (2, 896)):
        for with_residual in (True, False):
            x, weight = _random(device, dtype, rows, size), _random(device, dtype, size)
            residual = _random(device, dtype, rows, size) * 3 if with_residual else None
            total = x if residual is None else (x.float() + residual.float()).to(dtype)
            wide = total.double()
            expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
            normed, kept = fused.add_rms_norm(x.clone(), None if residual is None else residual.clone(), weight, 1e-6)
            assert torch.equal(kept, total)
            _close(normed, expected, dtype)


def check_silu_mul(device: torch.device, dtype: torch.dtype) -> None:
    for rows, inner in ((1, 48), (3, 1000), (40, 96), (300, 7)):
        gate_up = _random(device, dtype, rows, 2 * inner) * 4
        gate, up = gate_up.double().chunk(2, dim=-1)
        _close(fused.silu_mul(gate_up), F.silu(gate) * up, dtype)


def check_norm_rope_write(device: torch.device, dtype: torch.dtype) -> None:
    for heads, kv_heads, dim, rotary, norm, block_size in (
        (4, 2, 64, 64, (True, True), 16),
        (3, 1, 80, 32, (True, True), 16),
        (6, 2, 96, 96, (False, False), 7),
        (16, 8, 128, 128, (True, False), 1),
        (2, 2, 80, 40, (False, True), 16),
        (2, 1, 256, 64, (True, True), 5),
    ):
        tokens, slot_count, columns = 9, 5, 4
        tables = _permutation(device, slot_count * columns).view(slot_count, columns).int()
        k_cache = torch.full((slot_count * columns, block_size, kv_heads, dim), NAN, dtype=dtype, device=device)
        v_cache = k_cache.clone()
        places = _permutation(device, slot_count * columns * block_size)[:tokens]
        slots, positions = places // (columns * block_size), places % (columns * block_size)
        slots[0] = -1  # padding
        qkv = _random(device, dtype, tokens, (heads + 2 * kv_heads) * dim)
        angles = torch.rand(columns * block_size, rotary // 2, device=device) * 6
        table = torch.stack((angles.cos(), angles.sin()), 1)
        q_weight, k_weight = (_random(device, dtype, dim) if wanted else None for wanted in norm)
        rest = (k_cache, v_cache, tables, slots.int(), positions.int(), heads, kv_heads, dim)
        copied = slots[5:6].int()
        copy = torch.full((2, columns * block_size, kv_heads, dim), NAN, dtype=dtype, device=device)
        q = fused.norm_rope_write(qkv, q_weight, k_weight, 1e-6, table, *rest, copy=copy, copied=copied)
        q_in, k_in, v_in = torch.split(qkv.double().view(tokens, -1, dim), [heads, kv_heads, kv_heads], 1)
        cos, sin = (x[positions][:, None].double() for x in table.unbind(1))
        _close(q[1:], _rotated(_normed(q_in, q_weight), cos, sin)[1:], dtype)
        blocks = tables[slots[1:], positions[1:] // block_size].long()
        at = (blocks, positions[1:] % block_size)
        _close(k_cache[at], _rotated(_normed(k_in, k_weight), cos, sin)[1:], dtype)
        assert torch.equal(v_cache[at].double(), v_in[1:])
        for cache in (k_cache, v_cache):
            assert int((~cache.isnan()).sum()) == (tokens - 1) * kv_heads * dim, "written elsewhere too"
        mine = slots[1:] == copied
        assert int((~copy.isnan()).sum()) == 2 * int(mine.sum()) * kv_heads * dim, "another's was copied"
        for half, cache in zip(copy, (k_cache, v_cache), strict=True):
            assert torch.equal(half[positions[1:][mine]], cache[at][mine])
        copy.fill_(NAN)
        fused.norm_rope_write(qkv, q_weight, k_weight, 1e-6, table, *rest, copy=copy, copied=copied * 0 - 1)
        assert bool(copy.isnan().all()), "nobody's was copied"


def check_copy_tokens(device: torch.device, dtype: torch.dtype) -> None:
    for kv_heads, head_dim, tokens, begin in ((2, 16, 50, 0), (8, 64, 33, 17), (3, 20, 40, 39), (2, 16, 10, 10)):
        k, v = (torch.randn(10, 16, kv_heads, head_dim, dtype=dtype, device=device) for _ in range(2))
        places = torch.randperm(160, device=device)[:tokens]
        found = torch.zeros((2, 64, kv_heads, head_dim), dtype=dtype, device=device)
        fused.copy_tokens(k, v, places.int(), begin, found)
        expected = torch.zeros_like(found)
        for half, cache in enumerate((k, v)):
            expected[half, begin:tokens] = cache.flatten(0, 1)[places[begin:]]
        assert torch.equal(found, expected)


def check_fetch(device: torch.device, dtype: torch.dtype) -> None:
    """From the host's memory, as it is at that moment; one buffer after the other."""
    host = torch.zeros((3, 4000), dtype=torch.int32)
    host = host.pin_memory() if device.type == "cuda" else host
    ring = fetch.Ring(host, torch.zeros(2, dtype=torch.int32, device=device))
    segments = [
        (4, 0),
        (24, 1),
        (44, 1),
        (64, 2),
        (3900, 3),
        (3950, 3),
    ]  # where they begin, and where their lengths are
    parts = torch.tensor(segments, dtype=torch.int32, device=device)
    table = torch.zeros(300, dtype=torch.int32, device=device)
    expected_table = table.cpu()
    for turn, lengths in enumerate(((3, 20, 0, 1), (0, 7, 3800, 50), (0, 0, 0, 0), (20, 20, 1, 0), (1, 0, 700, 9))):
        found = torch.full((4000,), -1, dtype=torch.int32, device=device)
        expected = found.cpu()
        host.copy_(torch.randint(0, 10**9, host.shape, dtype=torch.int32))
        page = host[turn % 3]
        page[:4] = torch.tensor(lengths)
        page[3900:3950] = torch.randperm(300)[:50]
        fetch.fetch(ring, parts, found, table, max(lengths))
        for begin, at in segments[:-2]:
            expected[begin : begin + lengths[at]] = page[begin : begin + lengths[at]]
        assert torch.equal(found.cpu(), expected)
        news = lengths[3]
        expected_table[page[3900 : 3900 + news].long()] = page[3950 : 3950 + news]
        assert torch.equal(table.cpu(), expected_table)
        assert ring.state.tolist() == [(turn + 1) % 3, 0]


def check_post(device: torch.device, dtype: torch.dtype) -> None:
    host = torch.randint(0, 10**9, (2000,), dtype=torch.int32)
    host = host.pin_memory() if device.type == "cuda" else host
    for count in (0, 1, 900):
        found = torch.zeros(3000, dtype=torch.int32, device=device)
        places, numbers = host[:count], host[1000 : 1000 + count]
        places.copy_(torch.randperm(3000)[:count])
        fetch.post(places, numbers, found)
        expected = torch.zeros(3000, dtype=torch.int32)
        expected[places.long()] = numbers
        assert torch.equal(found.cpu(), expected)


def check_decode(device: torch.device, dtype: torch.dtype) -> None:
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
        _check_decode(device, dtype, heads, kv_heads, dim, block_size, window, wanted, positions)
    if device.type == "cuda":
        many = torch.randint(0, 5000, (40,)).tolist()
        _check_decode(device, dtype, 32, 8, 128, 16, None, 320, many)
        _check_decode(device, dtype, 16, 8, 128, 16, 1024, 1, many)
        _check_decode(device, dtype, 16, 8, 128, 16, None, 66, [60_000, *many])


def check_decode_tilings(device: torch.device, dtype: torch.dtype) -> None:
    for tiling in decode.candidates(dtype, 128):
        _check_decode(device, dtype, 8, 2, 128, 16, None, 16, (0, 127, 128, 500), tiling)


def check_decode_merges(device: torch.device, dtype: torch.dtype) -> None:
    """More splits than are read at once."""
    with changed(decode, "MERGED", 512):
        _check_decode(device, dtype, 4, 2, 64, 16, None, 48, (0, 64, 700))
        _check_decode(device, dtype, 3, 1, 80, 16, 90, 16, (300, 20))


def check_draw(device: torch.device, dtype: torch.dtype) -> None:
    for vocab in (5, 2048, 5000, 151936) if device.type == "cuda" else (5, 2048, 5000):
        rows = 12
        logits = _random(device, dtype, rows, vocab) * 3
        logits[1] = 0  # all equal
        logits[2, vocab // 2 :] = -torch.inf
        logits[3] = -torch.inf
        logits[3, vocab - 2] = -7
        logits[4, : vocab // 2 + 1] = -torch.inf
        logits[5, [1, vocab - 1]] = logits[5].max() + 1
        temperature = torch.tensor([0.0, 1.0, 5.0, 0.7, 1e-5, 0.0, 0.3, 1.0, 2.0, 1.0, 1.0, 5.0], device=device)
        uniform = torch.rand(rows, dtype=torch.float64)
        uniform[7], uniform[8], uniform[2], uniform[9] = 0.0, 1 - 2.0**-32, 1 - 2.0**-32, 1 - 2.0**-24
        _check_draw(logits, temperature, uniform)
        _check_draw(logits, torch.zeros_like(temperature), uniform)
    hopeless = torch.full((2, 3000), -torch.inf, dtype=dtype, device=device)
    hopeless[1] = NAN
    tokens = _draw(hopeless, torch.ones(2, device=device), _noise(torch.rand(2), device))
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 3000


def check_noise(device: torch.device, dtype: torch.dtype) -> None:
    """Bit by bit that of the CPU."""
    random = np.random.default_rng(1)
    seeds = random.integers(0, 2**64, 1024, dtype=np.uint64)
    seeds[:5] = [0, 1, 2**32 - 1, 2**63, 2**64 - 1]
    positions = random.integers(0, 2**20, 1024)
    halves = torch.from_numpy(seeds.view(np.int32).reshape(-1, 2).T.copy()).to(device)
    found = torch.empty(1024, dtype=torch.float64, device=device)
    _hash[(1,)](*halves, torch.from_numpy(positions).int().to(device), found, N=1024)
    assert found.tolist() == hashed_uniform(seeds, positions).tolist()


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _hash(low, high, positions, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out + at, draw._uniform(tl.load(low + at), tl.load(high + at), tl.load(positions + at)))


def check_matvec(device: torch.device, dtype: torch.dtype) -> None:
    shapes = [(1, 37, 99), (1, 21, 2048), (1, 9, 3072), (2, 70, 96), (4, 129, 512), (7, 50, 33), (16, 200, 640)]
    shapes += [(17, 70, 96), (33, 129, 256), (64, 50, 130)]
    if device.type == "cuda":
        shapes += [(1, 6144, 4096), (3, 1024, 3072), (16, 4096, 4096), (5, 151936, 1024), (64, 4096, 1024)]
    for rows, m, k in shapes:
        x, weight, bias = _random(device, dtype, rows, k), _random(device, dtype, m, k), _random(device, dtype, m)
        expected = x.double() @ weight.double().T
        for config in _some_configs(rows, m, k, dtype, False):
            _close(matvec.matvec(x, weight, config=config), expected, dtype, scale=math.sqrt(k))
        _close(matvec.matvec(x, weight, bias), expected + bias.double(), dtype, scale=math.sqrt(k))
        shared = _some_configs(rows, m, k, dtype, False)[-1]
        twice = [matvec.matvec(x, weight, bias, config=shared) for _ in range(2)]
        assert torch.equal(*twice), "not reproducible"


def check_matvec_silu(device: torch.device, dtype: torch.dtype) -> None:
    for rows, inner, k in ((1, 37, 99), (1, 70, 1024), (3, 40, 256), (16, 130, 640), (9, 33, 50), (40, 33, 96)):
        x, weight = _random(device, dtype, rows, k), _random(device, dtype, 2 * inner, k) / math.sqrt(k)
        gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
        for config in _some_configs(rows, inner, k, dtype, True):
            _close(matvec.matvec_silu(x, weight, config=config), F.silu(gate) * up, dtype)


CHECKS: tuple[Check, ...] = (
    check_copy_tokens,
    check_add_rms_norm,
    check_silu_mul,
    check_norm_rope_write,
    check_fetch,
    check_post,
    check_decode,
    check_decode_tilings,
    check_decode_merges,
    check_draw,
    check_noise,
    check_matvec,
    check_matvec_silu,
)


def _check_decode(
    device: torch.device,
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
    blocks = _permutation(device, batch * columns)
    tables = torch.full((batch + 3, columns + 1), batch * columns, dtype=torch.int32, device=device)
    shape = (batch * columns + 1, block_size, kv_heads, dim)
    k_cache, v_cache = (torch.full(shape, NAN, dtype=dtype, device=device) for _ in range(2))
    slots = _permutation(device, batch + 3)[:batch]
    q = _random(device, dtype, batch, heads, dim)
    expected = torch.zeros(batch, heads, dim, dtype=torch.float64, device=device)
    for row, position in enumerate(positions):
        first = 0 if window is None else max(0, position + 1 - window)
        seen = torch.arange(first, position + 1, device=device)
        tables[slots[row], :columns] = blocks[row * columns : (row + 1) * columns].int()
        at = (tables[slots[row], seen // block_size].long(), seen % block_size)
        k, v = (_random(device, dtype, len(seen), kv_heads, dim) for _ in range(2))
        k_cache[at], v_cache[at] = k, v
        k, v = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        weights = torch.softmax(torch.einsum("hd,thd->ht", q[row].double(), k) * 0.2, -1)
        expected[row] = torch.einsum("ht,thd->hd", weights, v)
    work = _shares(device, slots[:-1], positions, window, wanted)
    workspace = decode.Workspace.of(batch, heads, kv_heads, dim, wanted, device)
    for part in workspace[:2]:
        part.fill_(NAN)
    out = torch.full((batch, heads * dim), 7.0, dtype=dtype, device=device)
    inputs = (q, k_cache, v_cache, tables, work, 0.2, workspace)
    decode.paged_decode(*inputs, out, tiling=tiling)
    assert (out[-1] == 7).all(), "a row without a share was written"
    _close(out[:-1].view(-1, heads, dim), expected[:-1], dtype, scale=2.0)
    assert not workspace.ended.any()
    if device.type == "cuda":  # where programs end in another order each time
        for _ in range(3):
            again = decode.paged_decode(*inputs, tiling=tiling)
            assert torch.equal(again[:-1], out[:-1]), "not reproducible"


def _shares(device: torch.device, slots: Tensor, positions: Sequence[int], window: int | None, wanted: int) -> Tensor:
    """For `paged_decode`, with nobody's behind them."""
    found = shares.divide(slots.cpu().numpy().astype(np.int64), np.array(positions, np.int64), window, wanted)
    work = torch.tensor(shares.Shares.nobody(), dtype=torch.int32)[:, None]
    work = work.repeat(1, shares.most_shares(len(positions), wanted))
    work[:, : len(found.row)] = torch.from_numpy(np.stack(found))
    return work.to(device)


def _check_draw(logits: Tensor, temperature: Tensor, uniform: Tensor) -> None:
    rows, device = len(logits), logits.device
    noise = _noise(uniform, device)
    slots = _permutation(device, rows + 4)[:rows].int()
    slots[-1] = -1
    last = torch.full((rows + 4,), -1, dtype=torch.int32, device=device)
    places = _permutation(device, rows + 4)[:rows].int()
    returned = torch.full((rows + 4,), -1, dtype=torch.int32)
    returned = returned.pin_memory() if device.type == "cuda" else returned
    draw.draw(logits, temperature, noise, last, slots, returned, places)
    tokens = _draw(logits, temperature, noise)
    assert torch.equal(last[slots[:-1].long()], tokens[:-1])
    assert torch.equal(returned[places[:-1].long().cpu()], tokens[:-1].cpu())
    assert int((last >= 0).sum()) == int((returned >= 0).sum()) == rows - 1, "padding was written"
    heat = torch.where(temperature > 0, temperature, 1.0).double()
    cumulative = torch.softmax(logits.double() / heat[:, None], -1).cumsum(-1)
    for row, token in enumerate(tokens.tolist()):
        if temperature[row] == 0:
            best = logits[row].max()
            assert token == int((logits[row] == best).nonzero()[0])
            continue
        assert logits[row, token] > -torch.inf
        target, slack = float(uniform[row]), 1e-6
        assert float(cumulative[row, token]) >= target - slack
        assert token == 0 or float(cumulative[row, token - 1]) <= target + slack
        this = slice(row, row + 1)
        alone = _draw(logits[this], temperature[this], draw.Noise(*(field[this] for field in noise)))
        assert int(alone) == token, "depends on its company"


def _draw(logits: Tensor, temperature: Tensor, noise: draw.Noise) -> Tensor:
    places = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    tokens, last = torch.empty_like(places), torch.empty_like(places)
    draw.draw(logits, temperature, noise, last, places, tokens, places)
    return tokens


def _noise(uniform: Tensor, device: torch.device) -> draw.Noise:
    """Seeds that hash to these numbers, for some positions: the hash can be turned round."""
    positions = np.random.default_rng(0).integers(0, 10**6, len(uniform))
    bits = (uniform.double().numpy() * 2**32).astype(np.uint64) << np.uint64(32)
    seeds = np.empty(len(uniform), np.uint64)
    for row, (wanted, position) in enumerate(zip(bits.tolist(), positions.tolist(), strict=True)):
        mixed = _unmix(wanted) ^ ((position + 1) * 0xD1342543DE82EF95) % 2**64
        seeds[row] = (_unmix(mixed) - 0x9E3779B97F4A7C15) % 2**64
    assert (hashed_uniform(seeds, positions + 1) == bits / 2.0**64).all()
    halves = torch.from_numpy(seeds.view(np.int32).reshape(-1, 2).T.copy())
    return draw.Noise(*halves.to(device), torch.from_numpy(positions).int().to(device))


def _unmix(bits: int) -> int:
    """What the finaliser of splitmix64 makes `bits` of."""
    bits = bits ^ (bits >> 31) ^ (bits >> 62)
    bits = bits * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    bits = bits ^ (bits >> 27) ^ (bits >> 54)
    bits = bits * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return bits ^ (bits >> 30) ^ (bits >> 60)


def _some_configs(rows: int, m: int, k: int, dtype: torch.dtype, gated: bool) -> list[matvec.Config]:
    """The default, the last candidate, and both with shared columns; splits may be without any."""
    found = matvec.candidates(rows, m, k, dtype, gated=gated)
    chosen = [found[0], found[-1]]
    if -(-m // found[-1].block_m) <= matvec.PROGRAMS >= -(-m // found[0].block_m):
        chosen += [found[0]._replace(splits=2), found[-1]._replace(splits=5)]
    return chosen


@contextlib.contextmanager
def changed(module: object, name: str, value: object) -> Iterator[None]:
    """A constant that has another value for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _normed(x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _permutation(device: torch.device, size: int) -> Tensor:
    return torch.randperm(size, device=device)


def _close(actual: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Within one rounding of each result, and one of a typical size `scale` for those that nearly cancel."""
    error = (actual.double() - expected).abs()
    allowed = ROUNDING[dtype] * (expected.abs() + scale)
    assert actual.shape == expected.shape
    assert bool((error <= allowed).all()), (
        f"off by {float((error / allowed).nan_to_num(math.inf).max()):.1f} tolerances"
    )


# Kernels that overlap


HIDDEN, HEADS, KV_HEADS, DIM, INNER, BLOCK_SIZE, CONTEXT = 1024, 16, 8, 128, 3072, 16, 2048  # Qwen3-0.6B


class Layer(NamedTuple):
    norms: Tensor  # [2, HIDDEN]
    head_norms: Tensor  # [2, DIM]
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    k_cache: Tensor
    v_cache: Tensor


class Chain:
    """Layers of a decode step, from buffers that are always the same; the cache begins as that of any other chain."""

    def __init__(self, device: torch.device, rows: int, layers: Sequence[Layer], table: Tensor) -> None:
        self.layers = [layer._replace(k_cache=layer.k_cache.clone(), v_cache=layer.v_cache.clone()) for layer in layers]
        self.table = table
        self.x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.positions = torch.full((rows,), 255, dtype=torch.int32, device=device)
        self.tables = torch.arange(rows * CONTEXT // BLOCK_SIZE, dtype=torch.int32, device=device).view(rows, -1)
        wanted = decode.wanted_shares(KV_HEADS, torch.cuda.get_device_properties(device).multi_processor_count)
        self.shares = _shares(device, self.slots, [255] * rows, None, wanted)
        self.workspace = decode.Workspace.of(rows, HEADS, KV_HEADS, DIM, wanted, device)

    def run(self) -> Tensor:
        x, residual = self.x * 1, None  # a kernel, as an embedding is, where a copy would be none
        for layer in self.layers:
            x, residual = ops.add_rms_norm(x, residual, layer.norms[0], 1e-6)
            caches = (layer.k_cache, layer.v_cache, self.tables, self.slots, self.positions)
            qkv = ops.linear(x, layer.qkv)
            q = fused.norm_rope_write(qkv, *layer.head_norms.unbind(), 1e-6, self.table, *caches, HEADS, KV_HEADS, DIM)
            x = decode.paged_decode(q, *caches[:3], self.shares, 0.1, self.workspace)
            x, residual = ops.add_rms_norm(ops.linear(x, layer.o), residual, layer.norms[1], 1e-6)
            x = ops.linear(ops.gated_linear(x, layer.gate_up, None, F.silu), layer.down)
        assert residual is not None
        return x + residual


def make_layers(device: torch.device, count: int, rows: int) -> tuple[list[Layer], Tensor]:
    def matrix(m: int, k: int) -> Tensor:
        return _weights(device, m, k)[0]

    def layer() -> Layer:
        shape = (rows * CONTEXT // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, DIM)
        return Layer(
            _random(device, torch.bfloat16, 2, HIDDEN),
            _random(device, torch.bfloat16, 2, DIM),
            matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            matrix(HIDDEN, HEADS * DIM),
            matrix(2 * INNER, HIDDEN),
            matrix(HIDDEN, INNER),
            *(_random(device, torch.bfloat16, *shape) for _ in range(2)),
        )

    table = torch.randn(CONTEXT, 2, DIM // 2, device=device)
    return [layer() for _ in range(count)], table


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        result = call()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph, result


def check_pdl(device: torch.device, quick: bool) -> None:
    """Replays a chain whose kernels overlap, and the same one by one: all bits have to agree, the cache's too."""
    assert fused.dependent(device)["PDL"], "this device cannot, or fused.PDL is False"
    replays = 200
    good = True
    for rows, merge in ((1, True), (16, True), (40, False)):  # 40: products by torch, so silu_mul takes part
        layers, table = make_layers(device, 3, rows)
        chains = [Chain(device, rows, layers, table) for _ in range(2)]
        graphs = []
        for chain, pdl in zip(chains, (True, False), strict=True):
            with changed(fused, "PDL", pdl), changed(decode, "MERGE_AT_ONCE", merge):
                graphs.append(captured(chain.run))
        for one, other in zip(chains[1].layers, chains[0].layers, strict=True):  # what warming up has written
            one.k_cache.copy_(other.k_cache)
            one.v_cache.copy_(other.v_cache)
        xs = torch.randn(replays, rows, HIDDEN, device=device).bfloat16()
        longest = torch.tensor([CONTEXT, 300, 64], dtype=torch.int32, device=device).repeat(replays)[:replays, None]
        positions = (torch.rand(replays, rows, device=device) * longest).int()
        slots = torch.stack([_permutation(device, rows).int() for _ in range(replays)])
        if rows > 1:
            slots[:, -1] = -1
        different = torch.zeros(replays, dtype=torch.bool, device=device)
        for turn in range(replays):
            for chain, (graph, _) in zip(chains, graphs, strict=True):
                chain.x.copy_(xs[turn])
                chain.positions.copy_(positions[turn])
                chain.slots.copy_(slots[turn])
                graph.replay()
            different[turn] = (graphs[0][1] != graphs[1][1]).any()
        wrong = int(different.sum())
        caches = sum(
            int((a != b).any())
            for one, other in zip(chains[0].layers, chains[1].layers, strict=True)
            for a, b in ((one.k_cache, other.k_cache), (one.v_cache, other.v_cache))
        )
        finite = bool(graphs[0][1].isfinite().all())
        name = f"pdl N={rows} merge {'at once' if merge else 'by a second kernel'}"
        print(f"{name}: {wrong} of {replays} replays and {caches} of 6 caches differ{'' if finite else ', not finite'}")
        good &= not wrong and not caches and finite
    assert good


def time_chain(device: torch.device, quick: bool) -> None:
    """One layer, on average over twelve, whose weights do not fit into L2 together."""
    count = 12
    for rows in (1, 16, 64):
        layers, table = make_layers(device, count, rows)
        chain = Chain(device, rows, layers, table)
        spans = {}
        for pdl, merge in ((True, True), (False, True), (False, False)):
            with changed(fused, "PDL", pdl), changed(decode, "MERGE_AT_ONCE", merge):
                spans[pdl, merge] = seconds([chain.run] * 3) / count
        print(
            f"layer N={rows} T=256: "
            + ", ".join(
                f"{'PDL' if pdl else 'no PDL'} {'one' if merge else 'two'} launches {span * 1e6:.2f} us"
                for (pdl, merge), span in spans.items()
            ),
            flush=True,
        )
        if rows <= ops.FEW and not quick:
            _tune_chain(chain, rows, count)


def _tune_chain(chain: Chain, rows: int, count: int) -> None:
    """Each product's configuration in turn, within the chain: what is fastest there need not be so alone."""
    until = time.perf_counter() + 12
    products = (((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, False), (HIDDEN, HEADS * DIM, False), (INNER, HIDDEN, True))
    for m, k, gated in (*products, (HIDDEN, INNER, False)):
        key = (matvec.bucket(rows), m, k, gated)
        before = matvec.configure(rows, m, k, torch.bfloat16, gated=gated)
        timed = {}
        for config in dict.fromkeys([before, *matvec.candidates(rows, m, k, torch.bfloat16, gated=gated)]):
            if time.perf_counter() > until:
                print("    out of time")
                break
            with changed(matvec, "TUNED", {**matvec.TUNED, key: config}):
                timed[config] = seconds([chain.run] * 3) / count
        print("    " + ", ".join(f"{tuple(config)} {span * 1e6:.2f}" for config, span in timed.items()))
        best = min(timed, key=timed.__getitem__, default=before)
        if best != before and timed[best] < 0.99 * timed[before]:
            matvec.TUNED[key] = best  # the next product is tuned beside it
            print(f"    {key}: {best!r},  # in the chain: {timed[before] * 1e6:.2f} -> {timed[best] * 1e6:.2f} us")


# Timing


SHAPES = {  # name: (outputs, inputs)
    "llama-8b qkv": (6144, 4096),
    "llama-8b o": (4096, 4096),
    "llama-8b gate_up": (28672, 4096),
    "llama-8b down": (4096, 14336),
    "llama-8b head": (128256, 4096),
    "qwen-0.6b qkv": (4096, 1024),
    "qwen-0.6b o": (1024, 2048),
    "qwen-0.6b gate_up": (6144, 1024),
    "qwen-0.6b down": (1024, 3072),
    "qwen-0.6b head": (151936, 1024),
}
COLD = 256 << 20  # bytes to go through before an input is used again, several times what fits into L2
Tuned = dict[tuple[int, int, int, bool], matvec.Config]


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, on average over a CUDA graph of all of them: the best of five replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # not torch.cuda.graph, which empties caches each time
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in pairwise(events)) / len(calls) / 1e3


def repeated(call: Callable[..., object], inputs: Sequence[tuple[object, ...]]) -> float:
    """Seconds of a call over inputs in turn, at least twenty times."""
    times = -(-20 // len(inputs))
    return seconds([functools.partial(call, *each) for each in list(inputs) * times])


def copies(make: Callable[[], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """So many fresh inputs that each has left the caches when its turn comes again; 100 at most."""
    first = make()
    size = sum(x.numel() * x.element_size() for x in first)
    return [first, *(make() for _ in range(min(99, COLD // max(1, size))))]


def time_matvec(device: torch.device, quick: bool) -> None:
    tuned: Tuned = {}
    shapes = dict(list(SHAPES.items())[:4]) if quick else SHAPES
    for name, (m, k) in shapes.items():
        weights = [x for (x,) in copies(functools.partial(_weights, device, m, k))]
        _time_shape(name, weights, False, tuned)
        if "gate_up" in name:
            _time_shape(name + " silu", weights, True, tuned)
        del weights
    _print_tuned(tuned)


def time_matvec64(device: torch.device, quick: bool) -> None:
    """17 to 64 rows, the smaller model first. Kernels do not overlap, as torch's do not."""
    tuned: Tuned = {}
    faster: list[tuple[int, int, int, bool]] = []
    until = time.perf_counter() + 45
    with changed(fused, "PDL", False):
        for name, (m, k) in sorted(SHAPES.items(), key=lambda item: "qwen" not in item[0]):
            if time.perf_counter() > until or (quick and "qwen" not in name):
                print(f"{name}: left out")
                continue
            weights = [x for (x,) in copies(functools.partial(_weights, device, m, k))]
            faster += _time_shape(name, weights, False, tuned, (32, 64))
            if "gate_up" in name:
                faster += _time_shape(name + " silu", weights, True, tuned, (32, 64))
            del weights
    _print_tuned(tuned)
    print("\nFASTER: frozenset[tuple[int, int, int, bool]] = frozenset(\n    [")
    for key in faster:
        print(f"        {key},")
    print("    ]\n)")


def _print_tuned(tuned: Tuned) -> None:
    print("\nTUNED: dict[tuple[int, int, int, bool], Config] = {")
    for key, config in tuned.items():
        print(f"    {key}: {config!r},")
    print("}")


def _weights(device: torch.device, m: int, k: int) -> tuple[Tensor]:
    return (torch.randn(m, k, device=device, dtype=torch.bfloat16) / math.sqrt(k),)


def _time_shape(
    name: str, weights: list[Tensor], gated: bool, tuned: Tuned, numbers: Sequence[int] = (1, 4, 16, 2, 8)
) -> list[tuple[int, int, int, bool]]:
    """Fills in `tuned`, and returns the keys of what is clearly faster than torch."""
    faster = []
    rows_of_weight, k = weights[0].shape
    m = rows_of_weight // (1 + gated)
    ours = matvec.matvec_silu if gated else matvec.matvec
    for rows in numbers:  # the largest of each bucket is tuned, the others follow
        x = torch.randn(rows, k, device=weights[0].device, dtype=torch.bfloat16)
        inputs = [(x, weight) for weight in weights]
        key = (matvec.bucket(rows), m, k, gated)
        if key not in tuned:
            timed = {}
            for config in matvec.candidates(rows, m, k, torch.bfloat16, gated=gated):
                try:
                    timed[config] = repeated(functools.partial(ours, config=config), inputs)
                except Exception as error:
                    print(f"    {tuple(config)} fails: {str(error).splitlines()[-1]}")
            print("    " + ", ".join(f"{tuple(config)} {span * 1e6:.1f}" for config, span in timed.items()))
            if not timed:
                continue
            tuned[key] = min(timed, key=timed.__getitem__)
        span = repeated(functools.partial(ours, config=tuned[key]), inputs)
        plain = repeated(_plain_silu if gated else F.linear, inputs)
        _print(f"matvec {name} N={rows}", span, weights[0].numel() * 2, plain)
        if span < 0.97 * plain:
            faster.append(key)
    return faster


def _plain_silu(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def time_decode(device: torch.device, quick: bool) -> None:
    """Contexts that are alike, that differ, and one that is much longer than the others."""
    kv_heads, dim, block_size, group = 8, 128, 16, 2
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    most = 512 * 2048
    shape = (most // block_size, block_size, kv_heads, dim)
    caches = [[torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(2)] for _ in range(3)]
    random = np.random.default_rng(0)
    blocks = _permutation(device, most // block_size).int()
    for batch in (64, 256) if quick else (1, 4, 16, 32, 48, 64, 128, 256):
        different = random.integers(200, 1800, batch)
        lone = np.where(np.arange(batch) == batch // 2, 64_000, 500)
        alike = {str(context): [context] * batch for context in (256, 1000)}
        for name, contexts in {**alike, "200..1800": different, "lone": lone}.items():
            used = [-(-int(context) // block_size) for context in contexts]
            tables = torch.zeros((batch, max(used)), dtype=torch.int32, device=device)
            for row, (count, end) in enumerate(zip(used, np.cumsum(used).tolist(), strict=True)):
                tables[row, :count] = blocks[end - count : end]
            q = torch.randn(batch, group * kv_heads, dim, device=device, dtype=torch.bfloat16)
            read = int(np.sum(contexts)) * kv_heads * dim * 4
            rates = []
            for programs in (2, 3, 4):
                with changed(decode, "PROGRAMS", programs):
                    wanted = decode.wanted_shares(kv_heads, sm_count)
                work = _shares(device, torch.arange(batch), [int(c) - 1 for c in contexts], None, wanted)
                workspace = decode.Workspace.of(batch, group * kv_heads, kv_heads, dim, wanted, device)
                for tiling in decode.candidates(torch.bfloat16, dim)[: 2 if quick else 4]:
                    call = functools.partial(decode.paged_decode, tiling=tiling)
                    span = repeated(call, [(q, k, v, tables, work, 0.1, workspace) for k, v in caches])
                    rates.append(f"{programs} {tuple(tiling)} {span * 1e6:.0f} us {read / span / 1e12:.2f}")
            print(f"decode B={batch} T={name}, programs, tiling, TB/s: " + "; ".join(rates), flush=True)


def time_fused(device: torch.device, quick: bool) -> None:
    heads, kv_heads, dim, block_size = 32, 8, 128, 16
    weight = torch.ones(4096, dtype=torch.bfloat16, device=device)
    for rows in (1, 64, 256, 4096):
        random = functools.partial(_random, device, torch.bfloat16, rows)
        inputs = copies(lambda random=random: (random(4096), random(4096)))  # type: ignore[misc]
        span = repeated(lambda x, residual: fused.add_rms_norm(x, residual, weight, 1e-6), inputs)
        plain = repeated(lambda x, residual: F.rms_norm(x + residual, (4096,), weight, 1e-6), inputs)
        _print(f"add_rms_norm T={rows}", span, 4 * rows * 4096 * 2, plain)
        inputs = copies(lambda random=random: (random(28672),))  # type: ignore[misc]
        span = repeated(fused.silu_mul, inputs)
        plain = repeated(lambda x: F.silu(x[:, :14336]) * x[:, 14336:], inputs)
        _print(f"silu_mul T={rows}", span, 3 * rows * 14336 * 2, plain)

        tables = _permutation(device, 8192).view(8, 1024).int()
        shape = (8192, block_size, kv_heads, dim)
        k_cache, v_cache = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        places = _permutation(device, 8192 * block_size)[:rows].int()
        slots, positions = places // (1024 * block_size), places % (1024 * block_size)
        table = torch.randn(1024 * block_size, 2, dim // 2, device=device)
        inputs = copies(lambda random=random: (random((heads + 2 * kv_heads) * dim),))  # type: ignore[misc]
        for norm in (None, weight[:dim]):
            rest = (norm, norm, 1e-6, table, k_cache, v_cache, tables, slots, positions, heads, kv_heads, dim)
            span = repeated(fused.norm_rope_write, [(*x, *rest) for x in inputs])
            name = "norm_rope_write" if norm is not None else "rope_write"
            _print(f"{name} T={rows}", span, 2 * rows * (heads + 2 * kv_heads) * dim * 2)


def time_draw(device: torch.device, quick: bool) -> None:
    for vocab in (128256, 151936):
        for rows in (1, 64, 256, 4096):
            if rows > 256 and quick:
                continue
            random = functools.partial(_random, device, torch.bfloat16, rows, vocab)
            inputs = copies(lambda random=random: (random(),))  # type: ignore[misc]
            slots = torch.arange(rows, dtype=torch.int32, device=device)
            noise = draw.Noise(slots, slots, slots)
            rest = (torch.ones(rows, device=device), noise, slots.clone(), slots, slots.clone(), slots)
            span = repeated(draw.draw, [(*x, *rest) for x in inputs])
            plain = repeated(lambda x: x.argmax(-1), inputs)
            _print(f"draw V={vocab} N={rows} (torch: argmax)", span, rows * vocab * 2, plain)


def _print(name: str, span: float, size: int, plain: float | None = None) -> None:
    beside = "" if plain is None else f"   torch {plain * 1e6:9.1f} us, {plain / span:5.2f} times as long"
    print(f"{name:58s} {span * 1e6:9.1f} us {size / span / 1e12:6.2f} TB/s{beside}", flush=True)


def guarded(name: str, call: Callable[[], None]) -> bool:
    """Runs one part; a failure is printed, and the others go on."""
    began = time.perf_counter()
    try:
        call()
    except Exception:
        print(f"FAIL {name}\n    " + "\n    ".join(traceback.format_exc().splitlines()[-8:]), flush=True)
        return False
    print(f"PASS {name} ({time.perf_counter() - began:.1f} s)", flush=True)
    return True


PARTS: dict[str, Callable[[torch.device, bool], None]] = {
    "pdl": check_pdl,
    "chain": time_chain,
    "fused": time_fused,
    "decode": time_decode,
    "draw": time_draw,
    "matvec64": time_matvec64,
    "matvec": time_matvec,
}


def main() -> int:
    checks = {check.__name__: check for check in CHECKS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes to time")
    parser.add_argument(
        "--only", nargs="+", metavar="PART", choices=("check", *checks, *PARTS), help="some parts of it, in this order"
    )
    options = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(time.time_ns() % 2**31)
    wanted = [name for part in options.only or ("check", *PARTS) for name in (checks if part == "check" else (part,))]
    good, summary = True, []
    for index, name in enumerate(wanted):
        if name in PARTS:
            runs = {name: functools.partial(PARTS[name], device, options.quick)}
        else:
            runs = {
                f"{name} {dtype}": functools.partial(checks[name], device, dtype)
                for dtype in (torch.bfloat16, torch.float32)
            }
        for title, run in runs.items():
            passed = guarded(title, run)
            summary.append(f"{'PASS' if passed else 'FAIL'} {title}")
            good &= passed
        if not good and not _is_alive() and wanted[index + 1 :]:
            # After an illegal access nothing works any more in this process.
            print("\n".join(summary), flush=True)
            rest = [sys.executable, __file__, *(["--quick"] if options.quick else []), "--only", *wanted[index + 1 :]]
            subprocess.run(rest, check=False)
            return 1
    print("\nSummary\n" + "\n".join(summary), flush=True)
    return 0 if good else 1


def _is_alive() -> bool:
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
