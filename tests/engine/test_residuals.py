"""What steps in service differ by: a device whose products are uneven and whose clock follows its load."""

import math
from dataclasses import astuple, replace

import numpy as np
import pytest

from weft.core import Coefficients, StepShape
from weft.engine.residuals import Heat, Residuals, RunStep, fit_residuals, fit_sizes

COST = Coefficients(1e-3, 3e-3, 2e-5, 0.0, 5e-5, 5e-6, 3e-8, grain=128, wave=512)
SIZES = (1.05, 1.0, 0.95, 0.93, 1.0, 1.04, 1.0, 0.97)
HOT = 0.1


def served(coefficients: Coefficients, hot: float, noise: float = 0.0) -> list[RunStep]:
    """Prefills of all sizes, several behind each other or between decodes."""
    random = np.random.default_rng(0)
    heat, steps = Heat(coefficients), []
    for _ in range(600):
        shape = StepShape(32, decodes=32, context=32 * 500.0)
        if random.uniform() < 0.5:
            shape = coefficients.with_slice(shape, 0, int(random.integers(1, 990)))
        idle = 0.05 if random.uniform() < 0.02 else 0.0
        heat.note_idle(idle)
        seconds = coefficients.predict(shape) * math.exp(hot * heat.share + random.normal(0, noise))
        heat.note_step(shape, seconds)
        steps.append(RunStep(shape, seconds, idle))
    return steps


def test_sizes_and_heat_are_found() -> None:
    steps = served(replace(COST, sizes=SIZES), HOT, noise=0.02)
    found = fit_sizes(COST, steps)
    assert len(found) == len(SIZES)
    ratios = np.array(found) / np.array(SIZES)
    assert ratios.std() < 0.012, "but for a common factor, which is the residual's"
    known = replace(COST, sizes=found)
    residuals = fit_residuals(known, steps)
    assert residuals is not None
    assert residuals.hot == pytest.approx(HOT, abs=0.02)
    assert residuals.prefill_noise == pytest.approx(0.02, abs=0.008)
    assert residuals.decode == pytest.approx(0.0, abs=0.01)


def test_a_device_without_either_has_none() -> None:
    steps = served(COST, hot=0.0)
    assert fit_sizes(COST, steps) == pytest.approx([1.0] * 8, abs=1e-6)
    found = fit_residuals(COST, steps)
    assert found is not None
    assert astuple(found) == pytest.approx([0.0] * 5, abs=1e-6)


def test_a_size_that_was_hardly_seen_counts_as_like_the_others() -> None:
    steps = [step for step in served(replace(COST, sizes=SIZES), 0.0) if step.shape.tokens <= 512]
    lone = COST.with_slice(StepShape(), 0, 1020)
    found = fit_sizes(COST, [*steps, RunStep(lone, 1.5 * COST.predict(lone))])
    assert found[4] == found[5] == found[6] == pytest.approx(1.0, abs=1e-9)
    assert found[7] < 1.15


def test_too_few_steps_say_nothing() -> None:
    steps = served(COST, HOT)[:60]
    assert fit_residuals(COST, steps) is None
    assert fit_sizes(COST, steps) == ()


def test_heat_follows_the_load_and_fades() -> None:
    heat = Heat(COST)
    decode = StepShape(32, decodes=32, context=0.0)
    prefill = COST.with_slice(StepShape(), 0, 2048)
    heat.note_step(decode, 0.005)
    assert heat.share == 0
    for _ in range(10):
        heat.note_step(prefill, COST.predict(prefill))
    assert 0.8 < heat.share <= 1
    before = heat.share
    heat.note_idle(0.03)
    assert heat.share == pytest.approx(before / math.e)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_residuals_that_are_no_numbers_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="hot"):
        Residuals(0.0, 0.0, wrong, 0.0, 0.0)
    with pytest.raises(ValueError, match="noise"):
        Residuals(0.0, 0.0, 0.0, -0.1, 0.0)
