"""Bursts: screening is bounded in every plan, and what nobody asked for refuses nobody."""

import math

import numpy as np
import pytest

from weft.bench.engine.scheduler import measure_burst
from weft.core import CostModel, HostCost, Outcome, Request, Scheduler, Source, slo
from weft.core.budget import DecodeLoad
from weft.core.forecast import FORECAST_GROUPS
from weft.sim.profiles import load_profile

PROFILE = load_profile("h200-llama-3-8b")


class Counted:
    """A scheduler on the H200's profile that counts how often a plan asks for a pace."""

    def __init__(self, host: HostCost | None = None) -> None:
        cost = CostModel(PROFILE.coefficients, host=host)
        policy = slo(cost, PROFILE.max_num_batched_tokens)
        budget_policy, self.asked = policy.budget_policy, 0
        pace = budget_policy.pace

        def counted(cost: CostModel, decode_load: DecodeLoad, reach: float) -> float:
            self.asked += 1
            return pace(cost, decode_load, reach)

        budget_policy.pace = counted  # type: ignore[method-assign]
        self.scheduler = Scheduler(
            policy=policy, num_blocks=50_000, block_size=16, max_num_seqs=1024, wave=PROFILE.coefficients.wave
        )
        self.now = 0.0

    def step(self) -> int:
        """Paces that the plan asked for."""
        before = self.asked
        plan = self.scheduler.plan(self.now)
        if plan.batch is not None:
            step = self.scheduler.steps_in_flight[-1]
            started, self.now = self.now, self.now + (step.predicted or 0.0)
            done = [(step.requests[row], "length") for row in np.flatnonzero(plan.may_be_last).tolist()]
            self.scheduler.commit(plan.batch, Outcome(finished=done), started, self.now)
        return self.asked - before

    def run(self, streams: int) -> None:
        for number in range(streams):
            self.scheduler.add(Request(f"s{number}", 200, 5000, ttft_target=600.0, gap_target=0.025))
        while self.scheduler.num_waiting:
            self.step()
        self.step()  # the last of them was read

    def burst(self, count: int, **standing: object) -> list[Request]:
        wanted = {"ttft_target": 1.0, "gap_target": 0.025, **standing}
        newcomers = [Request(f"n{i:04d}", 200, 100, arrival=self.now, **wanted) for i in range(count)]  # type: ignore[arg-type]
        for request in newcomers:
            self.scheduler.add(request)
        return newcomers


@pytest.mark.parametrize("count", [10, 100, 1000])
def test_no_plan_asks_for_more_paces_than_a_few_forecasts_take(count: int) -> None:
    drive = Counted()
    drive.run(64)
    drive.burst(count)
    # Two forecasts, which look at groups again where prompts find no room, and the heads of the queue.
    most = 2 * 4 * FORECAST_GROUPS + 48
    while drive.scheduler.num_unscreened:
        assert drive.step() <= most


def test_a_slow_host_screens_fewer_in_one_plan() -> None:
    def left_after_one_plan(visit: float) -> int:
        drive = Counted(HostCost(visit=visit))
        drive.run(8)
        drive.burst(1000)
        drive.step()
        return drive.scheduler.num_unscreened

    assert left_after_one_plan(10e-6) < left_after_one_plan(20e-6) < left_after_one_plan(40e-6) < 1000


def test_streams_decode_in_every_step_while_a_burst_is_screened() -> None:
    drive = Counted()
    drive.run(16)
    drive.burst(500)
    while drive.scheduler.num_unscreened:
        plan = drive.scheduler.plan(drive.now)
        assert plan.batch is not None
        assert plan.batch.num_decodes >= 16
        started, drive.now = drive.now, drive.now + (drive.scheduler.steps_in_flight[-1].predicted or 0.0)
        assert drive.now - started <= 0.025
        drive.scheduler.commit(plan.batch, Outcome(), started, drive.now)


def test_the_burst_of_the_benchmark_is_screened_in_half_a_second_of_virtual_time() -> None:
    burst = measure_burst()
    assert burst.screened_s < 0.5
    assert 0 < burst.refused < burst.newcomers


def test_default_targets_refuse_nobody_however_many_come() -> None:
    drive = Counted()
    newcomers = drive.burst(600, ttft_source=Source.DEFAULT, gap_source=Source.DEFAULT)
    own = Request("own", 200, 10, arrival=0.0, ttft_target=0.05, gap_target=0.025)
    drive.scheduler.add(own)
    for _ in range(3000):
        drive.step()
        if not drive.scheduler.has_work:
            break
    assert {request.finish_reason for request in newcomers} == {"length"}
    assert own.finish_reason in ("length", "refused")  # its own deadline is kept or refused
    assert own.finish_reason == "refused" or (own.first_token or math.inf) <= own.due


def test_a_default_target_waits_behind_a_promise() -> None:
    drive = Counted()
    late = drive.burst(50, ttft_source=Source.DEFAULT)
    promised = Request("promised", 2000, 10, arrival=0.0, ttft_target=0.4, gap_target=0.025)
    drive.scheduler.add(promised)
    while drive.scheduler.has_work:
        drive.step()
    assert promised.finish_reason == "length"
    assert (promised.first_token or math.inf) <= 0.4
    assert all(request.finish_reason == "length" for request in late)


def test_a_promise_that_an_idle_machine_could_not_keep_is_not_made() -> None:
    drive = Counted()
    wanted = {"ttft_target": 0.1, "gap_target": 0.025, "ttft_source": Source.OPERATOR}
    long = Request("long", 40_000, 2, **wanted)  # type: ignore[arg-type]
    short = Request("short", 200, 2, **wanted)  # type: ignore[arg-type]
    own = Request("own", 40_000, 2, ttft_target=0.1, gap_target=0.025)
    for request in (long, short, own):
        drive.scheduler.add(request)
    while drive.scheduler.has_work:
        drive.step()
    assert (long.finish_reason, long.promised_due) == ("length", math.inf)
    assert (short.finish_reason, short.promised_due) == ("length", 0.1)
    assert (short.first_token or math.inf) <= 0.1
    assert own.finish_reason == "refused", "only a request's own deadline refuses it"


def test_a_default_gap_gives_way_and_a_promised_one_says_that_prompts_starve() -> None:
    slow = CostModel(PROFILE.coefficients)
    slow.prefill.spread = 0.4  # noise: a margin of four
    budget_policy = slo(slow, 2048).budget_policy
    default = DecodeLoad(64, 64_000, math.inf, 0.02)
    promised = DecodeLoad(64, 64_000, 0.02)
    chunked = budget_policy.pace(slow, DecodeLoad(64, 64_000, math.inf), 0)
    assert budget_policy.pace(slow, promised, 0) < 0.25 * chunked
    assert budget_policy.pace(slow, default, 0) > 0.5 * chunked
