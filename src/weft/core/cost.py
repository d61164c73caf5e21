"""The cost model: predicts the seconds of a step from what it carries, and knows how wrong it is.

It is shaped by physics. A forward pass reads all weights once and does arithmetic for every token, and whichever takes
longer bounds it; attention comes on top: prefill pays for pairs of query and key, decode for reading its context.

A GPU takes some things in lumps. A prefill slice's queries go through attention in waves that each read all the context
before them: one query more than a wave has costs as much as another one. Only where a slice has at most half a wave is
its context divided among the programs that would be idle. And a step may be run as if it had more tokens (`grain`).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.host import HostCost
from weft.core.refit import FEW, Refit

Array = NDArray[np.float64]
TILES = 16  # of a wave: where programs divide a context, they take its queries by so many
FEWEST = 1 / 12  # of a wave's time: as long as reading a context takes, for however few queries
BETTER = 1.02  # how many times as many tokens a second a slice must bring that is smaller than it could be


class StepShape(NamedTuple):
    """What a step's time depends on."""

    tokens: int = 0  # all tokens of the step
    pairs: float = 0.0  # query-key pairs of its prefill slices
    slices: int = 0  # prefill slices
    decodes: int = 0
    context: float = 0  # tokens of context that its decodes read
    reach: float = 0  # tokens of context that its prefill slices read, their own included: once, or once for every wave


def slice_pairs(first: int, count: int) -> float:
    """Query-key pairs of a prefill slice: each token sees all before it, and itself."""
    return count * (first + (count + 1) / 2)


