"""Requests in a loop that are wrong, or break something: the log stays short and tells how much it leaves out."""

import logging
import re
import threading
import time

import pytest

from tests.serve.running import RunningServer, eventually
from tests.serve.test_bad_input import CHAT, TEXT, check, exchange
from weft.serve import log_limits
from weft.serve.log_limits import MOST_ENTRIES, PERIOD_S, LogRateLimit

# It is fine for the greeting of TemplateCheck; what the sandbox forbids is a failure of the server, with a traceback.
TEMPLATE = "{% if messages[0].content == 'x' %}{{ ''.__class__.__mro__ }}{% endif %}{{ messages[0].content }}"
OPTIONS = ("--policy", "chunked", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "64MiB")
LEFT_OUT = re.compile(r"weft: (\d+) more errors were left out of the log")


def test_failures_in_a_loop_do_not_fill_the_log() -> None:
    server = RunningServer(*OPTIONS, "--chat-template", TEMPLATE)

    def told() -> int:
        return server.log.count("ModelError: the model's chat template does what the sandbox forbids")

    try:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        began = time.monotonic()
        for _ in range(100):
            check(server.post(CHAT, body), 500)
        eventually(lambda: LEFT_OUT.search(server.log), 2 * PERIOD_S)
        periods = 2 + (time.monotonic() - began) / PERIOD_S
        assert 1 <= told() <= MOST_ENTRIES * periods
        eventually(lambda: sum(map(int, LEFT_OUT.findall(server.log))) + told() == 100, 2 * PERIOD_S)
    finally:
        server.kill()


def test_what_is_wrong_is_not_logged(server: RunningServer) -> None:
    before = len(server.lines)
    for _ in range(50):
        for data in (
            b"\x16\x03\x01\x02garbage\r\n\r\n",
            b"GET http:// HTTP/1.1\r\n\r\n",
            b"GET /\xff HTTP/1.1\r\n\r\n",
        ):
            assert exchange(server, data).startswith(b"HTTP/1.1 400")
        check(server.http.post(TEXT, content=b"{"), 400)
        check(server.http.get("/nothing"), 404)
    assert server.lines[before:] == []


def test_periods_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_limits, "PERIOD_S", 0.2)
    said: list[str] = []
    sparing = LogRateLimit(said.append)
    for _ in range(MOST_ENTRIES + 3):
        sparing.write("x")
    assert said == ["x"] * MOST_ENTRIES
    eventually(lambda: len(said) > MOST_ENTRIES, 5)
    assert LEFT_OUT.search(said[-1])[1] == "3"  # type: ignore[index]
    sparing.write("y")
    assert said[-1] == "y"


def test_entries_of_all_threads_and_libraries_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_limits, "PERIOD_S", 60.0)
    said: list[str] = []
    sparing = LogRateLimit(said.append)
    threads = [threading.Thread(target=sparing.write, args=("x",)) for _ in range(MOST_ENTRIES - 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record = logging.makeLogRecord({"msg": "y"})
    assert [sparing.filter(record) for _ in range(3)] == [True, False, False]
    assert said == ["x"] * (MOST_ENTRIES - 1)
