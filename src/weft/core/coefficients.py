"""Coefficients: the seconds of a step from its shape.

They follow the hardware. A forward pass reads all weights once and does arithmetic for every token. The longer of the
two bounds the pass. Attention is added: prefill costs time per query-key pair, decode per token of context.

Some GPU costs grow in lumps. The queries of a prefill slice go through attention in waves. Each wave reads all the
context before it, so one query more than a full wave costs as much as another wave. If a slice has at most half a wave,
its context is split among the programs that would be idle. A step may also be padded to more tokens (`grain`).
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from weft.core.shape import StepShape, slice_pairs, slice_reach, with_slice

Array = NDArray[np.float64]
# The first decodes of a step cost more than further ones. H200 with Llama-3-8B: 30 us each up to about 16, then 11 us.
FEW_DECODES = 16
WORTHWHILE_GAIN = 1.02  # factor in tokens per second that a smaller slice must gain to be chosen instead of the largest


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per unit, if not stated otherwise."""

    fixed: float  # per step, whatever it carries
    weights: float  # reading all weights
    token: float  # arithmetic per token
    pair: float  # per query-key pair in a prefill
    slice: float  # per prefill slice
    decode: float  # per decode
    context: float  # per token of context that a decode reads
    reach: float = 0.0  # per token of context that a wave of a prefill slice reads, however many queries it has
    prefill: float = 0.0  # per step with prefill slices, however many: host time for which the device waits
    few: float = 0.0  # per decode, for the first FEW_DECODES decodes; added to `decode`
    # Tokens, not seconds. A step with a prefill is timed as if its tokens were rounded up to a multiple of `grain`.
    grain: int = field(default=1, kw_only=True)
    # Queries, not seconds. So many queries of a slice read the context together; 0: all of them.
    wave: int = field(default=0, kw_only=True)
    # Factors for steps with prefill, one per number of grains; larger steps use the last. The time of matrix products
    # does not grow evenly: on an H200, 512 tokens take 5% less than the line through all sizes. (): no correction.
    sizes: tuple[float, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))  # JSON has lists
        if not all(0 < factor < math.inf for factor in self.sizes):
            raise ValueError(f"sizes={self.sizes} must be factors above 0")
        for name, value in zip(NAMES, self.vector, strict=True):
            if not 0 <= value < math.inf:
                raise ValueError(f"coefficient {name}={value} must be a number of seconds, at least 0")
        if self.grain < 1 or self.wave < 0:
            raise ValueError(f"grain={self.grain} must be at least 1 and wave={self.wave} at least 0 tokens")

    @property
    def vector(self) -> tuple[float, ...]:
        """All coefficients in seconds, in the order of NAMES."""
        return astuple(self)[: len(NAMES)]

    def with_vector(self, vector: Sequence[float]) -> "Coefficients":
        """A copy with other seconds and the same grain, wave and sizes."""
        return Coefficients(*vector, grain=self.grain, wave=self.wave, sizes=self.sizes)

    @property
    def wave_pair(self) -> float:
        """Seconds per query-key pair for reading context in a full wave, in addition to `pair`."""
        return self.reach / self.wave if self.wave else 0.0

    @property
    def smallest_step(self) -> float:
        """Seconds of a step that is bound by reading the weights, without its rows."""
        return self.fixed + self.weights

    def with_slice(self, shape: StepShape, first: int, count: int) -> StepShape:
        return with_slice(shape, first, count, self.wave)

    def padded(self, shape: StepShape) -> StepShape:
        """The shape with its tokens rounded up to a multiple of `grain`, if it has prefill slices."""
        return (
            shape if self.grain == 1 or not shape.slices else shape._replace(tokens=self._padded_tokens(shape.tokens))
        )

    def _padded_tokens(self, tokens: int) -> int:
        """Tokens rounded up to a multiple of `grain`."""
        return -(-tokens // self.grain) * self.grain

    def predict(self, shape: StepShape) -> float:
        tokens, pairs, slices, decodes, context, reach = shape
        factor = 1.0
        if slices:
            tokens = self._padded_tokens(tokens)
            factor = self._size_factor(tokens)
        return factor * (
            self.fixed
            + max(self.weights, self.token * tokens)
            + self.pair * pairs
            + self.slice * slices
            + self.context * context
            + self.reach * reach
            + (self.prefill if slices else 0.0)
            + self.decode_seconds(decodes)
        )

    def size_factor(self, shape: StepShape) -> float:
        """Factor by which a step of this size takes longer than the line through all sizes."""
        return self._size_factor(self._padded_tokens(shape.tokens)) if shape.slices else 1.0

    def _size_factor(self, padded_tokens: int) -> float:
        return self.sizes[min(padded_tokens // self.grain, len(self.sizes)) - 1] if self.sizes else 1.0

    def decode_seconds(self, decodes: int) -> float:
        """Seconds that decodes add to a step, without reading their contexts."""
        return self.decode * decodes + self.few * min(decodes, FEW_DECODES)

    def prefill_seconds(self, first: int, count: int) -> float:
        """Seconds that `count` tokens from position `first` add to steps bound by arithmetic, in full waves."""
        return self.token * count + (self.pair + self.wave_pair) * slice_pairs(first, count)

    def prompt_seconds(self, first: Array, remaining: Array) -> Array:
        """Seconds to prefill `remaining` tokens from `first`, by prompt. Half of the last wave and grain is padding."""
        seconds = self.token * remaining + (self.pair + self.wave_pair) * remaining * (first + (remaining + 1) / 2)
        if self.wave:
            lump = self.token * self.grain + self.reach * (first + remaining)
            seconds += np.minimum(1.0, remaining / self.wave) / 2 * lump
        return seconds

    def overhead(self, decodes: int, context: float, reach: float) -> float:
        """Seconds of a step with a prefill that are not prefill work.

        `context` is read by the decodes, `reach` by the slice. With waves, half of one wave is counted.
        """
        read = self.reach * reach * (0.5 if self.wave else 1.0)
        return (
            self.fixed
            + self.prefill
            + self.slice
            + self.token * decodes
            + self.decode_seconds(decodes)
            + self.context * context
            + read
        )

    def least_step(self, decodes: int, context: float, reach: float) -> float:
        """Seconds of a step with these decodes and almost no prefill."""
        if self._is_lumpy:
            first = max(0, int(reach) - 1)  # the shape of a step with one slice of one token, without detours
            read = slice_reach(first, 1, self.wave)
            return self.predict(StepShape(decodes + 1, first + 1.0, 1, decodes, context, read))
        return self.overhead(decodes, context, reach) + max(0.0, self.weights - self.token * decodes)

    def slice_work(self, tokens: int, reach: float) -> float:
        """Seconds of prefill work in a slice of a prompt of `reach` tokens. Waves count at the middle of the prompt."""
        return (self.token + self.wave_pair * reach / 2) * max(0, tokens)

    def pace(self, decodes: int, context: float, reach: float, tokens: int, limit: float) -> float:
        """Share of the device's time that is left for prefill, in steps of at most `limit` seconds with these decodes.

        A slice has at most `tokens` tokens, of a prompt with `reach` tokens. 0 if the decodes fill the step.
        """
        least = self.least_step(decodes, context, reach)
        if least > limit:
            return 0.0
        if self._is_lumpy:
            most = max(1, tokens)
            middle = self._pace_at(decodes, context, int(reach / 2), most, limit)
            return min(middle, self._pace_at(decodes, context, int(reach), most, limit))
        overhead = self.overhead(decodes, context, reach)
        # If `tokens` limits the step, attention grows with the prompt: a quarter of the final context is counted.
        work = (self.token + self.pair * reach / 4) * max(0, tokens)
        full = max(least, overhead + work)
        return work / full if full < limit else 1 - overhead / limit

    def small_slice_work(self, tokens: int) -> float:
        """Seconds of prefill work in a small slice, without its attention."""
        return tokens * self.token

    def most_small_slice_pace(self, tokens: int) -> float:
        """Bound of the pace with a small slice in each step, fast to compute: every step reads the weights."""
        return math.inf if self.sizes else self.small_slice_work(tokens) / max(self.smallest_step, 1e-12)

    @property
    def _is_lumpy(self) -> bool:
        """Whether the time of a slice does not grow evenly with its tokens."""
        return bool(self.wave) or self.grain > 1

    def _pace_at(self, decodes: int, context: float, first: int, most: int, limit: float) -> float:
        """Pace at position `first` of a prompt: the share of a step's time that is `prefill_seconds`.

        The step has these decodes and as much of a prefill from position `first` as `limit` seconds allow, at most
        `most` tokens. The result is close to what `best_slice` would give, and faster to compute.
        """
        token, pair, reach, grain, sizes = self.token, self.pair, self.reach, self.grain, self.sizes
        overhead = self.fixed + self.decode_seconds(decodes) + self.context * context + self.slice + self.prefill
        available = limit - overhead  # seconds for prefill
        each = token + pair * first  # seconds per token, without waves
        wave = self.wave or most
        waves = int(available / max(wave * each + reach * first, 1e-12)) if self.wave else 0
        both = pair + self.wave_pair
        best = 0.0
        for number in (0.125, waves, waves + 1) if waves else (0.125, 1):  # if no wave fits, an eighth of one may
            most_tokens = min((available - reach * first * number) / max(each, 1e-12), 1e9)
            count = min(int(wave * number), most, int(most_tokens) // grain * grain - decodes)
            if count > 0:  # the hot path of admission: no calls that can be avoided
                pairs = count * (first + (count + 1) / 2)
                padded = -(-(decodes + count) // grain) * grain
                arithmetic = max(self.weights, token * padded)
                seconds = overhead + arithmetic + pair * pairs + reach * slice_reach(first, count, self.wave)
                if sizes:
                    seconds *= sizes[min(padded // grain, len(sizes)) - 1]
                best = max(best, (token * count + both * pairs) / max(seconds, 1e-12))
        return best

    def largest_slice(self, shape: StepShape, first: int, most: int, limit: float) -> int:
        """Most tokens of a prefill from `first` (up to `most`) that keep a step of `shape` within `limit` seconds."""
        if self.predict(self.with_slice(shape, first, most)) <= limit:
            return most
        fits, too_many = 0, most  # seconds grow in lumps; apart from `sizes`, they never fall as the slice grows
        while too_many - fits > 1:
            count = (fits + too_many) // 2
            if self.predict(self.with_slice(shape, first, count)) <= limit:
                fits = count
            else:
                too_many = count
        return fits

    def _whole(self, shape: StepShape, count: int) -> int:
        """Largest slice of at most `count` tokens that leaves no padding in the step."""
        return (shape.tokens + count) // self.grain * self.grain - shape.tokens

    def best_slice(self, shape: StepShape, first: int, most: int, limit: float) -> int:
        """Like `largest_slice`, but ends at a full wave or grain if that gives more tokens per second."""
        best = largest = self.largest_slice(shape, first, most, limit)
        if 0 < largest < most:
            seconds = self.predict(self.with_slice(shape, first, best))
            waves = largest // self.wave * self.wave if self.wave else largest
            for count in (self._whole(shape, largest), waves, self._whole(shape, waves)):
                if 0 < count < largest:
                    without = self.predict(self.with_slice(shape, first, count))
                    if count * seconds > WORTHWHILE_GAIN * best * without:
                        best, seconds = count, without
        return best


NAMES = tuple(one.name for one in fields(Coefficients) if not one.kw_only)
