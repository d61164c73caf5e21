"""What a browser is told: which pages may ask, in raw requests as browsers send them."""

import socket
from collections.abc import Iterator

import pytest

from tests.serve.running import RunningServer
from weft.serve.http.cors import AllowedOrigins

BODY = b'{"prompt": "x", "max_tokens": 1}'
LOCAL = (b"http://localhost", b"http://localhost:3000", b"http://127.0.0.1", b"http://127.0.0.1:65535")
FOREIGN = (
    *(b"null", b"", b"*", b"file://", b"https://evil.example.org", b"http://localhost.evil.example.org"),
    *(
        b"http://evil.example.org/http://localhost",
        b"http://localhost:80:80",
        b"http://localhost:",
        b"http://localhost:x",
    ),
    *(b"http://127.0.0.1.evil.org", b"http://127.0.0.11", b"http://127x0x0x1", b"http://user@localhost"),
    *(b"http://localhost/", b"ws://localhost", b"http://10.0.0.1:3000", b"http://localhost:3000 http://evil.org"),
)


@pytest.fixture(scope="module")
def closed() -> Iterator[RunningServer]:
    """No page may ask."""
    small = ("--max-num-seqs", "4", "--kv-cache-memory-bytes", "64MiB", "--policy", "chunked")
    server = RunningServer(*small, "--allowed-origins", "[]", "--api-key", "alpha")
    yield server
    server.kill()


def ask(server: RunningServer, method: bytes, path: bytes, *headers: bytes) -> tuple[int, dict[bytes, list[bytes]]]:
    """The status and the headers of an answer."""
    host, port = server.url.removeprefix("http://").split(":")
    body = BODY if method == b"POST" else b""
    lines = [method + b" " + path + b" HTTP/1.1", b"host: %b:%b" % (host.encode(), port.encode()), *headers]
    lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"\r\n".join(lines))
        found = b""
        while piece := connection.recv(65536):
            found += piece
    first, *rest = found.partition(b"\r\n\r\n")[0].split(b"\r\n")
    every: dict[bytes, list[bytes]] = {}
    for line in rest:
        name, _, value = line.partition(b":")
        every.setdefault(name.strip().lower(), []).append(value.strip())
    return int(first.split()[1]), every


def preflight(server: RunningServer, origin: bytes, method: bytes = b"POST") -> tuple[int, dict[bytes, list[bytes]]]:
    wish = (b"access-control-request-method: " + method, b"access-control-request-headers: authorization,content-type")
    return ask(server, b"OPTIONS", b"/v1/chat/completions", b"origin: " + origin, *wish)


@pytest.mark.parametrize("origin", LOCAL)
def test_pages_of_this_machine_may_ask(server: RunningServer, origin: bytes) -> None:
    status, headers = preflight(server, origin, b"DELETE")
    assert status == 200
    assert headers[b"access-control-allow-origin"] == [origin]
    assert {b"GET", b"POST", b"DELETE"} <= set(headers[b"access-control-allow-methods"][0].split(b", "))
    assert b"authorization" in headers[b"access-control-allow-headers"][0]
    for kind in (b"text/plain", b"application/json"):
        status, headers = ask(server, b"POST", b"/v1/completions", b"origin: " + origin, b"content-type: " + kind)
        assert status == 200
        assert headers[b"access-control-allow-origin"] == [origin]
        assert headers[b"vary"] == [b"Origin"]


@pytest.mark.parametrize("origin", FOREIGN)
def test_other_pages_may_not(server: RunningServer, origin: bytes) -> None:
    for status, headers in (
        preflight(server, origin),
        ask(server, b"POST", b"/v1/completions", b"origin: " + origin),
        ask(server, b"DELETE", b"/v1/responses/resp_x", b"origin: " + origin),
        ask(server, b"GET", b"/v1/models", b"origin: " + origin),
    ):
        assert b"access-control-allow-origin" not in headers
        assert headers[b"vary"] == [b"Origin"], "else a cache may give this answer to a page that may ask"
        assert status in (200, 403, 405)
    assert preflight(server, origin)[0] == 405
    assert ask(server, b"POST", b"/v1/completions", b"origin: " + origin)[0] == 403
    assert ask(server, b"DELETE", b"/v1/responses/resp_x", b"origin: " + origin)[0] == 403


def test_pages_may_read_our_headers(server: RunningServer) -> None:
    for path in (b"/v1/models", b"/nothing"):  # also of an error
        _, headers = ask(server, b"GET", path, b"origin: http://localhost:3000")
        exposed = set(headers[b"access-control-expose-headers"][0].split(b", "))
        assert exposed >= {b"x-request-id", b"x-slo-ttft-ms", b"x-slo-gap-ms", b"retry-after"}
    assert b"access-control-expose-headers" not in ask(server, b"GET", b"/v1/models")[1]


@pytest.mark.parametrize("origin", LOCAL)
def test_it_can_be_switched_off(closed: RunningServer, origin: bytes) -> None:
    assert preflight(closed, origin)[0] == 401
    status, headers = ask(closed, b"POST", b"/v1/completions", b"origin: " + origin, b"authorization: Bearer alpha")
    assert status == 403
    assert b"access-control-allow-origin" not in headers


def test_named_origins_take_the_place_of_the_default() -> None:
    named = AllowedOrigins(("https://chat.example.org",))
    assert named.allowed(b"https://chat.example.org") == b"https://chat.example.org"
    assert named.allowed(b"http://localhost:3000") is None
    assert AllowedOrigins(("*",)).allowed(b"https://chat.example.org") == b"*"
