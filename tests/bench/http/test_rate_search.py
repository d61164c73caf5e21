"""Rates in a row, and what was measured already."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.http.test_versus import STUB, weft
from weft.bench.http.rate_search import RATE_PRECISION, RunFile, highest_rate
from weft.errors import OptionError


@given(st.floats(0.1, 10), st.floats(1.5, 100), st.floats(0.05, 2000))
def test_the_highest_rate_is_found_by_few_runs(low: float, factor: float, limit: float) -> None:
    tried: list[float] = []

    def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = highest_rate(low, low * factor, holds)
    if limit < low:
        assert found is None
    else:
        assert found is not None
        assert found <= limit
        assert found == low * factor or found * RATE_PRECISION >= min(limit, low * factor) * (1 - 1e-9)
    assert len(tried) <= 12


def test_what_is_in_the_file_is_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    measured: list[int] = []

    def measure() -> dict[str, Any]:
        measured.append(1)
        return {"completed": 3}

    for _ in range(2):
        run_file = RunFile(file)
        assert run_file.get({"rate": 1.0, "variant": "a"}, measure)["completed"] == 3
        assert run_file.get({"rate": 2.0, "variant": "a"}, measure)["rate"] == 2.0
    assert len(measured) == 2
    assert RunFile(file).get({"rate": 3.0}, lambda: {"was_interrupted": True})["was_interrupted"]
    assert len(file.read_text().splitlines()) == 2, "half a run is none"


def test_a_file_of_something_else_is_not_written_to(tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text('{"a": 1}\n')
    with pytest.raises(OptionError, match="line 1 is not a run"):
        RunFile(file)


def test_a_sweep_measures_each_rate_once_and_finds_the_highest(tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    load = ["--num-prompts", "20", "--input-len", "16", "--output-len", "1", "--goodput", "ttft:5000"]
    command = ["sweep", "--variant", f"stub: {STUB}", "--rates", "50", "100", "--find", "50:200", *load]
    for turn in range(2):
        done = weft(*command, "--out", str(file))
        assert done.returncode == 0, done.stderr
        assert "the goals are kept by 99% of the requests up to 200 requests/s" in done.stdout
        assert ("stub at 50 requests/s" in done.stderr) == (turn == 0), "the second time all is in the file"
    assert [json.loads(line)["rate"] for line in file.read_text().splitlines()] == [50, 100, 200]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to measure"),
        (["--rates", "0"], "must all be above 0"),
        (["--find", "1:2"], "needs goals"),
        (["--find", "2:1", "--goodput", "ttft:1"], "must be LOW:HIGH"),
        (["--rates", "1", "--trace", "x.csv"], "has its own times"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "weft", "bench", "sweep", "--variant", "x: http://127.0.0.1:9", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert message in done.stderr
