"""Bytes that no client of good will would send: endless trailers, offers of other protocols, requests within bodies."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.attacks.victim import CALM, NOISE, Victim
from tests.serve.running import RunningServer
from tests.serve.test_bad_input import exchange

KEY = "a-key-for-tests"
STATUS = re.compile(rb"HTTP/1\.1 \d")
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
)


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    """A server with a key."""
    server = RunningServer("--policy", "chunked", "--kv-cache-memory-bytes", "64MiB", "--api-key", KEY)
    yield server
    assert server.stop() == 0, server.log


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def megabytes(pid: int) -> float:
    """Memory of a process that is in use."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def flood(server: RunningServer, head: bytes, piece: bytes, most: int) -> int:
    """Sends a piece again and again; returns the bytes that the server took before it hung up."""
    host, port = server.url.removeprefix("http://").split(":")
    sent = 0
    with (
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
        socket.create_connection((host, int(port)), timeout=20) as connection,
    ):
        connection.sendall(head)
        while sent < most:
            connection.sendall(piece)
            sent += len(piece)
    return sent


@pytest.mark.parametrize(
    "piece",
    [b"x-%d: y\r\n" % 7 * 4096, b"y" * 65536, b"1;" + b"e" * 65536],
    ids=["lines", "one endless line", "an extension"],
)
def test_trailers_without_end_are_cut_off(locked: RunningServer, piece: bytes) -> None:
    body = b"0\r\n" if not piece.startswith(b"1;") else b""
    head = CHUNKED + b"\r\n" + body + (b"x: " if piece.startswith(b"yy") else b"")
    before = megabytes(locked.process.pid)
    with Victim(locked, authorization=f"Bearer {KEY}") as victim:
        taken = sum(flood(locked, head, piece, 30_000_000) for _ in range(3))
    assert taken < 20_000_000, "the sockets' buffers hold a few megabytes; more than these was read"
    assert megabytes(locked.process.pid) - before < 40
    assert victim.longest_gap < NOISE * CALM, f"{victim.longest_gap:.3f} s"


def test_a_key_in_a_trailer_is_no_key(locked: RunningServer) -> None:
    body = chunk(b'{"prompt": "x", "max_tokens": 1}') + b"0\r\n"
    answer = exchange(locked, CHUNKED + b"\r\n" + body + b"authorization: Bearer %b\r\n\r\n" % KEY.encode())
    assert answer.startswith(b"HTTP/1.1 401")
    answer = exchange(locked, CHUNKED + b"authorization: Bearer %b\r\n\r\n" % KEY.encode() + body + b"x: y\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


def test_tiny_chunks_are_a_body_like_any_other(server: RunningServer) -> None:
    body = b'{"prompt": "' + b"x " * 200 + b'", "max_tokens": 1}'
    data = b"".join(chunk(bytes([byte])) for byte in body) + b"0\r\n\r\n"
    assert exchange(server, CHUNKED + b"\r\n" + data).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "offer",
    [
        b"upgrade: websocket\r\n",
        b"upgrade: h2c\r\nupgrade: h2c\r\n",
        b"upgrade: websocket\r\nupgrade: h2c\r\n",
        b"upgrade: h2c, websocket\r\n",
    ],
)
def test_upgrades_are_refused_and_no_body_is_run_as_a_request(server: RunningServer, offer: bytes) -> None:
    inner = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\n" + offer
    answer = exchange(server, head + b"content-length: %d\r\n\r\n%b" % (len(inner), inner), seconds=2)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"upgrade" in answer
    assert len(STATUS.findall(answer)) == 1


def test_tunnels_are_refused(server: RunningServer) -> None:
    answer = exchange(
        server, b"CONNECT example.org:443 HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\n\r\n", seconds=2
    )
    assert answer.startswith(b"HTTP/1.1 400")
    assert len(STATUS.findall(answer)) == 1


@pytest.mark.parametrize("cut", [0, 30, 95, 120])
def test_an_offer_of_h2c_is_ignored_however_its_bytes_come(server: RunningServer, cut: int) -> None:
    inner = b"GET /health HTTP/1.1\r\nupgrade: x\r\n\r\n"
    body = json.dumps({"prompt": inner.decode(), "max_tokens": 1, "echo": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    data = head + b"http2-settings: AAMAAABk\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data[:cut])
        connection.sendall(data[cut:])
        answer = connection.recv(65536)
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 200")
    text = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"]
    assert text.startswith(inner.decode()), "nothing is cut out of a body"
