"""Ctrl-C in every phase of a command, as a process: what is known is told, all else ends in one line."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bench.http.scripted import Script, ScriptedServer, beside
from tests.bench.http.test_versus import STUB
from weft.cli.load import _interrupting

LONG = ["--request-rate", "20", "--num-prompts", "4000", "--input-len", "10", "--output-len", "1"]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A word is a token."""
    with beside(lambda body, number: Script()) as server:
        server.count = lambda text: len(text.split())
        yield server


class Bench:
    """A command that is interrupted."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "weft", "bench", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def interrupted(self) -> tuple[int, str, str]:
        """The exit code, and what was said in all."""
        os.kill(self.process.pid, signal.SIGINT)
        out, err = self.process.communicate(timeout=60)
        assert "Traceback" not in err, err
        return self.process.returncode, out, err


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def test_while_the_server_is_asked_for_tokens(server: ScriptedServer, tmp_path: Path) -> None:
    server.counting = 600.0
    file = tmp_path / "result.json"
    bench = Bench("serve", "--url", server.url, *LONG, "--json", str(file))
    until(lambda: server.counts > 0)
    code, out, err = bench.interrupted()
    assert code == 130
    assert err == "weft: interrupted, before the first request was sent: there are no figures\n"
    assert not out
    assert not file.exists()


def test_while_long_prompts_are_made(server: ScriptedServer) -> None:
    """The check of their lengths is the last that the server hears of it; then they are made for a minute or so."""
    lengths = ["--num-prompts", "500", "--input-len", "200000", "--output-len", "1"]
    bench = Bench("serve", "--url", server.url, *lengths)
    until(lambda: server.longest_counted >= 200_000)
    time.sleep(0.5)
    assert len(server.bodies) == 1, "nothing is sent yet but the first greeting"
    code, out, err = bench.interrupted()
    assert code == 130
    assert err == "weft: interrupted, before the first request was sent: there are no figures\n"
    assert not out


def test_in_the_warm_up_of_a_run(server: ScriptedServer, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    bench = Bench("serve", "--url", server.url, *LONG, "--warmup", "60", "--json", str(file))
    until(lambda: len(server.bodies) > 10)
    code, out, err = bench.interrupted()
    assert code == 130
    assert "all requests are counted" in err
    assert "(interrupted)" in out
    found = json.loads(file.read_text())
    assert found["was_interrupted"]
    assert 0 < found["completed"] < 4000


def test_in_a_run_that_nothing_has_come_of(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda body, number: Script([0.0 if number == 0 else 600.0])
    file = tmp_path / "result.json"
    bench = Bench("serve", "--url", server.url, *LONG, "--json", str(file), "--html", str(tmp_path / "report.html"))
    until(lambda: len(server.bodies) > 3)
    code, _, _ = bench.interrupted()
    assert code == 130
    found = json.loads(file.read_text())
    assert (found["was_interrupted"], found["completed"]) == (True, 0)
    assert found["unfinished"] >= 3


def test_between_the_runs_of_variants(server: ScriptedServer, tmp_path: Path) -> None:
    """The second variant counts for ever: the first one's run is told."""
    file = tmp_path / "ab.json"
    load = ["--num-prompts", "5", "--input-len", "16", "--output-len", "1", "--repeats", "1", "--json", str(file)]
    server.counting = 600.0
    bench = Bench("ab", "--variant", f"stub: {STUB}", "--variant", f"slow: {server.url}", *load)
    until(lambda: server.counts > 0)
    code, _, err = bench.interrupted()
    assert code == 130
    assert err.splitlines()[-1] == "weft: interrupted, after 1 of 2 runs"
    assert [len(runs) for runs in json.loads(file.read_text())["runs"].values()] == [1, 0]


def test_while_a_variant_starts() -> None:
    """It never listens; it ends with the command, or its process would keep the pipe open."""
    idle = f"{sys.executable} -c 'import time; time.sleep(600)' {{port}}"
    bench = Bench("ab", "--variant", f"one: {idle}", "--variant", f"two: {idle}", "--num-prompts", "1")
    assert bench.process.stderr is not None
    assert "6 runs, and 6 starts of servers; each takes as long as" in bench.process.stderr.readline()
    assert bench.process.stderr.readline() == "run 1 of 6: one\n"
    time.sleep(0.5)
    code, _, err = bench.interrupted()
    assert code == 130
    assert err.splitlines()[-1] == "weft: interrupted, after 0 of 6 runs"


def test_who_listened_for_the_end_before_a_run_listens_again() -> None:
    """As the one who would end a server that was started for the run."""

    def mine(*_: object) -> None:
        raise AssertionError

    async def run() -> None:
        with _interrupting(asyncio.create_task(asyncio.sleep(0))):
            assert signal.getsignal(signal.SIGTERM) is not mine

    before = signal.signal(signal.SIGTERM, mine)
    try:
        asyncio.run(run())
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_a_sweep(server: ScriptedServer, tmp_path: Path) -> None:
    out = tmp_path / "sweep.jsonl"
    server.counting = 600.0
    bench = Bench("sweep", "--variant", f"x: {server.url}", "--rates", "5", "--num-prompts", "9", "--out", str(out))
    until(lambda: server.counts > 0)
    code, _, err = bench.interrupted()
    assert code == 130
    assert err.splitlines()[-1] == f"weft: interrupted, the same command goes on with what is in {out}"
