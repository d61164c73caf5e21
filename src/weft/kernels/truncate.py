"""Truncating distributions (min_p, top_k, top_p) without sorting them.

What is kept of a row are the logits above a border, and of those at the border so many, the lowest tokens first. The
border is searched for among the ranks of all numbers that a logit can be. Each round divides the interval where it may
be by WAYS, with all tiles of all rows at once, by how many logits lie above each pivot, and how much probability. Both
are added up as whole numbers, so that no result depends on the order of the programs. Only imported where there is a
GPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

WAYS = 16
UNIT = tl.constexpr(float(1 << 40))  # of probability, where the most likely token has 1: sums of 2^22 fit into an int64
SLACK = tl.constexpr(1 - 1e-6)  # of top_p, which float32 may have rounded up: 0.2 of five equal tokens is one of them
# By type: how many bits of float32 it does not have, which ranks leave out, and the rounds until one rank is left.
ROUNDS = {torch.bfloat16: (16, 4), torch.float16: (13, 5), torch.float32: (0, 8)}
NUMBERS = 8  # of a row's search, see `_begin`
FIRST, BY_COUNT, TURN, BY_MASS = range(4)  # rounds: the first and others for top_k, the first and others for top_p


class Cuts(NamedTuple):
    """What is to be kept of each row, [N]."""

    top_k: Tensor  # int32: so many tokens; more than there are: all
    top_p: Tensor  # float32: so much of the probability; 2: all
    floor: Tensor  # float32: the logarithm of min_p; -inf: all


class Border(NamedTuple):
    """What is kept of each row."""

    rank: Tensor  # [N] int32: what ranks higher is kept
    ties: Tensor  # [N] int64: and so many of those with this rank, the lowest tokens first
    sums: Tensor  # [N, tiles] float32: the powers of a tile's logits above it, in the tile's own unit
    equal: Tensor  # [N, tiles] int32: how many of a tile have this rank


def truncate(
    logits: Tensor,  # [N, V]
    temperature: Tensor,  # [N] float32; 0 counts as 1
    highest: Tensor,  # [N, tiles] float32: the highest logit of each tile
    cuts: Cuts,
    tile: int,  # logits in one
) -> Border:
    """As the sampler of the CPU: first min_p, then top_k of what that leaves, then top_p of what that leaves.

    All rounds are run whatever the rows ask for, so that no row's result depends on what others do.
    """
    rows, vocab = logits.shape
    tiles, device = highest.shape[1], logits.device
    shift, rounds = ROUNDS[logits.dtype]
    kinds = [FIRST, *[BY_COUNT] * (rounds - 1), TURN, *[BY_MASS] * (rounds - 1)]
    numbers = torch.empty((len(kinds), rows, NUMBERS), dtype=torch.int64, device=device)
    above = torch.zeros((len(kinds), 2, rows, WAYS), dtype=torch.int64, device=device)  # counts and masses
    given = (logits, temperature, highest, *cuts)
    sizes = {
        "SHIFT": shift,
        "TILE": tile,
        "TILES": max(2, triton.next_power_of_2(tiles)),
        "WAYS": WAYS,
        "NUMBERS": NUMBERS,
    }
    for number, kind in enumerate(kinds):
        before = max(0, number - 1)
        _narrow[(tiles, rows)](
            *given,
            *(numbers[before], above[before], numbers[number], above[number]),
            *(vocab, logits.stride(0), tiles, kind),
            **sizes,
            num_warps=4,
        )
    found = Border(
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty_like(highest),
        torch.empty((rows, tiles), dtype=torch.int32, device=device),
    )
    _measure[(tiles, rows)](
        *given, numbers[-1], above[-1], *found, vocab, logits.stride(0), tiles, **sizes, num_warps=4
    )
    return found


@triton.jit
def rank_of(logits, SHIFT: tl.constexpr):
    """int32, in the order of the logits; equal for equal ones."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def logit_of(rank, SHIFT: tl.constexpr):
    bits = (rank << SHIFT) | tl.where(rank < 0, (1 << SHIFT) - 1, 0)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def power_of(logits, highest, temperature):
    """exp((logit - highest) / temperature): 1 at the highest logit, 0 where a logit is -inf, even if all are.

    Divided only after the subtraction, so that nothing overflows however small the temperature is.
    """
    top = tl.where(highest == float("-inf"), 0.0, highest)
    return tl.exp((logits - top) / tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def mass_of(ties, rank, top, heat, SHIFT: tl.constexpr):
    """Of so many logits of one rank, as float64; a rank below that of -inf, which nothing has, stands for no number."""
    power = power_of(logit_of(rank, SHIFT), top, heat).to(tl.float64)
    return tl.where(power == power, ties * power, 0.0)


@triton.jit
def _top_of(highest, row, tiles, TILES: tl.constexpr):
    each = tl.arange(0, TILES)
    return tl.max(tl.load(highest + row * tiles + each, mask=each < tiles, other=float("-inf")), 0)


@triton.jit
def _lowest_of(floor, row, top, heat, SHIFT: tl.constexpr):
    """The lowest rank that min_p leaves."""
    least = top + tl.load(floor + row) * tl.where(heat > 0, heat, 1.0)
    rank = rank_of(least, SHIFT)
    return tl.where(logit_of(rank, SHIFT) < least, rank + 1, rank).to(tl.int64)


@triton.jit
def _begin(temperature, highest, top_k, floor, row, tiles, SHIFT: tl.constexpr, TILES: tl.constexpr):
    """A row's search, in NUMBERS: a rank that is too low for the border, and one that is not; how many logits are above
    the first, how many above the second, and their mass; the measure that what lies above the border has to fall short
    of; and of top_k's border its rank and how many of those there are kept.
    """
    top = _top_of(highest, row, tiles, TILES)
    lowest = _lowest_of(floor, row, top, tl.load(temperature + row), SHIFT)
    zero = lowest * 0
    target = tl.load(top_k + row).to(tl.int64)
    return lowest - 2, rank_of(top, SHIFT).to(tl.int64), zero, zero, zero, target, zero, zero


@triton.jit
def _advance(numbers, above, rows, row, by_mass, WAYS: tl.constexpr, NUMBERS: tl.constexpr):
    """The search after a round whose measures are complete."""
    at = numbers + row * NUMBERS
    low, high, below, count = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    mass, target, border, ties = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7)
    each = tl.arange(0, WAYS)
    counts = tl.load(above + row * WAYS + each)
    masses = tl.load(above + (rows + row) * WAYS + each)
    measures = counts
    if by_mass:
        measures = masses
    step = (high - low + WAYS - 1) // WAYS
    is_too_low = (low + (each + 1) * step < high) & (each < WAYS - 1) & (measures >= target)
    short = tl.sum(is_too_low.to(tl.int64), 0)
    below = tl.where(short > 0, tl.sum(tl.where(each == short - 1, counts, 0), 0), below)
    is_pivot = low + (short + 1) * step < high
    count = tl.where(is_pivot, tl.sum(tl.where(each == short, counts, 0), 0), count)
    mass = tl.where(is_pivot, tl.sum(tl.where(each == short, masses, 0), 0), mass)
    high = tl.minimum(low + (short + 1) * step, high)
    return low + short * step, high, below, count, mass, target, border, ties


