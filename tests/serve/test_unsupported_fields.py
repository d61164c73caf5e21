"""No field is ignored in silence: it is honoured, refused by its name, or told to the client as ignored."""

import json
from typing import Any

import pytest

from tests.serve.running import RunningServer, eventually
from weft.serve.errors import ApiError
from weft.serve.http import json_body
from weft.serve.log_limits import MOST_NAMES, UnknownFieldLog
from weft.serve.protocols.openai_bodies import ChatBody, CompletionBody
from weft.serve.protocols.unsupported_fields import (
    HARMLESS_FIELDS,
    KNOWN_FIELDS,
    MOST_HEADER,
    REFUSED_FIELDS,
    header_value,
    unknown_fields,
)

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "seed": 1},
    TEXT: {"prompt": "Once upon a time", "max_tokens": 8, "seed": 1},
    RESPONSES: {"input": "Hello", "max_output_tokens": 8},
}
DIGITS = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}


def refused(server: RunningServer, path: str, **wish: Any) -> str:
    answer = server.post(path, {**BODIES[path], **wish})
    (name,) = wish
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text
    return str(answer.json()["error"]["message"])


def answered(server: RunningServer, path: str, **wish: Any) -> Any:
    answer = server.post(path, {**BODIES[path], **wish})
    assert answer.status_code == 200, answer.text
    assert "x-weft-ignored-fields" not in answer.headers
    return answer.json()


@pytest.mark.parametrize(
    ("path", "name", "value", "neutral"),
    [
        (CHAT, "modalities", ["text", "audio"], ["text"]),
        (CHAT, "audio", {"voice": "x"}, None),
        (CHAT, "web_search_options", {"a": 1}, {}),
        (CHAT, "verbosity", "low", "medium"),
        (CHAT, "echo", True, False),
        (CHAT, "best_of", 2, 1),
        (CHAT, "logprob_token_ids", [1], []),
        (CHAT, "mm_processor_kwargs", {"a": 1}, {}),
        (CHAT, "kv_transfer_params", {"a": 1}, None),
        (CHAT, "vllm_xargs", {"a": 1}, {}),
        (CHAT, "chat_template", "{{ 1 }}", None),
        (TEXT, "n_predict", 5, -1),
        (TEXT, "mirostat", 2, 0),
        (TEXT, "dry_multiplier", 0.8, 0),
        (TEXT, "samplers", ["top_k"], []),
        (TEXT, "typical_p", 0.9, 1.0),
        (TEXT, "repeat_penalty", 1.1, 1.0),
        (TEXT, "tools", [{"type": "function"}], []),
        (RESPONSES, "stop", ["x"], None),
        (RESPONSES, "n", 2, 1),
    ],
)
def test_known_fields_are_refused_where_they_ask_for_something(
    server: RunningServer, path: str, name: str, value: Any, neutral: Any
) -> None:
    refused(server, path, **{name: value})
    answered(server, path, **{name: neutral})


