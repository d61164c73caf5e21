"""Served against simulated: the comparison, the replay of an engine in virtual time, and what is written of it."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from tests.smooth import SMOOTH
from weft.bench.engine.other_processes import OtherProcesses, Ticks
from weft.bench.engine.replay import replay
from weft.bench.engine.virtual import virtual_engine
from weft.bench.http.client import Reply
from weft.bench.http.replay import served_of, token_prompts
from weft.core import Targets
from weft.engine.build import MOST_SPREAD
from weft.engine.engine import CalibratedTargets
from weft.engine.simulated import VirtualClock
from weft.errors import OptionError
from weft.sim import fidelity, profiles
from weft.sim.compare import kept_promises, report
from weft.sim.simulator import Played, Truth
from weft.sim.traces import MOONCAKE_BLOCK, Arrival, Trace
from weft.sim.workloads import parse_workload

WORKLOAD = "gamma:rate=8,cv=2,prompt=lognormal:1500:1.0,output=uniform:5:80,duration=20"
TARGETS = Targets(gap=0.025, ttft=0.5)


def served_in_virtual_time(trace: Trace, truth: Truth) -> Played:
    """The real loop with its streams, on the clock of a device that takes what `truth` says."""
    engine = virtual_engine(SMOOTH, truth)
    assert engine.calibrated_targets is not None
    engine.calibrated_targets = CalibratedTargets(TARGETS, engine.calibrated_targets.calibration)
    clock = engine.loop.clock
    assert isinstance(clock, VirtualClock)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    _, prompts = token_prompts(trace, engine.vocab_size, words=3)
    served = replay(engine, trace, prompts, sleep=sleep)
    assert len(served.steps) == served.played.steps > 0
    return served.played


def test_an_engine_that_takes_what_the_profile_says_is_simulated_without_an_error() -> None:
    trace = parse_workload(WORKLOAD).trace(1, 8000)
    played = served_in_virtual_time(trace, Truth(SMOOTH.coefficients))
    simulated = fidelity.simulate("slo", trace, SMOOTH, TARGETS)
    assert played.refused.any()
    assert played.refused.tolist() == simulated.refused.tolist()
    np.testing.assert_allclose(played.ttft, simulated.ttft, rtol=1e-6)
    np.testing.assert_allclose(np.sort(played.gaps), np.sort(simulated.gaps), rtol=1e-6, atol=1e-9)
    one, other = report("slo", played, TARGETS), report("slo", simulated, TARGETS)
    for line in fidelity.compared([one], other):
        assert line.error == pytest.approx(0, abs=1e-6), line
        assert line.difference is None


def test_the_truth_is_what_the_calibration_found_and_nothing_else() -> None:
    profile = replace(SMOOTH, mean=0.1, spread=0.08)
    truth = fidelity.truth_of(profile)
    assert (1 + truth.bias, truth.noise) == (pytest.approx(math.exp(0.1)), 0.08)
    cost = profile.cost_model()
    assert (cost.prefill.mean, cost.prefill.spread) == (0.1, 0.08)
    assert replace(profile, spread=0.9).cost_model().prefill.spread == profiles.MOST_SPREAD == MOST_SPREAD
    assert fidelity.truth_of(SMOOTH) == Truth(SMOOTH.coefficients, seed=fidelity.SEED)


def test_probes_tell_what_clients_on_the_same_cores_cost() -> None:
    """Served times of probes that were simulated with known costs give these costs back."""
    true = fidelity.Correction(step=0.0004, row=-5e-6, request=0.003)
    busy = replace(SMOOTH, host=replace(SMOOTH.host, request=true.request))
    truth = true.applied_to(fidelity.truth_of(SMOOTH))
    probes = []
    for streams, prompt, tokens in ((1, 128, 48), (32, 16, 64)):
        probe = fidelity.Probe(streams, prompt, tokens, 0.0, 0.0)
        played = fidelity._simulated_probe(probe, busy, truth)
        probes.append(probe._replace(ttft=float(np.median(played.ttft)), gap=float(np.median(played.gaps))))
    found = fidelity.correction_of(SMOOTH, probes)
    assert list(found) == pytest.approx(list(true), rel=0.1)
    assert fidelity.correction_of(SMOOTH, probes[:1]) == fidelity.Correction()
    trace = Trace("t", tuple(Arrival(0.1 * i, 400, 10) for i in range(20)))
    plain, slower = (fidelity.simulate("chunked", trace, SMOOTH, TARGETS, correction=one) for one in (None, found))
    assert np.median(slower.gaps) - np.median(plain.gaps) == pytest.approx(true.step + true.row, rel=0.2)


def test_errors_are_relative_and_those_of_kept_promises_in_points() -> None:
    trace = Trace("t", tuple(Arrival(0.1 * i, 400, 10) for i in range(20)))
    simulated = report("slo", fidelity.simulate("slo", trace, SMOOTH, TARGETS), TARGETS)
    slower = replace(
        simulated,
        ttft_ms={name: 2 * value for name, value in simulated.ttft_ms.items()},
        output_tokens_per_s=0.5 * simulated.output_tokens_per_s,
        kept=0.9,
    )
    found = {line.name: line for line in fidelity.compared([slower], simulated)}
    assert found["TTFT ms p99.9"].error == pytest.approx(-0.5)
    assert found["gap ms p50"].error == pytest.approx(0)
    assert found["output tokens/s"].error == pytest.approx(1.0)
    assert (found["promises kept"].error, found["promises kept"].difference) == (pytest.approx(0.1), None)
    twice = {line.name: line for line in fidelity.compared([simulated, slower], simulated)}
    assert twice["TTFT ms p50"].served == pytest.approx(1.5 * simulated.ttft_ms["p50"])
    assert twice["TTFT ms p50"].difference == pytest.approx(2 / 3)
    assert twice["promises kept"].difference == pytest.approx(0.1)


def test_what_a_client_saw_is_told_in_the_simulators_terms() -> None:
    trace = Trace("t", (Arrival(0.0, 50, 3), Arrival(1.0, 60, 4), Arrival(2.0, 70, 2), Arrival(3.0, 9, 9)))
    fine = Reply(0, 0.0, 50, 0.01, [0.2, 0.22, 0.24], 0.25, 3, server={"ttft_ms": 150.0, "preemptions": 1}, status=200)
    refused = Reply(2, 2.0, 70, 2.0, [], 2.1, 0, error="503: too late", status=503)
    cut = Reply(3, 3.0, 9, 3.0, [3.1], 3.2, 1, error="the stream was cut", status=200)
    chunks = Reply(1, 1.0, 60, 1.0, [1.5, 1.7], 1.7, 4, status=200)  # four tokens in two chunks
    served = served_of(trace, [refused, fine, cut, chunks])
    played = served.played
    assert played.ttft.tolist() == pytest.approx([0.2, 0.5, math.inf, 0.1])
    assert played.refused.tolist() == [False, False, True, False]
    assert np.isfinite(played.finished).tolist() == [True, True, False, False]
    assert played.gap_owner.tolist() == [0, 0, 1, 1, 1]
    assert played.gaps.tolist() == pytest.approx([0.02, 0.02, 0.2, 0.0, 0.0])
    assert (played.ended, played.preemptions) == (3.2, 1)
    assert (served.inside.tolist(), served.lag.tolist()) == ([0.15], [0.01])
    assert served.outside.tolist() == pytest.approx([0.2 - 0.01 - 0.15])
    assert served.failures == {"the stream was cut": 1}
    assert kept_promises(played, Targets(gap=0.05, ttft=0.3)).tolist() == [True, False, False, False]


def test_prompts_share_what_the_simulator_takes_for_cached_and_nothing_else() -> None:
    shared = Arrival(0.0, 2 * MOONCAKE_BLOCK + 100, 5, (7, 8, 9))
    other = Arrival(1.0, 2 * MOONCAKE_BLOCK + 100, 5, (7, 6, 9))
    warm, prompts = token_prompts(Trace("t", (shared, shared, other)), 1000, words=1)
    assert [len(ids) for ids in prompts[:3]] == [arrival.prompt_tokens for arrival in (shared, shared, other)]
    assert len(prompts) == 3 + len(warm.arrivals)
    assert all(0 <= token < 1000 for ids in prompts for token in ids)
    one, same, third = prompts[:3]
    whole = 2 * MOONCAKE_BLOCK
    assert one[:whole] == same[:whole]
    assert one[whole : whole + 16] != same[whole : whole + 16], "the simulator caches no partial tail"
    assert one[:MOONCAKE_BLOCK] == third[:MOONCAKE_BLOCK]
    assert one[MOONCAKE_BLOCK : MOONCAKE_BLOCK + 16] != third[MOONCAKE_BLOCK : MOONCAKE_BLOCK + 16]
    assert token_prompts(Trace("t", (shared,)), 1000, words=2)[1][0][:16] != one[:16]


def result(slice_: str = "t x3", date: str = "2026-11-16T10:00:00+00:00") -> dict[str, object]:
    trace = Trace("t", tuple(Arrival(0.1 * i, 400, 10) for i in range(20)))
    simulated = report("slo", fidelity.simulate("slo", trace, SMOOTH, TARGETS), TARGETS)
    return {
        "date": date,
        "weft": "0.1.0",
        "command": "weft bench fidelity",
        "how": "over HTTP",
        "device": "A Device",
        "model": "a model",
        "slice": slice_,
        "requests": 20,
        "seconds": 2.0,
        "left_out_too_long": 1,
        "targets_ms": {"gap": 25.0, "ttft": 500.0, "ttft_per_1k": 0.0},
        "profile": asdict(SMOOTH),
        "truth": {"bias": 0.0, "noise": 0.0, "seed": 0},
        "policies": [
            {
                "policy": "slo",
                "runs": [asdict(simulated)],
                "simulated": asdict(simulated),
                "lines": [line._asdict() for line in fidelity.compared([simulated], simulated)],
                "inside": [],
                "outside_ms": {},
                "step_errors": {},
                "others": [0.25],
                "failures": {},
            }
        ],
    }


def test_a_profile_keeps_the_last_result_of_each_slice_and_tells_it() -> None:
    first, second = fidelity.entries(result()), fidelity.entries(result("t x4", "2026-11-17T10:00:00+00:00"))
    again = fidelity.entries(result(date="2026-11-18T10:00:00+00:00"))
    kept = fidelity.with_entries(fidelity.with_entries(first, second), again)
    assert [(one["slice"], one["date"][:10]) for one in kept] == [("t x4", "2026-11-17"), ("t x3", "2026-11-18")]
    profile = replace(SMOOTH, fidelity=tuple(kept))
    told = fidelity.known_error(profile, "slo")
    assert "(2026-11-18, A Device, t x3): TTFT +0.0% / +0.0% / +0.0%, gap" in told
    assert "kept +0.0 points" in told
    assert "is not known" in fidelity.known_error(profile, "chunked:512")


def test_a_result_takes_the_place_of_an_older_one_in_the_docs(tmp_path: Path) -> None:
    from weft.cli import main
    from weft.cli.fidelity import BEGIN, END

    docs, file = tmp_path / "docs.md", tmp_path / "result.json"
    docs.write_text(f"# Title\n\n{BEGIN}\n\n{END}\n\nThe end.\n")
    for number, name in enumerate(("t x3", "t x4", "t x3")):
        file.write_text(json.dumps(result(name, f"2026-11-1{number}T10:00:00+00:00")))
        assert main(["bench", "fidelity", "--from", str(file), "--table", str(docs)]) == 0
    text = docs.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("\n\nThe end.\n")
    assert [line for line in text.splitlines() if line.startswith("###")] == [
        "### t x4, a model on A Device",
        "### t x3, a model on A Device",
    ]
    assert "2026-11-12" in text
    assert "2026-11-10" not in text
    assert "| promises kept | 100.0% | 100.0% | +0.0 points | - |" in text
    assert "(1 longer than the context left out)" in text
    assert "Other processes took 25% of the machine's processor time." in text


def test_errors_are_noted_in_a_profile_and_told_by_the_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from weft.cli import main

    profile, file, shipped = tmp_path / "mine.json", tmp_path / "result.json", profiles.profile_path("h200-llama-3-8b")
    profile.write_text(json.dumps({**json.loads(shipped.read_text()), "fidelity": []}))
    file.write_text(json.dumps(result()))
    assert main(["bench", "fidelity", "--from", str(file), "--update-profile", str(profile)]) == 0
    assert {**json.loads(profile.read_text()), "fidelity": []} == {**json.loads(shipped.read_text()), "fidelity": []}
    workload = "poisson:rate=2,prompt=fixed:100,output=fixed:3,duration=3"
    assert main(["simulate", "--workload", workload, "--profile", str(profile), "--no-progress"]) == 0
    assert "slo: last known error against served traffic (2026-11-16, A Device, t x3)" in capsys.readouterr().out
    profile.write_text(json.dumps({**json.loads(profile.read_text()), "fidelity": [{"policy": "slo"}]}))
    with pytest.raises(OptionError, match="fidelity without date, device, errors, slice"):
        profiles.load_profile(str(profile))


def test_processor_time_of_others_is_a_share_of_all_and_without_ones_own() -> None:
    watched = OtherProcesses()
    before = watched._begin
    if before is None:
        pytest.skip("there is no /proc/stat here")
    assert watched.share() is None or 0 <= watched.share() <= 1
    readings = iter([Ticks(100, 1000, 2000), Ticks(150, 1150, 2400)])
    watched._read = lambda: next(readings)  # type: ignore[method-assign]
    watched._begin = watched._read()
    assert watched.share() == (150 - 50) / 400
