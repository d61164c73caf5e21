"""StepMix: the rows of a step that calibration measures, and the ranges that mixes are drawn from."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from weft.core import StepShape
from weft.core.shape import step_shape

LADDER_CONTEXT = 256  # tokens of context of each decode of a growing batch
LADDER_SLICE = 16  # tokens of a slice after a growing context


class StepLimits(NamedTuple):
    """Limits of a step."""

    rows: int
    blocks: int  # of the KV cache
    block_size: int
    length: int  # tokens of one row, with its context
    tokens: int

    @property
    def slice_tokens(self) -> int:
        """Tokens of the longest slice. Slices may not use the blocks that decodes write to."""
        return min(self.tokens, self.length, max(1, self.blocks - self.rows) * self.block_size)

    @property
    def context(self) -> int:
        """Tokens of the longest context, in whole blocks, that leaves room for one more token."""
        return (self.length - 1) // self.block_size * self.block_size

    def whole(self, tokens: float) -> int:
        """A context of about `tokens` tokens, in whole blocks."""
        return min(int(tokens) // self.block_size * self.block_size, self.context)

    def allow(self, mix: "StepMix") -> bool:
        ends = [context + 1 for context in mix.decodes] + [first + count for first, count in mix.slices]
        written = sum(-(-count // self.block_size) for _, count in mix.slices)
        return (
            0 < len(ends) <= self.rows
            and mix.tokens <= self.tokens
            and max(ends) <= self.length
            and written <= max(1, self.blocks - self.rows)
            and sum(-(-end // self.block_size) for end in ends) <= self.blocks
        )


class StepMix(NamedTuple):
    """The rows of a step. Contexts are whole blocks (not in the warm-up), so that no row writes to another's block."""

    decodes: tuple[int, ...] = ()  # tokens of context of each decode
    slices: tuple[tuple[int, int], ...] = ()  # tokens of context and tokens of the slice

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(count for _, count in self.slices)

    def shape(self, wave: int = 0) -> StepShape:
        return step_shape(np.array(self.decodes, np.int64), self.slices, wave)


class MixRanges(NamedTuple):
    """Ranges of random mixes: contexts uniform on a logarithmic scale, rows and tokens like on a busy server."""

    bounds: StepLimits
    slice_tokens: int
    decodes: int
    context: int  # of decodes
    slice_context: int

    def draw(self, random: np.random.Generator) -> StepMix:
        kind = random.integers(8)  # 0 to 2: decodes, 3: one slice, 4: several slices, 5 to 7: decodes and slices
        decodes: tuple[int, ...] = ()
        slices: tuple[tuple[int, int], ...] = ()
        if kind not in (3, 4):
            typical = _log_uniform(random, 32, self.context)
            spread = random.uniform(0.5, 1.5, _mostly_large(random, self.decodes))
            decodes = tuple(self.bounds.whole(share * typical) for share in spread)
        if kind > 2:
            number = 1 + (_log_uniform(random, 1, 8) if kind == 4 else int(kind == 7))
            behind = [self.bounds.whole(_log_uniform(random, 8, self.slice_context)) for _ in range(number)]
            slices = tuple((first, _mostly_large(random, self.slice_tokens)) for first in behind)
        return StepMix(decodes, slices)


def ladders(bounds: StepLimits) -> list[tuple[int, int, Callable[[int], StepMix]]]:
    """Directions to grow in, in the order of MixRanges: first size, last size, and the mix of a size."""
    behind = bounds.whole(LADDER_CONTEXT)
    short = min(LADDER_SLICE, bounds.slice_tokens)
    return [
        (1, bounds.slice_tokens, lambda size: StepMix(slices=((0, size),))),
        (1, bounds.rows, lambda size: StepMix(decodes=(behind,) * size)),
        (bounds.block_size, bounds.context, lambda size: StepMix(decodes=(bounds.whole(size),))),
        (bounds.block_size, bounds.context, lambda size: StepMix(slices=((bounds.whole(size), short),))),
    ]


def _mostly_large(random: np.random.Generator, high: int) -> int:
    """A random whole number from 1 to high; half of the draws are above a quarter of high."""
    return 1 + int((high - 1) * random.uniform() ** 2)


def _log_uniform(random: np.random.Generator, low: int, high: int) -> int:
    """A random whole number from min(low, high) to high, uniform on a logarithmic scale."""
    low = min(low, high)
    return min(high, int(low * math.exp(random.uniform(0, math.log((high + 1) / low)))))
