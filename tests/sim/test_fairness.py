"""Tenants, classes and short prompts behind long ones, in virtual time on the H200 profile."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.smooth import SMOOTH
from tests.strength import examples
from weft.core import CostModel, Plan, PlannedStep, Scheduler, Targets, slo
from weft.sim.simulator import Played, Truth, play
from weft.sim.traces import Arrival, Trace

PROFILE = SMOOTH
COST = PROFILE.coefficients
DEFAULTS = Targets(gap=0.05, ttft=1.0, ttft_per_1k=0.25)


class Watched(Scheduler):
    """Keeps its steps, and looks for work left undone whenever it makes one."""

    def __init__(self, num_blocks: int = 50_000, seqs: int = 1024) -> None:
        policy = slo(CostModel(COST, spread=0.0), PROFILE.max_num_batched_tokens)
        super().__init__(policy=policy, num_blocks=num_blocks, block_size=16, max_num_seqs=seqs)
        self.steps: list[PlannedStep] = []

    def plan(self, now: float) -> Plan:
        slots = self.slots
        ready = np.flatnonzero(slots.decoding & (slots.num_tokens < slots.limit))
        plan = super().plan(now)
        batch = plan.batch
        decoding = set() if batch is None else set(batch.slots[: batch.num_decodes].tolist())
        assert decoding == set(ready[slots.decoding[ready]].tolist()), "a ready decode was left out"
        if batch is None:
            uncommitted = any(self.slots.num_in_flight)
            assert uncommitted or not (self.queue or self.running), "the device idles while work waits"
        else:
            self.steps.append(self.steps_in_flight[-1])
            assert batch.num_decodes or batch.shape.slices
        return plan


def play_all(arrivals: list[Arrival], targets: Targets = DEFAULTS, **sizes: int) -> tuple[Played, Watched]:
    scheduler = Watched(**sizes)
    trace = Trace("drawn", tuple(sorted(arrivals, key=lambda arrival: arrival.time)))
    played = play(trace, scheduler, Truth(COST), targets)
    scheduler.check_integrity()
    assert scheduler.kv.block_pool.num_free == scheduler.kv.block_pool.num_blocks
    return played, scheduler


def test_a_short_prompt_just_behind_a_huge_one_does_not_wait_for_it() -> None:
    short = Arrival(0.01, 200, 20)
    alone, _ = play_all([short])
    together, scheduler = play_all([Arrival(0.0, 100_000, 20), short])
    assert not together.refused.any()
    longest = max(step.predicted or 0.0 for step in scheduler.steps)
    assert together.ttft[1] <= 2 * alone.ttft[0] + 2 * longest
    assert longest <= 0.25


@pytest.mark.parametrize("gap", [0.015, *(pytest.param(gap, marks=pytest.mark.long) for gap in (0.025, 0.05)), 0.1])
def test_a_tenant_that_sends_twenty_times_as_much_does_not_slow_the_other(gap: float) -> None:
    """The heavy one alone would keep the device busy twice over."""
    rng = np.random.default_rng(0)
    targets = Targets(gap=gap, ttft=1.0, ttft_per_1k=0.25)
    light = [Arrival(t, int(rng.integers(100, 3000)), 100, tenant="light") for t in np.arange(0.5, 60, 0.7)]
    heavy = [
        Arrival(t, int(rng.integers(100, 3000)), 100, tenant="heavy")
        for t in np.sort(rng.uniform(0, 60, 20 * len(light)))
    ]
    alone, _ = play_all(light, targets)
    both, scheduler = play_all([*light, *heavy], targets)
    ours = np.array([a.tenant == "light" for a in sorted([*light, *heavy], key=lambda a: a.time)])
    assert not both.refused[ours].any(), "the light tenant was refused"
    assert both.refused[~ours].any(), "the heavy one is beyond what the device can do"
    steps = 2 * max(step.predicted or 0.0 for step in scheduler.steps)
    assert np.percentile(both.ttft[ours], 99) <= 2 * np.percentile(alone.ttft, 99) + steps


def test_flex_fills_what_is_left_and_costs_the_others_nothing() -> None:
    people = [Arrival(0.4 * i, 800, 150) for i in range(100)]
    flex = [Arrival(0.0, 4000, 300, flex=True) for _ in range(150)]
    alone, _ = play_all(people)
    both, _ = play_all([*people, *flex])
    ours = np.array([not a.flex for a in sorted([*people, *flex], key=lambda a: a.time)])
    assert not both.refused.any()
    assert (both.gaps[ours[both.gap_owner]] <= DEFAULTS.gap + 1e-9).all()
    assert (both.ttft[ours] <= [DEFAULTS.first_token(800)] * ours.sum()).all()
    assert np.isfinite(both.finished).all()
    assert both.ended < alone.ended + 60, "flex made next to no progress beside the others"


arrivals = st.lists(
    st.builds(
        Arrival,
        time=st.floats(0, 2).map(lambda t: round(t, 3)),
        prompt_tokens=st.one_of(st.integers(1, 2000), st.integers(1, 20_000)),
        output_tokens=st.integers(1, 200),
        prefix_ids=st.just(()),
        tenant=st.sampled_from(["", "a", "b"]),
        flex=st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    arrivals,
    st.builds(Targets, gap=st.sampled_from([0.015, 0.05]), ttft=st.floats(0.3, 2), ttft_per_1k=st.floats(0, 0.3)),
    st.integers(1400, 6000),
    st.integers(2, 30),
)
def test_whoever_is_not_refused_comes_to_an_end_and_the_device_never_idles(
    drawn: list[Arrival], wanted: Targets, num_blocks: int, seqs: int
) -> None:
    """Classes, tenants, few seats and few blocks: nothing starves, blocks are accounted for, no ready decode waits."""
    played, scheduler = play_all(drawn, wanted, num_blocks=num_blocks, seqs=seqs)
    assert np.isfinite(played.finished[~played.refused]).all()
    for step in scheduler.steps:
        decoding = step.batch.num_decodes > 0 and step.batch.shape.slices > 0
        gaps = [request.gap_target for request in step.requests[: step.batch.num_decodes]]
        assert not decoding or step.predicted is None or step.predicted <= min(gaps) + 1e-9
