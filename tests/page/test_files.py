"""How the page's files are served, and the process of its what-if questions; without browser and engine."""

import asyncio
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.page.synthetic import engine_frame
from tests.serve.running import eventually, is_alive
from weft.observe.frames import encode_frame
from weft.observe.metrics import ServerMetrics
from weft.observe.recording_buffer import RecordingBuffer
from weft.serve.app import build_app
from weft.serve.engines.messages import clock
from weft.serve.http.body_reader import BodyReader
from weft.serve.log_limits import LogRateLimit
from weft.serve.options import ServeOptions
from weft.serve.page.diagnosis import Diagnosis, DiagnosisFailed
from weft.serve.page.page_files import FOLDER, PageFiles
from weft.serve.page.what_if_process import Superseded, WhatIfFailed, WhatIfProcess

FILES = sorted(path.name for path in FOLDER.iterdir())


def ask(path: str, options: ServeOptions, method: str = "GET", **headers: str) -> httpx.Response:
    """An answer of the application, whose engines have not started."""
    state: Any = SimpleNamespace(
        options=options,
        parser=None,
        metrics=ServerMetrics("m", engines=["0"]),
        error_log=LogRateLimit(),
        body_reader=BodyReader(1000),
        engines=SimpleNamespace(info=None),
        recording=None,
    )
    app = build_app(state)

    async def answered() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://here") as client:
            return await client.request(
                method, path, headers={name.replace("_", "-"): v for name, v in headers.items()}
            )

    return asyncio.run(answered())


PLAIN, KEYED = ServeOptions(), ServeOptions(api_key=("secret",))
WITHOUT = [ServeOptions(page=False), ServeOptions(page=False, api_key=("secret",))]


@pytest.mark.parametrize("options", [PLAIN, KEYED])
@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in FILES)])
def test_files_need_no_key_and_have_a_strict_policy(path: str, options: ServeOptions) -> None:
    answer = ask(path, options)
    assert answer.status_code == 200
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert {policy[name] for name in ("base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert ask(path, options, if_none_match=answer.headers["etag"]).status_code == 304
    assert ask(path, options, if_none_match='"other"').status_code == 200


def test_the_page_names_no_other_server_and_has_no_inline_script_or_style() -> None:
    for name in FILES:
        text = (FOLDER / name).read_text()
        urls = set(re.findall(r"https?://[^\s\"'`]+", text)) - {"http://www.w3.org/2000/svg"}
        assert urls == set(), name
        if name.endswith(".html"):
            assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text)
        if name.endswith(".js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)


@pytest.mark.parametrize("options", WITHOUT)
def test_without_the_page_there_is_nothing(options: ServeOptions) -> None:
    for path, method in (
        ("/", "GET"),
        ("/page/main.js", "GET"),
        ("/page/what_if", "POST"),
        ("/page/diagnosis", "POST"),
    ):
        assert ask(path, options, method).status_code == (401 if options.api_key else 404)


@pytest.mark.parametrize(
    "path", ["/page/", "/page/..%2fpage_files.py", "/page/page_files.py", "/page/%2e%2e", "/page/x"]
)
def test_there_are_no_other_files(path: str) -> None:
    assert ask(path, PLAIN).status_code == 404
    assert ask(path, KEYED).status_code == 401


def test_data_needs_a_key() -> None:
    for path in ("/observe/frames", "/server_info"):
        assert ask(path, KEYED).status_code == 401
    for path in ("/page/profiles", "/page/what_if", "/page/diagnosis"):
        assert ask(path, KEYED, "POST").status_code == 401


def test_a_file_that_is_no_part_of_a_page_is_not_served(tmp_path: Path) -> None:
    for name in ("a.js", "a.py", "secret"):
        (tmp_path / name).write_text("x")
    assert PageFiles(tmp_path).paths == {"/", "/page/a.js"}


# Programs that answer each line with the same line, with an exception.
EACH = "import sys, time\nfor line in sys.stdin:\n    {exception}\n    print(line.strip(), flush=True)"
ECHO = EACH.format(exception="pass")
SLOW = EACH.format(exception="time.sleep(99 * ('slow' in line))")
DYING = EACH.format(exception="'die' in line and sys.exit()")


def process(code: str, answer_s: float = 30.0) -> WhatIfProcess:
    return WhatIfProcess((sys.executable, "-c", code), answer_s)


def test_only_the_newest_question_is_asked() -> None:
    async def play() -> None:
        asked = process(ECHO)
        first = asyncio.create_task(asked.ask(b"1"))
        await asyncio.sleep(0)
        others = [asyncio.create_task(asked.ask(b"%d" % number)) for number in range(2, 6)]
        assert await first == b"1"
        found = await asyncio.gather(*others, return_exceptions=True)
        assert [type(one) for one in found[:-1]] == [Superseded] * 3
        assert found[-1] == b"5"
        await asked.close()

    asyncio.run(play())


@pytest.mark.parametrize(("code", "bad"), [(SLOW, b"slow"), (DYING, b"die")])
def test_a_process_that_does_not_answer_is_replaced(code: str, bad: bytes) -> None:
    async def play() -> None:
        asked = process(code)
        assert await asked.ask(b"1") == b"1"
        before = asked.pid
        asked._answer_s = 0.2 if code is SLOW else 30.0
        with pytest.raises(WhatIfFailed):
            await asked.ask(bad)
        asked._answer_s = 30.0
        assert await asked.ask(b"2") == b"2"
        assert before is not None
        assert asked.pid != before
        eventually(lambda: not is_alive(before), 20)
        last = asked.pid
        assert last is not None
        await asked.close()
        eventually(lambda: not is_alive(last), 20)

    asyncio.run(play())


def test_a_question_that_is_given_up_does_not_answer_the_next() -> None:
    async def play() -> None:
        asked = process(SLOW)
        given_up = asyncio.create_task(asked.ask(b"slow"))
        await asyncio.sleep(0.2)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert await asked.ask(b"2") == b"2"
        await asked.close()
        with pytest.raises(WhatIfFailed, match="shutting down"):
            await asked.ask(b"3")

    asyncio.run(play())


def recorded() -> RecordingBuffer:
    buffer = RecordingBuffer()
    buffer.add_engine("0", encode_frame(engine_frame()), clock())
    return buffer


def test_a_diagnosis_of_nothing_is_empty() -> None:
    assert asyncio.run(Diagnosis(recorded()).make("")) == b"{}"


def test_a_diagnosis_has_a_time_limit_and_runs_alone(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    async def play() -> None:
        diagnosis = Diagnosis(recorded(), answer_s=1.0)
        code = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(9999)"
        diagnosis.command = (sys.executable, "-c", code)
        first = asyncio.create_task(diagnosis.make(""))
        await asyncio.sleep(0)
        with pytest.raises(DiagnosisFailed, match="another diagnosis"):
            await diagnosis.make("")
        with pytest.raises(DiagnosisFailed, match="more than 1 s"):
            await first

    asyncio.run(play())
    if pid.exists():  # else it was ended before it began
        eventually(lambda: not is_alive(int(pid.read_text())), 20)
