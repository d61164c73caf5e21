"""A stream that runs beside an attack, and its longest gap."""

import json
import threading
import time
from types import TracebackType

import httpx

from tests.serve.running import RunningServer

CALM = 0.25  # seconds: the longest gap that an attack may cause on quiet cores
NOISE = 4.0  # times as much on cores that others use as well


class Victim:
    """`with Victim(server) as victim: attack()`; afterwards `victim.longest_gap` is known."""

    def __init__(self, server: RunningServer, **headers: str) -> None:
        self.server, self.headers = server, headers
        self.longest_gap = 0.0
        self.tokens = 0
        self._begun, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._stream, daemon=True)

    def __enter__(self) -> "Victim":
        self._thread.start()
        assert self._begun.wait(60), "the victim's stream did not begin"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        time.sleep(0.2)  # what the attack left behind may come late
        self._over.set()
        self._thread.join(60)

    def _stream(self) -> None:
        while not self._over.is_set():
            body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
            with (
                httpx.Client(base_url=self.server.url, timeout=60, headers=self.headers) as client,
                client.stream("POST", "/v1/completions", json=body) as answer,
            ):
                answer.raise_for_status()
                last = None
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    assert "error" not in json.loads(line[6:]), line
                    now = time.perf_counter()
                    if last is not None:
                        self.longest_gap = max(self.longest_gap, now - last)
                    last = now
                    self.tokens += 1
                    self._begun.set()
                    if self._over.is_set():
                        return
