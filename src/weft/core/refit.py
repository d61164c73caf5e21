"""Refit: learns better coefficients from served steps. They are used only after they have proved to be better.

Served steps say little about single coefficients. Most steps are close to the gap target, most only decode, and their
quantities grow and shrink together. A free fit would explain such steps well and all others badly. So the fit finds one
multiplier per current coefficient. Each multiplier is pulled towards the common factor by which all steps are off.
If the steps say nothing about a coefficient, it keeps its proportion to the others. A coefficient of zero stays zero.

Steps are divided into windows. Coefficients fitted on one window are compared with the current ones on the next window.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.coefficients import FEW_DECODES, Coefficients
from weft.core.shape import StepShape

Array = NDArray[np.float64]
COLUMNS = 7  # of a sample: the fields of StepShape and the seconds

WINDOW_STEPS = 1024  # steps; a window ends here if it has QUOTA_STEPS of both kinds (decode only, with prefill)
QUOTA_STEPS = 64
LONGEST_WINDOW = 8 * WINDOW_STEPS  # steps; a window ends here if one kind is rare
FEWEST_SAMPLES = 8  # samples of a kind that are needed to judge it

MOST_SAMPLES = 384  # most samples of a kind that a window keeps
MOST_PAST_SAMPLES = 128  # most samples of a kind kept from earlier windows, so that a fit sees more than one load

ROUNDS = 5
HUBER = 1.345  # spreads; a larger error counts in proportion to its size, not its square
LEAST_SPREAD = 0.01  # smallest spread of the relative error; no machine is more regular
PULL = 0.1  # expected relative distance of a multiplier from the common factor, unless the steps say otherwise
MOST_FIT_CHANGE = 4.0  # largest factor by which one fit may move a coefficient relative to the others
MOST_TOTAL_CHANGE = 16.0  # largest factor by which all fits together may move it from its initial value

# New coefficients are used if all three conditions hold.
CLEARLY = 0.9  # the median error of a kind of step falls below this share of the old one
BY_CHANCE = 1.5  # more steps improve than by chance: three standard deviations of a fair coin
NOT_WORSE = 1.05  # no percentile of either kind grows by more than this factor, which chance explains
TRIFLE = 0.005  # smaller relative errors count as this one
LEAST_COMMON_ERROR = 0.03  # logarithm; a smaller common factor is left to the margin of the cost model


class Reservoir:
    """Samples of one window, evenly spread over it. When it is full, every second sample is dropped."""

    def __init__(self) -> None:
        self.seen = 0
        self.stride = 1
        self.samples: list[tuple[float, ...]] = []  # fields of the shape, and the seconds

    def add(self, shape: StepShape, seconds: float) -> None:
        if self.seen % self.stride == 0:
            if len(self.samples) == MOST_SAMPLES:
                del self.samples[1::2]
                self.stride *= 2
            self.samples.append((*shape, seconds))
        self.seen += 1

    def array(self) -> Array:
        return np.array(self.samples, np.float64).reshape(-1, COLUMNS)


class FitWindow(NamedTuple):
    """Samples of a finished window: steps that only decode, and steps with prefill."""

    kinds: tuple[Array, Array]
    seen: tuple[int, int]  # number of steps of each kind in the window


class Candidate(NamedTuple):
    vector: Array  # coefficients
    level: float  # logarithm of the factor by which the fitted steps took longer than the current ones predicted


class Refit:
    """Observes every step and returns new coefficients when they should be used."""

    def __init__(self, coefficients: Coefficients) -> None:
        self.in_force = coefficients
        # Error of the current coefficients on the window in which they proved better: log(measured / predicted), as in
        # the cost model.
        self.mean = 0.0
        self.variance = 0.0
        self._start = np.array(coefficients.vector)
        self._vector = self._start
        self._candidate: Candidate | None = None
        self._past = (np.empty((0, COLUMNS)), np.empty((0, COLUMNS)))
        self._open()

    def observe(self, shape: StepShape, seconds: float) -> Coefficients | None:
        """Records one served step. Returns new coefficients at the step from which on they are used, else None."""
        if not 0 < seconds < math.inf:
            return None
        seconds /= self.in_force.size_factor(shape)  # the factors in `sizes` are not refitted
        (self._prefill if shape.slices else self._decode).add(self.in_force.padded(shape), seconds)
        self._steps += 1
        if self._steps < self._due:
            return None
        return self._end_window()

    def _open(self) -> None:
        self._decode, self._prefill = Reservoir(), Reservoir()
        self._steps = 0
        self._due = WINDOW_STEPS

    def _end_window(self) -> Coefficients | None:
        """Ends the window if it has enough steps: judges the candidate of the window before, and fits a new one."""
        decode, prefill = self._decode, self._prefill
        if min(decode.seen, prefill.seen) < QUOTA_STEPS and self._steps < LONGEST_WINDOW:
            self._due += QUOTA_STEPS
            return None
        window = FitWindow((decode.array(), prefill.array()), (decode.seen, prefill.seen))
        self._open()
        winner = self._judge(window)
        if winner is not None:
            self._put_in_force(winner, window)
        self._learn(window)
        return None if winner is None else self.in_force

    def _judge(self, window: FitWindow) -> Array | None:
        """Coefficients that are clearly better on steps that they were not fitted to, or None.

        The cost model corrects a common factor (`Drift`), so errors are measured around their centre. Both kinds of
        step have one common centre: if one kind is off by more than the other, that needs a correction. If only a
        common factor is off, the coefficients are scaled by it, so that predictions are in real seconds.
        """
        if self._candidate is None:
            return None
        vector, factor = self._candidate
        old, new = _log_errors(self._vector, window), _log_errors(vector, window)
        level = _centre(old, window.seen)
        if _better(_around(old, level), _around(new, _centre(new, window.seen))):
            return vector
        if abs(level) > LEAST_COMMON_ERROR and _is_common(factor, old):
            scaled = self._within_reach(self._vector * math.exp(factor))
            return None if np.array_equal(scaled, self._vector) else scaled
        return None

    def _put_in_force(self, vector: Array, window: FitWindow) -> None:
        self._vector = vector
        self.in_force = self.in_force.with_vector(vector.tolist())
        self.mean, self.variance = _moments(_log_errors(vector, window), window.seen)

    def _learn(self, window: FitWindow) -> None:
        level = _centre(_log_errors(self._vector, window), window.seen)
        decode, prefill = (np.concatenate(pair) for pair in zip(self._past, window.kinds, strict=True))
        self._past = (_thinned(decode), _thinned(prefill))
        multipliers = fit_multipliers(self._vector, np.concatenate((decode, prefill)), math.exp(level))
        self._candidate = Candidate(self._within_reach(self._vector * multipliers), level)

    def _within_reach(self, vector: Array) -> Array:
        return np.clip(vector, self._start / MOST_TOTAL_CHANGE, self._start * MOST_TOTAL_CHANGE)


def fit_multipliers(vector: Array, samples: Array, common: float) -> Array:
    """Multiplier for each coefficient: least squares of the relative error, with Huber weights.

    The error is relative to the prediction. Relative to the measurement, it would favour steps that were quick by luck.
    """
    parts = _parts(vector, samples)
    predicted = _seconds(parts)
    useful = predicted > 0
    parts, predicted = parts[useful], predicted[useful] * common
    shares = parts * (common / predicted)[:, None]
    ratio = samples[useful, -1] / predicted
    apart = np.ones(len(vector))  # multipliers divided by the common factor
    if not len(ratio):
        return apart * common
    for _ in range(ROUNDS):
        # Which steps are bound by bytes depends on the multipliers, so the two are found alternately.
        by_bytes = shares[:, 1] * apart[1] >= shares[:, 2] * apart[2]
        design = shares.copy()
        design[by_bytes, 2] = 0.0
        design[~by_bytes, 1] = 0.0
        errors = np.abs(ratio - design @ apart)
        spread = max(1.4826 * float(np.median(errors)), LEAST_SPREAD)
        weighted = design * np.minimum(1.0, HUBER * spread / np.maximum(errors, 1e-12))[:, None]
        pull = (spread / PULL) ** 2
        normal = weighted.T @ design + pull * np.eye(len(vector))
        apart = np.clip(np.linalg.solve(normal, weighted.T @ ratio + pull), 1 / MOST_FIT_CHANGE, MOST_FIT_CHANGE)
    return apart * common


def _parts(vector: Array, samples: Array) -> Array:
    """Seconds of each coefficient in each step. Of weights and token, only the larger one counts (see `_seconds`)."""
    parts = np.ones((len(samples), len(vector)))
    parts[:, 2:-2] = samples[:, :-1]
    parts[:, -2] = samples[:, 2] > 0
    parts[:, -1] = np.minimum(samples[:, 3], FEW_DECODES)
    parts *= vector
    return parts


def _seconds(parts: Array) -> Array:
    seconds: Array = parts[:, 0] + np.maximum(parts[:, 1], parts[:, 2]) + parts[:, 3:].sum(axis=1)
    return seconds


def _log_errors(vector: Array, window: FitWindow) -> list[Array]:
    """log(measured / predicted) of each step, for each kind of step."""
    return [np.log(samples[:, -1] / np.maximum(_seconds(_parts(vector, samples)), 1e-12)) for samples in window.kinds]


def _centre(errors: list[Array], seen: tuple[int, int]) -> float:
    """Centre of the errors of all served steps: medians of both kinds, weighted by their counts. Robust to hiccups."""
    return sum(float(np.median(e)) * n for e, n in zip(errors, seen, strict=True) if n) / max(1, sum(seen))


def _around(errors: list[Array], centre: float) -> list[Array]:
    return [np.abs(e - centre) for e in errors]


def _better(old: list[Array], new: list[Array]) -> bool:
    """Whether one kind of step is predicted clearly better, and no kind worse at the median or in the tail."""
    clearly = False
    for before, after in zip(old, new, strict=True):
        if len(before) < FEWEST_SAMPLES:
            continue
        was, now = (np.maximum(np.percentile(e, (50, 90, 99)), TRIFLE) for e in (before, after))
        if (now > was * NOT_WORSE).any():
            return False
        wins = float(np.mean(after < before))  # compared step by step: a lucky percentile is not enough
        clearly |= bool(now[0] < was[0] * CLEARLY) and wins > 0.5 + BY_CHANCE / math.sqrt(len(before))
    return clearly


def _is_common(factor: float, errors: list[Array]) -> bool:
    """Whether both kinds of step are off by about this much."""
    medians = [float(np.median(e)) for e in errors if len(e) >= FEWEST_SAMPLES]
    return all(abs(median - factor) < abs(median) / 2 for median in medians)


def _moments(errors: list[Array], seen: tuple[int, int]) -> tuple[float, float]:
    """Mean and variance of all served steps, kinds weighted by their counts. A hiccup counts as three spreads."""
    centre = _centre(errors, seen)
    share = np.concatenate([np.full(len(e), n / max(1, len(e))) for e, n in zip(errors, seen, strict=True)])
    share /= share.sum()
    error = np.concatenate(errors) - centre
    most = 3 * 1.4826 * float(np.median(np.abs(error))) + 0.02
    error = np.clip(error, -most, most)
    mean = float(share @ error)
    return centre + mean, float(share @ (error - mean) ** 2)


def _thinned(samples: Array) -> Array:
    return samples[:: max(1, -(-len(samples) // MOST_PAST_SAMPLES))]
