"""Engine processes that are stopped or cannot be started: clients are told, and the server goes on or ends."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.running import RunningServer, eventually, is_alive
from weft.observe.metrics import ServerMetrics
from weft.serve.engines.engine_pool import EnginePool
from weft.serve.engines.messages import EngineProcessConfig

SMALL = ("--policy", "chunked", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "64MiB")
ENDLESS = {"prompt": "Once", "max_tokens": 16000, "ignore_eos": True, "stream": True}


def test_a_stopped_engine_is_told_and_replaced() -> None:
    """Its client gets an error, probes say so, and another engine serves within a minute."""
    server = RunningServer(*SMALL)
    try:
        first = server.engine_pid
        assert first is not None
        lines: list[str] = []

        def read() -> None:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=120) as answer:
                lines.extend(answer.iter_lines())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        eventually(lambda: server.of_engine("weft_requests_running") > 0, 10)
        os.kill(first, signal.SIGSTOP)
        eventually(lambda: server.http.get("/health").status_code == 503, 20)
        assert server.http.get("/ready").status_code == 503
        refused = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_silent"
        eventually(lambda: not is_alive(first), 40)
        reader.join(10)
        assert any('"error"' in line and "did not respond" in line for line in lines)
        eventually(lambda: server.http.get("/health").status_code == 200, 60)
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert "did not respond" in server.log
    finally:
        server.kill()


def test_an_engine_that_is_stopped_for_a_moment_goes_on(server: RunningServer) -> None:
    first = server.engine_pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    time.sleep(3)
    os.kill(first, signal.SIGCONT)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert server.engine_pid == first


def started(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "serve", "--port", "0", *SMALL, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_a_socket_path_that_is_too_long_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 113)
    deep.mkdir()
    done = started(env={**os.environ, "TMPDIR": str(deep)})
    assert done.returncode == 1
    assert "point TMPDIR to a folder with a shorter path" in done.stderr
    assert list(deep.iterdir()) == []


def test_too_few_files_end_the_server_with_its_reason() -> None:
    limited = 'ulimit -n 14; exec "$0" -m weft serve --port 0 --policy chunked'
    done = subprocess.run(["bash", "-c", limited, sys.executable], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Too many open files" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interpreter_that_may_not_be_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an upgrade of Python beneath a running server."""
    interpreter = tmp_path / "python"
    interpreter.write_text("")

    logged: list[str] = []

    async def scenario() -> str | None:
        engines = EnginePool(EngineProcessConfig("", "nowhere", (), {}), ServerMetrics("m"), logged.append)
        engines.start()
        await asyncio.wait_for(engines.changed.wait(), 10)
        await engines.close()
        return engines.failure

    monkeypatch.setattr(sys, "executable", str(interpreter))
    reason = asyncio.run(scenario())
    assert reason is not None
    assert "Permission denied" in reason
    assert str(interpreter) in reason
    assert logged == [], "the server says the reason when it ends"


def test_what_killed_servers_left_is_swept(tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    server = RunningServer(*SMALL, **environment)
    server.kill()
    left = [folder for folder in tmp_path.iterdir() if folder.name.startswith("weft-")]
    assert left, "a killed server cannot clean up"
    for folder in left:
        os.utime(folder, (1, 1))
    other = tmp_path / "weft-of-somebody"
    other.mkdir()
    os.utime(other, (1, 1))
    server = RunningServer(*SMALL, **environment)
    try:
        assert not any(folder.exists() for folder in left)
        assert other.exists(), "a folder without our lock is not ours"
    finally:
        assert server.stop() == 0, server.log
