"""Residuals: how served steps differ from the cost model's coefficients, measured by the rehearsal.

Two effects are larger than the noise on a GPU. First, the time of matrix products does not grow evenly with the tokens
of a step; this becomes part of the coefficients (`sizes`). Second, a GPU that has run prefills for some tens of
milliseconds reaches its power limit and lowers its clock. On an H200 the same step of 1,100 tokens takes 28 ms after
decodes and 31 to 33 ms after other prefills. The simulator models this; the scheduler does not.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.coefficients import Coefficients
from weft.core.refit import HUBER
from weft.core.shape import StepShape

# Seconds after which the GPU clock has followed a load change by two thirds; measured on an H200.
HEATING_SECONDS = 0.03
SIZE_PRIOR_STEPS = 4.0  # steps; a size with fewer measurements is assumed to be mostly like the others
HEAT_PRIOR = 1e-3  # weight of a prior of zero for heat: keeps the fit regular if no step is hot
FEWEST_STEPS = 64  # steps of each kind that a fit needs
FIT_ROUNDS = 10


class Heat:
    """Share of arithmetic-bound prefill work in the device's recent time, from 0 (decodes only) to 1."""

    def __init__(self, coefficients: Coefficients) -> None:
        self.share = 0.0
        self._coefficients = coefficients
        self._by_bytes = coefficients.smallest_step  # seconds of a step that do not heat the device

    def note_idle(self, seconds: float) -> None:
        """The device was idle for `seconds`."""
        if seconds > 0:
            self.share *= math.exp(-seconds / HEATING_SECONDS)

    def note_step(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took `seconds`."""
        work = max(0.0, self._coefficients.predict(shape) - self._by_bytes) if shape.slices else 0.0
        kept = math.exp(-seconds / HEATING_SECONDS)
        self.share = kept * self.share + (1 - kept) * min(1.0, work / seconds)


@dataclass(frozen=True)
class Residuals:
    """Parameters of log(measured / predicted) time of steps."""

    decode: float  # mean of steps without prefill, on a cool device
    prefill: float  # mean of steps with prefill, on a cool device
    hot: float  # added at heat 1, in proportion to the heat
    decode_noise: float  # standard deviation of the remaining error, for steps without prefill
    prefill_noise: float  # the same for steps with prefill

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not math.isfinite(value) or (name.endswith("noise") and value < 0):
                raise ValueError(f"residual {name}={value} must be a finite number, and noise at least 0")

    def expected(self, shape: StepShape, heat: float) -> float:
        """Expected log(measured / predicted) of a step, without noise."""
        return (self.prefill if shape.slices else self.decode) + self.hot * heat

    def noise(self, shape: StepShape) -> float:
        return self.prefill_noise if shape.slices else self.decode_noise


class RunStep(NamedTuple):
    """A step that was served."""

    shape: StepShape
    seconds: float
    idle: float = 0.0  # seconds that the device was idle before it; infinite for the first step


def fit_residuals(coefficients: Coefficients, steps: Sequence[RunStep]) -> Residuals | None:
    """Residuals of these steps, given in the order of execution; None if there are too few."""
    slices = _with_slices(steps)
    if not _are_enough(slices):
        return None
    design = np.column_stack([~slices, slices, _heats(coefficients, steps)]).astype(np.float64)
    solution, left = _robust_fit(design, _errors(coefficients, steps), np.array([0.0, 0.0, HEAT_PRIOR]))
    decode, prefill, hot = solution.tolist()
    return Residuals(decode, prefill, hot, _deviation(left[~slices]), _deviation(left[slices]))


def fit_sizes(coefficients: Coefficients, steps: Sequence[RunStep]) -> tuple[float, ...]:
    """Factors of steps with prefill by size (see Coefficients.sizes); empty if there are too few steps."""
    slices = _with_slices(steps)
    if not _are_enough(slices):
        return ()
    sizes = np.array([-(-step.shape.tokens // coefficients.grain) - 1 for step in steps])
    number = 1 + int(sizes[slices].max())
    # Columns: decode, prefill, heat, and one correction per size of a prefill step.
    design = np.zeros((len(steps), 3 + number))
    design[~slices, 0] = design[slices, 1] = 1.0
    design[:, 2] = _heats(coefficients, steps)
    design[slices, 3 + sizes[slices]] = 1.0
    prior = np.concatenate([[0.0, 0.0, HEAT_PRIOR], np.full(number, math.sqrt(SIZE_PRIOR_STEPS))])
    solution, _ = _robust_fit(design, _errors(coefficients, steps), prior)
    return tuple(np.exp(solution[3:]).tolist())


def _with_slices(steps: Sequence[RunStep]) -> NDArray[np.bool_]:
    return np.array([step.shape.slices > 0 for step in steps], np.bool_)


def _are_enough(slices: NDArray[np.bool_]) -> bool:
    return min(int(slices.sum()), int((~slices).sum())) >= FEWEST_STEPS


def _errors(coefficients: Coefficients, steps: Sequence[RunStep]) -> NDArray[np.float64]:
    return np.array([math.log(step.seconds / coefficients.predict(step.shape)) for step in steps])


def _heats(coefficients: Coefficients, steps: Sequence[RunStep]) -> list[float]:
    """Heat at the start of each step."""
    heat, found = Heat(coefficients), []
    for step in steps:
        heat.note_idle(step.idle)
        found.append(heat.share)
        heat.note_step(step.shape, step.seconds)
    return found


def _robust_fit(
    design: NDArray[np.float64], errors: NDArray[np.float64], prior: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Solution and remaining errors of a least-squares fit.

    Outliers count less. Columns with a prior are pulled towards zero.
    """
    weight = np.ones(len(errors))
    solution = np.zeros(design.shape[1])
    wanted = np.zeros(len(prior))
    for _ in range(FIT_ROUNDS):
        rows = np.vstack([design * weight[:, None], np.diag(prior)])
        solution = np.linalg.lstsq(rows, np.concatenate([errors * weight, wanted]), rcond=None)[0]
        left = np.abs(errors - design @ solution)
        weight = np.sqrt(np.minimum(1.0, HUBER * max(_deviation(left), 1e-4) / np.maximum(left, 1e-12)))
    return solution, errors - design @ solution


def _deviation(errors: NDArray[np.float64]) -> float:
    """Robust standard deviation, from the median."""
    return 1.4826 * float(np.median(np.abs(errors)))
