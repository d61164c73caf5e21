"""A real server process for tests: started on a free port, with the model that ships with weft."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import httpx

from tests.commands import run_here
from weft.core import Coefficients
from weft.engine.calibration import Calibration

# As two cores of a server took with the default model.
MEASURED = Calibration(
    Coefficients(
        fixed=1.2e-3,
        weights=1.8e-3,
        token=74e-6,
        pair=124e-9,
        slice=960e-6,
        decode=56e-6,
        context=4.6e-6,
        reach=580e-9,
        few=112e-6,
        grain=16,
    ),
    mean=0.02,
    spread=0.1,
    error_p50=0.06,
    error_p99=0.31,
    steps=224,
    largest=2048,
    device="two cores",
    submit=20e-6,
    submit_prefill=20e-6,
    wake=0.07,
)


def store_calibration(cache: Path, *limits: str | Path) -> None:
    """Stores a calibration for servers with these limits. Else each measures for ten seconds when it starts with
    targets, and on a busy machine the next one does so again."""
    given = mock.patch("weft.engine.run_calibration.calibrate", return_value=MEASURED)
    with given, mock.patch.dict(os.environ, XDG_CACHE_HOME=str(cache)):
        done = run_here("calibrate", "--no-progress", *limits)
    assert done.returncode == 0, done.stderr


class RunningServer:
    """`weft serve` in a process of its own. Its log is kept, and shown where it does not come up."""

    command: tuple[str, ...] = ("-m", "weft", "serve", "--port", "0")

    def __init__(self, *arguments: str, **environment: str) -> None:
        own = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        command = [sys.executable, *self.command, *arguments]
        self.process = subprocess.Popen(
            command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self._said = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._said.wait(120) or not self.url:
            self.kill()
            raise RuntimeError("the server did not come up:\n" + self.log)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"on (https?://\S+)", line):
                self.url = found[1]
                self._said.set()
        self._said.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    @property
    def engine_pid(self) -> int | None:
        found = self.get("/server_info")["processes"]["engine"]
        return None if found is None else int(found)

    def get(self, path: str, **options: Any) -> Any:
        answer = self.http.get(path, **options)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def metric(self, name: str) -> float:
        """One value of /metrics, by its name with labels, as it stands there."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.split()[-1])
        raise KeyError(name)

    def of_engine(self, name: str, engine: str = "0") -> float:
        """One value of /metrics that belongs to an engine."""
        return self.metric(f'{name}{{engine="{engine}"}}')

    def wait_until_idle(self, seconds: float = 30) -> None:
        """Until nothing runs or waits and all blocks are free."""
        streams = ("weft_requests_running", "weft_requests_waiting")
        eventually(lambda: all(self.of_engine(name) == 0 for name in streams), seconds)
        eventually(lambda: self.of_engine("weft_kv_blocks_free") == self.of_engine("weft_kv_blocks"), seconds)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 20) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def eventually(condition: Any, seconds: float) -> None:
    """Waits for a condition; fails where it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not just been left for its parent to collect."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
