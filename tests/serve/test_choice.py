"""What a client sees of a stream whose words are known: thoughts, calls and text apart, in pieces or whole."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from weft.engine.executor import TokenLogprobs
from weft.engine.params import SamplingParams
from weft.serve.engines.messages import SequenceEnd
from weft.serve.engines.request_output_collector import SequenceUpdate
from weft.serve.output.choice import Choice
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
    pieces = [choice.append(SequenceUpdate(0, token)) for token in ids]
    pieces.append(choice.append(SequenceUpdate(0, None, SequenceEnd(0, None, "stop", None, 0, None))))
    return choice, pieces


def test_thoughts_text_and_calls_come_apart() -> None:
    choice, pieces = read(f"<think>Where is it?</think>Let me see. {CALL % 'Rome'}{CALL % 'Oslo'}")
    assert choice.reasoning == "".join(piece.reasoning for piece in pieces) == "Where is it?"
    assert choice.text == "".join(piece.text for piece in pieces)
    assert choice.text.strip() == "Let me see."
    assert [json.loads(call["function"]["arguments"])["city"] for call in choice.calls] == ["Rome", "Oslo"]
    streamed = "".join(call.arguments for piece in pieces for call in piece.calls if call.index == 1)
    assert json.loads(streamed) == {"city": "Oslo"}
    assert choice.finish_reason == pieces[-1].finish_reason == "tool_calls"
    assert len(choice.tokens) == len(pieces) - 1


def test_tokens_of_thoughts_are_counted() -> None:
    """Those of the tags may count or not, as a tag may share a token with its neighbours."""
    assert TOKENIZER is not None
    thought = "Where is it? " * 20
    choice, _ = read(f"<think>{thought}</think>Let me see.")
    tags = len(TOKENIZER.encode("<think></think>", add_special_tokens=False))
    assert abs(choice.reasoning_tokens - len(TOKENIZER.encode(thought, add_special_tokens=False))) <= tags
    assert read("Let me see. Where is it?")[0].reasoning_tokens == 0


def test_one_call_where_only_one_is_wanted() -> None:
    choice, pieces = read(f"{CALL % 'Rome'}{CALL % 'Oslo'}", single=True)
    assert [call["function"]["name"] for call in choice.calls] == ["get_weather"]
    assert {call.index for piece in pieces for call in piece.calls} == {0}


def test_a_second_call_that_is_not_wanted_ends_the_reply() -> None:
    """Else the engine would write it to its end, and nobody would see it."""
    _, pieces = read(f"{CALL % 'Rome'}{CALL % 'Oslo'}", single=True)
    assert "tool_calls" in [piece.finish_reason for piece in pieces[:-1]]


@pytest.mark.parametrize("text", ["Plain words.", "<tool_call> is a tag", "a < b", ""])
def test_what_is_no_call_is_text(text: str) -> None:
    choice, pieces = read(text)
    assert choice.text.split() == text.split()
    assert (choice.calls, choice.finish_reason) == ([], "stop")
    assert sum(len(piece.calls) for piece in pieces) == 0


class Told(NamedTuple):
    tokens: list[str]  # whose log probabilities belong to the text
    offsets: list[int]
    text: str


def told(ids: list[int], params: SamplingParams, *, thinks: bool = False, last: int | None = None) -> Told:
    """What is told of each token of a reply that ends with `last`; pieces must agree with the whole."""
    assert TOKENIZER is not None
    thoughts = make_reasoning_parser("qwen3", "") if thinks else None
    choice = Choice(0, TOKENIZER, [], params, reasoning=thoughts)
    pieces = [choice.append(SequenceUpdate(0, token, logprobs=TokenLogprobs(token, -1.0, 1, {}))) for token in ids]
    found = None if last is None else TokenLogprobs(last, -1.0, 1, {})
    pieces.append(choice.append(SequenceUpdate(0, last, SequenceEnd(0, last, "stop", None, 0, None), found)))
    assert [found for piece in pieces for found in piece.text_logprobs] == choice.text_logprobs
    assert [piece.offset for piece in pieces if piece.logprobs] == choice.offsets
    assert "".join(piece.text for piece in pieces) == choice.text
    names = [TOKENIZER.token_text(found.token) for found in choice.text_logprobs]
    return Told(names, choice.offsets, choice.text)


def test_tokens_of_the_text_and_where_they_are() -> None:
    assert TOKENIZER is not None
    params = SamplingParams(logprobs=0)
    ids = TOKENIZER.encode("a😀b", add_special_tokens=False)
    assert len(ids) == 6  # the model knows no such character
    end = TOKENIZER.eos_token_id
    found = told(ids, params, last=end)
    assert len(found.tokens) == 6
    assert found.offsets == [0, 1, 1, 1, 1, 2, 3]
    cut_off = told(ids[:3], params, last=end)  # in the middle of a character
    assert (cut_off.text, cut_off.offsets) == ("a\ufffd", [0, 1, 1, 2])
    hidden = told([ids[0], end, ids[-1]], params, last=end)  # it is in the middle of a text, and not to be seen
    assert (hidden.tokens, hidden.offsets) == (["a", "b"], [0, 1, 1, 2])


def test_thoughts_are_not_the_text() -> None:
    assert TOKENIZER is not None
    ids = TOKENIZER.encode("<think>Where?</think>There it is.", add_special_tokens=False)
    found = told(ids, SamplingParams(logprobs=0), thinks=True, last=TOKENIZER.eos_token_id)
    assert found.text == "There it is."
    assert "".join(found.tokens) == "There it is."


def test_what_a_stop_string_held_back_is_told_with_the_text() -> None:
    assert TOKENIZER is not None
    ids = TOKENIZER.encode("one two three", add_special_tokens=False)
    held = told(ids, SamplingParams(logprobs=0, stop=["one two three four"]), last=TOKENIZER.eos_token_id)
    assert "".join(held.tokens) == held.text == "one two three"
    assert held.offsets[-1] == len(held.text)


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), max_size=30))
def test_whole_tokens_are_where_they_are_said_to_be(ids: list[int]) -> None:
    """Among any others, of which many are parts of characters, and do not always go together."""
    assert TOKENIZER is not None
    found = told(ids, SamplingParams(logprobs=0), last=TOKENIZER.eos_token_id)
    assert found.offsets == sorted(found.offsets)
    assert found.offsets[-1] == len(found.text)
    for token, at in zip(ids, found.offsets, strict=False):
        whole = TOKENIZER.whole_text(token)
        if whole is not None and token not in TOKENIZER.special_token_ids:
            assert found.text[at:].startswith(whole)
