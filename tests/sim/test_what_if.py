"""What-if answers: they are those of the real scheduler, and bad questions get an answer in words."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from weft.core import Source, Targets
from weft.sim import what_if
from weft.sim.compare import run_policy
from weft.sim.profiles import FOLDER, load_profile
from weft.sim.simulator import Truth
from weft.sim.what_if import SERVER, Question, answer, predict

PROFILE = "h200-llama-3-8b"
QUESTION: dict[str, Any] = {
    "prompt_tokens": 8000,
    "output_tokens": 50,
    "concurrency": 20,
    "max_num_batched_tokens": 2048,
    "policy": "slo",
    "gap_target_ms": 20.0,
    "profile": PROFILE,
}


def asked(server: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return answer(json.dumps({"question": {**QUESTION, **changes}, "server": server}).encode())


def test_the_policies_differ_as_they_should() -> None:
    found = asked()["predictions"]
    slo, chunked, monolithic = found
    assert [one["policy"] for one in found] == ["slo", "chunked", "monolithic"]
    assert slo["gap_max_ms"] < chunked["gap_max_ms"] < monolithic["gap_max_ms"]
    assert slo["gap_p99_ms"] <= 20 * 1.15
    assert monolithic["ttft_ms"] < chunked["ttft_ms"] < slo["ttft_ms"]
    assert all(one["ttft_ms"] < one["total_ms"] for one in found)


@pytest.mark.parametrize("policy", ["slo", "chunked", "monolithic"])
def test_the_steps_read_the_whole_prompt_and_nothing_twice(policy: str) -> None:
    found = asked(policy=policy)
    steps, long = found["steps"], QUESTION["concurrency"]
    slices = [(first, count) for step in steps for number, first, count, _ in step["slices"] if number == long]
    assert [first for first, _ in slices] == [sum(count for _, count in slices[:at]) for at in range(len(slices))]
    assert sum(count for _, count in slices) == QUESTION["prompt_tokens"]
    written = sum(long in step["decodes"] for step in steps) + 1  # the prompt's last slice samples as well
    assert written == QUESTION["output_tokens"]
    assert (len(slices) == 1) == (policy == "monolithic")
    first = next(at for at, step in enumerate(steps) if any(number == long for number, *_ in step["slices"]))
    assert first <= what_if.STEPS_BEFORE
    by_number = {one["number"]: one for one in found["requests"]}
    assert by_number[long] == {"number": long, "long": True, "read": 0, "written": 0}
    assert by_number[0]["read"] == what_if.CHAT_PROMPT
    assert by_number[0]["written"] > 0
    blocks = [step["blocks"] for step in steps]
    assert max(blocks) > QUESTION["prompt_tokens"] / found["block_size"]


def test_the_answer_is_that_of_the_simulator() -> None:
    question = Question(**QUESTION)
    profile = replace(load_profile(PROFILE), max_num_batched_tokens=question.max_num_batched_tokens)
    trace = what_if._situation(question, profile)
    targets = Targets(gap=0.02, ttft=1.0, ttft_per_1k=0.25, ttft_source=Source.DEFAULT)
    played = run_policy("chunked", trace, profile, targets, Truth(profile.coefficients))
    found = predict(question, load_profile(PROFILE))["predictions"][1]
    assert found["ttft_ms"] == pytest.approx(float(played.ttft[-1]) * 1000)
    assert found["total_ms"] == pytest.approx(float(played.finished[-1] - played.arrival[-1]) * 1000)
    assert found["steps"] == played.steps


def test_a_prompt_alone() -> None:
    found = asked(concurrency=0, prompt_tokens=1, output_tokens=1)
    assert all(one["ttft_ms"] == one["total_ms"] > 0 for one in found["predictions"])


def test_the_servers_own_calibration() -> None:
    own = json.loads((FOLDER / f"{PROFILE}.json").read_text())
    own["coefficients"] = {**own["coefficients"], "fixed": 0.5}
    slow, quick = asked(own, profile=SERVER, gap_target_ms=2000), asked(own, gap_target_ms=2000)
    assert slow["predictions"][0]["gap_p50_ms"] > 500 > quick["predictions"][0]["gap_p50_ms"]
    assert answer(json.dumps({"server": own}).encode())["profiles"][0]["name"] == SERVER
    assert SERVER not in [one["name"] for one in answer(b"{}")["profiles"]]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": 131_000, "output_tokens": 2000}, "131,072"),
        ({"concurrency": 257}, "concurrency"),
        ({"gap_target_ms": 0.5}, "an empty step takes"),
        ({"gap_target_ms": 0}, "gap_target_ms"),
        ({"max_num_batched_tokens": 20}, "no room for a prompt"),
        ({"policy": "slow"}, "policy"),
        ({"profile": "../../etc/passwd.json"}, "unknown profile"),
        ({"profile": SERVER}, "unknown profile"),
        ({"more": 1}, "more"),
    ],
)
def test_a_bad_question_is_answered_in_words(changes: dict[str, Any], named: str) -> None:
    assert named in asked(**changes)["error"]


def test_a_question_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "QUESTION_S", 0.0)
    assert "takes more than 0 s" in asked()["error"]


def test_the_process_answers_each_line_with_one_and_ends_with_its_input() -> None:
    lines = ["{}", "x", json.dumps({"question": QUESTION}), "[]", ""]
    done = subprocess.run(
        [sys.executable, "-m", "weft.sim.what_if"],
        input="\n".join(lines).encode(),
        capture_output=True,
        check=True,
        env={**os.environ},
        timeout=120,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [next(iter(one)) for one in found] == ["profiles", "error", "predictions", "error"]
    assert done.stderr == b""
