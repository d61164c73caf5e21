"""Truncating distributions (min_p, top_k, top_p) without sorting them.

A row keeps the logits above a border, and a certain number of the logits at the border, lowest token ids first. The
border is searched for among the ranks of all values that a logit can have. Each round divides the search interval by
WAYS, for all tiles of all rows at once. For top_k it counts the logits above each pivot, for top_p it adds up their
probability. Both are sums of integers, so no result depends on the order of addition, which differs between logit types
and between kernels. Tiles without a logit in the interval are not read. The interval starts narrow: with the logits of
a real model, most rounds read next to nothing. Imported only where there is a GPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from weft.kernels.ranks import logit_of, mass_of, power_of, rank_of, units_of

WAYS = 16
EVERYTHING = tl.constexpr(1 << 62)  # more units than a row can have
SLACK = tl.constexpr(1 - 1e-6)  # factor on top_p, which float32 may have rounded up: 0.2 of five equal tokens is one
# By logit type: the bits of float32 that the type lacks, which ranks leave out; and the rounds until one rank is left.
ROUNDS = {torch.bfloat16: (16, 4), torch.float16: (13, 5), torch.float32: (0, 8)}
# Numbers of state per row in the searches for the top_k border and the top_p border: see `_counted` and `_weighed`.
COUNTING, WEIGHING = tl.constexpr(4), tl.constexpr(6)
PROGRAMS_PER_ROUND = 2048  # about as many as can run at the same time
WARPS_PER_PROGRAM = 2


class TruncationParams(NamedTuple):
    """top_k, top_p and min_p of each row: which tokens it may sample. All fields are [N]."""

    top_k: Tensor  # int32: number of tokens; more than the vocabulary: all
    top_p: Tensor  # float32: share of the probability; 2: all
    log_min_p: Tensor  # float32; -inf: all


class Border(NamedTuple):
    """The border of each row, and what each tile keeps."""

    rank: Tensor  # [N] int32: logits that rank higher are kept
    ties: Tensor  # [N] int64: number of logits of exactly this rank that are kept, lowest token ids first
    sums: Tensor  # [N, tiles] int64: units of the tile's logits above the border; the tile's highest logit has UNIT
    equal: Tensor  # [N, tiles] int32: number of the tile's logits with exactly this rank


def truncate(
    logits: Tensor,  # [N, V]
    temperature: Tensor,  # [N] float32; 0 counts as 1
    highest: Tensor,  # [N, tiles] float32: highest logit of each tile
    sums: Tensor,  # [N, tiles] int64: units of the tile's logits; the tile's highest logit has UNIT
    truncation: TruncationParams,
    tile: int,  # logits per tile
) -> Border:
    """Same order as the CPU sampler: first min_p, then top_k of what min_p keeps, then top_p of what top_k keeps.

    All rounds run whatever the rows ask for, so that no row's result depends on other rows.
    """
    rows, vocab = logits.shape
    tiles, device = highest.shape[1], logits.device
    shift, rounds = ROUNDS[logits.dtype]
    counting = torch.empty((rounds, rows, COUNTING.value), dtype=torch.int64, device=device)
    weighing = torch.empty((rounds, rows, WEIGHING.value), dtype=torch.int64, device=device)
    targets = torch.empty(rows, dtype=torch.int64, device=device)
    counts, masses = torch.zeros((2, rounds, rows, WAYS), dtype=torch.int64, device=device)
    found = Border(
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty_like(sums),
        torch.empty((rows, tiles), dtype=torch.int32, device=device),
    )
    given = (logits, temperature, highest)
    sizes = {"SHIFT": shift, "num_warps": WARPS_PER_PROGRAM}
    reading = {"TILE": tile, "WAYS": WAYS, **sizes}
    every = {"TILES": max(2, triton.next_power_of_2(tiles))}
    layout = (vocab, logits.stride(0), tiles)
    grid = (min(tiles, triton.cdiv(PROGRAMS_PER_ROUND, rows)), rows)
    _begin[(rows,)](temperature, highest, sums, *truncation, counting, targets, vocab, tiles, **sizes, **every)
    for number in range(rounds):
        before = max(0, number - 1)
        states = (counting[before], counts[before], counting[number], counts[number])
        _count[grid](logits, highest, truncation.top_k, *states, *layout, number, **reading)
    for number in range(rounds):
        before = max(0, number - 1)
        states = (weighing[before], masses[before], weighing[number], masses[number])
        _weigh[grid](
            *given, *truncation, counting[-1], counts[-1], targets, *states, *layout, number, **reading, **every
        )
    _measure[grid](
        *given, truncation.top_p, truncation.log_min_p, weighing[-1], masses[-1], *found, *layout, **reading, **every
    )
    return found


@triton.jit
def _top_of(highest, row, tiles, TILES: tl.constexpr):
    each = tl.arange(0, TILES)
    return tl.max(tl.load(highest + row * tiles + each, mask=each < tiles, other=float("-inf")), 0)


@triton.jit
def _lowest_of(floor, row, top, heat, SHIFT: tl.constexpr):
    """The lowest rank that min_p keeps."""
    least = top + tl.load(floor + row) * tl.where(heat > 0, heat, 1.0)
    rank = rank_of(least, SHIFT)
    return tl.where(logit_of(rank, SHIFT) < least, rank + 1, rank).to(tl.int64)


@triton.jit
def _top_k_ties(high, below, count, most, lowest):
    """Number of logits at the border that top_k keeps; 0 if min_p has removed this rank."""
    return tl.where(high < lowest, 0, tl.minimum(most, below) - count)


@triton.jit
def _share_of(top_p, row):
    return tl.load(top_p + row).to(tl.float64) * SLACK


@triton.jit
def _target_of(left, share):
    """The share of top_p, in units, of the units that are left."""
    return tl.maximum((left * share).to(tl.int64), 1)  # at least one unit, so that the most likely token is always kept


@triton.jit
def _begin(
    temperature,
    highest,
    sums,
    top_k,
    top_p,
    floor,
    counting,
    targets,
    vocab,
    tiles,
    SHIFT: tl.constexpr,
    TILES: tl.constexpr,
):
    """Starts a row's top_k search. Stores its top_p target, or -1 if min_p or top_k may remove tokens first."""
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, TILES)
    exists = each < tiles
    heights = tl.load(highest + row * tiles + each, mask=exists, other=float("-inf"))
    top = tl.max(heights, 0)
    heat = tl.load(temperature + row)
    lowest = _lowest_of(floor, row, top, heat, SHIFT)
    most = tl.load(top_k + row).to(tl.int64)
    # If n tiles have a highest logit of at least h, then at least n logits are at least h.
    as_high = tl.sum(((heights[None, :] >= heights[:, None]) & exists[None, :]).to(tl.int32), 1)
    bound = rank_of(tl.max(tl.where(exists & (as_high >= most), heights, float("-inf")), 0), SHIFT).to(tl.int64)
    is_bound = (most <= tiles) & (bound >= lowest)
    at = counting + row * COUNTING
    tl.store(at, tl.where(is_bound, bound - 1, lowest - 2))
    tl.store(at + 1, tl.where(most > vocab, lowest - 1, rank_of(top, SHIFT).to(tl.int64)))
    tl.store(at + 2, tl.where(is_bound, most, 0))
    tl.store(at + 3, most * 0)
    factors = power_of(heights, top, heat).to(tl.float64)
    left = tl.sum(factors * tl.load(sums + row * tiles + each, mask=exists, other=0).to(tl.float64), 0)
    is_whole = (most > vocab) & (tl.load(floor + row) == float("-inf"))
    tl.store(targets + row, tl.where(is_whole, _target_of(left, _share_of(top_p, row)), -1))


