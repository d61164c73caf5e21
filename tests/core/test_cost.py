"""The cost model's view of itself: margin, reported error, and what happens when coefficients change."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core import Coefficients, CostModel, StepShape
from weft.core.budget import DecodeLoad, LatencyBudgetPolicy
from weft.core.host_cost import MOVED_ROWS, HostCost
from weft.core.shape import slice_reach, with_slice
from weft.engine.cost_fit import fit

MODEL = Coefficients(0.001, 0.004, 2e-5, 1e-9, 2e-5, 1e-5, 3e-8)
DECODES = StepShape(32, 0.0, 0, 32, 32_000)
MIXED = StepShape(544, 400_000.0, 1, 32, 32_000)


def test_the_margin_grows_with_the_error_and_shrinks_without() -> None:
    cost = CostModel(MODEL, spread=0.05, refit=False)
    for number in range(3000):
        cost.observe(DECODES, 1.0, 1.1 + 0.05 * (-1) ** number)
    assert cost.decode.margin > 1.15  # at least the worst that was seen
    for _ in range(3000):
        cost.observe(DECODES, 1.0, 1.0)
    assert cost.decode.margin == pytest.approx(1.0, abs=0.01)
    hiccup = CostModel(MODEL, spread=0.05)
    hiccup.observe(DECODES, 1.0, 100.0)
    assert hiccup.decode.margin < 1.3


def test_errors_are_those_of_the_last_steps() -> None:
    cost = CostModel(MODEL)
    assert cost.errors() is None
    cost.observe(DECODES, 0.0, 1.0)  # nothing can be said of it
    assert cost.errors() is None
    for _ in range(3 * cost.REPORTED):
        cost.observe(DECODES, 1.0, 3.0)
    for number in range(cost.REPORTED):
        cost.observe(DECODES, 1.0, 0.5 if number % 50 == 0 else 1.1)
    errors = cost.errors()
    assert errors is not None
    assert errors.p50 == pytest.approx(0.1)
    assert errors.p99 == pytest.approx(0.5)


def serve(cost: CostModel, factors: tuple[float, float], steps: int) -> list[tuple[float, float]]:
    """Two kinds of step in turn that take so many times what MODEL says; margins before and after each change."""
    changes = []
    in_flight: tuple[StepShape, float] | None = None
    for step in range(steps):
        kind = step % 2
        shape = (DECODES, MIXED)[kind]._replace(context=32_000 + step % 1000)
        planned = shape, cost.predict(shape)
        if in_flight is not None:
            before, margin = cost.coefficients, cost.margin
            wobble = 1 + 0.02 * math.sin(step)
            cost.observe(*in_flight, MODEL.predict(in_flight[0]) * factors[1 - kind] * wobble)
            if cost.coefficients is not before:
                changes.append((margin, cost.margin))
        in_flight = planned
    return changes


def test_without_refit_coefficients_stay() -> None:
    cost = CostModel(MODEL, refit=False)
    assert serve(cost, (1.0, 1.5), 5000) == []
    assert cost.coefficients is MODEL


def test_after_a_change_the_margin_is_that_of_the_new_coefficients() -> None:
    cost = CostModel(MODEL)
    changes = serve(cost, (1.0, 1.5), 2100)
    assert len(changes) == 1
    before, after = changes[0]
    assert before > 1.5  # two kinds that are off by different factors
    assert 1.0 < after < 1.15
    # The step that was in flight meanwhile was predicted with the old ones, which must not count against the new.
    assert cost.margin == pytest.approx(after, abs=0.02)


def test_a_change_of_level_leaves_what_the_margin_makes_of_a_prediction() -> None:
    cost = CostModel(MODEL)
    [(before, after)] = serve(cost, (1.3, 1.3), 2500)
    assert cost.predict(MIXED) / MODEL.predict(MIXED) * after == pytest.approx(before, rel=0.03)
    errors = cost.errors()
    assert errors is not None
    assert errors.p50 < 0.3  # of the last steps, some of which were predicted before
    serve(cost, (1.3, 1.3), cost.REPORTED + 1)
    errors = cost.errors()
    assert errors is not None
    assert errors.p50 < 0.03


@given(
    st.builds(
        Coefficients,
        *[st.sampled_from([0.0, 1e-3, 7e-3])] * 2,
        *[st.sampled_from([0.0, 1e-9, 3e-6, 2e-5])] * 6,
        grain=st.sampled_from([1, 7, 128]),
        wave=st.sampled_from([0, 5, 512]),
    ),
    st.integers(0, 300),
    st.integers(0, 100_000),
    st.integers(1, 20_000),
    st.floats(0, 0.3),
)
def test_the_largest_slice_is_the_largest(
    cost: Coefficients, decodes: int, first: int, most: int, limit: float
) -> None:
    shape = StepShape(decodes, 0.0, 0, decodes, decodes * 100)
    found = cost.largest_slice(shape, first, most, limit)
    assert 0 <= found <= most
    assert found == 0 or cost.predict(cost.with_slice(shape, first, found)) <= limit
    assert found == most or cost.predict(cost.with_slice(shape, first, found + 1)) > limit
    best = cost.best_slice(shape, first, most, limit)
    assert (0 < best <= found) if found else best == 0
    if best < found:
        rates = [count / cost.predict(cost.with_slice(shape, first, count)) for count in (best, found)]
        assert rates[0] > rates[1]


def test_a_slice_does_not_begin_a_lump_that_it_cannot_fill() -> None:
    """Steps of 128 tokens, 2 ms each; waves of 512 queries, 4 ms each behind 10,000 tokens."""
    cost = Coefficients(0.001, 0, 2e-3 / 128, 0, 0, 0, 0, 4e-7, grain=128, wave=512)
    beside = StepShape(32, 0.0, 0, 32, 3200)
    # 608 tokens take 1 + 10 + 8.5 ms, 31 a millisecond; 480 take 1 + 8 + 4.2 ms, 36 a millisecond.
    assert cost.largest_slice(beside, 10_000, 4000, 0.0205) == 5 * 128 - 32
    assert cost.best_slice(beside, 10_000, 4000, 0.0205) == 4 * 128 - 32
    assert cost.best_slice(beside, 10_000, 100, 0.0205) == 100, "it is read to its end"
    assert cost.best_slice(beside, 0, 4000, 0.0205) == cost.largest_slice(beside, 0, 4000, 0.0205), "nothing to gain"


def test_few_queries_behind_a_long_context_take_their_share() -> None:
    """A promise smaller than what a whole wave takes does not keep a prompt from being read."""
    cost = Coefficients(0.001, 0, 2e-3 / 128, 0, 0, 0, 0, 4e-7, grain=128, wave=512)
    first = 100_000  # 40 ms a wave
    alone = [cost.predict(cost.with_slice(StepShape(), first, count)) for count in (16, 32, 33, 256, 257, 512, 513)]
    attention = [
        round(1000 * seconds - 1 - 2 * lumps) for seconds, lumps in zip(alone, (1, 1, 1, 2, 3, 4, 5), strict=True)
    ]
    assert attention == [3, 5, 10, 40, 40, 40, 80]
    assert cost.largest_slice(StepShape(), first, 4000, 0.015) > 0


def test_every_wave_reads_what_lies_before_its_last_query() -> None:
    assert slice_reach(0, 512, 512) == 512
    assert slice_reach(0, 1024, 512) == 512 + 1024
    assert slice_reach(100, 1100, 512) == 612 + 1124 + 1200
    assert slice_reach(100, 1100, 0) == 1200, "without waves all of them read it together"


def test_a_step_with_prefill_has_a_price_of_its_own_that_is_found() -> None:
    """As where the host launches kernels one by one as soon as a step has a prompt in it."""
    truth = replace(MODEL, prefill=0.002)
    one, two = with_slice(StepShape(), 0, 100), with_slice(with_slice(StepShape(), 0, 50), 0, 50)
    assert truth.predict(one) - MODEL.predict(one) == pytest.approx(0.002)
    assert truth.predict(two) - MODEL.predict(two) == pytest.approx(0.002)
    decodes = StepShape(8, decodes=8, context=800)
    assert truth.predict(decodes) == MODEL.predict(decodes)
    shapes = [StepShape(n, decodes=n, context=n * context) for n in (1, 8, 64) for context in (10, 1000, 9000)]
    for count in (1, 30, 300, 3000):
        for first in (0, 1000, 20_000):
            shapes += [with_slice(shapes[5], first, count), with_slice(with_slice(StepShape(), 0, 9), first, count)]
    found = fit(shapes, [truth.predict(shape) for shape in shapes])
    assert found.prefill == pytest.approx(0.002, rel=0.01)
    assert found.slice == pytest.approx(MODEL.slice, rel=0.01)


def test_a_burst_is_forgotten_while_the_device_is_idle() -> None:
    model = CostModel(Coefficients(0.01, 0, 0, 0, 0, 0, 0), spread=0.05, refit=False)
    quiet = model.margin
    for _ in range(200):
        model.observe(MIXED, 0.01, 0.03)
    assert model.bias > 2.5
    model.note_idle(10.0)
    assert model.bias < 1.2
    assert model.margin < 1.2 * quiet


def test_what_lasts_is_not_forgotten() -> None:
    model = CostModel(Coefficients(0.01, 0, 0, 0, 0, 0, 0), spread=0.05, refit=False)
    for _ in range(20_000):
        model.observe(MIXED, 0.01, 0.03)
    model.note_idle(3600.0)
    assert model.bias > 2.5


def test_the_first_decodes_of_a_step_may_cost_more_than_those_that_follow_and_that_is_found() -> None:
    truth = replace(MODEL, few=2e-5)
    alone = [truth.predict(StepShape(n, decodes=n)) for n in (1, 2, 16, 17, 64, 65)]
    assert alone[1] - alone[0] == pytest.approx(3e-5), "as one of few"
    assert alone[3] - alone[2] == pytest.approx(1e-5), "as one of many"
    assert alone[5] - alone[4] == pytest.approx(1e-5)
    shapes = [StepShape(n, decodes=n, context=n * context) for n in (1, 4, 16, 40, 100) for context in (10, 1000)]
    shapes += [with_slice(shape, first, count) for shape in shapes for first in (0, 3000) for count in (30, 300, 3000)]
    found = fit(shapes, [truth.predict(shape) for shape in shapes])
    assert found.few == pytest.approx(2e-5, rel=0.01)
    assert found.decode == pytest.approx(MODEL.decode, rel=0.01)


def test_sizes_count_where_steps_are_not_padded() -> None:
    uneven = replace(MODEL, sizes=(1.2, 0.8))
    for tokens, factor in ((1, 1.2), (2, 0.8), (3, 0.8)):
        shape = with_slice(StepShape(), 0, tokens)
        assert uneven.size_factor(shape) == factor
        assert uneven.predict(shape) == pytest.approx(factor * MODEL.predict(shape))


def test_a_pace_knows_sizes() -> None:
    slow = replace(MODEL, grain=128, wave=512, sizes=(1.25,) * 8)
    even = replace(slow, sizes=())
    paces = [one.pace(32, 32_000.0, 0.0, 2000, 0.02) for one in (slow, even)]
    assert paces[0] == pytest.approx(paces[1] / 1.25)


def test_delivery_leaves_room_for_so_many_rows_and_no_more() -> None:
    host = HostCost(token=1e-5)
    assert host.delivery_jitter(40) == pytest.approx(4e-4)
    assert host.delivery_jitter(MOVED_ROWS) == host.delivery_jitter(1000) == pytest.approx(1e-5 * MOVED_ROWS)
    cost = CostModel(MODEL, spread=0.0, host=host)
    few, many, more = (
        LatencyBudgetPolicy(cost, 4096).step_seconds(cost, DecodeLoad(rows, 1000.0, 0.05), 0)
        for rows in (10, MOVED_ROWS, 1000)
    )
    assert few > many == more


def test_steps_with_prefill_take_the_factor_of_their_size() -> None:
    uneven = replace(MODEL, grain=128, sizes=(1.1, 0.9))
    even = replace(uneven, sizes=())
    for tokens, factor in ((1, 1.1), (128, 1.1), (129, 0.9), (256, 0.9), (5000, 0.9)):
        shape = with_slice(StepShape(), 0, tokens)
        assert uneven.predict(shape) == pytest.approx(factor * even.predict(shape))
        assert uneven.size_factor(shape) == factor
    assert uneven.predict(DECODES) == even.predict(DECODES)
    limit = uneven.predict(with_slice(StepShape(), 0, 256))
    assert uneven.best_slice(StepShape(), 0, 500, limit) == 256
    assert even.best_slice(StepShape(), 0, 500, limit) == 128
    assert Coefficients(*MODEL.vector, sizes=[1.0, 1.1]).sizes == (1.0, 1.1)  # type: ignore[arg-type]  # as JSON has it
    with pytest.raises(ValueError, match="sizes"):
        replace(MODEL, sizes=(1.0, 0.0))