def test_fields_without_effect_are_accepted(server: RunningServer) -> None:
    for path in BODIES:
        known = {"store": True, "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "s"}
        answered(server, path, **known, cache_prompt=True, length_penalty=0.5, prediction={"type": "content"})
    assert not HARMLESS_FIELDS & REFUSED_FIELDS.keys()


def test_unknown_fields_are_told(server: RunningServer) -> None:
    answer = server.post(TEXT, {**BODIES[TEXT], "frobnicate": 1, "ünknown,": {"a": [1]}, "store": False})
    assert answer.headers["x-weft-ignored-fields"] == "frobnicate, ?nknown?"
    server.post(CHAT, {**BODIES[CHAT], "frobnicate": 2})
    eventually(lambda: "'frobnicate'" in server.log, 10)
    assert server.log.count("'frobnicate'") == 1


def test_large_bodies_are_looked_at_too(server: RunningServer) -> None:
    body = {"prompt": [5] * 100_000, "truncate_prompt_tokens": 9, "max_tokens": 1}
    answer = server.post(TEXT, {**body, "frobnicate": [1] * 1000})
    assert answer.headers["x-weft-ignored-fields"] == "frobnicate"
    assert server.post(TEXT, {**body, "mirostat": 2}).json()["error"]["param"] == "mirostat"
    assert "x-weft-ignored-fields" not in server.post(TEXT, body).headers


@pytest.mark.parametrize("large", [False, True])
def test_what_a_body_has_beside_its_fields(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(json_body, "LARGE_BODY", 0)
    data = json.dumps({"prompt": "x", "mirostat": [1, 2], "other": {"a": 1}}).encode()
    body, others = json_body.parse_all(data, CompletionBody, KNOWN_FIELDS)
    assert (body.prompt, set(others)) == ("x", {"mirostat", "other"})
    assert json.loads(others["mirostat"]) == [1, 2]
    body, others = json_body.parse_all(b'{"messages": [], "stream": true}', ChatBody, KNOWN_FIELDS)
    assert (body.stream, others) == (True, {})


def test_names_are_bounded() -> None:
    header = header_value(["x" * 1000, *(f"name{number}" for number in range(100))])
    assert len(header) <= MOST_HEADER
    assert header.endswith(b", ...")
    assert header.startswith(b"x" * 64 + b", name0, ")
    said: list[str] = []
    unknown = UnknownFieldLog(said.append)
    for _ in range(2):
        unknown.note([f"name{number}" for number in range(1000)])
    assert len(said) == MOST_NAMES


def test_long_values_of_refused_fields_are_not_read() -> None:
    with pytest.raises(ApiError, match="samplers"):
        unknown_fields({"samplers": b"[" + b"[" * 100_000})
    assert unknown_fields({"new": b"1", "mirostat": b"0", "store": b"true"}) == ["new"]


def test_forms_of_llama_cpp(server: RunningServer) -> None:
    for path in (CHAT, TEXT):
        for wish in (
            {"json_schema": DIGITS},
            {"response_format": {"type": "json_object", "schema": DIGITS}},
            {"grammar": 'root ::= "{\\"n\\": " [0-9] "}"'},
        ):
            choice = answered(server, path, **wish, max_tokens=60)["choices"][0]
            text = choice["text"] if path == TEXT else choice["message"]["content"]
            assert set(json.loads(text)) == {"n"}, wish
    answered(server, TEXT, grammar="")
    refused(server, TEXT, json_schema="text")
    both = server.post(TEXT, {**BODIES[TEXT], "guided_json": DIGITS, "grammar": 'root ::= "x"'})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "grammar")


def test_what_is_unknown_in_structured_outputs_is_refused(server: RunningServer) -> None:
    wish = {"json": DIGITS, "whitespace_pattern": " *"}
    assert "whitespace_pattern" in refused(server, TEXT, structured_outputs=wish)
    answered(server, TEXT, structured_outputs={"json": DIGITS, "whitespace_pattern": None, "disable_fallback": True})


def test_tokens_are_named_by_their_ids(server: RunningServer) -> None:
    wish = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = answered(server, TEXT, **wish, logprobs=1)["choices"][0]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    assert all(name.startswith("token_id:") for name in choice["logprobs"]["top_logprobs"][0])
    choice = answered(server, CHAT, **wish, logprobs=True, top_logprobs=1)["choices"][0]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert [one["token"] for one in choice["logprobs"]["content"]] == names


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_prompts_are_truncated_on_either_side(server: RunningServer, path: str) -> None:
    def prompt(**wish: Any) -> list[int]:
        found = answered(server, path, **wish, return_token_ids=True, max_tokens=1)
        return list((found if path == CHAT else found["choices"][0])["prompt_token_ids"])

    whole = prompt()
    assert prompt(truncate_prompt_tokens=2) == whole[-2:]
    assert prompt(truncate_prompt_tokens=2, truncation_side="left") == whole[-2:]
    assert prompt(truncate_prompt_tokens=2, truncation_side="right") == whole[:2]
    assert prompt(truncate_prompt_tokens=-1) == whole
    refused(server, path, truncate_prompt_tokens=0)
    refused(server, path, truncation_side="top")


def test_a_prompt_is_truncated_to_what_there_is_room_for() -> None:
    server = RunningServer("--policy", "chunked", "--max-model-len", "256", "--kv-cache-memory-bytes", "16MiB")
    wish = {"prompt": [7] * 300, "truncate_prompt_tokens": -1, "max_tokens": 3, "return_token_ids": True}
    try:
        assert len(answered(server, TEXT, **wish)["choices"][0]["prompt_token_ids"]) == 253
    finally:
        assert server.stop() == 0, server.log


@pytest.mark.parametrize("temperature", [0, 1])
def test_only_allowed_tokens_are_sampled(server: RunningServer, temperature: int) -> None:
    wish = {"allowed_token_ids": [300, 301, 302, 302], "return_token_ids": True, "temperature": temperature}
    for path in (CHAT, TEXT):
        tokens = answered(server, path, **wish, min_tokens=2)["choices"][0]["token_ids"]
        assert len(tokens) == 8
        assert set(tokens) <= {300, 301, 302}
    refused(server, TEXT, allowed_token_ids=[])
    refused(server, TEXT, allowed_token_ids=[10**9])
    refused(server, TEXT, allowed_token_ids=list(range(2000)))
    both = server.post(TEXT, {**BODIES[TEXT], "allowed_token_ids": [300], "json_schema": DIGITS})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_all_of_the_vocabulary_is_too_much(server: RunningServer) -> None:
    assert "at most 20" in refused(server, TEXT, prompt_logprobs=-1)
    assert "at most 20" in refused(server, CHAT, prompt_logprobs=-1)
    assert "at most 20" in refused(server, TEXT, logprobs=-1)