@triton.jit
def _narrow(low, high, found, enough, WAYS: tl.constexpr):
    """Narrows an interval of ranks to the part with the border. `found` holds what lies above each pivot: enough above
    all pivots below this part, not enough above the pivot that ends it. Returns the number of that pivot, and the part.
    """
    each = tl.arange(0, WAYS)
    step = (high - low + WAYS - 1) // WAYS
    is_pivot = (low + (each + 1) * step < high) & (each < WAYS - 1)
    number = tl.sum((is_pivot & (found >= enough)).to(tl.int64), 0)
    return number, low + number * step, tl.minimum(low + (number + 1) * step, high)


@triton.jit
def _add_above(found, ranks, amounts, low, high, step, pivots, WAYS: tl.constexpr):
    """Adds to `found`, for each pivot of an interval, the amounts of the ranks above it."""
    each = tl.arange(0, WAYS)
    for pivot in range(pivots):
        above = ranks > tl.minimum(low + (pivot + 1) * step, high).to(tl.int32)
        found += tl.where(each == pivot, tl.sum(tl.where(above, amounts, 0), 0), 0)
    return found


@triton.jit
def _at(found, number, WAYS: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, WAYS) == number, found, 0), 0)


@triton.jit
def _counted(counting, counts, top_k, row, WAYS: tl.constexpr):
    """State of the search for the top_k border after a round with complete counts: a rank that is too low for the
    border, a rank that is not, and the number of logits above each of the two.
    """
    at = counting + row * COUNTING
    low, high, below, count = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    found = tl.load(counts + row * WAYS + tl.arange(0, WAYS))
    number, new_low, new_high = _narrow(low, high, found, tl.load(top_k + row), WAYS)
    below = tl.where(number > 0, _at(found, number - 1, WAYS), below)
    count = tl.where(new_high < high, _at(found, number, WAYS), count)
    return new_low, new_high, below, count


