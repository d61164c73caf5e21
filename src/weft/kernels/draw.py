"""Drawing one token a row from logits, without sorting and without the host.

A row's token is the inverse of its cumulative distribution at one uniform number. The vocabulary is read in tiles: one
kernel sums each tile up, the other finds the tile and then the token in it. A row never sees another.
Only imported where there is a GPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

TILE = 2048  # logits; the second kernel reads one such tile a row again


def draw(
    logits: Tensor,  # [N, V]
    temperature: Tensor,  # [N] float32; 0: greedy, the lowest token among equals
    uniform: Tensor,  # [N] float32 or float64 in [0, 1)
    last_token: Tensor,  # [S] int32 or int64, where each row's token is also written
    slots: Tensor,  # [N] int32: each row's place in last_token; negative: padding, which is written nowhere
    tokens: Tensor | None = None,  # [N] int32, where to put them; may be the host's pinned memory
) -> Tensor:  # [N] int32
    """Tokens from softmax(logits / temperature). A token of probability 0 is never drawn."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    if tokens is None:
        tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        tiles = triton.cdiv(vocab, TILE)
        # Not in one: for another alignment of the second, both kernels would be compiled anew.
        highest, sums = (torch.empty((rows, tiles), dtype=torch.float32, device=logits.device) for _ in range(2))
        places = torch.empty((rows, tiles), dtype=torch.int32, device=logits.device)
        _summarise[(tiles, rows)](
            logits, temperature, highest, sums, places, vocab, logits.stride(0), TILE=TILE, num_warps=4
        )
        _select[(rows,)](
            logits,
            temperature,
            uniform,
            highest,
            sums,
            places,
            tokens,
            last_token,
            slots,
            vocab,
            logits.stride(0),
            tiles,
            TILE=TILE,
            TILES=max(2, triton.next_power_of_2(tiles)),
            num_warps=4,
        )
    return tokens


@triton.jit
def _powers(logits, highest, temperature):
    """exp((logit - highest) / temperature): 1 at the highest logit, 0 where a logit is -inf, even if all are.

    Divided only after the subtraction, so that nothing overflows however small the temperature is.
    """
    top = tl.where(highest == float("-inf"), 0.0, highest)
    return tl.exp((logits - top) / tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def _summarise(logits, temperature, highest, sums, places, vocab, stride, TILE: tl.constexpr):
    """Of one tile of one row: the highest logit, the first place that has it, and the sum of the powers."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    tokens = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(values, 0)
    total = tl.sum(_powers(values, top, tl.load(temperature + row)), 0)
    at = row * tl.num_programs(0) + tile
    tl.store(highest + at, top)
    tl.store(sums + at, total)
    tl.store(places + at, tl.min(tl.where(values == top, tokens, vocab), 0))


@triton.jit
def _select(
    logits,
    temperature,
    uniform,
    highest,
    sums,
    places,
    out,
    last_token,
    slots,
    vocab,
    stride,
    tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """One row's token. Masses are added in float64: in float32 the borders between tokens would shift."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    each = tl.arange(0, TILES)
    at = row * tiles + each
    tops = tl.load(highest + at, mask=each < tiles, other=float("-inf"))
    top = tl.max(tops, 0)
    first = tl.load(places + at, mask=each < tiles, other=vocab)
    greedy = tl.min(tl.where(tops == top, first, vocab), 0)

    # The tile: the first whose cumulative mass exceeds the target. Where rounding leaves none, the last with any mass.
    factors = _powers(tops, top, heat).to(tl.float64)
    mass = factors * tl.load(sums + at, mask=each < tiles, other=0.0).to(tl.float64)
    cumulative = tl.cumsum(mass, 0)
    target = tl.load(uniform + row).to(tl.float64) * tl.sum(mass, 0)
    some = mass > 0
    tile = tl.min(tl.where(some & (cumulative > target), each, TILES), 0)
    tile = tl.where(tile < TILES, tile, tl.max(tl.where(some, each, 0), 0))
    chosen = each == tile
    before = tl.sum(tl.where(chosen, cumulative - mass, 0.0), 0)
    factor = tl.sum(tl.where(chosen, factors, 0.0), 0)
    tile_top = tl.max(tl.where(chosen, tops, float("-inf")), 0)

    # The token in it, in the same way, in the tile's own unit of mass.
    tokens = tile * TILE + tl.arange(0, TILE)
    values = tl.load(logits + row * stride + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    powers = _powers(values, tile_top, heat)
    target = (target - before) / tl.where(factor > 0, factor, 1.0)
    possible = powers > 0
    beyond = possible & (tl.cumsum(powers.to(tl.float64), 0) > target)
    drawn = tl.min(tl.where(beyond, tokens, vocab), 0)
    drawn = tl.where(drawn < vocab, drawn, tl.max(tl.where(possible, tokens, 0), 0))

    token = tl.where(heat > 0, drawn, greedy)
    token = tl.minimum(token, vocab - 1)  # only a row of NaN comes here with more
    tl.store(out + row, token)
    slot = tl.load(slots + row).to(tl.int64)
    tl.store(last_token + slot, token, mask=slot >= 0)
