"""Traces, profiles and the command, on small files made here; the real traces where WEFT_TRACES names them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.smooth import SMOOTH
from weft.core import StepShape, Targets
from weft.core.coefficients import Coefficients
from weft.core.shape import with_slice
from weft.engine.cost_fit import fit
from weft.errors import OptionError
from weft.sim.compare import kept_promises, make_policy, report, run_policy
from weft.sim.profiles import load_profile
from weft.sim.simulator import Truth
from weft.sim.traces import Arrival, LeftOut, Trace, load_trace

PROFILE = SMOOTH
EXACT = Truth(PROFILE.coefficients)


def azure(path: Path, rows: list[str]) -> Path:
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    return path


def simulate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "simulate", "--no-progress", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_an_azure_trace_is_read_and_sorted(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:50.5000000,396,109", "2023-11-16 18:15:46.5000000,374,44"]
    trace = load_trace(azure(tmp_path / "t.csv", rows))
    assert trace.was_unsorted
    assert trace.arrivals == (Arrival(0.0, 374, 44), Arrival(4.0, 396, 109))
    assert trace.scaled(2).span == 2.0
    assert len(trace.first(4.0).arrivals) == 1


def test_mooncake_s_bins_are_spread_and_its_ids_become_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 2, "hash_ids": [7, 8, 9]},
        {"timestamp": 0, "input_length": 1200, "output_length": 2, "hash_ids": [7, 8, 10]},
        {"timestamp": 3000, "input_length": 600, "output_length": 2, "hash_ids": [7, 11]},
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    trace = load_trace(path)
    assert [arrival.time for arrival in trace.arrivals] == [0.0, 1.5, 3.0]
    played = run_policy("chunked:512", trace, PROFILE, Targets(), EXACT)
    # The second shares two ids of 512 tokens with the first, the third one; partial tails (9, 10, 11) are not cached.
    assert played.cached_tokens == 1024 + 512
    assert played.prefill_tokens == 1100 + (1200 - 1024) + (600 - 512)


def test_requests_longer_than_the_context_are_left_out_counted_and_named() -> None:
    trace = Trace("t", (Arrival(0.0, 90, 10), Arrival(1.0, 90, 11), Arrival(2.0, 5, 5), Arrival(3.0, 500, 1)))
    played, left_out = trace.fitting(100)
    assert played.arrivals == (Arrival(0.0, 90, 10), Arrival(2.0, 5, 5))
    assert left_out == LeftOut(count=2, of=4, longest=501, context=100)
    assert str(left_out) == (
        "2 of 4 requests are longer than the context of 100 tokens and are left out; the longest has 501"
    )
    assert trace.fitting(501) == (trace, None)
    with pytest.raises(OptionError, match="t: 4 of 4 requests are longer than the context of 9 tokens"):
        trace.fitting(9)


def test_the_command_plays_a_trace_without_what_does_not_fit(tmp_path: Path) -> None:
    rows = ["2023-11-16 18:15:46,374,44", "2023-11-16 18:15:47,200000,44", "2023-11-16 18:15:48,100,9"]
    trace, out = azure(tmp_path / "t.csv", rows), tmp_path / "out.json"
    done = simulate("--trace", trace, "--profile", "h200-llama-3-8b", "--json", out)
    assert done.returncode == 0, done.stderr
    assert "1 of 3 requests are longer than the context of 131,072 tokens" in done.stderr
    (found,) = json.loads(out.read_text())
    assert (found["requests"], found["left_out_too_long"]) == (2, 1)


def mooncake(**fields: str) -> str:
    """One line, with something else in these fields."""
    line = {"timestamp": "0", "input_length": "5", "output_length": "5", "hash_ids": "[1]", **fields}
    return "{" + ", ".join(f'"{name}": {value}' for name, value in line.items()) + "}"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "TIMESTAMP,ContextTokens\n", "column GeneratedTokens is missing"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1", "line 2"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,1", "lengths must be at least 1"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests in it"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 5}', "line 1: 'output_length' is missing"),
        ("t.jsonl", "{", "line 1"),
        ("t.jsonl", "[1]", "line 1: .1. is not an object"),
        ("t.jsonl", mooncake(timestamp="Infinity"), "line 1: timestamp inf is not a time"),
        ("t.jsonl", mooncake(timestamp="NaN"), "line 1: timestamp nan is not a time"),
        ("t.jsonl", mooncake(timestamp="1" + "0" * 400), "line 1"),
        ("t.jsonl", mooncake(input_length="1e999"), "line 1"),
        ("t.jsonl", mooncake(hash_ids="[1e999]"), "line 1"),
        ("t.jsonl", mooncake(hash_ids="3"), "line 1: hash_ids 3 is not a list of whole numbers"),
        ("t.jsonl", mooncake(hash_ids='["a"]'), "line 1: hash_ids .'a'. is not a list of whole numbers"),
    ],
)
def test_broken_traces_are_refused_with_the_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(OptionError, match=message):
        load_trace(tmp_path / name)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"unknown profile 'tpu'; known: h200-llama-3-8b, h200-qwen3-0\.6b"):
        load_profile("tpu")
    for name in ("best", "slo:5", "slo-order", "chunked:-1", "chunked:x"):
        with pytest.raises(OptionError, match="policy"):
            make_policy(name, PROFILE)


def test_the_fit_finds_the_coefficients_of_a_machine_back() -> None:
    truth = PROFILE.coefficients
    shapes = []
    for decodes in (0, 1, 16, 64, 256):
        for context in (200, 2000):
            base = StepShape(decodes, 0.0, 0, decodes, decodes * context)
            shapes += [base] if decodes else []
            shapes += [with_slice(base, first, count) for first in (0, 4000) for count in (16, 128, 512, 2048)]
    found = fit(shapes, [truth.predict(shape) for shape in shapes])
    assert all(found.predict(s) == pytest.approx(truth.predict(s), rel=0.01) for s in shapes)


def test_negative_coefficients_are_refused() -> None:
    with pytest.raises(ValueError, match="coefficient token=-1"):
        Coefficients(0, 0, -1, 0, 0, 0, 0)


# Four streams decode, then a prompt of 30,000 tokens arrives: the whole point of this project.
INTERFERENCE = Trace("interference", (*[Arrival(0.0, 256, 400)] * 4, Arrival(1.0, 30_000, 5)))


def test_a_long_prompt_freezes_streams_under_monolithic_and_not_under_slo() -> None:
    targets = Targets(gap=0.025, ttft=5.0)
    gaps = {name: run_policy(name, INTERFERENCE, PROFILE, targets, EXACT).gaps.max() for name in ("monolithic", "slo")}
    assert gaps["monolithic"] > 1.0  # the whole prefill
    assert gaps["slo"] <= 0.025


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    targets = Targets(gap=0.05, ttft=1.0, ttft_per_1k=0.25)
    alone = run_policy("slo", Trace("solo", (Arrival(0.0, 200, 5),)), PROFILE, targets, EXACT)
    both = Trace("both", (Arrival(0.0, 100_000, 5), Arrival(0.01, 200, 5)))
    played = run_policy("slo", both, PROFILE, targets, EXACT)
    # Within twice its solo time and two steps, one running and one already planned (nobody decodes: 250 ms each).
    assert played.ttft[1] <= 2 * alone.ttft[0] + 2 * 0.25
    assert kept_promises(played, targets).all()


def test_a_long_prompt_on_an_idle_machine_is_not_refused() -> None:
    played = run_policy(
        "slo", Trace("t", (Arrival(0.0, 120_000, 5),)), PROFILE, Targets(gap=0.05, ttft=1.0, ttft_per_1k=0.25), EXACT
    )
    assert not played.refused.any()


def test_steps_after_an_idle_time_take_longer_where_the_profile_says_so() -> None:
    trace = Trace("t", tuple(Arrival(float(at), 500, 1) for at in (1.0, 2.0, 2.0, 3.0)))
    plain = run_policy("chunked:512", trace, PROFILE, Targets(), EXACT)
    sleepy = replace(PROFILE, host=replace(PROFILE.host, wake=0.5))
    found = run_policy("chunked:512", trace, sleepy, Targets(), EXACT)
    assert found.ttft[[0, 1, 3]] == pytest.approx(1.5 * plain.ttft[[0, 1, 3]])
    assert (found.ttft >= plain.ttft).all()


def test_a_request_without_a_promise_is_never_refused() -> None:
    trace = Trace("flood", tuple(Arrival(0.001 * i, 2000, 50) for i in range(100)))
    played = run_policy("slo", trace, PROFILE, Targets(gap=0.006), EXACT)  # next to no room beside the decodes
    assert not played.refused.any()
    assert np.isfinite(played.finished).all()


def test_overload_is_refused_and_what_is_admitted_keeps_its_promise() -> None:
    trace = Trace("flood", tuple(Arrival(0.001 * i, 2000, 50) for i in range(200)))
    targets = Targets(gap=0.05, ttft=1.0)
    slo = report("slo", run_policy("slo", trace, PROFILE, targets, EXACT), targets)
    plain = report("chunked:2048", run_policy("chunked:2048", trace, PROFILE, targets, EXACT), targets)
    assert 0 < slo.refused < 200
    assert slo.kept == pytest.approx(1 - slo.refused / 200)
    assert slo.kept > 2 * plain.kept


def test_noise_and_bias_that_the_scheduler_is_not_told_of_are_learnt() -> None:
    trace = Trace("t", tuple(Arrival(0.05 * i, 1000, 100) for i in range(400)))
    targets = Targets(gap=0.03, ttft=1.0)
    truth = Truth(PROFILE.coefficients, bias=0.1, noise=0.05, seed=1)
    played = run_policy("slo", trace, PROFILE, targets, truth)
    late = played.gaps[len(played.gaps) // 2 :] > 0.03  # after it has seen some
    assert late.mean() < 0.002


def test_the_command_prints_a_table_and_writes_json_and_repeats_itself(tmp_path: Path) -> None:
    trace = azure(
        tmp_path / "t.csv", [f"2023-11-16 18:15:{i % 60:02d}.0000000,{500 + 40 * i},{20 + i}" for i in range(40)]
    )
    options = (
        "--trace",
        trace,
        "--profile",
        "h200-llama-3-8b",
        "--compare",
        "monolithic,chunked:512,slo",
        "--rate-scale",
        "20",
    )
    done = simulate(*options, "--gap-target-ms", "25", "--json", tmp_path / "a.json")
    assert done.returncode == 0, done.stderr
    assert "chunked:512" in done.stdout
    assert "monolithic: the error of h200-llama-3-8b against served traffic is not known" in done.stdout
    reports = json.loads((tmp_path / "a.json").read_text())
    assert [one["policy"] for one in reports] == ["monolithic", "chunked:512", "slo"]
    assert set(reports[0]["gap_ms"]) == {"p50", "p99", "p999", "max"}
    simulate(*options, "--gap-target-ms", "25", "--json", tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--policy", "best"), "unknown policy 'best'; known: monolithic, chunked:N, slo, slo-order:N"),
        (("--profile", "tpu"), "unknown profile 'tpu'"),
        (("--gap-target-ms", "3"), "cannot be met: an empty step takes 4.25 ms"),
        (("--gap-target-ms", "-1"), "--gap-target-ms -1.0 must be above 0"),
        (("--rate-scale", "0"), "--rate-scale 0.0 must be above 0"),
        (("--trace", "/no/such/trace.csv"), "cannot read the trace /no/such/trace.csv"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, options: tuple[str, str], message: str) -> None:
    trace = azure(tmp_path / "t.csv", ["2023-11-16 18:15:46,374,44"])
    done = simulate("--trace", trace, "--profile", "h200-llama-3-8b", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif("WEFT_TRACES" not in os.environ, reason="WEFT_TRACES does not name a folder with the real traces")
def test_the_real_traces_have_what_their_readme_says() -> None:
    folder = Path(os.environ["WEFT_TRACES"])
    conversations = load_trace(folder / "AzureLLMInferenceTrace_conv.csv")
    assert len(conversations.arrivals) == 19_366
    mooncake = load_trace(folder / "mooncake_conversation_trace.jsonl")
    assert len(mooncake.arrivals) == 12_031
    assert max(arrival.prompt_tokens for arrival in mooncake.arrivals) == 126_195
