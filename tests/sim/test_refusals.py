"""What a refusal says of the time is about true: the same traffic once more, with the refused request kept."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from weft.core import CostModel, Request, Scheduler, Source, Targets, slo
from weft.core.admission import DeadlineAdmission, MakeLineup, Screened
from weft.core.budget import StepLoad
from weft.core.forecast import Prefill
from weft.core.policies import Policy
from weft.sim.profiles import load_profile
from weft.sim.simulator import Played, Truth, play
from weft.sim.traces import Arrival, Trace

PROFILE = load_profile("h200-llama-3-8b")
TARGETS = Targets(gap=0.025, ttft=1.0, ttft_source=Source.OPERATOR, gap_source=Source.OPERATOR)


class Keeping(DeadlineAdmission):
    """Refuses every request that it must, but for one."""

    def __init__(self, policy: Policy, kept: int | None) -> None:
        assert policy.cost is not None
        super().__init__(policy.cost, policy.allowance)
        self.kept = kept
        self.predicted: dict[int, float] = {}  # of those that were refused

    def screen(self, newcomers: Sequence[Request], lineup: MakeLineup, load: StepLoad, visits: int) -> Screened:
        found = super().screen(newcomers, lineup, load, visits)
        for request in found.refused:
            self.predicted[int(request.id)] = request.predicted_ttft
        stays = [request for request in found.refused if int(request.id) == self.kept]
        return found._replace(
            kept=[*found.kept, *stays], refused=[request for request in found.refused if request not in stays]
        )

    def is_hopeless(self, prefill: Prefill, load: StepLoad) -> bool:
        return int(prefill.request.id) != self.kept and super().is_hopeless(prefill, load)


def run(trace: Trace, noise: float, kept: int | None = None) -> tuple[Played, Keeping]:
    policy = slo(CostModel(PROFILE.coefficients, spread=noise), PROFILE.max_num_batched_tokens)
    admission = Keeping(policy, kept)
    limits = {
        "num_blocks": PROFILE.kv_tokens // PROFILE.block_size,
        "block_size": PROFILE.block_size,
        "max_num_seqs": PROFILE.max_num_seqs,
    }
    scheduler = Scheduler(policy=replace(policy, admission=admission), wave=PROFILE.coefficients.wave, **limits)
    return play(trace, scheduler, Truth(PROFILE.coefficients, noise=noise, seed=1), TARGETS), admission


@pytest.mark.parametrize("noise", [0.03, 0.2])
def test_what_a_refusal_predicts_is_within_a_factor_of_two_nine_times_out_of_ten(noise: float) -> None:
    random = np.random.default_rng(0)
    times = np.sort(np.concatenate([random.uniform(0, 6, 180), random.normal(3, 0.05, 60).clip(0)]))
    sizes = np.exp(random.normal(6.8, 0.8, len(times))).astype(int).clip(1, 6000)
    arrivals = tuple(Arrival(float(time), int(size), 60) for time, size in zip(times, sizes, strict=True))
    trace = Trace("a burst", arrivals)
    played, admission = run(trace, noise)
    refused = np.flatnonzero(played.refused)
    assert len(refused) > 20
    ratios = []
    for number in random.choice(refused, 12, replace=False).tolist():
        kept, _ = run(trace, noise, number)
        ratios.append(admission.predicted[number] / kept.ttft[number])
    right = [0.5 <= ratio <= 2 for ratio in ratios]
    assert np.mean(right) >= 0.9, ratios
