"""A client that asks for a gap of 1 ms, on a virtual H200: the others' times stay what they are without it."""

from dataclasses import replace

import numpy as np
import pytest

from tests.smooth import SMOOTH
from weft.bench.engine.virtual import virtual_engine
from weft.core import Targets
from weft.engine.engine import Engine, RequestOptions
from weft.engine.params import SamplingParams
from weft.engine.sequence import Sequence
from weft.sim.simulator import Truth

HOUSE = Targets(gap=0.05, ttft=1.0, ttft_per_1k=0.25)


def engine_of_the_house() -> Engine:
    profile = SMOOTH
    engine = virtual_engine(profile, Truth(profile.coefficients, 0.0, 0.0))
    assert engine.calibrated_targets is not None
    least = 1.5 * engine.calibrated_targets.calibration.decode_step
    engine.calibrated_targets = replace(engine.calibrated_targets, targets=replace(HOUSE, min_gap=least))
    return engine


def others_times(rate: float, impatient_gap_ms: float | None) -> tuple[np.ndarray, np.ndarray, int]:
    """Times to the first token and gaps of everybody but one long stream, and how many were refused."""
    engine, random = engine_of_the_house(), np.random.default_rng(0)
    loop = engine.loop
    params = SamplingParams(temperature=0, max_tokens=20_000, ignore_eos=True)
    (one,) = engine.create_sequences([1] * 100, params, options=RequestOptions(gap_target_ms=impatient_gap_ms))
    loop.add(one)
    arrivals = np.cumsum(random.exponential(1 / rate, 200)).tolist()
    lengths = random.integers(100, 8000, 200).tolist()
    seen: dict[Sequence, list[float]] = {}
    refused = 0
    while arrivals or len(loop.sequences) > 1:
        if len(loop.sequences) == 1 and arrivals and not loop.has_work:
            break
        while arrivals and arrivals[0] <= loop.clock():
            (stream,) = engine.create_sequences(
                random.integers(0, 60_000, lengths.pop(0)).tolist(), replace(params, max_tokens=150)
            )
            stream.request.arrival = arrivals.pop(0)
            loop.add(stream)
            seen[stream] = []
        for event in loop.step():
            if event.sequence in seen:
                if event.finish_reason == "refused":
                    refused += 1
                else:
                    seen[event.sequence].append(loop.clock())
    ttft = [times[0] - stream.request.arrival for stream, times in seen.items() if times]
    gaps = [gap for times in seen.values() for gap in np.diff(times)]
    return np.array(ttft), np.array(gaps), refused


@pytest.mark.parametrize("rate", [2.0, 6.0, 9.0])
def test_nobody_elses_latency_changes(rate: float) -> None:
    ttft, gaps, refused = others_times(rate, None)
    hasty_ttft, hasty_gaps, hasty_refused = others_times(rate, 1.0)
    for percent in (50, 90, 99):
        assert np.percentile(hasty_ttft, percent) <= 1.1 * np.percentile(ttft, percent)
        assert np.percentile(hasty_gaps, percent) <= 1.1 * np.percentile(gaps, percent)
    assert hasty_refused <= refused + 1


def test_a_modest_wish_is_granted() -> None:
    """Half of what all are promised costs prompts next to nothing, so it is given."""
    engine = engine_of_the_house()
    (one,) = engine.create_sequences(
        [1] * 100, SamplingParams(max_tokens=2000), options=RequestOptions(gap_target_ms=25)
    )
    assert (one.request.gap_target, one.request.gap_wish) == (0.05, 0.025)
    engine.loop.add(one)
    times: list[float] = []
    for _ in range(3):
        engine.loop.step()
    (long,) = engine.create_sequences(list(range(40_000)), SamplingParams(max_tokens=1))
    engine.loop.add(long)
    while long.request.finish_reason is None:
        times += [engine.loop.clock() for event in engine.loop.step() if event.sequence is one]
    assert np.diff(times).max() <= 0.025