@triton.jit
def _weighed(weighing, masses, top_p, row, top, heat, SHIFT: tl.constexpr, WAYS: tl.constexpr):
    """State of the search for the top_p border after a round with complete masses: a rank that is too low for the
    border; a rank that is not; the mass above the second rank; the target, which the mass above the border must not
    reach; the rank of the top_k border; and the number of logits kept at that rank.
    """
    at = weighing + row * WEIGHING
    low, high, mass = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    target, border, ties = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    found = tl.load(masses + row * WAYS + tl.arange(0, WAYS))
    if target < 0:  # the first round has added up the mass that top_k keeps
        left = _at(found, WAYS - 1, WAYS).to(tl.float64)
        left += mass_of(ties, border.to(tl.int32), top, heat, SHIFT)
        target = _target_of(left, _share_of(top_p, row))
    number, new_low, new_high = _narrow(low, high, found, target, WAYS)
    mass = tl.where(new_high < high, _at(found, number, WAYS), mass)
    return new_low, new_high, mass, target, border, ties


@triton.jit
def _turn(border, ties, target, top_k, top_p, row, top, heat, vocab, SHIFT: tl.constexpr):
    """Starts the search for the top_p border. Returns the interval and the target (-1: the first round finds it)."""
    share = _share_of(top_p, row)
    # All tokens less likely than this have together less than half of the probability that top_p may leave out.
    tokens = tl.minimum(tl.load(top_k + row), vocab)
    unlikely = tl.log((tl.maximum(1 - share, 1e-6) / (2.0 * tokens)).to(tl.float32))
    bound = rank_of(top + unlikely * tl.where(heat > 0, heat, 1.0), SHIFT).to(tl.int64)
    is_asked = share < 1  # otherwise the top_p border is the top_k border
    low = tl.where(is_asked, tl.maximum(border, bound), border) - 1
    high = tl.where(is_asked, rank_of(top, SHIFT).to(tl.int64), border)
    return low, high, tl.where(is_asked, target, EVERYTHING)


