"""`weft bench fidelity` as a process, with a real server and the model that ships with weft. No times are judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny import talking_directory, tiny_directory
from tests.serve.running import RunningServer, store_calibration

WORKLOAD = "poisson:rate=20,prompt=uniform:5:60,output=uniform:2:6,duration=0.5"
SMALL = ("--max-num-seqs", "16", "--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", "64MiB")
DUMMY = ("--load-format", "dummy")
EASY = ("--gap-target-ms", "5000", "--ttft-target-ms", "60000")  # machines that run tests are slow at times


def fidelity(*arguments: str | Path, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "bench", "fidelity", "--no-progress", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(home)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small, so that what is played takes no time."""
    return talking_directory(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def home(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a calibration of the small engine."""
    folder = tmp_path_factory.mktemp("calibrations")
    store_calibration(folder, model, *DUMMY, *SMALL)
    return folder


def check(found: dict[str, object], policies: list[str]) -> None:
    parts = found["policies"]
    assert isinstance(parts, list)
    assert [one["policy"] for one in parts] == policies
    for one in parts:
        assert one["failures"] == {}
        for run in (*one["runs"], one["simulated"]):
            assert (run["requests"], run["refused"]) == (found["requests"], 0)
            assert run["prefix_hit_rate"] == 0
            assert run["output_tokens_per_s"] > 0
        assert {"TTFT ms p50", "gap ms p99.9", "output tokens/s", "promises kept"} <= {x["name"] for x in one["lines"]}


def test_a_workload_is_served_over_http_and_simulated_with_the_servers_calibration(
    tmp_path: Path, model: Path, home: Path
) -> None:
    file = tmp_path / "result.json"
    played = ("--workload", WORKLOAD, *EASY, "--policy", "chunked,slo", "--repeats", "1", "--json", file)
    done = fidelity(model, *DUMMY, *SMALL, *played, home=home)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    check(found, ["slo", "chunked"])  # slo first, whose start makes the calibration where there is none
    assert found["profile"]["origin"].startswith("measured with weft")
    assert (found["profile"]["max_num_seqs"], found["profile"]["max_num_batched_tokens"]) == (16, 256)
    assert found["truth"]["noise"] == pytest.approx(min(found["profile"]["spread"], 0.5))
    assert found["command"].startswith(f"weft bench fidelity {model.name} --workload {WORKLOAD} ")
    assert "--repeats 1 --policy chunked,slo" in found["command"]
    assert all(len(one["inside"]) == 3 and one["outside_ms"]["outside_p50"] > 0 for one in found["policies"])
    assert "promises kept" in done.stdout


def test_a_shape_without_a_tokenizer_is_served_over_http(tmp_path: Path) -> None:
    shape, file = tiny_directory(tmp_path / "tiny", max_position_embeddings=1024), tmp_path / "result.json"
    command = ("--shape", shape, "--workload", WORKLOAD, *SMALL, *EASY, "--repeats", "1", "--json", file)
    done = fidelity(*command, home=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    check(found, ["slo"])
    assert found["model"] == "tiny"
    assert str(tmp_path) not in json.dumps(found), "folders of this machine are not for the docs"


def test_an_engine_in_this_process_is_played_the_same_way(tmp_path: Path, model: Path, home: Path) -> None:
    file = tmp_path / "result.json"
    command = (model, *DUMMY, "--embedded", "--workload", WORKLOAD, *SMALL, *EASY, "--json", file)
    done = fidelity(*command, home=home)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    check(found, ["slo"])
    (slo,) = found["policies"]
    assert len(slo["runs"]) == 2
    assert slo["step_errors"]["decode"]["steps"] > 0


def test_a_running_server_is_played_with_its_own_policy_and_a_given_profile(
    tmp_path: Path, server: RunningServer
) -> None:
    trace, file = tmp_path / "trace.csv", tmp_path / "result.json"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:00:00,30,4", "2023-11-16 18:00:01,30,4"]
    trace.write_text("\n".join([*rows, "2023-11-16 18:00:02,90000,4", "2023-11-16 18:00:09,30,4"]))
    played = ("--url", server.url, "--trace", trace, "--rate-scale", "4", "--duration", "2")
    done = fidelity(*played, "--profile", "h200-qwen3-0.6b", "--repeats", "1", "--json", file, home=tmp_path)
    alone = fidelity(*played, home=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    check(found, ["chunked"])
    assert (found["requests"], found["left_out_too_long"]) == (2, 1)
    assert "1 of 3 requests are longer than the context" in done.stderr
    assert found["slice"] == "trace x4, first 2 s"
    assert alone.returncode == 2
    assert "the engine has no calibration" in alone.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --trace FILE or --workload SPEC"),
        (["--trace", "t.csv", "--workload", WORKLOAD], "give either --trace FILE or --workload SPEC"),
        (["--workload", WORKLOAD, "--duration", "3"], "--duration 3.0: it is for a trace"),
        (["--trace", "t.csv", "--seed", "3"], "--seed 3: it is for a workload"),
        (["--workload", WORKLOAD, "--policy", "best"], "--policy 'best' is unknown: choose of slo, chunked"),
        (["--workload", WORKLOAD, "--repeats", "0"], "--repeats 0 must be at least 1"),
        (["--workload", WORKLOAD, "--gap-target-ms", "0"], "--gap-target-ms 0 must be above 0"),
        (["--workload", WORKLOAD, "--api-key", "k"], "--api-key k: it is for a running server"),
        (["--workload", WORKLOAD, "--profile", "tpu"], "unknown profile 'tpu'"),
        (["m", "--workload", WORKLOAD, "--shape", "s"], "MODEL m and --shape s: give one of them"),
        (["--url", "http://x", "--workload", WORKLOAD, "--max-num-seqs", "3"], "--max-num-seqs 3: the server at --url"),
        (["--from", "no.json", "--workload", WORKLOAD], "--from plays nothing"),
        (["--from", "no.json"], "cannot read no.json"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from weft.cli import main

    assert main(["bench", "fidelity", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
