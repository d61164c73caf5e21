"""A stream that runs beside an attack, and its longest gap.

The stream is read by a process of its own: beside an attacker that parses a large answer in the same interpreter, it
would wait for that.
"""

import http.client
import json
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:  # this file is also run as a script
    from tests.serve.running import RunningServer

CALM = 0.25  # seconds: the longest gap that an attack may cause on quiet cores
NOISE = 4.0  # times as much on cores that others use as well


class Victim:
    """`with Victim(server) as victim: attack()`; afterwards `victim.longest_gap` is known."""

    def __init__(self, server: "RunningServer", **headers: str) -> None:
        self.longest_gap = 0.0
        self.tokens = 0
        self._command = [sys.executable, __file__, server.url, json.dumps(headers)]

    def __enter__(self) -> "Victim":
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "begun\n", "the victim's stream did not begin"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        time.sleep(0.2)  # what the attack left behind may come late
        found, _ = self._process.communicate("over\n", timeout=60)
        assert self._process.returncode == 0
        self.longest_gap, self.tokens = json.loads(found)
        print(f"the victim's longest gap: {1000 * self.longest_gap:.0f} ms")  # `pytest -s` shows it


def read_streams(url: str, headers: dict[str, str]) -> None:
    """Prints `begun` with the first token, and the longest gap and the number of tokens when stdin says that it is
    over."""
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()
    body = json.dumps({"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True})
    longest, tokens = 0.0, 0
    while not over.is_set():
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        last = None
        while not over.is_set() and (line := answer.readline()):
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            assert "error" not in json.loads(line[6:]), line
            longest = max(longest, now - (last or now))
            last = now
            tokens += 1
            if tokens == 1:
                print("begun", flush=True)
        connection.close()
    print(json.dumps([longest, tokens]))


if __name__ == "__main__":
    read_streams(sys.argv[1], json.loads(sys.argv[2]))
