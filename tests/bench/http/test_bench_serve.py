"""`weft bench serve` as a process, against a real server and against none."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.serve.running import RunningServer


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "bench", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_the_command_of_vllms_users_works_as_written(server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    rate = ["--request-rate", "40", "--num-prompts", "40", "--input-len", "100", "--output-len", "20"]
    done = bench("--url", server.url, *rate, "--json", str(file), "--save-detailed")
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert (found["completed"], found["failed"]) == (40, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (4000, 800)
    for key in ("mean_ttft_ms", "p99_tpot_ms", "p99_itl_ms", "p99.9_gap_ms", "request_throughput", "median_e2el_ms"):
        assert found[key] > 0
    first = found["requests"][0]
    assert len(first["times"]) >= 1
    assert (sum(found["input_lens"]), sum(found["output_lens"]), set(found["errors"])) == (4000, 800, {""})
    assert found["ttfts"][0] == pytest.approx(first["times"][0] - first["due"])
    assert len(found["itls"][0]) == len(first["times"]) - 1
    assert {"queue_ms", "prefill_ms"} <= first["server"].keys()
    assert "time between successive tokens" in done.stdout
    assert "the server's own account of the time to the first token" in done.stdout
    whole = first["server"]["queue_ms"] + first["server"]["prefill_ms"]
    assert first["server"]["ttft_ms"] >= whole - 1
    assert 0 <= found["p50_outside_ms"] < found["p50_ttft_ms"]


def test_nothing_of_a_run_is_in_the_cache_of_a_server_that_had_the_same_one(
    server: RunningServer, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [1, 2]}))
    for load in (["--num-prompts", "3", "--input-len", "100", "--output-len", "2"], ["--trace", str(trace)]):
        for run in range(2):
            file = tmp_path / f"{run}.json"
            assert bench("--url", server.url, *load, "--json", str(file)).returncode == 0
            assert json.loads(file.read_text())["total_cached_tokens"] == 0


def test_a_trace_is_sent_with_its_lengths_and_shared_prefixes(server: RunningServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 1100, "output_length": 2, "hash_ids": [1, 3, 4]},
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    file = tmp_path / "result.json"
    done = bench(
        "--url", server.url, "--trace", str(trace), "--rate-scale", "3", "--json", str(file), "--save-detailed"
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(file.read_text())["requests"]
    assert (first["prompt_tokens"], second["prompt_tokens"]) == (700, 1100)
    assert (first["output_tokens"], second["output_tokens"]) == (3, 2)
    assert second["due"] == pytest.approx(1.0)
    assert second["cached_tokens"] == 512


def test_what_is_known_is_written_when_a_run_is_interrupted(server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    sent = ["--request-rate", "20", "--num-prompts", "4000", "--input-len", "10", "--output-len", "5"]
    command = [sys.executable, "-m", "weft", "bench", "serve", "--url", server.url, *sent, "--json", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    before, deadline = _answered(server), time.monotonic() + 60
    while time.monotonic() < deadline and _answered(server) <= before + 20:
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "(interrupted)" in out
    found = json.loads(file.read_text())
    assert found["was_interrupted"]
    assert 0 < found["completed"] < 4000
    assert found["failed"] == 0


def _answered(server: RunningServer) -> int:
    """Requests that the server has ended well, by its own count."""
    lines = server.http.get("/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith("vllm:request_success_total") and "length" in line]
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in counts))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["--url", "{url}", "--model", "other"], "has no model 'other'; it has"),
        (["--url", "{url}", "--goodput", "speed:3"], "is no goal"),
        (["--url", "{url}", "--num-prompts", "0"], "must be at least 1"),
        (["--url", "{url}", "--request-rate", "0"], "must be above 0"),
        (
            ["--url", "{url}", "--trace", "t.csv", "--request-rate", "4"],
            "--request-rate 4.0: a trace has its own times",
        ),
        (["--url", "{url}", "--input-len", "9000000"], "no requests are left to send"),
        (["--url", "{url}", "--trace", "nothing.csv"], "cannot read the trace"),
        (["--url", "{url}", "--num-prompts", "2", "--warmup", "60"], "leave nothing of a run"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(server: RunningServer, arguments: list[str], message: str) -> None:
    done = bench(*(argument.format(url=server.url) for argument in arguments))
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
