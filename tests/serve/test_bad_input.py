"""Whatever a client sends, it gets an error object with a status that says what is wrong, and the server goes on."""

import contextlib
import socket

import httpx
import pytest

from tests.serve.running import RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def check(answer: httpx.Response, status: int) -> dict:
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    return error


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', b"{" * 100_000, b'{"prompt": "\\ud800"}'],
)
def test_broken_bodies(server: RunningServer, path: str, body: bytes) -> None:
    check(server.http.post(path, content=body), 400)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": ["hello"]}, None),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}, None),
        (CHAT, {"messages": [{"content": "no role"}]}, None),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        (CHAT, {"messages": HELLO, "n": 1000}, "n"),
        (CHAT, {"messages": HELLO, "stream": "yes"}, "stream"),
        (CHAT, {"messages": HELLO, "tools": [{}]}, "tools"),
        (CHAT, {"messages": HELLO, "tools": [], "tool_choice": "always"}, "tool_choice"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": -1}, "max_tokens"),
        (CHAT, {"messages": HELLO, "stop": [""]}, "stop"),
        (CHAT, {"messages": HELLO, "stop_token_ids": [10**9]}, "stop_token_ids"),
        (CHAT, {"messages": HELLO, "seed": 10**30}, "seed"),
        (CHAT, {"messages": HELLO, "logit_bias": {"99999999": 1}}, "logit_bias"),
        (TEXT, {}, None),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [1, "x"]}, "prompt"),
        (TEXT, {"prompt": [True]}, "prompt"),
        (TEXT, {"prompt": [10**9]}, None),
        (TEXT, {"prompt": [-1]}, None),
        (TEXT, {"prompt": [10**30]}, None),
        (TEXT, {"prompt": ["x"] * 2000}, "prompt"),
        (TEXT, {"prompt": "x", "best_of": 2, "n": 3}, "best_of"),
        (TEXT, {"prompt": "x", "suffix": "y"}, "suffix"),
        (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": [1] * 20_000}, None),
        (TEXT, {"prompt": "a b " * 20_000}, None),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [-1]}, None),
        ("/detokenize", {"tokens": [5, 10**6]}, "tokens"),
    ],
)
def test_bad_values(server: RunningServer, path: str, body: dict, param: str | None) -> None:
    error = check(server.post(path, body), 400)
    if param is not None:
        assert error["param"] == param


def test_unknown_things(server: RunningServer) -> None:
    assert check(server.post(TEXT, {"prompt": "x", "model": "gpt"}), 404)["code"] == "model_not_found"
    check(server.http.get("/v2/completions"), 404)
    check(server.http.get(TEXT), 405)
    fine = server.post(TEXT, {"prompt": "x", "max_tokens": 1, "no_such_field": {"a": [1]}})
    assert fine.status_code == 200


@pytest.mark.parametrize("value", ["0", "-5", "soon", "nan", "inf", "", "1_0", "1e999", "0x10"])
def test_promises_that_make_no_sense(server: RunningServer, value: str) -> None:
    for name in ("x-slo-gap-ms", "x-slo-ttft-ms", "x-slo-tpot-ms"):
        assert check(server.post(TEXT, {"prompt": "x"}, headers={name: value}), 400)["param"] == name


def test_of_two_names_for_a_promise_neither_may_be_nonsense(server: RunningServer) -> None:
    headers = {"x-slo-gap-ms": "30", "x-slo-tpot-ms": "-1"}
    assert check(server.post(TEXT, {"prompt": "x"}, headers=headers), 400)["param"] == "x-slo-tpot-ms"


