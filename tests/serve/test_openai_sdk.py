"""The OpenAI SDK against a real server process: what users' clients do."""

import json
import math
from typing import Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.serve.running import RunningServer

MODEL = "weft-default"
HELLO = [{"role": "user", "content": "A latte with oat milk, please."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as found:
        client.models.retrieve("gpt-5")
    assert found.value.code == "model_not_found"


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_completion_tokens=12)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_is_the_same_as_the_whole(client: OpenAI) -> None:
    wish = {"model": MODEL, "messages": HELLO, "max_tokens": 24, "seed": 7, "temperature": 1.0}
    whole = client.chat.completions.create(**wish)
    chunks = list(client.chat.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_last_chunk_tells_the_times(client: OpenAI) -> None:
    stream = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, stream=True)
    last = list(stream)[-1].model_extra["metrics"]
    assert last["ttft_ms"] >= last["queue_ms"] >= 0
    assert last["largest_gap_ms"] > 0
    assert last["decode_ms"] > 0
    assert last["cached_tokens"] % 16 == 0


def test_completion_of_several_prompts(client: OpenAI) -> None:
    prompts = ["The old house", "At noon the ship"]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=6, temperature=0, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    alone = client.completions.create(model=MODEL, prompt=prompts[1], max_tokens=6, temperature=0)
    assert alone.choices[0].text == texts[2]


def test_n_choices_streamed_side_by_side(client: OpenAI) -> None:
    wish = {"model": MODEL, "prompt": "The door", "max_tokens": 12, "n": 3, "seed": 1, "temperature": 1.0}
    whole = [choice.text for choice in client.completions.create(**wish).choices]
    assert len(set(whole)) == 3
    texts = ["", "", ""]
    for chunk in client.completions.create(**wish, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == whole


def test_seed(client: OpenAI) -> None:
    def text(seed: int) -> str:
        wish = {"model": MODEL, "prompt": "Far away", "max_tokens": 16, "temperature": 1.0}
        return client.completions.create(**wish, seed=seed).choices[0].text

    assert text(5) == text(5)
    assert len({text(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop(client: OpenAI, stream: bool) -> None:
    def text(**more: object) -> tuple[str, str | None]:
        wish = {"model": MODEL, "prompt": "Once upon a time there was", "max_tokens": 40, "temperature": 0}
        answer = client.completions.create(**wish, **more, stream=stream)
        if not stream:
            return answer.choices[0].text, answer.choices[0].finish_reason
        pieces = [chunk.choices[0] for chunk in answer]
        return "".join(piece.text for piece in pieces), pieces[-1].finish_reason

    full, _ = text()
    word = full.split()[4]
    cut, reason = text(stop=[word])
    assert (cut, reason) == (full[: full.index(word)], "stop")
    kept, _ = text(stop=word, extra_body={"include_stop_str_in_output": True})
    assert kept == full[: full.index(word)] + word


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(client: OpenAI, stream: bool) -> None:
    wish = {"model": MODEL, "messages": HELLO, "max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(**wish, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    found = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    text = "".join(choice.delta.content or "" for choice in choices) if stream else choices[0].message.content
    spelled = b"".join(bytes(entry.bytes) for entry in found).decode()
    assert spelled.startswith(text)
    for entry in found:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.001


def test_completion_logprobs_and_echo(client: OpenAI) -> None:
    wish = {"model": MODEL, "prompt": "The old house", "temperature": 0, "logprobs": 2, "echo": True}
    (choice,) = client.completions.create(**wish, max_tokens=4).choices
    found = choice.logprobs
    assert choice.text.startswith("The old house")
    assert "".join(found.tokens) == choice.text
    assert found.token_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert [choice.text[at:][: len(token)] for at, token in zip(found.text_offset, found.tokens, strict=True)] == (
        found.tokens
    )
    (scored,) = client.completions.create(**wish, max_tokens=0).choices
    assert scored.text == "The old house"
    assert scored.logprobs.token_logprobs == found.token_logprobs[: len(scored.logprobs.tokens)]
    chunks = list(client.completions.create(**wish, max_tokens=4, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    streamed = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens]
    assert streamed == found.tokens


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_characters_in_several_tokens(client: OpenAI, server: RunningServer, echo: bool) -> None:
    """They index the text that is returned, in which a character counts once, however many tokens it takes."""
    word = "größer 😀日本 "
    bias = dict.fromkeys(map(str, server.post("/tokenize", {"prompt": "😀é日"}).json()["tokens"]), 30)
    wish = {
        "model": MODEL,
        "prompt": word,
        "logprobs": 0,
        "max_tokens": 24,
        "seed": 5,
        "temperature": 1.5,
        "echo": echo,
    }
    wish |= {"logit_bias": bias, "extra_body": {"ignore_eos": True}}
    (whole,) = client.completions.create(**wish).choices
    found = whole.logprobs
    assert any("\ufffd" in token for token in found.tokens)  # else it shows nothing
    for token, at, following in zip(found.tokens, found.text_offset, [*found.text_offset[1:], None], strict=True):
        if "\ufffd" not in token:
            assert whole.text[at:following] == token
    assert found.text_offset == sorted(found.text_offset)
    assert found.text_offset[-1] <= len(whole.text)
    chunks = [chunk.choices[0] for chunk in client.completions.create(**wish, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    streamed = [at for chunk in chunks if chunk.logprobs for at in chunk.logprobs.text_offset]
    assert streamed == found.text_offset


def test_offsets_of_what_a_stop_string_cuts_off(client: OpenAI) -> None:
    wish = {"model": MODEL, "prompt": "Once upon a time there was", "max_tokens": 40, "temperature": 0, "logprobs": 0}
    full = client.completions.create(**wish).choices[0]
    at = len(full.text) // 2
    for stop in (full.text[at : at + 12], full.text[at : at + 12] + "...", full.text[at : at + 2]):
        (whole,) = client.completions.create(**wish, stop=[stop]).choices
        found = whole.logprobs
        assert found.text_offset == [min(at, len(whole.text)) for at in full.logprobs.text_offset[: len(found.tokens)]]
        chunks = [chunk.choices[0] for chunk in client.completions.create(**wish, stop=[stop], stream=True)]
        assert [at for chunk in chunks if chunk.logprobs for at in chunk.logprobs.text_offset] == found.text_offset
        tokens = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens]
        assert tokens == found.tokens


def test_a_prompt_that_is_only_read_costs_no_completion(client: OpenAI) -> None:
    wish = {"model": MODEL, "prompt": "The old house", "echo": True, "max_tokens": 0}
    whole = client.completions.create(**wish)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(**wish, stream=True, stream_options=options))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "The old house"
    for usage in (whole.usage, *(chunk.usage for chunk in chunks)):
        assert (usage.completion_tokens, usage.total_tokens) == (0, usage.prompt_tokens)


@pytest.mark.parametrize("n", [1, 3])
def test_usage_in_every_chunk(client: OpenAI, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    wish = {"model": MODEL, "max_tokens": 5, "n": n, "stream": True, "stream_options": options}
    chats = list(client.chat.completions.create(**wish, messages=HELLO))
    assert chats[0].usage.completion_tokens == 0
    texts = list(client.completions.create(**wish, prompt="The", echo=True))
    for chunks in (chats, texts):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert all(chunk.usage.prompt_tokens == chunks[-1].usage.prompt_tokens for chunk in chunks)


def test_best_of(client: OpenAI) -> None:
    wish = {"model": MODEL, "prompt": "The sea", "max_tokens": 8, "seed": 3, "temperature": 1.0, "logprobs": 0}
    every = client.completions.create(**wish, n=4).choices
    best = client.completions.create(**wish, n=1, best_of=4).choices
    mean = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in every]
    assert [choice.text for choice in best] == [every[mean.index(max(mean))].text]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools(client: OpenAI, stream: bool, choice: object) -> None:
    wish = {"model": MODEL, "messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 200, "seed": 2}
    answer = client.chat.completions.create(**wish, stream=stream, parallel_tool_calls=False)
    if stream:
        pieces = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or []]
        name = pieces[0].function.name
        assert pieces[0].id
        arguments = "".join(piece.function.arguments or "" for piece in pieces)
    else:
        (call,) = answer.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments
        assert call.id
        assert answer.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert name == "get_weather"
    assert set(json.loads(arguments)) == {"city", "days"}


def test_tools_in_auto_mode_leave_text_alone(client: OpenAI) -> None:
    wish = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    plain = client.chat.completions.create(**wish)
    offered = client.chat.completions.create(**wish, tools=[WEATHER], tool_choice="none")
    assert offered.choices[0].message.content == plain.choices[0].message.content


class Order(BaseModel):
    drink: Literal["latte", "tea"]
    shots: int = Field(ge=1, le=4)


def test_parse_with_a_schema(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Order, max_tokens=400, temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Order)


def test_json_object_regex_and_choice(client: OpenAI, server: RunningServer) -> None:
    def text(**more: object) -> str:
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=300, seed=1, **more)
        return answer.choices[0].message.content or ""

    # So small a model would write JSON for ever; a liking for the end shows what it is held to.
    (brace,) = server.post("/tokenize", {"prompt": "}", "add_special_tokens": False}).json()["tokens"]
    assert json.loads(text(response_format={"type": "json_object"}, logit_bias={str(brace): 100})) == {}
    assert text(extra_body={"structured_outputs": {"regex": "[a-f]{4}-[0-9]{2}"}})[4] == "-"
    assert text(extra_body={"structured_outputs": {"choice": ["tea", "coffee"]}}) in ("tea", "coffee")
    assert text(extra_body={"guided_choice": ["tea", "coffee"]}) in ("tea", "coffee")


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": 16384}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}}, None),
        ({"extra_body": {"structured_outputs": {"regex": "(["}}}, None),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_bad_requests(client: OpenAI, wish: dict, param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model=MODEL, messages=HELLO, **wish)
    assert found.value.body["message"]
    if param is not None:
        assert found.value.param == param


def test_responses(client: OpenAI) -> None:
    wish = {"model": MODEL, "input": "A latte with oat milk, please.", "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**wish)
    chat = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12, temperature=0)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    events = list(client.responses.create(**wish, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text
    assert [item.type for item in last.response.output] == ["message"]


def test_logprobs_of_responses_are_those_of_the_text(client: OpenAI, server: RunningServer) -> None:
    """Streamed or not: also those of tokens that are a part of a character, and not that of the end."""
    wish = {"model": MODEL, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    ended = False
    for text in ("A latte with oat milk, please.", "Thanks!", "größer 😀日本"):
        whole = client.responses.create(**wish, input=text, max_output_tokens=200)
        ended |= whole.status == "completed"
        (part,) = whole.output[0].content
        spelled = b"".join(bytes(entry.bytes) for entry in part.logprobs)
        assert spelled.decode(errors="replace") == part.text
        events = list(client.responses.create(**wish, input=text, max_output_tokens=200, stream=True))
        (last,) = events[-1].response.output[0].content
        assert last.logprobs == part.logprobs
        pieces = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
        assert [entry.logprob for entry in pieces] == [entry.logprob for entry in part.logprobs]
    assert ended  # else it shows nothing


@pytest.mark.parametrize("stream", [False, True])
def test_responses_with_tools(client: OpenAI, stream: bool) -> None:
    tool = {"type": "function", **WEATHER["function"], "strict": True}
    talk = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Rome", "days": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "user", "content": "And tomorrow?"},
    ]
    wish = {"model": MODEL, "input": talk, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    answer = client.responses.create(**wish, max_output_tokens=200, stream=stream)
    if stream:
        events = list(answer)
        pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        (call,) = events[-1].response.output
        assert "".join(pieces) == call.arguments
    else:
        (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert set(json.loads(call.arguments)) == {"city", "days"}


def test_responses_parse(client: OpenAI) -> None:
    answer = client.responses.parse(
        model=MODEL, input="Order?", text_format=Order, max_output_tokens=300, temperature=0
    )
    assert isinstance(answer.output_parsed, Order)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_are_cut_off_leave_no_text(client: OpenAI, stream: bool) -> None:
    wish = {"model": MODEL, "messages": HELLO, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 3}
    answer = client.chat.completions.create(**wish, stream=stream)
    texts = [chunk.choices[0].delta.content for chunk in answer] if stream else [answer.choices[0].message.content]
    assert not any(texts)


def test_tools_may_have_schemas_that_cannot_be_kept_to(client: OpenAI) -> None:
    fields = {"tags": {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}, "maxItems": 2}}
    tool = {"type": "function", "function": {"name": "tag", "parameters": {"type": "object", "properties": fields}}}
    wish = {"model": MODEL, "messages": HELLO, "tools": [tool], "max_tokens": 100, "seed": 1}
    for choice in ("required", {"type": "function", "function": {"name": "tag"}}):
        assert client.chat.completions.create(**wish, tool_choice=choice).choices[0].message.tool_calls


def test_numbers_may_be_written_as_text(client: OpenAI) -> None:
    wish = {"max_tokens": "3", "temperature": "0", "stream": "false", "ignore_eos": 1}
    answer = client.completions.create(model=MODEL, prompt="The", extra_body=wish)
    assert answer.usage.completion_tokens == 3


def test_a_truncated_prompt(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="word " * 100, extra_body={"truncate_prompt_tokens": 7})
    assert answer.usage.prompt_tokens == 7


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_what_was_given_out(client: OpenAI, stream: bool) -> None:
    """Tokens behind a stop string were computed perhaps, but nobody asked for them."""
    wish = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 60, "seed": 4, "n": 4, "stop": [" the", ","]}
    more = {"extra_body": {"return_token_ids": True, "ignore_eos": True}}
    if stream:
        chunks = list(client.completions.create(**wish, **more, stream=True, stream_options={"include_usage": True}))
        ids = [token for chunk in chunks for choice in chunk.choices for token in choice.model_extra["token_ids"]]
        usage, metrics = chunks[-1].usage, chunks[-1].model_extra["metrics"]
    else:
        answer = client.completions.create(**wish, **more)
        ids = [token for choice in answer.choices for token in choice.model_extra["token_ids"]]
        usage, metrics = answer.usage, answer.model_extra["metrics"]
    assert usage.completion_tokens == len(ids)
    assert metrics["queue_ms"] is not None
    assert metrics["prefill_ms"] > 0


def test_cached_tokens_are_told_also_where_a_stop_string_ends_it(client: OpenAI) -> None:
    wish = {"model": MODEL, "prompt": "The sea and the ship and the old house by the sea. " * 8, "seed": 1}
    client.completions.create(**wish, max_tokens=1)
    answer = client.completions.create(**wish, max_tokens=60, stop=["a", "e", "i", "o"])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def test_every_choice_describes_the_prompt(client: OpenAI) -> None:
    wish = {"model": MODEL, "prompt": "The old house", "logprobs": 1, "echo": True, "max_tokens": 3, "seed": 2}
    first, second = client.completions.create(**wish, n=2).choices
    length = len(client.completions.create(**{**wish, "max_tokens": 0}).choices[0].logprobs.tokens)
    assert first.logprobs.token_logprobs[:length] == second.logprobs.token_logprobs[:length]
    assert all(value is not None for value in second.logprobs.token_logprobs[1:])
    (best,) = client.completions.create(**wish, best_of=4).choices
    assert all(value is not None for value in best.logprobs.token_logprobs[1:])


@pytest.mark.parametrize("last", ["end", "I would like", "im", "<"])
def test_a_message_to_be_continued(client: OpenAI, server: RunningServer, last: str) -> None:
    talk = [*HELLO, {"role": "assistant", "content": last}]
    body = {"messages": talk, "continue_final_message": True, "add_generation_prompt": False}
    tokens = server.post("/tokenize", body).json()["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text.endswith(last)
    assert client.chat.completions.create(model=MODEL, messages=talk, max_tokens=2, extra_body=body).choices


def test_a_response_that_was_cut_off_says_so(client: OpenAI) -> None:
    tool = {"type": "function", **WEATHER["function"]}
    wish = {"model": MODEL, "input": "Weather?", "tools": [tool], "tool_choice": "required", "max_output_tokens": 12}
    whole = client.responses.create(**wish)
    assert (whole.status, whole.output[-1].status) == ("incomplete", "incomplete")
    last = list(client.responses.create(**wish, stream=True))[-1]
    assert last.type == "response.incomplete"
    assert all(item.status == "incomplete" for item in last.response.output[-1:])


def test_a_required_tool_may_refer_to_definitions_of_its_own(client: OpenAI) -> None:
    class Place(BaseModel, extra="forbid"):
        x: int = Field(ge=0, le=9)

    class Move(BaseModel, extra="forbid"):
        start: Place
        end: Place

    tools = [
        {"type": "function", "function": {"name": name, "parameters": Move.model_json_schema()}}
        for name in ("walk", "swim")
    ]
    wish = {"model": MODEL, "messages": HELLO, "tools": tools, "max_tokens": 300, "seed": 3}
    (call, *_) = client.chat.completions.create(**wish, tool_choice="required").choices[0].message.tool_calls
    assert call.function.name in ("walk", "swim")
    assert Move.model_validate_json(call.function.arguments)
    assert " " not in call.function.arguments  # nobody reads it


def test_how_a_structure_begins_is_not_the_clients_to_say(client: OpenAI) -> None:
    for thoughts in (["<a>", "b", True], ["a" * 200_000, "b", False], 7):
        wish = {"regex": "[0-9]{3}", "behind": thoughts}
        answer = client.completions.create(
            model=MODEL, prompt="One", max_tokens=9, extra_body={"structured_outputs": wish}
        )
        assert answer.choices[0].text.isdecimal()
