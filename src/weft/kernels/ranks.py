"""Ranks of logits and units of probability: whole numbers, so that sums do not depend on the order of addition.

Imported only where there is a GPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

UNIT = tl.constexpr(float(1 << 40))  # units of probability of the most likely token; 2^21 such tokens fit into an int64


@triton.jit
def rank_of(logits, SHIFT: tl.constexpr):
    """int32 ranks in the order of the logits; equal for equal logits."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def logit_of(rank, SHIFT: tl.constexpr):
    bits = (rank << SHIFT) | tl.where(rank < 0, (1 << SHIFT) - 1, 0)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def power_of(logits, highest, temperature):
    """exp((logit - highest) / temperature): 1 at the highest logit, 0 where a logit is -inf, even if all are.

    Divides only after the subtraction, so that nothing overflows, however small the temperature is.
    """
    top = tl.where(highest == float("-inf"), 0.0, highest)
    return tl.exp((logits - top) / tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def units_of(logits, highest, temperature):
    """`power_of` in units, as int64: sums do not depend on the order of addition."""
    return (power_of(logits, highest, temperature) * UNIT).to(tl.int64)


@triton.jit
def mass_of(ties, rank, top, heat, SHIFT: tl.constexpr):
    """Units of `ties` logits of one rank, as float64. A rank below that of -inf is no number and has no mass."""
    logit = logit_of(rank, SHIFT)
    is_number = logit == logit
    units = units_of(tl.where(is_number, logit, float("-inf")), top, heat)
    return tl.where(is_number, ties * units.to(tl.float64), 0.0)
