"""Learns better coefficients from the steps that are served; they take force when they have proved themselves.

What is served teaches little about single coefficients: steps sit at the gap target, most of them only decode, and what
they carry grows and shrinks together. A free fit explains such steps well and everything else badly. So what is fitted
is one multiplier for each coefficient in force, and each is pulled towards the factor by which all steps are off: where
the steps say nothing of a coefficient, it keeps its proportion to the others. A coefficient of zero stays zero.

Time is cut into windows. What one window taught is judged on the next, beside what is in force.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # cost.py imports this file
    from weft.core.cost import Coefficients, StepShape

Array = NDArray[np.float64]
COLUMNS = 7  # of a sample: what a step's time depends on, and the seconds
# Decodes up to which one more costs most. On an H200, with Llama-3-8B: 30 us each up to about 16, and 11 us beyond.
FEW = 16

WINDOW = 1024  # steps; a window ends here if it has QUOTA samples of either kind of step
QUOTA = 64
LONGEST_WINDOW = 8 * WINDOW  # or here, if one kind is rare
FEWEST = 8  # samples of a kind that a judgement about this kind takes

SAMPLES = 384  # of a kind that a window keeps at most
PAST = 128  # of a kind that outlive their window, so that a fit sees more than one load

ROUNDS = 5
HUBER = 1.345  # spreads from where on an error counts in proportion to its size instead of its square
LEAST_SPREAD = 0.01  # of the relative error, which no machine gets below
PULL = 0.1  # multipliers are expected to lie within so much of the common factor, unless the steps say otherwise
APART = 4.0  # most that one fit may move a coefficient against the others
REACH = 16.0  # most that all fits together may move it from where it began

CLEARLY = 0.9  # the median error of a kind of step must fall to this share of what it was
BY_CHANCE = 1.5  # and more steps must be better than chance would have it: three standard deviations of a fair coin
NOT_WORSE = 1.05  # and no percentile of either kind may grow by more than chance explains
TRIFLE = 0.005  # errors below are as good as none
LEVEL = 0.03  # logarithm: a common factor below this is left to the cost model's margin


class Reservoir:
    """Samples of one window, evenly spread over it: every second goes whenever there are too many."""

    def __init__(self) -> None:
        self.seen = 0
        self.stride = 1
        self.samples: list[tuple[float, ...]] = []  # the numbers of a shape, and the seconds

    def add(self, shape: "StepShape", seconds: float) -> None:
        if self.seen % self.stride == 0:
            if len(self.samples) == SAMPLES:
                del self.samples[1::2]
                self.stride *= 2
            self.samples.append((*shape, seconds))
        self.seen += 1

    def array(self) -> Array:
        return np.array(self.samples, np.float64).reshape(-1, COLUMNS)


class Window(NamedTuple):
    """What was kept of a window: steps that only decode, and steps that carry prefill."""

    kinds: tuple[Array, Array]
    seen: tuple[int, int]  # how many there were of either


class Candidate(NamedTuple):
    vector: Array  # coefficients
    level: float  # logarithm of the factor by which the steps of the fit took longer than those in force predicted


class Refit:
    """Watches every step; says when other coefficients should take force."""

    def __init__(self, coefficients: "Coefficients") -> None:
        self.in_force = coefficients
        # What is known of the error of those in force from the steps that proved them: logarithm of measured over
        # predicted, as the cost model counts it.
        self.mean = 0.0
        self.variance = 0.0
        self._start = np.array(coefficients.vector)
        self._vector = self._start
        self._candidate: Candidate | None = None
        self._past = (np.empty((0, COLUMNS)), np.empty((0, COLUMNS)))
        self._open()

    def observe(self, shape: "StepShape", seconds: float) -> "Coefficients | None":
        """Takes one served step in. Coefficients come back at the moment when they take force."""
        if not 0 < seconds < math.inf:
            return None
        seconds /= self.in_force.size_factor(shape)  # sizes keep their factors
        (self._prefill if shape.slices else self._decode).add(self.in_force.padded(shape), seconds)
        self._steps += 1
        if self._steps < self._due:
            return None
        return self._turn()

    def _open(self) -> None:
        self._decode, self._prefill = Reservoir(), Reservoir()
        self._steps = 0
        self._due = WINDOW

    def _turn(self) -> "Coefficients | None":
        """Ends the window if it has seen enough: judges what the one before taught, and learns from this one."""
        decode, prefill = self._decode, self._prefill
        if min(decode.seen, prefill.seen) < QUOTA and self._steps < LONGEST_WINDOW:
            self._due += QUOTA
            return None
        window = Window((decode.array(), prefill.array()), (decode.seen, prefill.seen))
        self._open()
        winner = self._judge(window)
        if winner is not None:
            self._put_in_force(winner, window)
        self._learn(window)
        return None if winner is None else self.in_force

    def _judge(self, window: Window) -> Array | None:
        """Coefficients that are clearly better on steps that they were not fitted to; None if there are none.

        The cost model corrects a common factor by itself (`Drift`), so errors are counted around their own centre. It
        is one centre for both kinds of step: that one kind is off more than the other is worth a correction. Where
        nothing but a common factor is off, this factor is folded in, so that predictions mean seconds.
        """
        if self._candidate is None:
            return None
        vector, factor = self._candidate
        old, new = _log_errors(self._vector, window), _log_errors(vector, window)
        level = _centre(old, window.seen)
        if _better(_around(old, level), _around(new, _centre(new, window.seen))):
            return vector
        if abs(level) > LEVEL and _is_common(factor, old):
            scaled = self._within_reach(self._vector * math.exp(factor))
            return None if np.array_equal(scaled, self._vector) else scaled
        return None

    def _put_in_force(self, vector: Array, window: Window) -> None:
        self._vector = vector
        self.in_force = self.in_force.with_vector(vector.tolist())
        self.mean, self.variance = _moments(_log_errors(vector, window), window.seen)

    def _learn(self, window: Window) -> None:
        level = _centre(_log_errors(self._vector, window), window.seen)
        decode, prefill = (np.concatenate(pair) for pair in zip(self._past, window.kinds, strict=True))
        self._past = (_thinned(decode), _thinned(prefill))
        multipliers = fit_multipliers(self._vector, np.concatenate((decode, prefill)), math.exp(level))
        self._candidate = Candidate(self._within_reach(self._vector * multipliers), level)

    def _within_reach(self, vector: Array) -> Array:
        return np.clip(vector, self._start / REACH, self._start * REACH)


def fit_multipliers(vector: Array, samples: Array, common: float) -> Array:
    """By what each coefficient should be multiplied: least squares of the relative error, with Huber's weights.

    Relative to what is predicted, not to what was measured, which would favour steps that happened to be quick.
    """
    parts = _parts(vector, samples)
    predicted = _seconds(parts)
    useful = predicted > 0
    parts, predicted = parts[useful], predicted[useful] * common
    shares = parts * (common / predicted)[:, None]
    ratio = samples[useful, -1] / predicted
    apart = np.ones(len(vector))  # multipliers over the common factor
    if not len(ratio):
        return apart * common
    for _ in range(ROUNDS):
        # Which steps are bound by bytes depends on the multipliers, so the two are found in turns.
        by_bytes = shares[:, 1] * apart[1] >= shares[:, 2] * apart[2]
        design = shares.copy()
        design[by_bytes, 2] = 0.0
        design[~by_bytes, 1] = 0.0
        errors = np.abs(ratio - design @ apart)
        spread = max(1.4826 * float(np.median(errors)), LEAST_SPREAD)
        weighted = design * np.minimum(1.0, HUBER * spread / np.maximum(errors, 1e-12))[:, None]
        pull = (spread / PULL) ** 2
        normal = weighted.T @ design + pull * np.eye(len(vector))
        apart = np.clip(np.linalg.solve(normal, weighted.T @ ratio + pull), 1 / APART, APART)
    return apart * common


def _parts(vector: Array, samples: Array) -> Array:
    """Seconds that each coefficient stands for in each step; of weights and token only the larger one counts."""
    parts = np.ones((len(samples), len(vector)))
    parts[:, 2:-2] = samples[:, :-1]
    parts[:, -2] = samples[:, 2] > 0
    parts[:, -1] = np.minimum(samples[:, 3], FEW)
    parts *= vector
    return parts


def _seconds(parts: Array) -> Array:
    seconds: Array = parts[:, 0] + np.maximum(parts[:, 1], parts[:, 2]) + parts[:, 3:].sum(axis=1)
    return seconds


def _log_errors(vector: Array, window: Window) -> list[Array]:
    """Logarithms of measured over predicted, for each kind of step."""
    return [np.log(samples[:, -1] / np.maximum(_seconds(_parts(vector, samples)), 1e-12)) for samples in window.kinds]


def _centre(errors: list[Array], seen: tuple[int, int]) -> float:
    """Where the errors of all served steps lie, each kind with its true share; hiccups do not move it."""
    return sum(float(np.median(e)) * n for e, n in zip(errors, seen, strict=True) if n) / max(1, sum(seen))


def _around(errors: list[Array], centre: float) -> list[Array]:
    return [np.abs(e - centre) for e in errors]


def _better(old: list[Array], new: list[Array]) -> bool:
    """Whether some kind of step is predicted clearly better and none worse, neither at the median nor in the tail."""
    clearly = False
    for before, after in zip(old, new, strict=True):
        if len(before) < FEWEST:
            continue
        was, now = (np.maximum(np.percentile(e, (50, 90, 99)), TRIFLE) for e in (before, after))
        if (now > was * NOT_WORSE).any():
            return False
        wins = float(np.mean(after < before))  # step by step, so that a lucky percentile is not enough
        clearly |= bool(now[0] < was[0] * CLEARLY) and wins > 0.5 + BY_CHANCE / math.sqrt(len(before))
    return clearly


def _is_common(factor: float, errors: list[Array]) -> bool:
    """Whether both kinds of step are off by about this much."""
    medians = [float(np.median(e)) for e in errors if len(e) >= FEWEST]
    return all(abs(median - factor) < abs(median) / 2 for median in medians)


def _moments(errors: list[Array], seen: tuple[int, int]) -> tuple[float, float]:
    """Mean and variance of all served steps, each kind with its true share; a hiccup counts as three spreads."""
    centre = _centre(errors, seen)
    share = np.concatenate([np.full(len(e), n / max(1, len(e))) for e, n in zip(errors, seen, strict=True)])
    share /= share.sum()
    error = np.concatenate(errors) - centre
    most = 3 * 1.4826 * float(np.median(np.abs(error))) + 0.02
    error = np.clip(error, -most, most)
    mean = float(share @ error)
    return centre + mean, float(share @ (error - mean) ** 2)


def _thinned(samples: Array) -> Array:
    return samples[:: max(1, -(-len(samples) // PAST))]
