"""Coefficients that are learnt while serving: what takes force is better, and what is not stays out."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strength import examples
from weft.core import Coefficients, CostModel, StepShape
from weft.core.refit import (
    MOST_FIT_CHANGE,
    MOST_SAMPLES,
    MOST_TOTAL_CHANGE,
    WINDOW_STEPS,
    Refit,
    Reservoir,
    fit_multipliers,
)
from weft.core.shape import with_slice

MODEL = Coefficients(0.0006, 0.0043, 2.35e-5, 8.5e-10, 2e-5, 1.1e-5, 3.2e-8)  # an H200 with a model of 8B
GAP = 0.025  # seconds
Truth = Callable[[StepShape], float]


def times(**factors: float) -> Coefficients:
    return dataclasses.replace(MODEL, **{name: getattr(MODEL, name) * factor for name, factor in factors.items()})


SLOW_PREFILL = times(token=1.3, pair=1.3, context=0.8)


def noisy(coefficients: Coefficients, seed: int, noise: float, hiccups: float = 0.0) -> Truth:
    rng = np.random.default_rng(seed)

    def seconds(shape: StepShape) -> float:
        factor = max(0.5, 1 + noise * rng.standard_normal()) * (10 if rng.random() < hiccups else 1)
        return coefficients.predict(shape) * float(factor)

    return seconds


def loads(seed: int, prefills: float = 0.3, busy: int = 120) -> Iterator[tuple[StepShape, int]]:
    """What decodes in a step, which grows and shrinks slowly, and where a prefill beside it begins (-1: none)."""
    rng = np.random.default_rng(seed)
    decodes, length = busy / 2, 800.0
    while True:
        decodes = float(np.clip(decodes + rng.normal(0, 3), 1, busy))
        length = float(np.clip(length + rng.normal(0, 20), 200, 2000))
        first = int(rng.choice([0, 0, 512, 4000])) if rng.random() < prefills else -1
        yield StepShape(int(decodes), 0.0, 0, int(decodes), int(decodes * length)), first


def serve(cost: CostModel, steps: int, truth: Truth, load: Iterator[tuple[StepShape, int]]) -> list[Coefficients]:
    """Serves as the scheduler does: slices up to the gap target, one step in flight. Gives all that took force."""
    forced: list[Coefficients] = []
    in_flight: tuple[StepShape, float] | None = None
    for _ in range(steps):
        shape, first = next(load)
        room = cost.coefficients.largest_slice(shape, first, 2048, GAP / cost.margin) if first >= 0 else 0
        if room:
            shape = with_slice(shape, first, room)
        planned = shape, cost.predict(shape)
        if in_flight is not None:
            before = cost.coefficients
            cost.observe(*in_flight, truth(in_flight[0]))
            forced += [cost.coefficients] if cost.coefficients is not before else []
        in_flight = planned
    return forced


def wide_grid() -> list[StepShape]:
    """Shapes far outside what `loads` serves as well as inside."""
    shapes = []
    for decodes in (0, 1, 16, 64, 256, 1024):
        for length in (100, 2000, 8000):
            base = StepShape(decodes, 0.0, 0, decodes, decodes * length)
            shapes += [base] if decodes else []
            shapes += [with_slice(base, first, count) for first in (0, 4000, 60_000) for count in (16, 512, 8192)]
    return shapes


def off_by(found: Coefficients, truth: Coefficients) -> list[float]:
    return [abs(found.predict(shape) / truth.predict(shape) - 1) for shape in wide_grid()]


@pytest.mark.parametrize("hiccups", [0.0, 0.01])
@pytest.mark.parametrize("seed", range(3))
def test_single_coefficients_that_are_off_are_learnt(seed: int, hiccups: float) -> None:
    unlearnt = CostModel(MODEL, refit=False)
    serve(unlearnt, 4000, noisy(SLOW_PREFILL, seed, 0.02, hiccups), loads(seed, prefills=0.6))
    cost = CostModel(MODEL)
    assert serve(cost, 8000, noisy(SLOW_PREFILL, seed, 0.02, hiccups), loads(seed, prefills=0.6))
    before, after = unlearnt.errors(), cost.errors()
    assert before is not None
    assert after is not None
    assert before.p50 > 0.1
    assert after.p50 < 0.03
    assert cost.coefficients.token == pytest.approx(SLOW_PREFILL.token, rel=0.05)
    # Far from what was served it is no worse than what it replaced, and mostly much better.
    learnt, unlearnt_errors = off_by(cost.coefficients, SLOW_PREFILL), off_by(MODEL, SLOW_PREFILL)
    assert np.median(learnt) < np.median(unlearnt_errors) / 3
    assert max(learnt) < max(unlearnt_errors)


@settings(max_examples=examples(15), deadline=None)
@given(
    seed=st.integers(0, 1000),
    prefills=st.sampled_from([0.01, 0.1, 0.5, 0.95]),
    busy=st.sampled_from([3, 30, 300]),
    hiccups=st.sampled_from([0.0, 0.01]),
)
def test_an_exact_model_stays_exact_everywhere(seed: int, prefills: float, busy: int, hiccups: float) -> None:
    cost = CostModel(MODEL)
    serve(cost, 6000, noisy(MODEL, seed, 0.05, hiccups), loads(seed, prefills, busy))
    assert max(off_by(cost.coefficients, MODEL)) < 0.03


def test_without_noise_nothing_changes_at_all() -> None:
    cost = CostModel(MODEL)
    assert serve(cost, 5000, MODEL.predict, loads(1)) == []
    assert cost.coefficients is MODEL


@settings(max_examples=examples(10), deadline=None)
@given(seed=st.integers(0, 1000), factor=st.sampled_from([0.5, 0.8, 1.25, 3.0]))
def test_a_factor_common_to_all_is_folded_in_and_nothing_else_moves(seed: int, factor: float) -> None:
    cost = CostModel(MODEL)
    truth = Coefficients(*(factor * value for value in MODEL.vector))
    serve(cost, 18_000 if factor > 2 else 6000, noisy(truth, seed, 0.05), loads(seed))  # so slow, it hardly prefills
    assert max(off_by(cost.coefficients, truth)) < 0.04
    assert cost.prefill.mean == pytest.approx(0.0, abs=0.03)


@pytest.mark.parametrize("seed", range(3))
def test_what_the_next_window_does_not_confirm_stays_out(seed: int) -> None:
    """The machine is slow for one window and then as it was: the candidate is worse on the held-out steps."""
    refit = Refit(MODEL)
    load = loads(seed, prefills=0.5)
    slow, usual = noisy(SLOW_PREFILL, seed, 0.02), noisy(MODEL, seed, 0.02)
    for step in range(2 * WINDOW_STEPS):
        shape, first = next(load)
        shape = with_slice(shape, first, 400) if first >= 0 else shape
        assert refit.observe(shape, (slow if step < WINDOW_STEPS else usual)(shape)) is None
    assert refit.in_force is MODEL


def test_many_decodes_do_not_hide_that_prefill_got_worse() -> None:
    """The window of the fit says that decodes and prefills are off, the next one only that decodes are."""
    refit = Refit(MODEL)
    load = loads(1, prefills=0.1)
    fitted, judged = times(token=1.4, pair=1.4, context=2.0), times(context=2.0)
    for step in range(2 * WINDOW_STEPS):
        shape, first = next(load)
        shape = with_slice(shape, first, 800) if first >= 0 else shape
        assert refit.observe(shape, (fitted if step < WINDOW_STEPS else judged).predict(shape)) is None


def test_the_same_steps_teach_the_same() -> None:
    def run() -> list[Coefficients]:
        return serve(CostModel(MODEL), 6000, noisy(SLOW_PREFILL, 7, 0.05, 0.01), loads(7))

    assert run() == run() != []


def test_rare_prefills_are_waited_for_and_not_crowded_out() -> None:
    cost = CostModel(MODEL)
    forced = serve(cost, 30_000, noisy(SLOW_PREFILL, 3, 0.02), loads(3, prefills=0.02))
    assert forced
    assert cost.coefficients.token == pytest.approx(SLOW_PREFILL.token, rel=0.1)


@given(st.integers(0, 20 * MOST_SAMPLES))
def test_a_reservoir_is_bounded_and_evenly_spread(count: int) -> None:
    reservoir = Reservoir()
    for number in range(count):
        reservoir.add(StepShape(number), 1.0)
    kept = [int(sample[0]) for sample in reservoir.samples]
    assert reservoir.seen == count
    assert len(kept) >= min(count, MOST_SAMPLES // 2)
    assert len(kept) <= MOST_SAMPLES
    assert kept == list(range(0, count, reservoir.stride))


shapes = st.builds(
    lambda decodes, length, first, count: (
        with_slice(StepShape(decodes, 0.0, 0, decodes, decodes * length), first, count)
        if count
        else StepShape(decodes, 0.0, 0, decodes, decodes * length)
    ),
    decodes=st.integers(0, 500),
    length=st.integers(1, 10_000),
    first=st.integers(0, 100_000),
    count=st.integers(0, 8192),
)


@given(st.lists(st.tuples(shapes, st.floats(1e-6, 1e3)), max_size=60), st.floats(0.01, 100))
def test_multipliers_stay_within_reason_whatever_was_measured(
    steps: list[tuple[StepShape, float]], common: float
) -> None:
    samples = np.array([(*shape, seconds) for shape, seconds in steps]).reshape(-1, 7)
    found = fit_multipliers(np.array(MODEL.vector), samples, common)
    assert np.isfinite(found).all()
    assert (found >= common / MOST_FIT_CHANGE * 0.999).all()
    assert (found <= common * MOST_FIT_CHANGE * 1.001).all()


@settings(max_examples=examples(10), deadline=None)
@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=8), st.integers(0, 100))
def test_whatever_the_machine_does_coefficients_stay_within_reach(speeds: list[float], seed: int) -> None:
    refit = Refit(MODEL)
    load = loads(seed)
    for number in range(6 * WINDOW_STEPS):
        shape, first = next(load)
        shape = with_slice(shape, first, 100) if first >= 0 else shape
        refit.observe(shape, MODEL.predict(shape) * speeds[number // WINDOW_STEPS % len(speeds)])
    for now, then in zip(refit.in_force.vector, MODEL.vector, strict=True):
        assert then / MOST_TOTAL_CHANGE * 0.999 <= now <= then * MOST_TOTAL_CHANGE * 1.001


def test_times_that_are_none_are_not_looked_at() -> None:
    refit = Refit(MODEL)
    for seconds in (0.0, -1.0, math.inf, math.nan):
        for _ in range(WINDOW_STEPS):
            assert refit.observe(StepShape(1, 0.0, 0, 1, 1), seconds) is None


def test_a_model_without_coefficients_learns_nothing_and_does_not_fail() -> None:
    refit = Refit(Coefficients(0, 0, 0, 0, 0, 0, 0))
    assert all(refit.observe(StepShape(1, 0.0, step % 2, 1, 1), 0.01) is None for step in range(4 * WINDOW_STEPS))


def test_factors_of_sizes_are_no_news() -> None:
    """Steps that take the factor of their size, as predicted, teach nothing, and the factors are kept."""
    uneven = replace(MODEL, grain=128, sizes=(1.2, 0.85, 1.1, 0.9))
    cost = CostModel(uneven)
    assert serve(cost, 5000, uneven.predict, loads(1)) == []
    slower = replace(uneven.with_vector([1.3 * value for value in uneven.vector]))
    serve(cost, 6000, noisy(slower, 1, 0.02), loads(1))
    assert cost.coefficients.sizes == uneven.sizes
    assert max(off_by(cost.coefficients, slower)) < 0.04
