"""The command against servers over HTTP: another engine's metrics, frames, and what goes wrong."""

import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import Done, run_here
from tests.diagnose.metrics import Traffic, pages
from weft.diagnose import download
from weft.observe.frames import LagFrame, encode_frame, packed

Answer = tuple[int, bytes] | tuple[int, bytes, dict[str, str]]


@contextmanager
def serving(answer: Callable[[str, str | None], Answer]) -> Iterator[str]:
    """A server whose `answer` gets the path and the API key. Yields its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            key = self.headers.get("Authorization")
            status, body, *more = answer(self.path, key.removeprefix("Bearer ") if key else None)
            self.send_response(status)
            for name, value in (more[0] if more else {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def in_turn(texts: Iterator[str]) -> Callable[[str, str | None], Answer]:
    return lambda path, key: (200, next(texts).encode()) if path == "/metrics" else (404, b"")


def diagnose(*arguments: str | Path) -> Done:
    return run_here("diagnose", "--no-progress", *arguments)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_another_engine_is_read_twice(engine: str, tmp_path: Path) -> None:
    stutter = {"gaps": [(0.012, 90_000), (0.18, 4_000)]}
    with serving(in_turn(iter(pages(engine, stutter)))) as url:
        done = diagnose("--url", url, "--engine", engine, "--seconds", "0.1", "--json", tmp_path / "d.json")
    assert done.returncode == 1, done.stderr
    assert "DECODE SCHEDULING" in done.stdout
    assert "Not known from outside" in done.stdout
    data = json.loads((tmp_path / "d.json").read_text())
    assert data["healthy"] is False
    assert data["findings"][0]["symptom"] == "decode scheduling"
    assert data["facts"][0]["gap"]["count"] == 94_000


def test_a_healthy_server_exits_with_0() -> None:
    with serving(in_turn(iter(pages("vllm", {})))) as url:
        done = diagnose("--url", url, "--engine", "vllm", "--seconds", "0.1")
    assert done.returncode == 0, done.stderr
    assert "Healthy" in done.stdout


def test_the_key_is_sent() -> None:
    texts = iter(pages("vllm", {}))
    with serving(lambda path, key: (200, next(texts).encode()) if key == "k" else (401, b"")) as url:
        assert diagnose("--url", url, "--engine", "vllm", "--seconds", "0.1", "--api-key", "k").returncode == 0
        done = diagnose("--url", url, "--engine", "vllm", "--seconds", "0.1", "--api-key", "other")
    assert done.returncode == 2
    assert "status 401: give --api-key" in done.stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (Traffic().sglang().encode(), "it is sglang: write --engine sglang"),
        (b"<html>welcome</html>", "does not answer with Prometheus metrics"),
        (b"\xff\xfe\x00", "does not answer with Prometheus metrics"),
        (Traffic().vllm().encode(), "no request got a token"),
    ],
)
def test_an_endpoint_that_is_not_what_was_claimed(body: bytes, message: str) -> None:
    with serving(lambda path, key: (200, body)) as url:
        done = diagnose("--url", url, "--engine", "vllm", "--seconds", "0.1")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("engine", [(), ("--engine", "vllm")])
def test_a_server_that_is_down(engine: tuple[str, ...]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and never listening
        done = diagnose("--url", f"http://127.0.0.1:{taken.getsockname()[1]}", *engine)
    assert done.returncode == 2
    assert "cannot be read" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((404, b""), "write --engine vllm or sglang"),
        ((200, b"<html>welcome</html>"), "does not answer with frames"),
        ((200, b"\x05\x00\x00\x00hello"), "does not answer with frames"),
        ((200, b""), "has no steps with their requests"),
        ((500, b""), "status 500"),
    ],
)
def test_frames_of_no_weft_server(answer: Answer, message: str) -> None:
    with serving(lambda path, key: answer) as url:
        done = diagnose("--url", url)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_frames_are_downloaded_in_parts() -> None:
    """A server cuts its answers. The paths also say that --seconds reaches it."""
    frames = [encode_frame(LagFrame(float(number), 0.01)) for number in range(7)]
    asked: list[str] = []

    def answer(path: str, key: str | None) -> Answer:
        asked.append(path)
        since = int(path.partition("since=")[2] or 0)
        more = {"x-weft-next": str(min(7, since + 3)), "x-weft-more": str(int(since + 3 < 7))}
        return 200, packed(frames[since : since + 3]), more

    with serving(answer) as url:
        recording = download.download_frames(url, None, 5.0)
    assert [lag.time for lag in recording.lags] == [0, 1, 2, 3, 4, 5, 6]
    assert asked == ["/observe/frames?seconds=5", "/observe/frames?since=3", "/observe/frames?since=6"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no recording of weft"),
        (b"\x89PNG\r\n\x1a\n", "is no recording of weft"),
        (b"weft-recording 99\n", "has format 99, and this version of weft reads format 1"),
        (b"weft-recording 1\n", "has no steps with their requests"),
        (b"weft-recording 1\n\xff\xff\xff\xff", "is damaged"),
        (b"weft-recording 1\n\x03\x00\x00\x00abc", "is damaged"),
    ],
)
def test_a_file_that_is_no_recording(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "r.weft"
    file.write_bytes(content)
    done = diagnose("--file", file)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--file", "/no/such/file"), "cannot read the recording /no/such/file"),
        ((), "one of the arguments --url --file is required"),
        (("--url", "localhost:8000"), "must begin with http://"),
        (("--file", "r", "--engine", "vllm"), "a file is always a recording of weft"),
        (("--file", "r", "--seconds", "3"), "--seconds is for --url: a file is diagnosed whole"),
        (("--file", "r", "--api-key", "k"), "leave it out"),
        (("--url", "http://x", "--engine", "vllm", "--seconds", "0"), "--seconds 0 must be above 0"),
        (("--file", "r", "--json", "/no/such/folder/x"), "there is no folder /no/such/folder"),
        (("--file", "r", "--profile", "no-such"), "unknown profile 'no-such'"),
        (("--url", "http://x", "--engine", "vllm", "--profile", "h200-llama-3-8b"), "is for the replay"),
        (("--url", "http://x", "--engine", "tgi"), "invalid choice: 'tgi'"),
    ],
)
def test_wrong_options_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = diagnose(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