@triton.jit
def _ranks(logits, row, tile, vocab, stride, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """The logits of a tile and their ranks. Places beyond the vocabulary rank below all logits."""
    tokens = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    return values, tl.where(tokens < vocab, rank_of(values, SHIFT), -2147483648)


@triton.jit(do_not_specialize=["number"])
def _count(
    logits,
    highest,
    top_k,
    counting_before,
    counts_before,
    counting,
    counts,
    vocab,
    stride,
    tiles,
    number,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
):
    """One round over some tiles of one row: counts the logits above each pivot."""
    row = tl.program_id(1).to(tl.int64)
    at = counting + row * COUNTING
    if number == 0:
        low, high = tl.load(at), tl.load(at + 1)
    else:
        low, high, below, count = _counted(counting_before, counts_before, top_k, row, WAYS)
        if tl.program_id(0) == 0:
            tl.store(at, low)
            tl.store(at + 1, high)
            tl.store(at + 2, below)
            tl.store(at + 3, count)
    step = (high - low + WAYS - 1) // WAYS
    pivots = tl.minimum(high - low, WAYS).to(tl.int32) - 1
    each = tl.arange(0, WAYS)
    found = tl.zeros((WAYS,), tl.int64)
    if pivots > 0:
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            if rank_of(tl.load(highest + row * tiles + tile), SHIFT) > low + step:
                _, ranks = _ranks(logits, row, tile, vocab, stride, SHIFT, TILE)
                found = _add_above(found, ranks, 1, low, high, step, pivots, WAYS)
        tl.atomic_add(counts + row * WAYS + each, found, mask=found > 0)


@triton.jit(do_not_specialize=["number"])
def _weigh(
    logits,
    temperature,
    highest,
    top_k,
    top_p,
    floor,
    counting,
    counts,
    targets,
    weighing_before,
    masses_before,
    weighing,
    masses,
    vocab,
    stride,
    tiles,
    number,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    WAYS: tl.constexpr,
):
    """One round over some tiles of one row: adds up the probability above each pivot."""
    row = tl.program_id(1).to(tl.int64)
    heat = tl.load(temperature + row)
    top = _top_of(highest, row, tiles, TILES)
    if number == 0:
        _, border, below, count = _counted(counting, counts, top_k, row, WAYS)
        lowest = _lowest_of(floor, row, top, heat, SHIFT)
        ties = _top_k_ties(border, below, count, tl.load(top_k + row), lowest)
        mass = count * 0
        low, high, target = _turn(border, ties, tl.load(targets + row), top_k, top_p, row, top, heat, vocab, SHIFT)
    else:
        low, high, mass, target, border, ties = _weighed(
            weighing_before, masses_before, top_p, row, top, heat, SHIFT, WAYS
        )
    if tl.program_id(0) == 0:
        at = weighing + row * WEIGHING
        tl.store(at, low)
        tl.store(at + 1, high)
        tl.store(at + 2, mass)
        tl.store(at + 3, target)
        tl.store(at + 4, border)
        tl.store(at + 5, ties)
    step = (high - low + WAYS - 1) // WAYS
    pivots = tl.minimum(high - low, WAYS).to(tl.int32) - 1
    lowest_of_all = low + step  # lowest rank above which probability is added up
    if target < 0:
        lowest_of_all = tl.minimum(lowest_of_all, border)
    each = tl.arange(0, WAYS)
    found = tl.zeros((WAYS,), tl.int64)
    if (pivots > 0) | (target < 0):
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            if rank_of(tl.load(highest + row * tiles + tile), SHIFT) > lowest_of_all:
                values, ranks = _ranks(logits, row, tile, vocab, stride, SHIFT, TILE)
                units = units_of(values, top, heat)
                found = _add_above(found, ranks, units, low, high, step, pivots, WAYS)
                if target < 0:
                    over = ranks > border.to(tl.int32)
                    found += tl.where(each == WAYS - 1, tl.sum(tl.where(over, units, 0), 0), 0)
        tl.atomic_add(masses + row * WAYS + each, found, mask=found > 0)


@triton.jit
def _measure(
    logits,
    temperature,
    highest,
    top_p,
    floor,
    weighing,
    masses,
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
):
    """Stores the border that was found; and for some tiles the mass above it and the number of logits at it."""
    row = tl.program_id(1).to(tl.int64)
    heat = tl.load(temperature + row)
    top = _top_of(highest, row, tiles, TILES)
    lowest = _lowest_of(floor, row, top, heat, SHIFT)
    _, found, mass, target, border, most = _weighed(weighing, masses, top_p, row, top, heat, SHIFT, WAYS)
    each = mass_of(1, found.to(tl.int32), top, heat, SHIFT)
    wanted = tl.ceil((target - mass).to(tl.float64) / tl.where(each > 0, each, 1.0))
    wanted = tl.where(each > 0, tl.minimum(wanted, vocab * 1.0), vocab * 1.0).to(tl.int64)
    wanted = tl.where(found == border, tl.minimum(wanted, most), wanted)
    wanted = tl.where(found < lowest, 0, wanted)
    if tl.program_id(0) == 0:
        tl.store(rank + row, found.to(tl.int32))
        tl.store(ties + row, wanted)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at = row * tiles + tile
        own = tl.load(highest + at)
        if rank_of(own, SHIFT) < found:
            tl.store(kept + at, 0)
            tl.store(equal + at, 0)
        else:
            values, ranks = _ranks(logits, row, tile, vocab, stride, SHIFT, TILE)
            tl.store(kept + at, tl.sum(tl.where(ranks > found, units_of(values, own, heat), 0), 0))
            tl.store(equal + at, tl.sum((ranks == found).to(tl.int32), 0))
