"""`weft calibrate` on a small model with random weights, once in a process of its own."""

import json
from pathlib import Path

import pytest

from tests.commands import run_here, run_process
from tests.engine.tiny import talking_directory
from weft.core import StepShape
from weft.sim.profiles import load_profile


def test_calibrate_shows_and_saves_what_it_measured(tmp_path: Path) -> None:
    model, cache, file = talking_directory(tmp_path / "small"), tmp_path / "cache", tmp_path / "out.json"
    limits = ("--load-format", "dummy", "--max-num-seqs", "8", "--kv-cache-memory-bytes", "1M")
    done = run_process(
        "calibrate", model, *limits, "--seconds", "1", "--json", file, "--no-progress", XDG_CACHE_HOME=str(cache)
    )
    assert done.returncode == 0, done.stderr
    why = "1 s of single steps and 1 s of a rehearsal, after the model is loaded"
    assert done.stderr == f"weft: about 2 s: {why}\n"
    for part in ("fixed", "weights", "decode step", "tokens/s (a step of ", "p50 / p99", "steps measured"):
        assert part in done.stdout
    (saved,) = (cache / "weft" / "calibration").iterdir()
    assert saved.name.startswith("small-")
    assert str(saved) in done.stdout
    result = json.loads(file.read_text())
    assert result["file"] == str(saved)
    assert result["steps"] >= 16
    assert result["coefficients"] == json.loads(saved.read_text())["coefficients"]


def test_a_senseless_time_is_refused(tmp_path: Path) -> None:
    done = run_here("calibrate", tmp_path, "--seconds", "0")
    assert done.returncode == 2
    assert done.stderr == "weft: --seconds 0.0 must be above 0\n"


def test_what_was_measured_is_a_profile_for_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory, file = talking_directory(tmp_path / "tiny"), tmp_path / "tiny.json"
    limits = ("--max-num-seqs", "8", "--kv-cache-memory-bytes", "1M", "--seconds", "1", "--no-progress")
    done = run_here("calibrate", "--shape", directory, *limits, "--profile", file)
    assert done.returncode == 0, done.stderr
    profile = load_profile(str(file))
    assert profile.origin.startswith("measured with weft")
    assert profile.max_num_seqs == 8
    assert profile.kv_tokens >= profile.max_model_len - 1
    assert profile.coefficients.predict(StepShape(tokens=1, decodes=1)) > 0
    assert run_here("calibrate", directory, "--shape", directory).returncode == 2
