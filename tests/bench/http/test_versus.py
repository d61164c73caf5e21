"""Variants side by side."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.bench.http.variants import Variant, parse_variants, running
from weft.bench.http.versus import comparison, ratio, run_order
from weft.errors import EngineError, OptionError

STUB = f"{sys.executable} {Path(__file__).parents[3] / 'scripts' / 'stub_server.py'} --port {{port}}"


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_runs_are_interleaved_and_every_second_round_goes_backwards() -> None:
    assert run_order(["a", "b", "c"], 3) == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]


@given(st.lists(st.floats(0.1, 1000), min_size=2, max_size=20), st.floats(0.2, 5))
def test_a_constant_ratio_is_found_and_clear(figures: list[float], factor: float) -> None:
    found = ratio(figures, [factor * figure for figure in figures])
    assert found is not None
    assert found.value == pytest.approx(factor)
    assert found.low == pytest.approx(found.high)
    assert found.is_clear or factor == pytest.approx(1)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        noise = random.normal(0, 0.2, (2, 4))
        found = ratio(np.exp(noise[0]).tolist(), (1.5 * np.exp(noise[1])).tolist())
        assert found is not None
        hits += found.low <= 1.5 <= found.high
    assert hits / 2000 == pytest.approx(0.95, abs=0.015)


def test_what_one_run_says_has_no_interval_and_what_is_missing_no_ratio() -> None:
    one = ratio([2.0], [3.0])
    assert one is not None
    assert (one.value, one.low, one.is_clear) == (1.5, None, False)
    assert ratio([2.0, 0.0], [3.0, 1.0]) is None
    told = comparison({"a": [{"p99_ttft_ms": 10.0}], "b": [{"p99_ttft_ms": 20.0}]})
    assert told["b"]["p99_ttft_ms"] is not None
    assert told["b"]["p50_gap_ms"] is None


@pytest.mark.parametrize("text", ["", "name", "name:", "name: weft serve", ": http://x"])
def test_a_variant_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="must be NAME: URL"):
        parse_variants([text])


def test_two_variants_of_one_name_are_refused() -> None:
    with pytest.raises(OptionError, match="same name"):
        parse_variants(["a: http://x", "a: http://y"])
    assert parse_variants(["a: http://x:1/v1"]) == [Variant("a", "http://x:1/v1")]


def test_a_server_that_does_not_come_up_is_quoted() -> None:
    quits = f"{sys.executable} -c \"print('no port {{port}} for me'); raise SystemExit(3)\""
    with pytest.raises(EngineError, match=r"ended while it started(.|\n)*for me"), running(Variant("x", quits)):
        pass
    with pytest.raises(EngineError, match="cannot start x"), running(Variant("x", "/no/such/thing {port}")):
        pass


GUARDED = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Guarded(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["authorization"] == "Bearer secret" else 401)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Guarded).serve_forever()
"""


@pytest.mark.parametrize("key", ["secret", "wrong"])
def test_a_started_server_is_asked_with_the_key_and_without_a_proxy(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with a key is for the client to say: nobody waits for a server that answers."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    file = tmp_path / "guarded.py"
    file.write_text(GUARDED)
    with running(Variant("guarded", f"{sys.executable} {file} {{port}}"), key, timeout=20) as url:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(url + "/v1/models", headers={"authorization": "Bearer secret"})
        assert direct.open(request, timeout=5).status == 200


def test_ab_starts_measures_and_ends_each_variant(tmp_path: Path) -> None:
    file = tmp_path / "ab.json"
    sent = ["--num-prompts", "20", "--input-len", "16", "--output-len", "1", "--repeats", "2"]
    written = ["--json", str(file), "--html", str(tmp_path / "ab.html"), "--chart", str(tmp_path / "ab.svg")]
    done = weft("ab", "--variant", f"one: {STUB}", "--variant", f"two: {STUB}", *sent, *written)
    assert done.returncode == 0, done.stderr
    assert "run 4 of 4: one" in done.stderr
    found = json.loads(file.read_text())
    assert [len(runs) for runs in found["runs"].values()] == [2, 2]
    assert all(run["completed"] == 20 for runs in found["runs"].values() for run in runs)
    assert found["ratios"]["two"]["p50_ttft_ms"]["value"] > 0
    assert "p50_ttft_ms" in done.stdout
    assert "one against two" in (tmp_path / "ab.html").read_text()
    assert "time to the first token" in (tmp_path / "ab.svg").read_text()


def test_compare_reads_what_serve_wrote(tmp_path: Path) -> None:
    files = []
    with running(Variant("stub", STUB)) as url:
        for number in range(2):
            files.append(str(tmp_path / f"{number}.json"))
            sent = ["--num-prompts", "10", "--input-len", "16", "--output-len", "1"]
            assert weft("serve", "--url", url, *sent, "--json", files[-1]).returncode == 0
    done = weft("compare", *files)
    assert done.returncode == 0, done.stderr
    assert "request_throughput" in done.stdout
    assert "note:" not in done.stdout
    shorter = {**json.loads(Path(files[1]).read_text()), "ignore_eos": False}
    Path(files[1]).write_text(json.dumps(shorter))
    assert f"note: {files[1]}: the server refused ignore_eos" in weft("compare", *files).stdout
    alone = weft("compare", files[0])
    assert alone.returncode != 0
    assert "cannot be compared" in alone.stderr
    (tmp_path / "other.json").write_text("[]")
    assert "is not what weft bench serve" in weft("compare", files[0], str(tmp_path / "other.json")).stderr
