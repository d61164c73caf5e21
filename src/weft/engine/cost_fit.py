"""Fits the coefficients of the cost model to measured steps."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.core.coefficients import FEW_DECODES, Coefficients
from weft.core.refit import HUBER
from weft.core.shape import StepShape

FIT_ROUNDS = 20


def fit(shapes: Sequence[StepShape], seconds: Sequence[float], grain: int = 1, wave: int = 0) -> Coefficients:
    """Non-negative coefficients with the smallest relative error on the measurements.

    Which steps are bound by reading weights depends on the coefficients, so the two are found in turns. An outlier
    counts in proportion to its error, not to its square.
    """
    features = np.array(shapes, np.float64)
    prefills = features[:, 2] > 0
    features[prefills, 0] = np.ceil(features[prefills, 0] / grain) * grain
    few = np.minimum(features[:, 3], FEW_DECODES)
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
