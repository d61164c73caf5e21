"""Default targets on a machine that is much slower than its calibration says: late prompts must not get later."""

import numpy as np
import pytest

from weft.core import Coefficients, CostModel, Policy, Scheduler, Source, Targets, chunked, slo
from weft.sim.simulator import Played, Truth, play
from weft.sim.traces import Arrival, Trace

CPU = Coefficients(0.004, 0.004, 1.5e-4, 2e-9, 1e-5, 3e-4, 1e-8, grain=16)  # a small model on two cores
DEFAULTS = Targets(gap=0.05, ttft=1.0, ttft_per_1k=0.25, gap_source=Source.DEFAULT, ttft_source=Source.DEFAULT)


def served(policy: Policy, trace: Trace, truth: Truth) -> Played:
    scheduler = Scheduler(policy=policy, num_blocks=16_384, block_size=16, max_num_seqs=256)
    played = play(trace, scheduler, truth, DEFAULTS)
    assert not played.refused.any()
    assert np.isfinite(played.ttft).all()
    return played


@pytest.mark.parametrize(("bias", "noise"), [(0.0, 0.05), (2.0, 0.5), (4.0, 0.8), (8.0, 1.0)])
@pytest.mark.parametrize(("requests", "prompt"), [(32, 60), (96, 60), (32, 400)])
def test_late_prompts_are_read_about_as_fast_as_under_chunked(
    bias: float, noise: float, requests: int, prompt: int
) -> None:
    """Each step was cut short for one late first token: 96 prompts took twice as long as under `chunked`."""
    arrivals = [Arrival(5 + 20.0 * moment, prompt, 40) for moment in range(3) for _ in range(requests)]
    trace, truth = Trace("bursts", tuple(arrivals)), Truth(CPU, bias=bias, noise=noise, seed=1)
    ours, theirs = (
        float(np.percentile(served(policy, trace, truth).ttft, 99))
        for policy in (slo(CostModel(CPU, 0.0, 0.08), 2048), chunked(2048))
    )
    assert ours <= 1.3 * theirs
