"""Bodies that are small or unfinished, and would cost much all the same."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.serve.attacks.test_connection import megabytes
from tests.serve.running import RunningServer, eventually
from tests.serve.test_bad_input import CHAT, TEXT, check
from weft.files import MOST_DEPTH

RESPONSES = "/v1/responses"
SAID = b'"messages": [{"role": "user", "content": "x"}]'


def nested(levels: int) -> bytes:
    """Objects and lists in each other."""
    pairs, odd = divmod(levels, 2)
    return b'{"a":[' * pairs + b"{}" * odd + b"]}" * pairs


@pytest.mark.parametrize("levels", [MOST_DEPTH + 4, 900, 980, 100_000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, b'{"input": "x", "metadata": %b}'),
        (RESPONSES, b'{"input": "x", "text": {"format": {"type": "text", "a": %b}}}'),
        (RESPONSES, b'{"input": "x", "reasoning": %b, "stream": true}'),
        (CHAT, b"{%b, " % SAID + b'"chat_template_kwargs": %b}'),
        (CHAT, b"{%b, " % SAID + b'"structured_outputs": {"json": %b}}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "x", "y": %b}]}'),
        (TEXT, b'{"prompt": [%b]}'),
        ("/tokenize", b'{"messages": [{"role": "user", "content": "x", "y": %b}]}'),
    ],
)
def test_what_is_nested_too_deep_is_refused(server: RunningServer, path: str, body: bytes, levels: int) -> None:
    message = check(server.http.post(path, content=body % nested(levels)), 400)["message"]
    assert f"{MOST_DEPTH} levels" in message


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_nested_less_deep_is_told_again(server: RunningServer, stream: bool) -> None:
    deep = nested(MOST_DEPTH)
    more = b'"stream": true, ' if stream else b""
    body = b'{"input": "x", "max_output_tokens": 1, %b"metadata": %b}' % (more, deep)
    answer = server.http.post(RESPONSES, content=body)
    assert answer.status_code == 200
    assert deep in answer.content


def test_a_large_body_may_be_as_deep_as_a_small_one(server: RunningServer) -> None:
    for levels, status in ((MOST_DEPTH, 200), (MOST_DEPTH + 2, 400)):
        body = b'{"input": "x", "max_output_tokens": 1, "metadata": %b, "no_such_field": "%b"}'
        answer = server.http.post(RESPONSES, content=body % (nested(levels), b"y" * 200_000))
        assert answer.status_code == status


@pytest.fixture
def own() -> Iterator[RunningServer]:
    server = RunningServer("--policy", "chunked", "--kv-cache-memory-bytes", "64MiB", "--shutdown-timeout", "1")
    yield server
    assert server.stop() == 0, server.log


def unfinished(server: RunningServer, size: int, *, chunked: bool) -> socket.socket:
    """A connection whose body lacks its last byte."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    how = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % size
    data = b'{"prompt": "' + b"x" * (size - 13)
    data = b"%x\r\n%b\r\n" % (len(data), data) if chunked else data
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n%b" % (how, data))
    return connection


def told(connection: socket.socket) -> bytes:
    """What the server says before it hangs up; nothing where it waits."""
    connection.settimeout(0.3)
    found = b""
    with contextlib.suppress(TimeoutError, ConnectionResetError):
        while piece := connection.recv(65536):
            found += piece
    return found


def test_unfinished_bodies_are_bounded_in_sum(own: RunningServer) -> None:
    """Clients that send all of a large body but its end are refused from some number on; small requests never are."""
    before = megabytes(own.process.pid)
    stalled, answers, refused = [], [], 0
    for number in range(44):  # 352 MB; 268 may be
        try:
            connection = unfinished(own, 8_000_000, chunked=bool(number % 2))
        except (BrokenPipeError, ConnectionResetError):  # refused before all was sent
            refused += 1
            continue
        if answer := told(connection):
            answers.append(answer)
        else:
            stalled.append(connection)
    try:
        assert len(stalled) < 35
        assert refused + len(answers) > 8
        assert any(b"bodies_full" in answer for answer in answers), "who reads is told"
        for answer in answers:
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"\r\nretry-after: " in answer
            assert b"\r\nconnection: close" in answer
        assert megabytes(own.process.pid) - before < 400
        assert own.post(TEXT, {"prompt": "x", "max_tokens": 1}).status_code == 200
        assert own.post(TEXT, {"prompt": "x", "max_tokens": 1, "no_such_field": "y" * 50_000}).status_code == 200
        assert own.metric('weft_requests_refused_total{reason="bodies_full"}') > 0
    finally:
        for connection in stalled:
            connection.close()
    large = {"prompt": "x", "max_tokens": 1, "no_such_field": "y" * 7_000_000}
    eventually(lambda: own.post(TEXT, large).status_code == 200, 10)
