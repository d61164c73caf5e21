"""Answers in Anthropic's form, of streams whose words are known."""

import json
from typing import Any

from tests.serve.test_choice import CALL, read
from weft.serve.errors import ApiError
from weft.serve.output.choice import Choice, ChoiceDelta
from weft.serve.protocols.anthropic_formatter import MessagesFormatter
from weft.text.tools import ToolCallDelta

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
EXTRAS: dict[str, Any] = {"usage": USAGE, "metrics": {}}


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.split(b"data: ")[1]) for block in data.strip().split(b"\n\n")]


def streamed(choice: Choice, pieces: list[ChoiceDelta]) -> list[dict[str, Any]]:
    format = MessagesFormatter("msg_1", "m", 5, None, False)
    data = format.first_chunk(choice, EXTRAS)
    data += b"".join(format.chunk(choice, piece, {}) for piece in pieces if not piece.is_empty)
    return events(data + format.last_chunk(EXTRAS))


def blocks(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put together as a client does it. Of two blocks, one ends before the other begins."""
    content: list[dict[str, Any]] = []
    is_open = False
    for event in found:
        match event["type"]:
            case "content_block_start":
                assert (is_open, event["index"]) == (False, len(content))
                content.append({**event["content_block"], "json": ""})
                is_open = True
            case "content_block_stop":
                assert (is_open, event["index"]) == (True, len(content) - 1)
                is_open = False
            case "content_block_delta":
                assert (is_open, event["index"]) == (True, len(content) - 1)
                delta, last = event["delta"], content[-1]
                kind = delta["type"].removesuffix("_delta").replace("input_json", "partial_json")
                last["json" if kind == "partial_json" else kind] += delta[kind]
    for block in content:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return content


def test_thoughts_text_and_calls_are_blocks() -> None:
    choice, pieces = read(f"<think>Where is it?</think>Let me see. {CALL % 'Rome'}{CALL % 'Oslo'}")
    found = streamed(choice, pieces)
    whole = MessagesFormatter("msg_1", "m", 5, None, False).full_response([choice], EXTRAS)
    assert blocks(found) == whole["content"]
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block["input"] for block in whole["content"][2:]] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert found[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
    assert whole["usage"]["input_tokens"] == found[-2]["usage"]["input_tokens"] == 6
    assert whole["usage"]["cache_read_input_tokens"] == 4


def test_the_end_of_a_call_comes_before_text_that_came_with_it() -> None:
    first = ToolCallDelta(0, "call_1", "f", '{"a"')
    rest, second = ToolCallDelta(0, None, None, ": 1}"), ToolCallDelta(1, "call_2", "g", "{}")
    pieces = [
        ChoiceDelta("", "", [first], 1, None, None),
        ChoiceDelta("then", "", [rest, second], 2, None, "tool_calls"),
    ]
    choice, _ = read("")
    content = blocks(streamed(choice, pieces))
    assert [block["type"] for block in content] == ["tool_use", "text", "tool_use"]
    assert (content[0]["input"], content[1]["text"], content[2]["input"]) == ({"a": 1}, "then", {})


def test_an_empty_answer_has_no_blocks() -> None:
    choice, pieces = read("")
    found = streamed(choice, pieces)
    assert [event["type"] for event in found] == ["message_start", "message_delta", "message_stop"]
    assert found[1]["delta"]["stop_reason"] == "end_turn"


def test_a_stop_sequence_is_named_also_where_a_tool_was_called() -> None:
    choice, _ = read(CALL % "Rome")
    choice.stop_reason = "END"
    body = MessagesFormatter("msg_1", "m", 5, None, False).full_response([choice], EXTRAS)
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")


def test_errors_within_a_stream() -> None:
    format = MessagesFormatter("msg_1", "m", 5, None, False)
    (event,) = events(format.error_chunk(ApiError(503, "the engine died", code="engine_died").body))
    assert (event["type"], event["error"]["type"]) == ("error", "overloaded_error")
    (event,) = events(format.error_chunk(ApiError(500, "something", code="internal").body))
    assert event["error"]["type"] == "api_error"
