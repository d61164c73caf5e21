"""Clients that close their writing side and wait, and clients that close everything."""

import json
import socket
import time

import pytest

from tests.serve.running import RunningServer, eventually
from tests.serve.test_bad_input import exchange

TEXT = "/v1/completions"


def request(body: dict, path: str = TEXT, version: str = "1.1") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def connect(server: RunningServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def answer_of(server: RunningServer, data: bytes) -> bytes:
    """Everything that comes for these bytes after the writing side is closed."""
    found = b""
    with connect(server) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(65536):
            found += piece
    return found


def final(answer: bytes) -> tuple[bytes, bytes]:
    """Head and body behind interim answers."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 100"):
        head, _, rest = rest.partition(b"\r\n\r\n")
    return head, rest


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("tokens", [1, 300])
def test_a_half_closed_connection_gets_its_whole_answer(server: RunningServer, tokens: int, version: str) -> None:
    body = {"prompt": "Once", "max_tokens": tokens, "ignore_eos": True}
    answer = answer_of(server, request(body, version=version))
    head, rest = final(answer)
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(rest)["usage"]["completion_tokens"] == tokens
    assert answer.count(b"HTTP/1.1 100") <= (version == "1.1")


@pytest.mark.parametrize("tokens", [1, 300])
def test_a_half_closed_connection_gets_its_whole_stream(server: RunningServer, tokens: int) -> None:
    body = {"prompt": "Once", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    head, rest = final(answer_of(server, request(body)))
    assert head.startswith(b"HTTP/1.1 200")
    assert b'"finish_reason":"length"' in rest
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_body_that_waits_to_be_read_is_no_matter(server: RunningServer) -> None:
    body = {"prompt": "Once", "max_tokens": 1, "no_such_field": "x" * 1_000_000}
    head, rest = final(answer_of(server, request(body)))
    assert head.startswith(b"HTTP/1.1 200")
    assert json.loads(rest)["usage"]["completion_tokens"] == 1


def test_half_a_request_gets_nothing(server: RunningServer) -> None:
    whole = request({"prompt": "Once", "max_tokens": 1})
    for data in (b"", whole[:20], whole[:-1]):
        assert answer_of(server, data) == b""


def test_answers_of_every_kind_get_out(server: RunningServer) -> None:
    assert final(answer_of(server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"))[0].startswith(b"HTTP/1.1 200")
    assert final(answer_of(server, b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n"))[0].startswith(b"HTTP/1.1 404")
    assert final(answer_of(server, request({"prompt": 7})))[0].startswith(b"HTTP/1.1 400")
    assert exchange(server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [0.0, 0.5])
def test_a_client_that_closes_everything_is_noticed(server: RunningServer, stream: bool, before: float) -> None:
    """Long before its answer would have been done."""
    body = {"prompt": "Once", "max_tokens": 16_000, "ignore_eos": True, "stream": stream}
    gone = server.metric("weft_client_disconnects_total")
    with connect(server) as connection:
        connection.sendall(request(body))
        eventually(lambda: server.get("/load")["server_load"] > 0, 10)
        time.sleep(before)
    eventually(lambda: server.get("/load")["server_load"] == 0, 5)
    assert server.metric("weft_client_disconnects_total") == gone + 1
    server.wait_until_idle()


def test_a_half_closed_client_that_goes_is_noticed_by_its_stream(server: RunningServer) -> None:
    body = {"prompt": "Once", "max_tokens": 16_000, "ignore_eos": True, "stream": True}
    with connect(server) as connection:
        connection.sendall(request(body))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100)
        time.sleep(0.3)
        assert server.get("/load")["server_load"] == 1
    eventually(lambda: server.get("/load")["server_load"] == 0, 5)
    server.wait_until_idle()
