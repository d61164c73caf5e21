"""Paths, headers and small rules that clients of OpenAI, vLLM, llama.cpp and llm-d count on."""

import json
from typing import Any

import pytest

from tests.serve.running import RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict] = {
    CHAT: {"messages": HELLO, "max_tokens": 3, "seed": 1},
    TEXT: {"prompt": "Once upon a time", "max_tokens": 3, "seed": 1},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
}


def chunks(server: RunningServer, path: str, **wish: Any) -> list[dict]:
    answer = server.post(path, {**BODIES[path], "stream": True, **wish})
    assert answer.status_code == 200, answer.text
    lines = answer.text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def blamed(server: RunningServer, path: str, body: dict) -> str | None:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"]


def test_paths_without_v1_are_the_same(server: RunningServer) -> None:
    assert server.get("/models") == server.get("/v1/models") == server.get("/v1/models/")
    for path, body in BODIES.items():
        assert server.post(path.removeprefix("/v1"), body).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/v1/chat/completions/render"])
def test_a_message_is_either_continued_or_followed(server: RunningServer, path: str) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "Hi"}]
    body = {"messages": talk, "continue_final_message": True, "add_generation_prompt": True}
    assert blamed(server, path, body) == "continue_final_message"
    assert server.post(path, {**body, "add_generation_prompt": False, "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_options_of_a_stream(server: RunningServer, path: str) -> None:
    options = {"include_usage": True}
    assert blamed(server, path, {**BODIES[path], "stream_options": options}) == "stream_options"
    assert blamed(server, path, {**BODIES[path], "stream_options": options, "stream": False}) == "stream_options"
    assert chunks(server, path, stream_options=options)[-1]["usage"]["completion_tokens"] == 3
    silent = {"include_usage": False, "continuous_usage_stats": True}
    assert all("usage" not in chunk for chunk in chunks(server, path, stream_options=silent))


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_answers_have_a_fingerprint(server: RunningServer, path: str) -> None:
    whole = server.post(path, BODIES[path]).json()["system_fingerprint"]
    assert whole.startswith("fp_")
    assert {chunk["system_fingerprint"] for chunk in chunks(server, path)} == {whole}


def test_tokens_as_the_vocabulary_has_them(server: RunningServer) -> None:
    found = server.post("/tokenize", {"prompt": "the sea, the sea", "return_token_strs": True}).json()
    assert len(found["token_strs"]) == found["count"]
    assert any(piece.startswith("Ġ") for piece in found["token_strs"])
    assert "".join(found["token_strs"]).replace("Ġ", " ").endswith("the sea, the sea")


def test_a_chat_is_rendered(server: RunningServer) -> None:
    shown = server.post("/v1/chat/completions/render", BODIES[CHAT]).json()
    assert shown["prompt"].endswith("<|user|>Hello<|end|><|assistant|>")
    answer = server.post(CHAT, {**BODIES[CHAT], "return_token_ids": True}).json()
    assert shown["prompt_token_ids"] == answer["prompt_token_ids"]
    assert shown["count"] == len(shown["prompt_token_ids"])
    short = server.post("/v1/chat/completions/render", {**BODIES[CHAT], "truncate_prompt_tokens": 2}).json()
    assert short["prompt_token_ids"] == shown["prompt_token_ids"][-2:]
    assert shown["prompt"].endswith(short["prompt"])


def test_the_tokenizers_configuration(server: RunningServer) -> None:
    found = server.get("/tokenizer_info")
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "add_generation_prompt" in found["chat_template"]


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-gap-ms", "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"])
def test_a_server_without_targets_says_that_it_promises_nothing(server: RunningServer, name: str) -> None:
    answer = server.post(TEXT, BODIES[TEXT], headers={name: "300"})
    assert (answer.status_code, answer.headers["x-slo-promise"]) == (200, "not promised")
    assert "x-slo-promise" not in server.post(TEXT, BODIES[TEXT]).headers
    wrong = server.post(TEXT, BODIES[TEXT], headers={name: "soon"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (TEXT, {}, "prompt"),
        (CHAT, {"messages": ["hello"]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages"),
        (CHAT, {"messages": [{"content": "no role"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a b " * 20_000}]}, "messages"),
        (TEXT, {"prompt": [1] * 20_000}, "prompt"),
        (TEXT, {"prompt": "a b " * 20_000}, "prompt"),
        (TEXT, {"prompt": [10**9]}, "prompt"),
        (TEXT, {"prompt": "x", "stop": ["y", 7]}, "stop"),
        (TEXT, {"prompt": "x", "guided_regex": "(["}, "guided_regex"),
        (CHAT, {"messages": HELLO, "structured_outputs": {"regex": "(["}}, "structured_outputs"),
        (
            CHAT,
            {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
            "response_format",
        ),
        (
            CHAT,
            {
                "messages": HELLO,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)
def test_errors_name_what_is_to_blame(server: RunningServer, path: str, body: dict, param: str) -> None:
    assert blamed(server, path, body) == param
