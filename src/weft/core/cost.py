"""The cost model: predicts the seconds of a step from its contents, and tracks the error of its predictions.

It follows the hardware. A forward pass reads all weights once and does arithmetic for every token. The longer of the
two bounds the pass. Attention is added: prefill costs time per query-key pair, decode per token of context.

Some GPU costs grow in lumps. The queries of a prefill slice go through attention in waves. Each wave reads all the
context before it, so one query more than a full wave costs as much as another wave. If a slice has at most half a wave,
its context is split among the programs that would be idle. A step may also be padded to more tokens (`grain`).
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
TILES = 16  # per wave; if programs split a context, they process the queries in units of one tile
FEWEST = 1 / 12  # of a wave's time: the least time to read a context, however few the queries
BETTER = 1.02  # gain in tokens per second that is needed to choose a smaller slice than the largest


class StepShape(NamedTuple):
    """The quantities that determine the time of a step."""

    tokens: int = 0  # all tokens of the step
    pairs: float = 0.0  # query-key pairs of the prefill slices
    slices: int = 0  # prefill slices
    decodes: int = 0
    context: float = 0  # tokens of context that the decodes read
    reach: float = 0  # tokens of context that its prefill slices read, slices included: once, or once per wave


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
    return end * (2 * -(-TILES * count // wave) / TILES if 2 * TILES * count > wave else FEWEST)


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
    few: float = 0.0  # per decode, for the first FEW decodes; added to `decode`
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

    def with_slice(self, shape: StepShape, first: int, count: int) -> StepShape:
        return with_slice(shape, first, count, self.wave)

    def padded(self, shape: StepShape) -> StepShape:
        """The shape with its tokens rounded up to a multiple of `grain`, if it has prefill slices."""
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
        """Factor by which a step of this size takes longer than the line through all sizes."""
        return self._size_factor(self._places(shape.tokens)) if shape.slices else 1.0

    def _size_factor(self, places: int) -> float:
        return self.sizes[min(places // self.grain, len(self.sizes)) - 1] if self.sizes else 1.0

    def rows(self, decodes: int) -> float:
        """Seconds that decodes add to a step, without reading their contexts."""
        return self.decode * decodes + self.few * min(decodes, FEW)

    def prefill_seconds(self, first: int, count: int) -> float:
        """Seconds that `count` tokens from position `first` add to steps bound by arithmetic, in full waves."""
        return self.token * count + (self.pair + self.wave_pair) * slice_pairs(first, count)

    def prompt_seconds(self, first: Array, left: Array) -> Array:
        """Seconds to prefill `left` tokens from `first`, per prompt. Half of the last wave and grain is padding."""
        seconds = self.token * left + (self.pair + self.wave_pair) * left * (first + (left + 1) / 2)
        if self.wave:
            seconds += np.minimum(1.0, left / self.wave) / 2 * (self.token * self.grain + self.reach * (first + left))
        return seconds

    def efficiency(self, decodes: int, context: float, first: int, most: int, limit: float) -> float:
        """Share of a step's time that is prefill work (see `prefill_seconds`).

        The step has these decodes and as much of a prefill from position `first` as `limit` seconds allow, at most
        `most` tokens. The result is close to what `best_slice` would give, and faster to compute.
        """
        token, pair, reach, grain, sizes = self.token, self.pair, self.reach, self.grain, self.sizes
        aside = self.fixed + self.rows(decodes) + self.context * context + self.slice + self.prefill
        left = limit - aside
        each = token + pair * first  # without waves
        wave = self.wave or most
        waves = int(left / max(wave * each + reach * first, 1e-12)) if self.wave else 0
        both = pair + self.wave_pair
        best = 0.0
        for number in (0.125, waves, waves + 1) if waves else (0.125, 1):  # if no wave fits, an eighth of one may
            room = min((left - reach * first * number) / max(each, 1e-12), 1e9)
            count = min(int(wave * number), most, int(room) // grain * grain - decodes)
            if count > 0:  # the hot path of admission: no calls that can be avoided
                pairs = count * (first + (count + 1) / 2)
                places = -(-(decodes + count) // grain) * grain
                arithmetic = max(self.weights, token * places)
                seconds = aside + arithmetic + pair * pairs + reach * slice_reach(first, count, self.wave)
                if sizes:
                    seconds *= sizes[min(places // grain, len(sizes)) - 1]
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
                    if count * seconds > BETTER * best * without:
                        best, seconds = count, without
        return best


NAMES = tuple(one.name for one in fields(Coefficients) if not one.kw_only)


def with_slice(shape: StepShape, first: int, count: int, wave: int = 0) -> StepShape:
    """The shape with one more prefill slice."""
    tokens, pairs, slices, decodes, context, reach = shape
    pairs += slice_pairs(first, count)
    return StepShape(tokens + count, pairs, slices + 1, decodes, context, reach + slice_reach(first, count, wave))


FIT_ROUNDS = 20
HUBER = 1.345  # spreads; a larger error counts in proportion to its size, not its square


class Errors(NamedTuple):
    """Percentiles of the prediction error of steps: |measured / predicted - 1|."""

    p50: float
    p99: float


class Drift:
    """Prediction error of one kind of step: centre and spread of log(measured / predicted).

    A hiccup is a step many times longer than predicted, because the machine did something else. It says nothing about
    the time of steps, and a smaller step would not have prevented it. So the spread is the distance from the centre
    within which two thirds of the steps lie, however far off the others are. For normal errors that is the standard
    deviation.
    """

    MEMORY = 256  # steps over which centre and spread are averaged
    PRIOR = 16  # weight of the initial spread, in steps
    PRIOR_MEAN = 4  # weight of the initial centre, in steps; small, so that a bias is not mistaken for spread
    WITHIN = 0.6827  # share of normal errors within one standard deviation
    SPREADS = 3.5  # spreads above the centre: apart from hiccups, only a few steps in ten thousand take longer
    TAIL = 2.33  # spreads above the centre: one step in a hundred takes longer, which a promise allows
    LEAST = 1e-4  # smallest spread from which the spread can still grow
    LASTING = 4096  # steps over which the lasting error is averaged
    IDLE = 2.0  # seconds without steps after which a third of the difference from the lasting error remains

    def __init__(self, mean: float, spread: float) -> None:
        self.mean = mean
        self.spread = spread
        # The error without bursts and noise of other programs. Idle times return to it.
        self._lasting_mean = mean
        self._lasting_spread = max(spread, self.LEAST)
        self._seen = 0

    @property
    def bias(self) -> float:
        """Factor by which steps take longer than predicted, on average."""
        return math.exp(self.mean)

    @property
    def margin(self) -> float:
        """Factor on a prediction such that almost no step takes longer."""
        return math.exp(self.mean + self.SPREADS * self.spread)

    @property
    def tail(self) -> float:
        """Factor on a prediction such that one step in a hundred takes longer."""
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
        """Forgets recent errors, after `seconds` without a step."""
        kept = math.exp(-seconds / self.IDLE)
        self.mean = self._lasting_mean + kept * (self.mean - self._lasting_mean)
        if self.spread > self._lasting_spread:
            self.spread = self._lasting_spread + kept * (self.spread - self._lasting_spread)


class CostModel:
    """The current coefficients and their errors, separately for steps with and without prefill.

    With `refit`, the coefficients are also learnt from served steps. They change only within `observe`.
    """

    REPORTED = 1024  # last steps that `errors` covers
    STALE = 2  # steps after a change that may be planned with old coefficients: one in flight, one to spare

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
        self._errors.append(abs(measured / predicted - 1))  # error of the plan, even if it used old coefficients
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
        """The device was idle for `seconds`."""
        self.prefill.rest(seconds)
        self.decode.rest(seconds)

    def errors(self) -> Errors | None:
        """Errors of the last REPORTED steps; None if no step was observed."""
        if not self._errors:
            return None
        p50, p99 = np.percentile(self._errors, (50, 99)).tolist()
        return Errors(p50, p99)


def fit(shapes: Sequence[StepShape], seconds: Sequence[float], grain: int = 1, wave: int = 0) -> Coefficients:
    """Non-negative coefficients with the smallest relative error on the measurements.

    Which steps are bound by reading weights depends on the coefficients, so the two are found in turns. An outlier
    counts in proportion to its error, not to its square.
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
        # Columns: fixed and token if arithmetic bounds the step, fixed + weights if bytes do, then the common ones.
        design = np.hstack([~by_bytes, by_bytes, tokens * ~by_bytes, others]) / measured[:, None]
        solution = _non_negative(design, trust)
        errors = np.abs(1 - design @ solution)
        spread = max(1.4826 * float(np.median(errors)), 0.01)
        trust = np.minimum(1.0, HUBER * spread / np.maximum(errors, 1e-12))
        by_bytes = solution[2] * tokens <= max(0.0, solution[1] - solution[0])
    fixed, with_weights, *rest = solution.tolist()
    return Coefficients(fixed, max(0.0, with_weights - fixed), *rest, grain=grain, wave=wave)


def _non_negative(design: NDArray[np.float64], trust: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 such that design @ x is close to 1: weighted least squares without the columns that would be negative."""
    scale = np.abs(design).max(axis=0)
    used = np.flatnonzero(scale > 0).tolist()  # columns that some step uses
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