@pytest.mark.parametrize("prompt", [[1] * 20_000, "a b " * 20_000, "a b " * 1_000_000])
def test_too_long_is_said_in_one_way(server: RunningServer, prompt: object) -> None:
    """However it was found out: by tokens, or by characters before there are tokens."""
    error = check(server.post(TEXT, {"prompt": prompt}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length" in error["message"]


def test_ids_outside_the_vocabulary_have_no_text(server: RunningServer) -> None:
    size = server.get("/server_info")["engine"]["vocab_size"]
    assert server.post("/detokenize", {"tokens": [size - 1]}).status_code == 200
    message = check(server.post("/detokenize", {"tokens": [1, size]}), 400)["message"]
    assert f"{size}, outside 0..{size - 1}" in message


def test_large_bodies(server: RunningServer) -> None:
    assert check(server.http.post(TEXT, content=b"x" * 9_000_000), 413)["code"] == "body_too_large"

    def pieces():  # without a content-length
        for _ in range(200):
            yield b"x" * 500_000

    with contextlib.suppress(httpx.WriteError):  # the server does not wait for the rest
        check(server.http.post(TEXT, content=pieces()), 413)
    assert server.http.get("/health").status_code == 200


ONES = b"[" + b",".join([b"1"] * 2_000_000) + b"]"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"messages": [], "documents": [{"x": %b}]}'),
        (CHAT, b'{"messages": [], "chat_template_kwargs": {"x": %b}}'),
        ("/tokenize", b'{"messages": [], "chat_template_kwargs": {"x": %b}}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "x", "y": %b}]}'),
        (CHAT, b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "%b"}}]}]}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"json": {"enum": %b}}}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"json": "%b"}}'),
    ],
)
def test_millions_of_values_are_refused(server: RunningServer, path: str, body: bytes) -> None:
    """Each of them would have to be looked at, by templates and others that keep the interpreter to themselves."""
    check(server.http.post(path, content=body % ONES), 400)


def test_fields_that_nobody_knows_may_hold_anything(server: RunningServer) -> None:
    deep = b"[" * 400 + b'"' + b"a" * 5_000_000 + b'"' + b"]" * 400
    for value in (deep, ONES):
        body = b'{"prompt": "x", "max_tokens": 1, "no_such_field": %b}' % value
        assert server.http.post(TEXT, content=body).status_code == 200


def test_slow_clients_stop_nobody(server: RunningServer) -> None:
    """Connections that send half a request and wait, and ones that never read their answer."""
    host, port = server.url.removeprefix("http://").split(":")
    idle = []
    for number in range(500):
        connection = socket.create_connection((host, int(port)))
        half = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
        connection.sendall(half if number % 2 else b"POST /v1/comp")
        idle.append(connection)
    assert server.post(TEXT, {"prompt": "x", "max_tokens": 2}).status_code == 200
    for connection in idle:
        connection.close()


def test_numbers_that_no_machine_has_room_for(server: RunningServer) -> None:
    schema = {"type": "integer", "maximum": 10**30}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}},
    }
    check(server.post(TEXT, {"prompt": "x", "n": 8, "guided_json": schema}), 400)
    check(server.post(CHAT, {"messages": HELLO, "tools": [tool], "tool_choice": "required"}), 400)
    assert server.get("/load")["sent"] == 0


@pytest.mark.parametrize(
    "wish",
    [
        {"stop": [str(number) for number in range(1000)]},
        {"stop": "x" * 5000},
        {"stop_token_ids": [1] * 5000},
        {"logit_bias": {str(number): 1 for number in range(5000)}},
        {"logit_bias": {"9" * 5000: 1}},
    ],
)
def test_wishes_without_measure(server: RunningServer, wish: dict) -> None:
    check(server.post(TEXT, {"prompt": "x", **wish}), 400)


@pytest.mark.parametrize("name", ["continues", "size", "messages", "self", "options", "tools"])
def test_template_options_of_any_name(server: RunningServer, name: str) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {name: "x"}}
    assert server.post(CHAT, body).status_code in (200, 400)
    assert server.post("/tokenize", {"messages": HELLO, "chat_template_kwargs": {name: "x"}}).status_code in (200, 400)


def exchange(server: RunningServer, data: bytes, seconds: float = 20) -> bytes:
    """What comes back for these bytes, until the server closes the connection or falls silent."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        found = b""
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            while piece := connection.recv(65536):
                found += piece
                if b"\r\n\r\n" in found and found.endswith(b"}"):
                    break
        return found


def test_heads_are_bounded(server: RunningServer) -> None:
    line = b"x-filler: " + b"y" * 1000 + b"\r\n"
    answer = exchange(server, b"GET /health HTTP/1.1\r\nhost: x\r\n" + line * 2000 + b"\r\n")
    assert b" 200 " not in answer.split(b"\r\n")[0]
    assert server.http.get("/health").status_code == 200


def test_an_offer_to_upgrade_is_ignored(server: RunningServer) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    answer = exchange(server, head + b"http2-settings: AAMAAABk\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    assert answer.startswith(b"HTTP/1.1 200")


def test_what_is_no_http_gets_an_error_object_too(server: RunningServer) -> None:
    answer = exchange(server, b"GET / HTTP/1.1\r\nbroken\x00header\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'{"error":' in answer
