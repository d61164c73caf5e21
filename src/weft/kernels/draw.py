"""Samples one token per row from logits, without sorting and without the host.

A row's token is the inverse of its cumulative distribution at one uniform number: a hash of its seed and its position.
The vocabulary is read in tiles. One kernel sums each tile, the other finds the tile and then the token in it. The sums
are of integers, so they do not depend on the order of addition. Therefore a row's token does not depend on what other
rows ask for. Imported only where there is a GPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.kernels.ranks import mass_of, power_of, rank_of, units_of
from weft.kernels.truncate import ROUNDS, Border, TruncationParams, truncate

TILE = 2048  # logits; the second kernel reads one tile per row again


class Noise(NamedTuple):
    """Inputs of each row's uniform number, each [N] int32."""

    low: Tensor  # lower half of the seed
    high: Tensor
    positions: Tensor  # position of the row's last token; the sampled token is the next one


def draw(
    logits: Tensor,  # [N, V]
    temperature: Tensor,  # [N] float32; 0: greedy, the lowest token id among equal logits
    noise: Noise,
    last_token: Tensor,  # [S] int32: receives each row's token, at its slot
    slots: Tensor,  # [N] int32; negative: padding, for which nothing is written
    tokens: Tensor,  # [M] int32: receives each token too, at its index; may be pinned host memory
    indices: Tensor,  # [N] int32: index of each row's token in `tokens`
    truncation: TruncationParams | None = None,  # None: every row samples from all tokens
) -> None:
    """Samples from softmax(logits / temperature). A token of probability 0 is never sampled."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    if not rows:
        return
    tiles = triton.cdiv(vocab, TILE)
    kinds = (torch.float32, torch.int64, torch.int32)
    highest, sums, tops = (torch.empty((rows, tiles), dtype=kind, device=logits.device) for kind in kinds)
    _summarise[(tiles, rows)](logits, temperature, highest, sums, tops, vocab, logits.stride(0), TILE=TILE, num_warps=4)
    border = Border(tops, tops, sums, tops)  # placeholders: only the sums are read
    if truncation is not None:
        border = truncate(logits, temperature, highest, sums, truncation, TILE)
    _select[(rows,)](
        logits,
        temperature,
        *noise,
        highest,
        tops,
        *border,
        last_token,
        slots,
        tokens,
        indices,
        vocab,
        logits.stride(0),
        tiles,
        CUT=truncation is not None,
        SHIFT=ROUNDS[logits.dtype][0],
        TILE=TILE,
        TILES=max(2, triton.next_power_of_2(tiles)),
        num_warps=4,
        enable_fp_fusion=False,  # otherwise products and sums would be fused differently with and without truncation
    )


@triton.jit
def _mix(bits):
    """The finaliser of splitmix64, for uint64."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def _uniform(low, high, position):
    """A number in [0, 1) as float64, bit by bit the same as `hashed_uniform`, which the CPU sampler uses."""
    seed = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    bits = _mix(seed + 0x9E3779B97F4A7C15)
    bits = _mix(bits ^ (position.to(tl.uint64) * 0xD1342543DE82EF95))
    return (bits >> 32).to(tl.int64).to(tl.float64) / 4294967296.0


@triton.jit
def _summarise(logits, temperature, highest, sums, tops, vocab, stride, TILE: tl.constexpr):
    """For one tile of one row: the highest logit, the first token that has it, and the sum of the units."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tokens = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(values, 0)
    total = tl.sum(units_of(values, top, tl.load(temperature + row)), 0)
    at = row * tl.num_programs(0) + tile
    tl.store(highest + at, top)
    tl.store(sums + at, total)
    tl.store(tops + at, tl.min(tl.where(values == top, tokens, vocab), 0))


@triton.jit
def _first_beyond(mass, cumulative, target, places, END):
    """The first place where the cumulative mass exceeds the target. If rounding leaves none, the last with any mass."""
    some = mass > 0
    found = tl.min(tl.where(some & (cumulative > target), places, END), 0)
    return tl.where(found < END, found, tl.max(tl.where(some, places, 0), 0))


@triton.jit
def _select(
    logits,
    temperature,
    low,
    high,
    positions,
    highest,
    tops,
    border,
    ties,
    sums,
    equal,
    last_token,
    slots,
    out,
    places,
    vocab,
    stride,
    tiles,
    CUT: tl.constexpr,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Samples one row's token. Tile masses are added in float64: float32 would shift the borders between tokens."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    each = tl.arange(0, TILES)
    at = row * tiles + each
    heights = tl.load(highest + at, mask=each < tiles, other=float("-inf"))
    top = tl.max(heights, 0)
    first = tl.load(tops + at, mask=each < tiles, other=vocab)
    greedy = tl.min(tl.where(heights == top, first, vocab), 0)

    factors = power_of(heights, top, heat).to(tl.float64)
    mass = factors * tl.load(sums + at, mask=each < tiles, other=0).to(tl.float64)
    if CUT:
        least = tl.load(border + row)
        there = tl.load(equal + at, mask=each < tiles, other=0).to(tl.int64)
        room = tl.load(ties + row) - (tl.cumsum(there, 0) - there)  # ties left for each tile
        taken = tl.maximum(tl.minimum(there, room), 0)
        mass += mass_of(taken, least, top, heat, SHIFT)
    cumulative = tl.cumsum(mass, 0)
    uniform = _uniform(tl.load(low + row), tl.load(high + row), tl.load(positions + row) + 1)
    target = uniform * tl.sum(mass, 0)
    tile = _first_beyond(mass, cumulative, target, each, TILES)
    chosen = each == tile
    before = tl.sum(tl.where(chosen, cumulative - mass, 0.0), 0)
    factor = tl.sum(tl.where(chosen, factors, 0.0), 0)
    tile_top = tl.max(tl.where(chosen, heights, float("-inf")), 0)

    # The token within the tile, in units relative to the tile's highest logit.
    tokens = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    units = units_of(values, tile_top, heat)
    if CUT:
        ranks = tl.where(tokens < vocab, rank_of(values, SHIFT), -2147483648)
        is_tie = (ranks == least).to(tl.int64)
        is_taken = (is_tie > 0) & (tl.cumsum(is_tie, 0) <= tl.sum(tl.where(chosen, taken, 0), 0))
        units = tl.where((ranks > least) | is_taken, units, 0)
    target = (target - before) / tl.where(factor > 0, factor, 1.0)
    drawn = _first_beyond(units, tl.cumsum(units, 0).to(tl.float64), target, tokens, vocab)

    token = tl.where(heat > 0, drawn, greedy)
    token = tl.minimum(token, vocab - 1)  # larger only for a row of NaN
    slot = tl.load(slots + row).to(tl.int64)
    tl.store(last_token + slot, token, mask=slot >= 0)
    tl.store(out + tl.load(places + row), token, mask=slot >= 0)
