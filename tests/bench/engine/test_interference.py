"""Interference in virtual time: what the benchmark says, and that slo keeps the streams going."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weft.bench.engine.interference import GPU_SCENARIO, Scenario, measure
from weft.bench.engine.virtual import virtual_engine
from weft.sim.profiles import load_profile
from weft.sim.simulator import Truth

PROFILE = load_profile("h200-llama-3-8b")


@pytest.mark.parametrize("gap", [0.015, 0.025, 0.05, 0.1])
@pytest.mark.parametrize(("bias", "noise"), [(0.0, 0.0), (0.1, 0.05)])
def test_under_slo_the_streams_hardly_notice_long_prompts(gap: float, bias: float, noise: float) -> None:
    engine = virtual_engine(PROFILE, Truth(PROFILE.coefficients, bias, noise))
    run = measure(engine, "slo", Scenario(prompt_tokens=60_000), target=gap)
    assert run.steps >= 20 * 2  # chunks of each of the two
    assert run.p999 <= 1.1 * gap
    assert len(run.gaps) % Scenario().streams == 0


def test_under_monolithic_they_wait_for_the_whole_prefill() -> None:
    engine = virtual_engine(PROFILE, Truth(PROFILE.coefficients))
    own = engine.loop.scheduler.policy
    run = measure(engine, "monolithic", Scenario(prompt_tokens=60_000), target=0.025)
    assert run.gaps.max() >= 0.99 * run.prefill > 5.0
    assert engine.loop.scheduler.policy is own, "the engine gets its policy back"
    assert not engine.loop.sequences


def test_prompts_that_come_one_by_one_are_timed_from_when_each_was_due() -> None:
    engine = virtual_engine(PROFILE, Truth(PROFILE.coefficients))
    run = measure(engine, "slo", GPU_SCENARIO, target=0.025)
    assert len(run.ttfts) == 4
    assert run.prefill >= 3 * GPU_SCENARIO.every
    alone = PROFILE.coefficients.prefill_seconds(0, GPU_SCENARIO.prompt_tokens)
    assert all(alone < ttft < 3 for ttft in run.ttfts)
    assert run.p999 <= 1.1 * 0.025


def test_the_target_is_three_decode_steps_where_none_is_given() -> None:
    engine = virtual_engine(PROFILE, Truth(PROFILE.coefficients))
    run = measure(engine, "slo", Scenario(prompt_tokens=20_000))
    step = PROFILE.coefficients.fixed + PROFILE.coefficients.weights
    assert 3 * step < run.target < 6 * step
    assert run.p999 <= run.target
    assert run.within(1.3) <= 1 / 1.3


def test_the_command_prints_writes_and_draws(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "weft", "bench", "interference", "--simulated-only", "--no-progress"]
    line += ["--json", str(tmp_path / "i.json"), "--chart", str(tmp_path / "i.svg")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "(within 1.1)" in done.stdout
    rows = json.loads((tmp_path / "i.json").read_text())
    assert [row["policy"] for row in rows] == ["monolithic", "chunked", "slo"] * 2
    assert rows[2]["gap_ms"]["p999"] <= 1.1 * rows[2]["target_ms"]
    assert "<svg" in (tmp_path / "i.svg").read_text()


@pytest.mark.parametrize("option", ["--runs", "--prompt-tokens"])
def test_nonsense_is_one_line(option: str) -> None:
    line = [sys.executable, "-m", "weft", "bench", "interference", option, "0"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"{option} 0 must be at least 1" in done.stderr
