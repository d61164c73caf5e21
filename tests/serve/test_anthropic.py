"""Anthropic's API against a real server process: raw HTTP, and the SDK that users have."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from tests.serve.running import RunningServer
from weft.serve.protocols.anthropic_bodies import MessagesBody, as_chat
from weft.text.chat import ChatTemplate

PATH, COUNT, MODEL = "/v1/messages", "/v1/messages/count_tokens", "weft-default"
ROOM = 256  # tokens in the context of the thinker
HELLO = [{"role": "user", "content": "A latte with oat milk, please."}]
SHORT: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "temperature": 0}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of some days",
    "input_schema": {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["days"],
        "additionalProperties": False,
    },
}
# The newer SDKs have no argument for the temperature.
SDK: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "extra_body": {"temperature": 0}}
FORCED: dict[str, Any] = {**SHORT, "max_tokens": 200, "tools": [WEATHER]}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"days": 3}}
# As Claude Code sends it: much that means nothing here, and must do no harm.
AGENT = {
    **SHORT,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f3e5;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "How is the weather?", "citations": None}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "They want the weather.", "signature": "abc"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "Let me look."},
                {**CALL, "cache_control": {"type": "ephemeral"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no such city"}],
                },
                {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "<total_tokens>5000 tokens left</total_tokens>"},
    ],
    "tools": [{**WEATHER, "type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "xhigh"},
    "context_management": {"edits": []},
    "service_tier": "auto",
    "max_tokens": 32000,
}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Anthropic:
    return Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def thinker() -> Iterator[RunningServer]:
    """Takes keys and small bodies. Its model seems to think, unless its prompt ends with a closed thought."""
    template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
    )
    limits = ("--policy", "chunked", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "64MiB", "--max-body-mb", "1")
    limits += ("--max-model-len", str(ROOM))
    keys = ("--api-key", "alpha", "--api-key", "beta", "--requests-per-minute", "30")
    server = RunningServer(*limits, *keys, "--reasoning-parser", "deepseek_r1", "--chat-template", template)
    server.http.headers["x-api-key"] = "alpha"
    yield server
    server.kill()


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Of a stream. Each has its type twice: as the name of the event, and in its data."""
    assert answer.status_code == 200, answer.text
    found = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_whole_message(server: RunningServer) -> None:
    answer = server.post(PATH, SHORT, headers={"anthropic-version": "2023-06-01", "x-request-id": "mine"})
    body = answer.json()
    chat = server.post("/v1/chat/completions", SHORT).json()
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"
    assert body["id"].startswith("msg_")
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", MODEL)
    assert body["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    assert body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert body["metrics"]["ttft_ms"] > 0


def test_a_stream_has_anthropics_events(server: RunningServer) -> None:
    whole = server.post(PATH, SHORT).json()
    first, begin, *deltas, end, last, stop = events(server.post(PATH, {**SHORT, "stream": True}))
    assert first["type"] == "message_start"
    message = first["message"]
    assert (message["type"], message["content"], message["stop_reason"]) == ("message", [], None)
    assert message["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert begin == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert {delta["type"] for delta in deltas} == {"content_block_delta"}
    assert "".join(delta["delta"]["text"] for delta in deltas) == whole["content"][0]["text"]
    assert end == {"type": "content_block_stop", "index": 0}
    assert last["type"] == "message_delta"
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert last["metrics"]["ttft_ms"] > 0
    assert stop == {"type": "message_stop"}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_reasons(server: RunningServer, stream: bool) -> None:
    def ask(**more: Any) -> tuple[str, Any]:
        answer = server.post(PATH, {**SHORT, "stream": stream, **more})
        if stream:
            every = events(answer)
            text = "".join(event["delta"].get("text", "") for event in every if event["type"] == "content_block_delta")
            return text, every[-2]["delta"]
        body = answer.json()
        shown = "".join(block["text"] for block in body["content"])
        return shown, {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}

    full, reason = ask()
    assert reason == {"stop_reason": "end_turn", "stop_sequence": None}
    cut, reason = ask(max_tokens=3)
    assert reason == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert full.startswith(cut)
    first, second = full.split()[2:4]
    cut, reason = ask(stop_sequences=["never", second, first])
    assert (cut, reason) == (full[: full.index(first)], {"stop_reason": "stop_sequence", "stop_sequence": first})


def test_max_tokens_may_be_more_than_there_is_room_for(thinker: RunningServer) -> None:
    """Agents ask for tens of thousands, whatever the model can do."""

    def words(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "word" + " word" * number}]

    counts = {number: thinker.post(COUNT, {"messages": words(number)}).json()["input_tokens"] for number in (99, 100)}
    used, each = counts[100], counts[100] - counts[99]
    number = 100 + (ROOM - 3 - used) // each
    left = ROOM - used - each * (number - 100)
    end = thinker.post(PATH, {**SHORT, "messages": words(number), "max_tokens": 32000}).json()
    assert (end["stop_reason"], end["usage"]["output_tokens"]) == ("model_context_window_exceeded", left)
    answer = thinker.post(PATH, {**SHORT, "messages": words(ROOM)})
    assert answer.status_code == 400
    # What makes an agent shorten its conversation.
    assert answer.json()["error"]["message"].startswith("prompt is too long: ")


def test_flex(server: RunningServer) -> None:
    assert server.post(PATH, SHORT).json()["usage"]["service_tier"] == "standard"
    assert server.post(PATH, {**SHORT, "service_tier": "flex"}).json()["usage"]["service_tier"] == "batch"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tools(server: RunningServer, stream: bool, choice: dict[str, Any]) -> None:
    wish = {**FORCED, "stream": stream, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    answer = server.post(PATH, wish)
    if not stream:
        (call,) = answer.json()["content"]
        assert answer.json()["stop_reason"] == "tool_use"
    else:
        _, begin, *deltas, end, last, _ = events(answer)
        assert (begin["content_block"]["input"], end["type"]) == ({}, "content_block_stop")
        assert {delta["delta"]["type"] for delta in deltas} == {"input_json_delta"}
        arguments = "".join(delta["delta"]["partial_json"] for delta in deltas)
        call = {**begin["content_block"], "input": json.loads(arguments)}
        assert last["delta"]["stop_reason"] == "tool_use"
    assert (call["type"], call["name"]) == ("tool_use", "get_weather")
    assert call["id"]
    assert 1 <= call["input"]["days"] <= 9


def test_tools_may_be_called_in_parallel_or_not_at_all(server: RunningServer) -> None:
    def ask(**choice: Any) -> list[dict[str, Any]]:
        return server.post(PATH, {**FORCED, "tool_choice": choice}).json()["content"]

    assert len(ask(type="any")) > 1  # so small a model goes on until it must stop
    assert len(ask(type="any", disable_parallel_tool_use=True)) == 1
    assert [block["type"] for block in ask(type="none")] == ["text"]


def test_a_call_that_is_cut_off_has_no_input(server: RunningServer) -> None:
    wish = {**FORCED, "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 4}
    body = server.post(PATH, wish).json()
    assert body["stop_reason"] == "max_tokens"
    assert [(block["type"], block["input"]) for block in body["content"]] == [("tool_use", {})]


def test_requests_of_agents_just_work(server: RunningServer) -> None:
    answer = server.post(f"{PATH}?beta=true", AGENT, headers={"anthropic-beta": "claude-code-20250219"})
    assert answer.status_code == 200, answer.text
    assert events(server.post(PATH, {**AGENT, "stream": True}))[-1] == {"type": "message_stop"}


def test_the_prompt_is_that_of_the_chat(server: RunningServer) -> None:
    """Thoughts and what is only for Anthropic's bookkeeping are not in it."""
    function = {"name": WEATHER["name"], "parameters": WEATHER["input_schema"], "description": WEATHER["description"]}
    call = {"id": "toolu_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"days":3}'}}
    chat = {
        "messages": [
            {"role": "system", "content": "You are an agent."},
            {"role": "user", "content": "How is the weather?"},
            {"role": "assistant", "content": "Let me look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: no such city"},
            {"role": "user", "content": "Go on."},
            {"role": "system", "content": "<total_tokens>5000 tokens left</total_tokens>"},
        ],
        "tools": [{"type": "function", "function": function}],
    }
    expected = server.post("/tokenize", chat).json()["count"]
    fields = ("messages", "system", "tools", "tool_choice", "thinking")
    counted = server.post(COUNT, {name: AGENT[name] for name in fields}).json()
    assert counted == {"input_tokens": expected}
    usage = server.post(PATH, {**AGENT, "max_tokens": 1}).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected
    assert usage["cache_creation_input_tokens"] == 0
    again = server.post(PATH, {**AGENT, "max_tokens": 1}).json()["usage"]
    assert again["cache_read_input_tokens"] > 0


def test_an_answer_goes_on_from_the_assistants_last_message(server: RunningServer) -> None:
    begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "One latte"}]}]
    body = server.post(PATH, {**SHORT, "messages": begun}).json()
    chat = {**SHORT, "messages": [*HELLO, {"role": "assistant", "content": "One latte"}]}
    chat |= {"continue_final_message": True}
    same = server.post("/v1/chat/completions", chat).json()
    assert body["content"][0]["text"] == same["choices"][0]["message"]["content"]
    assert server.post(COUNT, {"messages": begun}).json()["input_tokens"] == same["usage"]["prompt_tokens"]


