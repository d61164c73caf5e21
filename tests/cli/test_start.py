"""Starts that cannot succeed: what they say, how they end, and how soon."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from weft.serve.engines.messages import EngineProcessConfig

NO_TORCH = """\
import sys
from weft.cli import main
code = main(sys.argv[1:])
sys.exit(99 if "torch" in sys.modules else code)
"""


@pytest.fixture
def unusable(tmp_path: Path) -> Path:
    """A model directory that only the engine process finds out about."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    return tmp_path


def serve(model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", "serve", str(model), "--port", "0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize("starts", [2, pytest.param(10, marks=pytest.mark.long)])
def test_a_server_that_cannot_load_its_model_ends_in_one_line_each_time(starts: int, unusable: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        ended = list(threads.map(serve, [unusable] * starts))
    for one in ended:
        assert one.returncode == 1
        first, last = one.stderr.splitlines()
        assert first == f"weft: loading {unusable}"
        assert last.startswith(f"weft: {unusable}: unknown architecture (NoSuchModel); known: ")


def test_an_engine_process_that_cannot_start_ends_while_its_parent_lives(unusable: Path, tmp_path: Path) -> None:
    """Its standard input stays open meanwhile, and a thread reads it."""
    heartbeat = tmp_path / "heartbeat"
    heartbeat.write_bytes(bytes(24))
    orders = EngineProcessConfig(f"ipc://{tmp_path}/socket", str(unusable), (), {}, heartbeat_file=str(heartbeat))
    process = subprocess.Popen(
        [sys.executable, "-m", "weft.serve.engines.engine_main"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(msgspec.json.encode(orders) + b"\n")
    process.stdin.flush()
    said = process.stderr.read()
    assert process.wait(60) == 2, said
    assert said == b""
    process.stdin.close()


@pytest.mark.parametrize("command", [("serve", "--port", "0"), ("chat",), ("generate", "--prompt", "x")])
@pytest.mark.parametrize("wrong", ["missing", "empty"])
def test_a_wrong_model_path_is_told_before_torch_is_imported(
    command: tuple[str, ...], wrong: str, tmp_path: Path
) -> None:
    path = tmp_path / "no-such-model"
    if wrong == "empty":
        path.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, command[0], str(path), *command[1:]],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    what = "does not exist" if wrong == "missing" else "has no config.json"
    assert what in done.stderr
    assert done.stderr.count("\n") == 1
