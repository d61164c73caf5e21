"""Invented traffic: rates, burstiness, lengths, and what is wrong with a line that asks for it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from weft.errors import OptionError
from weft.sim.workloads import parse_workload

CONTEXT = 131_072
TAIL = "prompt=lognormal:1000:1.0,output=uniform:50:400,duration=2000"


def gaps(line: str, seed: int = 0) -> np.ndarray:
    trace = parse_workload(line).trace(seed, CONTEXT)
    return np.diff([arrival.time for arrival in trace.arrivals])


@pytest.mark.parametrize(
    ("line", "cv"),
    [
        (f"poisson:rate=5,{TAIL}", 1.0),
        (f"gamma:rate=5,cv=3,{TAIL}", 3.0),
        (f"gamma:rate=5,cv=0.2,{TAIL}", 0.2),
    ],
)
def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for(line: str, cv: float) -> None:
    found = gaps(line)
    assert 1 / found.mean() == pytest.approx(5, rel=0.1)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.1)
    assert (found >= 0).all()


def test_poisson_is_gamma_with_a_coefficient_of_variation_of_one() -> None:
    assert np.array_equal(gaps(f"poisson:rate=5,{TAIL}"), gaps(f"gamma:rate=5,cv=1,{TAIL}"))


def test_a_seed_says_it_all_and_lengths_leave_the_arrivals_alone() -> None:
    workload = parse_workload(f"gamma:rate=5,cv=2,{TAIL}")
    assert workload.trace(7, CONTEXT) == workload.trace(7, CONTEXT)
    assert workload.trace(7, CONTEXT) != workload.trace(8, CONTEXT)
    other = "gamma:rate=5,cv=2,prompt=fixed:9,output=exponential:30,duration=2000"
    assert np.array_equal(gaps(other, 7), gaps(f"gamma:rate=5,cv=2,{TAIL}", 7))


def test_lengths_follow_their_distributions() -> None:
    def lengths(prompt: str) -> np.ndarray:
        trace = parse_workload(f"poisson:rate=10,prompt={prompt},output=fixed:3,duration=1000").trace(0, CONTEXT)
        assert all(type(arrival.prompt_tokens) is int and arrival.output_tokens == 3 for arrival in trace.arrivals)
        return np.array([arrival.prompt_tokens for arrival in trace.arrivals])

    assert set(lengths("fixed:2000")) == {2000}
    uniform = lengths("uniform:50:52")
    assert set(uniform) == {50, 51, 52}
    spread = lengths("lognormal:1000:0.5")
    assert np.median(spread) == pytest.approx(1000, rel=0.05)
    assert np.log(spread).std() == pytest.approx(0.5, rel=0.05)
    assert lengths("exponential:700").mean() == pytest.approx(700, rel=0.05)


def test_a_prompt_and_its_output_are_cut_to_the_context() -> None:
    line = "poisson:rate=10,prompt=lognormal:100:3,output=exponential:80,duration=100"
    trace = parse_workload(line).trace(0, context=100)
    assert all(arrival.prompt_tokens >= 1 and arrival.output_tokens >= 1 for arrival in trace.arrivals)
    assert max(arrival.prompt_tokens + arrival.output_tokens for arrival in trace.arrivals) == 100


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"uniform:rate=5,{TAIL}", "unknown arrivals 'uniform'; known: poisson, gamma"),
        (f"gamma:rate=5,{TAIL}", "cv= is missing; gamma has rate, cv, prompt, output, duration"),
        (f"poisson:rate=5,cv=3,{TAIL}", "unknown part 'cv'; poisson has rate, prompt, output, duration"),
        (f"poisson:rate=fast,{TAIL}", "rate: 'fast' is not a number"),
        (f"poisson:rate=nan,{TAIL}", "rate: 'nan' is not a number"),
        (f"poisson:rate=-1,{TAIL}", "rate=-1 must be above 0"),
        (f"poisson:rate=1e9,{TAIL}", "2e+12 requests are more than 10,000,000"),
        (f"poisson:rate=5,rate=6,{TAIL}", "rate= is there twice"),
        (f"poisson:rate,{TAIL}", "'rate' is not NAME=VALUE"),
        (f"gamma:rate=5,cv=1000,{TAIL}", "cv=1000 must be between 0.01 and 100"),
        ("poisson:rate=1,prompt=pareto:1,output=fixed:1,duration=9", "unknown lengths 'pareto'; known: fixed:N, unif"),
        ("poisson:rate=1,prompt=uniform:5,output=fixed:1,duration=9", "prompt=uniform:5 should be uniform:A:B"),
        ("poisson:rate=1,prompt=uniform:5:4,output=fixed:1,duration=9", "A 5 must not be above B 4"),
        ("poisson:rate=1,prompt=fixed:1,output=fixed:0,duration=9", "output=fixed:0: N 0 must be at least 1"),
        ("poisson:rate=1,prompt=fixed:1.5,output=fixed:1,duration=9", "N 1.5 is not a whole number of tokens"),
        ("poisson:rate=1,prompt=lognormal:9:-1,output=fixed:1,duration=9", "SIGMA -1 must be at least 0"),
        ("poisson:rate=1,prompt=fixed:1e30,output=fixed:1,duration=9", "must be at most 1,000,000,000"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_known(line: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        parse_workload(line)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_workload_in_which_nothing_arrives_says_so() -> None:
    workload = parse_workload("poisson:rate=0.001,prompt=fixed:1,output=fixed:1,duration=0.1")
    with pytest.raises(OptionError, match=r"nothing arrives within 0\.1 s"):
        workload.trace(0, CONTEXT)


def simulate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "simulate", "--no-progress", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_plays_a_workload_and_repeats_itself(tmp_path: Path) -> None:
    line = "gamma:rate=4,cv=3,prompt=lognormal:800:1.0,output=uniform:5:40,duration=20"
    reports = []
    for seed, name in ((3, "a"), (3, "b"), (4, "c")):
        file = tmp_path / name
        options = ("--workload", line, "--profile", "h200-llama-3-8b", "--seed", seed, "--json", file)
        done = simulate(*map(str, options))
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(file.read_text()))
    assert reports[0] == reports[1] != reports[2]
    assert reports[0][0]["requests"] > 10


def test_exactly_one_of_trace_and_workload_is_needed() -> None:
    neither = simulate("--profile", "h200-llama-3-8b")
    assert neither.returncode == 2
    assert "one of the arguments --trace --workload is required" in neither.stderr
    both = simulate("--profile", "h200-llama-3-8b", "--trace", "t.csv", "--workload", "poisson:rate=1")
    assert both.returncode == 2
    assert "not allowed with argument" in both.stderr
    wrong = simulate("--profile", "h200-llama-3-8b", "--workload", "poisson")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1