@triton.jit
def _top_k_ties(high, below, count, target, lowest):
    """How many of those at the border are among the k; none of what min_p has left out."""
    return tl.where(high < lowest, 0, tl.minimum(target, below) - count)


@triton.jit(do_not_specialize=["kind"])
def _narrow(
    logits,
    temperature,
    highest,
    top_k,
    top_p,
    floor,
    numbers_before,
    above_before,
    numbers,
    above,
    vocab,
    stride,
    tiles,
    kind,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    WAYS: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """One round of one tile of one row."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    heat = tl.load(temperature + row)
    top = _top_of(highest, row, tiles, TILES)
    if kind == 0:
        low, high, below, count, mass, target, border, ties = _begin(
            temperature, highest, top_k, floor, row, tiles, SHIFT, TILES
        )
    else:
        low, high, below, count, mass, target, border, ties = _advance(
            numbers_before, above_before, rows, row, kind == 3, WAYS, NUMBERS
        )
        if kind == 2:  # top_k's border is found, and with it what top_p is a share of
            ties = _top_k_ties(high, below, count, target, _lowest_of(floor, row, top, heat, SHIFT))
            left = mass.to(tl.float64) + mass_of(ties, high.to(tl.int32), top, heat, SHIFT) * UNIT
            share = tl.load(top_p + row).to(tl.float64) * SLACK
            target = tl.maximum((left * share).to(tl.int64), 1)  # of the most likely token something is always left
            border = high
            low = high - 1
            high = rank_of(top, SHIFT).to(tl.int64)
            count = count * 0
            mass = mass * 0
    if tile == 0:
        at = numbers + row * NUMBERS
        tl.store(at, low)
        tl.store(at + 1, high)
        tl.store(at + 2, below)
        tl.store(at + 3, count)
        tl.store(at + 4, mass)
        tl.store(at + 5, target)
        tl.store(at + 6, border)
        tl.store(at + 7, ties)
    step = (high - low + WAYS - 1) // WAYS
    # Most tiles have nothing above the lowest pivot.
    if (high - low > 1) & (rank_of(tl.load(highest + row * tiles + tile), SHIFT) > low + step):
        tokens = tile * TILE + tl.arange(0, TILE)
        values = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
        ranks = tl.where(tokens < vocab, rank_of(values, SHIFT), -2147483648)
        powers = power_of(values, top, heat)
        each = tl.arange(0, WAYS)
        counts = tl.zeros((WAYS,), tl.int64)
        masses = tl.zeros((WAYS,), tl.float64)
        for number in range(WAYS - 1):
            over = ranks > tl.minimum(low + (number + 1) * step, high).to(tl.int32)
            counts = tl.where(each == number, tl.sum(over.to(tl.int32), 0).to(tl.int64), counts)
            masses = tl.where(each == number, tl.sum(tl.where(over, powers, 0.0), 0).to(tl.float64), masses)
        tl.atomic_add(above + row * WAYS + each, counts, mask=each < WAYS - 1)
        tl.atomic_add(above + (rows + row) * WAYS + each, (masses * UNIT).to(tl.int64), mask=each < WAYS - 1)


@triton.jit
def _measure(
    logits,
    temperature,
    highest,
    top_k,
    top_p,
    floor,
    numbers,
    above,
    rank,
    ties,
    kept,
    equal,
    vocab,
    stride,
    tiles,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    WAYS: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """The border that was found, and what one tile has above it and there."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    heat = tl.load(temperature + row)
    top = _top_of(highest, row, tiles, TILES)
    lowest = _lowest_of(floor, row, top, heat, SHIFT)
    _, found, _, _, mass, target, border, most = _advance(numbers, above, rows, row, True, WAYS, NUMBERS)
    each = mass_of(1, found.to(tl.int32), top, heat, SHIFT) * UNIT
    wanted = tl.ceil((target - mass).to(tl.float64) / tl.where(each > 0, each, 1.0))
    wanted = tl.where(each > 0, tl.minimum(wanted, vocab * 1.0), vocab * 1.0).to(tl.int64)
    wanted = tl.where(found == border, tl.minimum(wanted, most), wanted)
    wanted = tl.where(found < lowest, 0, wanted)
    if tile == 0:
        tl.store(rank + row, found.to(tl.int32))
        tl.store(ties + row, wanted)
    at = row * tiles + tile
    own = tl.load(highest + at)
    if rank_of(own, SHIFT) < found:
        tl.store(kept + at, 0.0)
        tl.store(equal + at, 0)
    else:
        tokens = tile * TILE + tl.arange(0, TILE)
        values = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
        ranks = tl.where(tokens < vocab, rank_of(values, SHIFT), -2147483648)
        tl.store(kept + at, tl.sum(tl.where(ranks > found, power_of(values, own, heat), 0.0), 0))
        tl.store(equal + at, tl.sum((ranks == found).to(tl.int32), 0))
