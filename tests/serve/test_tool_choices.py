"""Tools beside formats, the ways to choose among them, and their older form."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.running import RunningServer

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "A latte with oat milk, please."}]
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "order", "schema": {"type": "object", "properties": {"n": DIGIT}, "required": ["n"]}},
}


def function(name: str, **properties: Any) -> dict:
    return {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(properties)}}


def tool(name: str, **properties: Any) -> dict:
    return {"type": "function", "function": function(name, **properties)}


TOOLS = [tool("walk", steps=DIGIT), tool("swim", miles=DIGIT), tool("rest")]


@pytest.fixture(scope="module")
def caller() -> Iterator[RunningServer]:
    """Its model is said to write calls as Hermes does."""
    server = RunningServer("--policy", "chunked", "--tool-call-parser", "hermes", "--kv-cache-memory-bytes", "64MiB")
    yield server
    server.stop()


def ask(server: RunningServer, **wish: Any) -> dict:
    answer = server.post(CHAT, {"messages": HELLO, "max_tokens": 120, "seed": 1, **wish})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def calls(choice: dict) -> list[tuple[str, dict]]:
    found = [call["function"] for call in choice["message"].get("tool_calls", [])]
    return [(call["name"], json.loads(call["arguments"])) for call in found]


def token(server: RunningServer, text: str) -> str:
    (found,) = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return str(found)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "walk"}}])
def test_a_forced_tool_wins_over_a_format(server: RunningServer, choice: Any) -> None:
    wish = {"tools": TOOLS[:1], "tool_choice": choice, "response_format": FORMAT, "parallel_tool_calls": False}
    ((name, arguments),) = calls(ask(server, **wish))
    assert (name, set(arguments)) == ("walk", {"steps"})


def test_a_call_ends_though_its_schema_does_not_close_its_objects(server: RunningServer) -> None:
    """With a liking for commas, a model would go on with properties of its own."""
    wish = {"tools": TOOLS[:1], "tool_choice": {"type": "function", "function": {"name": "walk"}}}
    comma = {token(server, ","): 100}
    assert set(calls(ask(server, **wish, logit_bias=comma))[0][1]) == {"steps"}
    assert set(json.loads(ask(server, response_format=FORMAT, logit_bias=comma)["message"]["content"])) == {"n"}


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_only_allowed_tools_are_called(server: RunningServer, path: str) -> None:
    if path == CHAT:
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "swim"}}]}
        chosen = {"type": "allowed_tools", "allowed_tools": allowed}
        choice = ask(server, tools=TOOLS, tool_choice=chosen, parallel_tool_calls=False)
        names = {name for name, _ in calls(choice)}
    else:
        flat = [{"type": "function", **one["function"]} for one in TOOLS]
        chosen = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "swim"}]}
        body = {"input": "Hello", "tools": flat, "tool_choice": chosen, "max_output_tokens": 200}
        answer = server.post(path, body)
        assert answer.status_code == 200, answer.text
        names = {item["name"] for item in answer.json()["output"]}
    assert names == {"swim"}


@pytest.mark.parametrize(
    "allowed",
    [
        {},
        {"mode": "auto", "tools": []},
        {"mode": "sometimes", "tools": [{"function": {"name": "walk"}}]},
        {"mode": "auto", "tools": [{"function": {"name": "fly"}}]},
        {"mode": "auto", "tools": [7]},
    ],
)
def test_allowed_tools_that_make_no_sense(server: RunningServer, allowed: dict) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = server.post(CHAT, {"messages": HELLO, "tools": TOOLS, "tool_choice": choice})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("first", ["<", "{"])
def test_a_call_or_the_format_from_the_first_token(caller: RunningServer, first: str) -> None:
    """With tools and a format, the model chooses; a bias stands for what it likes."""
    wish = {"tools": TOOLS[:2], "response_format": FORMAT, "logit_bias": {token(caller, first): 100}}
    choice = ask(caller, **wish, parallel_tool_calls=False)
    if first == "<":
        ((name, arguments),) = calls(choice)
        assert (name, set(arguments)) in (("walk", {"steps"}), ("swim", {"miles"}))
        assert choice["finish_reason"] == "tool_calls"
    else:
        assert calls(choice) == []
        assert set(json.loads(choice["message"]["content"])) == {"n"}


def test_the_older_form_of_tools(server: RunningServer) -> None:
    wish = {"functions": [function("walk", steps=DIGIT)], "function_call": {"name": "walk"}}
    choice = ask(server, **wish)
    call = choice["message"]["function_call"]
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    assert (call["name"], set(json.loads(call["arguments"]))) == ("walk", {"steps"})
    talk = [*HELLO, choice["message"], {"role": "function", "name": "walk", "content": "tired"}]
    assert ask(server, functions=wish["functions"], messages=talk, max_tokens=2)["message"]["role"] == "assistant"


def test_the_older_form_is_streamed_too(server: RunningServer) -> None:
    body = {"messages": HELLO, "functions": [function("walk", steps=DIGIT)], "function_call": {"name": "walk"}}
    lines = server.post(CHAT, {**body, "max_tokens": 120, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"].get("function_call") for chunk in chunks]
    pieces = [delta for delta in deltas if delta]
    assert [piece["name"] for piece in pieces if "name" in piece] == ["walk"]
    assert set(json.loads("".join(piece["arguments"] for piece in pieces))) == {"steps"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"functions": [function("walk")], "tools": TOOLS}, "functions"),
        ({"functions": [function("walk")], "function_call": {"name": "fly"}}, "function_call"),
        ({"functions": [function("walk")], "function_call": "required"}, "function_call"),
        ({"function_call": {"name": "walk"}}, "function_call"),
    ],
)
def test_older_forms_that_make_no_sense(server: RunningServer, wish: dict, param: str) -> None:
    answer = server.post(CHAT, {"messages": HELLO, **wish})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
