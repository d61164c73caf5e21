"""The cost model: predicts the seconds of a step from what it carries, and knows how wrong it is.

It is shaped by physics. A forward pass reads all weights once and does arithmetic for every token, and whichever takes
longer bounds it; attention comes on top: prefill pays for pairs of query and key, decode for reading its context.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class StepShape(NamedTuple):
    """What a step's time depends on."""

    tokens: int = 0  # all tokens of the step
    pairs: float = 0.0  # query-key pairs of its prefill slices
    slices: int = 0  # prefill slices
    decodes: int = 0
    context: int = 0  # tokens of context that its decodes read


def slice_pairs(first: int, count: int) -> float:
    """Query-key pairs of a prefill slice: each token sees all before it, and itself."""
    return count * (first + (count + 1) / 2)


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

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(f"coefficient {name}={value} must be a number of seconds, at least 0")

    def predict(self, shape: StepShape) -> float:
        tokens, pairs, slices, decodes, context = shape
        return (
            self.fixed
            + max(self.weights, self.token * tokens)
            + self.pair * pairs
            + self.slice * slices
            + self.decode * decodes
            + self.context * context
        )

    def prefill_seconds(self, first: int, count: int) -> float:
        """What `count` tokens behind `first` add to steps that are bound by arithmetic."""
        return self.token * count + self.pair * slice_pairs(first, count)

    def largest_slice(self, shape: StepShape, first: int, most: int, limit: float) -> int:
        """The most tokens of a prefill behind `first` (up to `most`) that keep a step of `shape` within `limit`."""
        if self.predict(with_slice(shape, first, most)) <= limit:
            return most
        fits, fails = 0, most
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if self.predict(with_slice(shape, first, middle)) <= limit:
                fits = middle
            else:
                fails = middle
        return fits


def with_slice(shape: StepShape, first: int, count: int) -> StepShape:
    """The shape with one prefill slice more."""
    tokens, pairs, slices, decodes, context = shape
    return StepShape(tokens + count, pairs + slice_pairs(first, count), slices + 1, decodes, context)


class CostModel:
    """Coefficients in force, and what was learnt of their error: measured over predicted, on a logarithmic scale.

    `margin` is what a prediction must be multiplied with so that only a few steps in ten thousand take longer.
    """

    SPREADS = 3.5  # standard deviations above the mean
    MEMORY = 256  # steps over which the error is averaged

    def __init__(self, coefficients: Coefficients, mean: float = 0.0, spread: float = 0.05) -> None:
        self.coefficients = coefficients
        self.mean = mean
        self.variance = spread**2

    @property
    def margin(self) -> float:
        return math.exp(self.mean + self.SPREADS * math.sqrt(self.variance))

    def predict(self, shape: StepShape) -> float:
        return self.coefficients.predict(shape)

    def observe(self, predicted: float, measured: float) -> None:
        """Learns from one step. A hiccup (a step many times longer than predicted) counts as three spreads, no more."""
        if predicted <= 0 or measured <= 0:
            return
        spread = math.sqrt(self.variance)
        error = math.log(measured / predicted) - self.mean
        error = min(max(error, -3 * spread - 0.02), 3 * spread + 0.02)
        weight = 1 / self.MEMORY
        self.mean += weight * error
        self.variance += weight * (error * error - self.variance)


def fit(shapes: Sequence[StepShape], seconds: Sequence[float]) -> Coefficients:
    """The coefficients that explain measurements best, in relative error, none of them negative.

    Which steps are bound by bytes depends on the coefficients, so the two are found in turns.
    """
    features = np.array(shapes, np.float64)
    tokens, others = features[:, :1], features[:, 1:]
    measured = np.array(seconds, np.float64)
    by_bytes = tokens <= np.median(tokens)
    solution = np.zeros(7)
    for _ in range(20):
        # Columns: fixed and token where arithmetic binds, fixed + weights where bytes do, then what both share.
        design = np.hstack([~by_bytes, by_bytes, tokens * ~by_bytes, others])
        solution = _non_negative(design / measured[:, None])
        weights = max(0.0, solution[1] - solution[0])
        now_by_bytes = solution[2] * tokens <= weights
        if np.array_equal(now_by_bytes, by_bytes):
            break
        by_bytes = now_by_bytes
    fixed, with_weights, *rest = solution.tolist()
    return Coefficients(fixed, max(0.0, with_weights - fixed), *rest)


def _non_negative(design: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 that brings design @ x near one: least squares, leaving out what would come out negative."""
    scale = np.maximum(np.abs(design).max(axis=0), 1e-300)
    used = list(range(design.shape[1]))
    while used:
        values = np.linalg.lstsq(design[:, used] / scale[used], np.ones(len(design)), rcond=None)[0]
        if values.min() >= 0:
            break
        used.pop(int(values.argmin()))
    solution = np.zeros(design.shape[1])
    if used:
        solution[used] = values / scale[used]
    return solution