def test_neighbours_of_one_role_are_one_message(server: RunningServer) -> None:
    def count(*texts: str) -> int:
        messages = [{"role": "user", "content": text} for text in texts]
        return server.post(COUNT, {"messages": messages}).json()["input_tokens"]

    assert count("A latte.", "A tea.") == count("A latte.\nA tea.")


def test_structured_output(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"drink": {"enum": ["tea", "latte"]}}, "required": ["drink"]}
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    body = server.post(PATH, {**SHORT, "max_tokens": 200, "output_config": {"format": form}}).json()
    assert json.loads(body["content"][0]["text"])["drink"] in ("tea", "latte")


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image'"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]}
                ]
            },
            "'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0]: a block of type 'document'",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "must be text or a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "needs a text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [CALL]}]}, "tool_result"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [{**CALL, "input": "x"}]}]}, "input"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"),
        ({"system": [IMAGE]}, "system: a block of type 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [{**WEATHER, "name": None}]}, "name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: any needs tools"),
        ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [WEATHER]}, "'f'"),
        ({"tool_choice": {"type": "required"}}, "'required'"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences"),
        ({"thinking": {"type": "maybe"}}, "thinking"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"mcp_servers": [{"type": "url", "url": "https://example.org"}]}, "mcp_servers"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_errors_are_anthropics(server: RunningServer, wish: dict[str, Any], words: str) -> None:
    body = {name: value for name, value in {**SHORT, **wish}.items() if value is not None}
    answer = server.post(PATH, body)
    assert answer.status_code == 400
    found = answer.json()
    assert found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error"
    assert words in found["error"]["message"]
    assert found["request_id"] == answer.headers["request-id"]


def test_errors_of_other_statuses(server: RunningServer, thinker: RunningServer) -> None:
    def error(answer: httpx.Response) -> tuple[int, str]:
        found = answer.json()
        assert (found["type"], found["request_id"]) == ("error", answer.headers["request-id"])
        return answer.status_code, found["error"]["type"]

    assert error(server.post(PATH, {**SHORT, "model": "gpt-5"})) == (404, "not_found_error")
    assert error(server.post(COUNT, {"messages": HELLO, "model": "gpt-5"})) == (404, "not_found_error")
    assert error(server.http.get(f"{PATH}/batches")) == (404, "not_found_error")
    assert error(server.http.get(PATH)) == (405, "invalid_request_error")
    assert error(server.post(PATH, SHORT, headers={"origin": "https://evil.example.org"})) == (403, "permission_error")
    assert error(thinker.post(PATH, SHORT, headers={"x-api-key": "gamma"})) == (401, "authentication_error")
    large = {**SHORT, "messages": [{"role": "user", "content": "x" * (1 << 20)}]}
    assert error(thinker.post(PATH, large)) == (413, "request_too_large")
    many = [thinker.post(COUNT, {"messages": HELLO}, headers={"x-api-key": "beta"}) for _ in range(31)]
    assert error(many[-1]) == (429, "rate_limit_error")
    assert "type" not in server.http.get("/nothing").json(), "the other paths have OpenAI's form"


def test_keys_come_in_either_header(thinker: RunningServer) -> None:
    def status(path: str, **headers: str) -> int:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        with httpx.Client(base_url=thinker.url, headers=given) as client:
            return client.get(path).status_code

    for path in ("/v1/models", "/server_info"):
        assert status(path, x_api_key="alpha") == 200
        assert status(path, authorization="Bearer beta") == 200
        assert status(path, x_api_key="gamma", authorization="Bearer beta") == 200
        assert status(path, x_api_key="alpha", authorization="Bearer gamma") == 200
        assert status(path, x_api_key="gamma", authorization="Bearer delta") == 401
        assert status(path, x_api_key="") == 401
        assert status(path) == 401


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_blocks(thinker: RunningServer, stream: bool) -> None:
    def kinds(**more: Any) -> list[tuple[str, str]]:
        answer = thinker.post(PATH, {**SHORT, "max_tokens": 8, "stream": stream, **more})
        if not stream:
            return [(block["type"], block.get("thinking", "")) for block in answer.json()["content"]]
        every = events(answer)
        deltas = [event["delta"] for event in every if event["type"] == "content_block_delta"]
        thoughts = "".join(delta.get("thinking", "") for delta in deltas)
        begun = [event["content_block"]["type"] for event in every if event["type"] == "content_block_start"]
        signed = [delta for delta in deltas if delta["type"] == "signature_delta"]
        assert len(signed) == begun.count("thinking")
        return [(kind, thoughts) for kind in begun]

    ((kind, thoughts),) = kinds()
    assert kind == "thinking"
    assert thoughts
    assert kinds(thinking={"type": "enabled", "budget_tokens": 1024}) == [("thinking", thoughts)]
    assert kinds(thinking={"type": "adaptive", "display": "omitted"}) == [("thinking", "")]
    assert kinds(thinking={"type": "disabled"}) == [("text", "")]


def test_system_messages_within_a_conversation_stay_where_they_are_if_the_template_takes_them() -> None:
    assert ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}").takes_late_system
    first = "{% if loop.first %}<system>{{ m.content }}{% else %}{{ raise_exception('not first') }}{% endif %}"
    strict = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        + first
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert not ChatTemplate(strict).takes_late_system
    silent = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    assert not ChatTemplate(silent).takes_late_system
    body = MessagesBody(max_tokens=1, messages=[*HELLO, {"role": "system", "content": "Be quick."}])
    text = HELLO[0]["content"]
    assert as_chat(body, late_system=True).messages == [*HELLO, {"role": "system", "content": "Be quick."}]
    assert as_chat(body, late_system=False).messages == [{"role": "user", "content": f"{text}\nBe quick."}]


