"""Real clients against a real server, in an environment of their own: `make clients` installs and runs them.

What they send is recorded; test_recorded.py sends it again in every run of the tests.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.recorder import Recorder
from tests.serve.running import RunningServer

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
KEY = "a-key-of-the-tests"
MOST = 12  # recorded requests of a client
PROGRAMS = sorted(path for path in (FOLDER / "programs").iterdir() if path.stem.endswith(("_sdk", "_eval")))

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not PYTHON.exists(), reason="the clients are not installed: make clients"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    server = RunningServer("--api-key", KEY, "--served-model-name", "weft", "--kv-cache-memory-bytes", "256MiB")
    yield server
    assert server.stop() == 0, server.log


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_client_works(server: RunningServer, program: Path) -> None:
    runs = [str(PYTHON)] if program.suffix == ".py" else ["node"]
    own = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": KEY, "DO_NOT_TRACK": "1"}
    with Recorder(server.url) as recorder:
        done = subprocess.run(
            [*runs, str(program), recorder.url, KEY, "weft"],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=program.parent,
            env={**os.environ, **own},
        )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    record(program.stem, recorder)
    failed = {name: error for name, error in found.items() if error}
    assert found
    assert not failed, f"{failed}\n{done.stderr[-4000:]}"


def record(name: str, recorder: Recorder) -> None:
    """One line a request that was answered, the first MOST different ones."""
    good = [request for request in recorder.requests if request["status"] == 200]
    lines = dict.fromkeys(json.dumps(request, sort_keys=True) for request in good)
    target = FOLDER / "recorded" / f"{name}.jsonl"
    target.write_text("".join(f"{line}\n" for line in list(lines)[:MOST]))
