"""What a client sees of a stream whose words are known: thoughts, calls and text apart, in pieces or whole."""

import json
from pathlib import Path

import pytest

import weft
from weft.engine.params import SamplingParams
from weft.serve.choices import Choice
from weft.serve.client import Update
from weft.serve.messages import End
from weft.text.reasoning import make_reasoning_parser
from weft.text.tokenizer import Tokenizer
from weft.text.tools import make_tool_parser

TOKENIZER = Tokenizer.load(Path(weft.__file__).parent / "default_model")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'


def read(text: str, single: bool = False) -> tuple[Choice, list]:
    """Feeds a reply token by token, as an engine would."""
    assert TOKENIZER is not None
    choice = Choice(
        0,
        TOKENIZER,
        [],
        SamplingParams(),
        reasoning=make_reasoning_parser("qwen3", ""),
        tools=make_tool_parser("hermes", ["get_weather"]),
        single=single,
    )
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    pieces = [choice.take(Update(0, token)) for token in ids]
    pieces.append(choice.take(Update(0, None, End(0, None, "stop", None, 0, None))))
    return choice, pieces


def test_thoughts_text_and_calls_come_apart() -> None:
    choice, pieces = read(f"<think>Where is it?</think>Let me see. {CALL % 'Rome'}{CALL % 'Oslo'}")
    assert choice.reasoning == "".join(piece.reasoning for piece in pieces) == "Where is it?"
    assert choice.text == "".join(piece.text for piece in pieces)
    assert choice.text.strip() == "Let me see."
    assert [json.loads(call["function"]["arguments"])["city"] for call in choice.calls] == ["Rome", "Oslo"]
    streamed = "".join(call.arguments for piece in pieces for call in piece.calls if call.index == 1)
    assert json.loads(streamed) == {"city": "Oslo"}
    assert choice.reason == pieces[-1].reason == "tool_calls"
    assert len(choice.tokens) == len(pieces) - 1


def test_one_call_where_only_one_is_wanted() -> None:
    choice, pieces = read(f"{CALL % 'Rome'}{CALL % 'Oslo'}", single=True)
    assert [call["function"]["name"] for call in choice.calls] == ["get_weather"]
    assert {call.index for piece in pieces for call in piece.calls} == {0}


@pytest.mark.parametrize("text", ["Plain words.", "<tool_call> is a tag", "a < b", ""])
def test_what_is_no_call_is_text(text: str) -> None:
    choice, pieces = read(text)
    assert choice.text.split() == text.split()
    assert (choice.calls, choice.reason) == ([], "stop")
    assert sum(len(piece.calls) for piece in pieces) == 0