def test_the_model_sees_nothing_of_a_system_prompt_that_is_only_bookkeeping() -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]
    assert as_chat(MessagesBody(max_tokens=1, messages=HELLO, system=system)).messages == HELLO


def test_the_sdk(client: Anthropic) -> None:
    whole = client.messages.create(**SDK)
    assert whole.content[0].type == "text"
    assert whole.stop_reason == "end_turn"
    assert whole._request_id
    with client.messages.stream(**SDK) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text == last.content[0].text
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 5
    cut = client.messages.create(**SDK, stop_sequences=[text.split()[1]])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", text.split()[1])


@pytest.mark.parametrize("stream", [False, True])
def test_tools_with_the_sdk(client: Anthropic, stream: bool) -> None:
    wish = {**SDK, "max_tokens": 200, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}}
    if stream:
        with client.messages.stream(**wish) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**wish)
    (call,) = answer.content
    assert call.type == "tool_use"
    assert 1 <= call.input["days"] <= 9
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    talk = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**wish, "messages": talk, "tool_choice": {"type": "none"}}).content


def test_thoughts_with_the_sdk(thinker: RunningServer) -> None:
    client = Anthropic(base_url=thinker.url, api_key="alpha", max_retries=0, timeout=120)
    wish: dict[str, Any] = {**SDK, "max_tokens": 8, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    with client.messages.stream(**wish) as stream:
        (block,) = stream.get_final_message().content
    assert block.type == "thinking"
    assert block.thinking == client.messages.create(**wish).content[0].thinking


def test_errors_of_the_sdk(client: Anthropic, thinker: RunningServer) -> None:
    with pytest.raises(anthropic.BadRequestError, match="'image'") as found:
        client.messages.create(**{**SDK, "messages": [{"role": "user", "content": [IMAGE]}]})
    assert found.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**SDK, "model": "another"})
    with pytest.raises(anthropic.AuthenticationError):
        Anthropic(base_url=thinker.url, api_key="gamma", max_retries=0).messages.create(**SDK)
    bearer = Anthropic(base_url=thinker.url, auth_token="alpha", max_retries=0)
    assert bearer.messages.create(**SDK).content
