"""Simulated runs that are recorded: the result is the same, and the frames say what was played."""

import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from tests.smooth import SMOOTH
from weft.core import HostCost, Targets
from weft.observe.recording import Recording
from weft.sim.compare import run_policy
from weft.sim.profiles import load_profile, read_profile
from weft.sim.record import Recorded, record_policy
from weft.sim.simulator import Truth
from weft.sim.traces import Arrival, Trace

HOST = HostCost(step=0.0008, row=4e-7, prefill=0.002, commit=2e-5, token=3e-5, request=0.0005, arrival=4e-5)
SMALL = replace(SMOOTH, host=HOST, kv_tokens=9_600, max_num_seqs=24)
TRACE = Trace(
    "t", tuple(Arrival(0.004 * i, 200 + 613 * i % 3000, 3 + 7 * i % 150, (i % 4,) * (i % 3)) for i in range(80))
)
TARGETS = Targets(gap=0.02, ttft=1.5)


def recorded(policy: str) -> Recorded:
    return record_policy(policy, TRACE, SMALL, TARGETS, Truth(SMALL.coefficients, noise=0.05))


@pytest.mark.parametrize("policy", ["monolithic", "chunked:512", "slo"])
def test_recording_changes_no_result(policy: str) -> None:
    plain = run_policy(policy, TRACE, SMALL, TARGETS, Truth(SMALL.coefficients, noise=0.05))
    played = recorded(policy).played
    for field in fields(plain):
        assert np.array_equal(getattr(plain, field.name), getattr(played, field.name)), field.name


@pytest.mark.parametrize("policy", ["monolithic", "chunked:512", "slo"])
def test_the_frames_say_what_was_played(policy: str) -> None:
    played, recording = recorded(policy)
    (run,) = recording.runs
    assert run.info is not None
    assert run.info.profile is not None
    assert read_profile(SMALL.name, run.info.profile) == SMALL
    assert len(run.steps) == played.steps
    assert run.prompts.keys() == run.requests.keys() == set(range(len(TRACE.arrivals)))
    tokens = np.zeros(len(TRACE.arrivals), np.int64)
    for step in run.steps:
        np.add.at(tokens, step.decode_keys, 1)
        for key, _, _, ends_its_prompt in step.slices:
            tokens[key] += ends_its_prompt
    for number, arrival in enumerate(TRACE.arrivals):
        request, prompt = run.requests[number], run.prompts[number]
        assert (request.reason == "refused") == played.refused[number]
        assert prompt.prompt_tokens == request.prompt_tokens == arrival.prompt_tokens
        assert prompt.arrival == arrival.time <= request.parsed <= prompt.time
        if request.reason == "refused":
            assert request.first_sent is None
            assert tokens[number] == request.output_tokens == 0
            continue
        assert tokens[number] == request.output_tokens == arrival.output_tokens
        assert request.first_sent == pytest.approx(arrival.time + played.ttft[number])
        assert request.first_token is not None
        assert request.first_sent is not None
        assert request.first_token < request.first_sent
        assert request.finished == played.finished[number]
        gaps = played.gaps[played.gap_owner == number]
        late = np.flatnonzero(gaps > TARGETS.gap)
        assert [chunk.token_index for chunk in request.late_chunks] == (late + 1).tolist()
        for chunk, gap in zip(request.late_chunks, gaps[late], strict=True):
            assert chunk.previous_sent is not None
            assert chunk.sent - chunk.previous_sent == pytest.approx(gap)
            assert chunk.received < chunk.sent


def test_some_requests_were_late_preempted_and_refused() -> None:
    """Otherwise the tests above show little."""
    runs = {policy: recorded(policy).recording.runs[0] for policy in ("monolithic", "slo")}
    assert any(request.late_chunks for request in runs["monolithic"].requests.values())
    assert any(request.preemptions for request in runs["monolithic"].requests.values())
    assert any(request.reason == "refused" for request in runs["slo"].requests.values())
    assert sum(len(step.preempted) for step in runs["monolithic"].steps) > 0


def simulate(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "weft", "simulate", "--no-progress", "--profile", "h200-llama-3-8b"]
    workload = "poisson:rate=20,prompt=fixed:500,output=fixed:20,duration=2"
    command += ["--workload", workload, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_writes_a_recording(tmp_path: Path) -> None:
    done = simulate("--record", tmp_path / "r.weft")
    assert done.returncode == 0, done.stderr
    (run,) = Recording.read(tmp_path / "r.weft").runs
    assert run.info is not None
    assert run.info.policy == "slo"
    assert run.info.gap_target == 0.05
    assert read_profile("h200-llama-3-8b", run.info.profile or {}) == load_profile("h200-llama-3-8b")
    assert len(run.requests) > 10
    assert all(math.isclose(request.prompt_tokens, 500) for request in run.requests.values())


def test_a_recording_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    done = simulate("--record", tmp_path / "no" / "r.weft")
    assert done.returncode == 2
    assert done.stderr.startswith("weft: --record")
    assert "No such file" in done.stderr
    done = simulate("--record", tmp_path / "r.weft", "--compare", "slo,monolithic")
    assert done.returncode == 2
    assert "--record holds one run" in done.stderr
    assert done.stderr.count("\n") == 1
