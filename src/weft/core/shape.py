"""The shape of a step: the quantities that determine its time."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TILES_PER_WAVE = 16  # a wave has this many tiles; programs that split a context process whole tiles of queries
LEAST_WAVE_SHARE = 1 / 12  # of a wave's time: reading a context takes at least this, however few the queries


class StepShape(NamedTuple):
    """The quantities that determine the time of a step."""

    tokens: int = 0  # all tokens of the step
    pairs: float = 0.0  # query-key pairs of the prefill slices
    slices: int = 0  # prefill slices
    decodes: int = 0
    context: float = 0  # tokens of context that the decodes read
    reach: float = 0  # tokens of context that its prefill slices read, themselves included: once, or once per wave


def slice_pairs(first: int, count: int) -> float:
    """Query-key pairs of a prefill slice. Each token attends to all tokens before it and to itself."""
    return count * (first + (count + 1) / 2)


def slice_reach(first: int, count: int, wave: int) -> float:
    """Tokens of context that a prefill slice reads."""
    end = first + count
    if not wave:
        return end
    if 2 * count > wave:  # every wave reads the context up to its last query
        full, rest = divmod(count, wave)
        return full * first + wave * full * (full + 1) / 2 + (end if rest else 0)
    return end * (
        2 * -(-TILES_PER_WAVE * count // wave) / TILES_PER_WAVE
        if 2 * TILES_PER_WAVE * count > wave
        else LEAST_WAVE_SHARE
    )


def with_slice(shape: StepShape, first: int, count: int, wave: int = 0) -> StepShape:
    """The shape with one more prefill slice."""
    tokens, pairs, slices, decodes, context, reach = shape
    pairs += slice_pairs(first, count)
    return StepShape(tokens + count, pairs, slices + 1, decodes, context, reach + slice_reach(first, count, wave))


def step_shape(decodes: NDArray[np.int64], slices: Sequence[tuple[int, int]], wave: int) -> StepShape:
    """The shape of a step: positions of its decodes' first tokens, and (first, count) of its prefill slices."""
    context = int(decodes.sum()) + len(decodes)
    if not slices:  # most steps
        return decodes_alone(len(decodes), context)
    return StepShape(
        tokens=len(decodes) + sum(count for _, count in slices),
        pairs=sum(slice_pairs(first, count) for first, count in slices),
        slices=len(slices),
        decodes=len(decodes),
        context=context,
        reach=sum(slice_reach(first, count, wave) for first, count in slices),
    )


def decodes_alone(count: int, context: float) -> StepShape:
    """A step of `count` decodes that read `context` tokens in total, without prefill."""
    return StepShape(tokens=count, decodes=count, context=context)