def slice_reach(first: int, count: int, wave: int) -> float:
    """Tokens of context that a prefill slice reads."""
    end = first + count
    if not wave:
        return end
    if 2 * count > wave:  # every wave reads what lies before its own last query
        full, rest = divmod(count, wave)
        return full * first + wave * full * (full + 1) / 2 + (end if rest else 0)
    return end * (2 * -(-TILES * count // wave) / TILES if 2 * TILES * count > wave else FEWEST)


def decodes_alone(count: int, context: float) -> StepShape:
    """A step of so many decodes that read so many tokens of context together, and nothing else."""
    return StepShape(tokens=count, decodes=count, context=context)


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds each."""

    fixed: float  # a step, whatever it carries
    weights: float  # reading all weights
    token: float  # arithmetic for a token
    pair: float  # attention of one query over one key in a prefill
    slice: float  # one prefill slice more
    decode: float  # one decode more
    context: float  # one token of context that a decode reads
    reach: float = 0.0  # one token of context that a wave of a prefill slice reads, however many queries it has
    prefill: float = 0.0  # a step with prefill slices, however many: what the host takes where the device waits for it
    few: float = 0.0  # one decode more, as long as there are at most FEW; beside `decode`
    # No seconds, but tokens: a step with a prefill takes as long as with the next multiple of so many,
    grain: int = field(default=1, kw_only=True)
    # and so many queries of a slice read the context together; 0: all of them.
    wave: int = field(default=0, kw_only=True)
    # Factors of steps with prefill, by how many grains of tokens they have; larger steps take the last. Products do not
    # grow evenly: on an H200, 512 tokens take 5% less than the line through all sizes. (): all sizes lie on the line.
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
        """All that are seconds, in the order of NAMES."""
        return astuple(self)[: len(NAMES)]

    def with_vector(self, vector: Sequence[float]) -> "Coefficients":
        """The same device with other seconds."""
        return Coefficients(*vector, grain=self.grain, wave=self.wave, sizes=self.sizes)

    @property
    def wave_pair(self) -> float:
        """Seconds of one query over one key in a full wave, beside those of the pair."""
        return self.reach / self.wave if self.wave else 0.0

    def with_slice(self, shape: StepShape, first: int, count: int) -> StepShape:
        return with_slice(shape, first, count, self.wave)

    def padded(self, shape: StepShape) -> StepShape:
        """With as many tokens as it takes the time of."""
        return shape if self.grain == 1 or not shape.slices else shape._replace(tokens=self._places(shape.tokens))

    def _places(self, tokens: int) -> int:
        return -(-tokens // self.grain) * self.grain

    def predict(self, shape: StepShape) -> float:
        tokens, pairs, slices, decodes, context, reach = shape
        factor = 1.0
        if slices:
            tokens = self._places(tokens)
            factor = self._size_factor(tokens)
        return factor * (
            self.fixed
            + max(self.weights, self.token * tokens)
            + self.pair * pairs
            + self.slice * slices
            + self.context * context
            + self.reach * reach
            + (self.prefill if slices else 0.0)
            + self.rows(decodes)
        )

    def size_factor(self, shape: StepShape) -> float:
        """By how much a step of this size takes longer than the line through all sizes says."""
        return self._size_factor(self._places(shape.tokens)) if shape.slices else 1.0

    def _size_factor(self, places: int) -> float:
        return self.sizes[min(places // self.grain, len(self.sizes)) - 1] if self.sizes else 1.0

    def rows(self, decodes: int) -> float:
        """What so many decodes add to a step, but for their contexts."""
        return self.decode * decodes + self.few * min(decodes, FEW)

    def prefill_seconds(self, first: int, count: int) -> float:
        """What `count` tokens behind `first` add to steps that are bound by arithmetic, in full waves."""
        return self.token * count + (self.pair + self.wave_pair) * slice_pairs(first, count)

    def prompt_seconds(self, first: Array, left: Array) -> Array:
        """What it takes to read prompts, `left` tokens behind `first`. Half of the last lump of each stays unfilled."""
        seconds = self.token * left + (self.pair + self.wave_pair) * left * (first + (left + 1) / 2)
        if self.wave:
            seconds += np.minimum(1.0, left / self.wave) / 2 * (self.token * self.grain + self.reach * (first + left))
        return seconds

    def efficiency(self, decodes: int, context: float, first: int, most: int, limit: float) -> float:
        """Of the seconds of a step with these decodes and as much of a prefill behind `first` as `limit` leaves, how
        many are the prefill's (see `prefill_seconds`). Near what `best_slice` would find, in less time.
        """
        token, pair, reach, grain = self.token, self.pair, self.reach, self.grain
        aside = self.fixed + self.rows(decodes) + self.context * context + self.slice + self.prefill
        left = limit - aside
        each = token + pair * first  # but for waves
        wave = self.wave or most
        waves = int(left / max(wave * each + reach * first, 1e-12)) if self.wave else 0
        both = pair + self.wave_pair
        best = 0.0
        for number in (0.125, waves, waves + 1):  # where no wave fits, an eighth of one may
            room = min((left - reach * first * number) / max(each, 1e-12), 1e9)
            count = min(int(wave * number), most, int(room) // grain * grain - decodes)
            if count > 0:
                pairs = count * (first + (count + 1) / 2)
                arithmetic = max(self.weights, token * self._places(decodes + count))
                seconds = aside + arithmetic + pair * pairs + reach * slice_reach(first, count, self.wave)
                seconds *= self._size_factor(self._places(decodes + count))
                best = max(best, (token * count + both * pairs) / max(seconds, 1e-12))
        return best

    def largest_slice(self, shape: StepShape, first: int, most: int, limit: float) -> int:
        """The most tokens of a prefill behind `first` (up to `most`) that keep a step of `shape` within `limit`."""
        if self.predict(self.with_slice(shape, first, most)) <= limit:
            return most
        fits, too_many = 0, most  # seconds grow in lumps, and but for `sizes` they never fall with the slice
        while too_many - fits > 1:
            count = (fits + too_many) // 2
            if self.predict(self.with_slice(shape, first, count)) <= limit:
                fits = count
            else:
                too_many = count
        return fits

    def _whole(self, shape: StepShape, count: int) -> int:
        """The largest slice, of no more than `count`, that leaves no room in the step."""
        return (shape.tokens + count) // self.grain * self.grain - shape.tokens

    def best_slice(self, shape: StepShape, first: int, most: int, limit: float) -> int:
        """The same, but without what only begins another lump, where more tokens a second are done without it."""
        best = largest = self.largest_slice(shape, first, most, limit)
        if 0 < largest < most:
            seconds = self.predict(self.with_slice(shape, first, best))
            waves = largest // self.wave * self.wave if self.wave else largest
            for count in (self._whole(shape, largest), waves, self._whole(shape, waves)):
                if 0 < count < largest:
                    without = self.predict(self.with_slice(shape, first, count))
                    if count * seconds > BETTER * best * without:
                        best, seconds = count, without
        return best


NAMES = tuple(one.name for one in fields(Coefficients) if not one.kw_only)


def with_slice(shape: StepShape, first: int, count: int, wave: int = 0) -> StepShape:
    """The shape with one prefill slice more."""
    tokens, pairs, slices, decodes, context, reach = shape
    pairs += slice_pairs(first, count)
    return StepShape(tokens + count, pairs, slices + 1, decodes, context, reach + slice_reach(first, count, wave))


FIT_ROUNDS = 20
HUBER = 1.345  # spreads from where on an error counts in proportion to its size


class Errors(NamedTuple):
    """How far steps were from what was predicted of them: |measured / predicted - 1|."""

    p50: float
    p99: float


class Drift:
    """What was learnt of one kind of step: logarithm of measured over predicted, its centre and its spread.

    A hiccup (a step many times longer than predicted, because the machine did something else) says nothing of how long
    steps take, and no smaller step would have prevented it. So the spread is the one within which two thirds of the
    steps lie, however far off the others are: for normal errors that is the standard deviation.
    """

    MEMORY = 256  # steps over which it is averaged
    PRIOR = 16  # steps that the spread given at the start counts for
    PRIOR_MEAN = 4  # the same for the centre: a bias is learnt before it can pass for spread
    WITHIN = 0.6827  # share of normal errors within one standard deviation
    SPREADS = 3.5  # above the centre: but for hiccups, only a few steps in ten thousand take longer
    TAIL = 2.33  # spreads above the centre: one step in a hundred takes longer, as many as a promise allows
    LEAST = 1e-4  # spread from which it can still grow
    LASTING = 4096  # steps over which the lasting error is averaged
    IDLE = 2.0  # seconds without steps in which all but a third of what differs from the lasting error is forgotten

    def __init__(self, mean: float, spread: float) -> None:
        self.mean = mean
        self.spread = spread
        # What remains when a burst or another program's noise is over; idle times return to it.
        self._lasting_mean = mean
        self._lasting_spread = max(spread, self.LEAST)
        self._seen = 0

    @property
    def bias(self) -> float:
        """By how much steps take longer than predicted, on average."""
        return math.exp(self.mean)

    @property
    def margin(self) -> float:
        """What a prediction must be multiplied with so that hardly any step takes longer."""
        return math.exp(self.mean + self.SPREADS * self.spread)

    @property
    def tail(self) -> float:
        """The same so that one step in a hundred takes longer."""
        return math.exp(self.mean + self.TAIL * self.spread)

    def observe(self, error: float) -> None:
        error -= self.mean
        self._seen = min(self._seen + 1, self.MEMORY)
        most = 2 * self.spread + 0.02
        self.mean += min(max(error, -most), most) / min(self.PRIOR_MEAN + self._seen, self.MEMORY)
        weight = 1 / min(self.PRIOR + self._seen, self.MEMORY)
        outside = abs(error) > max(self.spread, self.LEAST)
        if outside:
            self.spread = max(self.spread, self.LEAST) * math.exp(2 * weight * self.WITHIN)
        else:
            self.spread *= math.exp(-2 * weight * (1 - self.WITHIN))
        self._lasting_mean += (self.mean - self._lasting_mean) / self.LASTING
        self._lasting_spread += (self.spread - self._lasting_spread) / self.LASTING

    def rest(self, seconds: float) -> None:
        """Forgets recent errors: no step ran for so many seconds."""
        kept = math.exp(-seconds / self.IDLE)
        self.mean = self._lasting_mean + kept * (self.mean - self._lasting_mean)
        if self.spread > self._lasting_spread:
            self.spread = self._lasting_spread + kept * (self.spread - self._lasting_spread)


class CostModel:
    """Coefficients in force, and what was learnt of their error, for steps with prefill and for those without.

    With `refit`, the coefficients themselves are learnt from what is served as well; they change within `observe` only.
    """

    REPORTED = 1024  # steps that `errors` tells of
    STALE = 2  # steps after new coefficients that may have been planned with the old ones: one in flight, one to spare

    def __init__(
        self,
        coefficients: Coefficients,
        mean: float = 0.0,
        spread: float = 0.05,
        refit: bool = True,
        host: HostCost | None = None,
    ) -> None:
        self.coefficients = coefficients
        self.host = host or HostCost()
        self.prefill = Drift(mean, spread)
        self.decode = Drift(mean, spread)
        self._refit = Refit(coefficients) if refit else None
        self._stale = 0
        self._errors: deque[float] = deque(maxlen=self.REPORTED)

    @property
    def bias(self) -> float:
        return self.prefill.bias

    @property
    def margin(self) -> float:
        return self.prefill.margin

    def predict(self, shape: StepShape) -> float:
        return self.coefficients.predict(shape)

    def observe(self, shape: StepShape, predicted: float, measured: float) -> None:
        """Learns from one step."""
        if predicted <= 0 or measured <= 0:
            return
        self._errors.append(abs(measured / predicted - 1))  # as it was planned, so with old coefficients if need be
        if self._stale:
            self._stale -= 1
            predicted = self.coefficients.predict(shape) or predicted
        (self.prefill if shape.slices else self.decode).observe(math.log(measured / predicted))
        if self._refit is not None:
            better = self._refit.observe(shape, measured)
            if better is not None:
                self.coefficients = better
                spread = math.sqrt(self._refit.variance)
                self.prefill, self.decode = Drift(self._refit.mean, spread), Drift(self._refit.mean, spread)
                self._stale = self.STALE

    def rest(self, seconds: float) -> None:
        """The device was idle for so long."""
        self.prefill.rest(seconds)
        self.decode.rest(seconds)

    def errors(self) -> Errors | None:
        """The error of the last thousand steps; None where nothing was observed."""
        if not self._errors:
            return None
        p50, p99 = np.percentile(self._errors, (50, 99)).tolist()
        return Errors(p50, p99)


def fit(shapes: Sequence[StepShape], seconds: Sequence[float], grain: int = 1, wave: int = 0) -> Coefficients:
    """The coefficients that explain measurements best, in relative error, none of them negative.

    Which steps are bound by bytes depends on the coefficients, so the two are found in turns; and a measurement that is
    far off counts in proportion to its error, not to the square of it.
    """
    features = np.array(shapes, np.float64)
    prefills = features[:, 2] > 0
    features[prefills, 0] = np.ceil(features[prefills, 0] / grain) * grain
    few = np.minimum(features[:, 3], FEW)
    tokens, others = features[:, :1], np.hstack([features[:, 1:], prefills[:, None], few[:, None]])
    measured = np.array(seconds, np.float64)
    by_bytes = tokens <= np.median(tokens)
    trust = np.ones(len(measured))
    solution = np.zeros(3 + others.shape[1])
    for _ in range(FIT_ROUNDS):
        # Columns: fixed and token where arithmetic binds, fixed + weights where bytes do, then what both share.
        design = np.hstack([~by_bytes, by_bytes, tokens * ~by_bytes, others]) / measured[:, None]
        solution = _non_negative(design, trust)
        errors = np.abs(1 - design @ solution)
        spread = max(1.4826 * float(np.median(errors)), 0.01)
        trust = np.minimum(1.0, HUBER * spread / np.maximum(errors, 1e-12))
        by_bytes = solution[2] * tokens <= max(0.0, solution[1] - solution[0])
    fixed, with_weights, *rest = solution.tolist()
    return Coefficients(fixed, max(0.0, with_weights - fixed), *rest, grain=grain, wave=wave)


def _non_negative(design: NDArray[np.float64], trust: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 that brings design @ x near one: weighted least squares, leaving out what would come out negative."""
    scale = np.abs(design).max(axis=0)
    used = np.flatnonzero(scale > 0).tolist()  # what no step has says nothing
    weight = np.sqrt(trust)
    while used:
        values = np.linalg.lstsq(design[:, used] / scale[used] * weight[:, None], weight, rcond=None)[0]
        if values.min() >= 0:
            break
        used.pop(int(values.argmin()))
    solution = np.zeros(design.shape[1])
    if used:
        solution[used] = values / scale[used]
    return solution
