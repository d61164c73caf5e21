"""Large bodies are read in pieces, and come out as if they had been read at once."""

import json
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.serve.errors import ApiError
from weft.serve.http import json_body
from weft.serve.protocols.openai_bodies import ChatBody, CompletionBody

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner))


ids = st.lists(st.integers(-9, 10**6))


class Fields(msgspec.Struct):
    a: Any = None
    b: Any = None


@settings(deadline=None)
@given(
    st.fixed_dictionaries({}, optional={"a": values, "b": ids | st.lists(ids) | st.lists(values), "c": values}),
    st.integers(1, 40),
    st.sampled_from([None, 1]),
)
def test_pieces_make_the_whole(body: dict, piece: int, indent: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "LARGE_BODY", 0)
        patch.setattr(json_body, "IDS_PIECE", piece)
        found = json_body.parse(json.dumps(body, indent=indent).encode(), Fields)
    assert (found.a, found.b) == (body.get("a"), body.get("b"))


@settings(deadline=None)
@given(st.lists(values, max_size=3))
def test_values_are_counted_outside_of_texts(found: list) -> None:
    def count(value: Any) -> int:  # brackets and commas
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else max(1, len(inner)) + sum(map(count, inner))

    texts = [json.dumps(value, ensure_ascii=False).encode() for value in found]
    total = sum(map(count, found))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "MOST_VALUES", total)
        assert not json_body.have_too_many_values(texts)
        patch.setattr(json_body, "MOST_VALUES", total - 1)
        assert json_body.have_too_many_values(texts) or not texts


@pytest.mark.parametrize("text", [b'"', b'"\\', b'[1, "a\\" , [2', b'\\"'])
def test_what_is_no_json_can_be_counted(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model may have written it, in the arguments of a call."""
    monkeypatch.setattr(json_body, "MOST_VALUES", 0)
    json_body.have_too_many_values([text])


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [1, 2,, 3]}',
        b'{"prompt": [1, 2, ]}',
        b'{"prompt": [1 2]}',
        b'{"prompt": [01]}',
        b'{"prompt": [-]}',
        b'{"prompt": [1]',
        b'{"prompt": [[1], [2 3]]}',
        b'{"prompt": [[1], [02]]}',
        b'{"prompt": [[1],, [2]]}',
        b'{"prompt": [[1] [2]]}',
        b'{"prompt": [[1], [2,]]}',
        b'{"prompt": 7}',
    ],
)
def test_what_is_wrong_is_wrong_in_pieces_too(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body, "LARGE_BODY", 0)
    monkeypatch.setattr(json_body, "IDS_PIECE", 2)
    with pytest.raises(msgspec.MsgspecError):
        json_body.parse(body, CompletionBody)


def test_large_bodies_of_both_kinds() -> None:
    ids = list(range(100_000))
    assert json_body.parse(json.dumps({"prompt": ids, "max_tokens": 3}).encode(), CompletionBody).prompt == ids
    messages = [{"role": "user", "content": "word " * 50}] * 2000
    assert json_body.parse(json.dumps({"messages": messages}).encode(), ChatBody).messages == messages
    with pytest.raises(msgspec.ValidationError, match="messages"):
        json_body.parse(json.dumps({"messages": [*messages, "no object"]}).encode(), ChatBody)


TEXT = '"' + "a, [" * 500_000 + '"'
DEEP = "[" * 400 + TEXT + "]" * 400


@pytest.mark.parametrize("name", ["chat_template_kwargs", "no_such_field"])
def test_nesting_costs_nothing(name: str) -> None:
    """Not a copy for every level."""
    body = f'{{"messages": [], "{name}": {{"x": {DEEP}}}}}'.encode()
    tracemalloc.start()
    try:
        found = json_body.parse(body, ChatBody)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(body)
    finally:
        tracemalloc.stop()
    assert (found.chat_template_kwargs is None) == (name == "no_such_field")


def test_deeper_than_python_can_go() -> None:
    for value in ("[" * 10_000 + TEXT + "]" * 10_000, '{"a":' * 10_000 + TEXT + "}" * 10_000):
        with pytest.raises(RecursionError):
            json_body.parse(f'{{"messages": [], "chat_template_kwargs": {value}}}'.encode(), ChatBody)


def test_millions_of_values_are_token_ids_or_too_many() -> None:
    ones = "[" + ",".join("1" * 500_000) + "]"
    assert len(json_body.parse(f'{{"prompt": {ones}}}'.encode(), CompletionBody).prompt) == 500_000
    assert len(json_body.parse(f'{{"prompt": [{ones}, {ones}]}}'.encode(), CompletionBody).prompt[1]) == 500_000
    many = ",".join("1" * 500_000)
    for prompt in (f"[[{ones}]]", f"[{many}, [1]]", f"[[1], {many}]", f'[{many}, "a"]', "[" + "[]," * 500_000 + "[]]"):
        with pytest.raises(ApiError, match="values"):
            json_body.parse(f'{{"prompt": {prompt}}}'.encode(), CompletionBody)


def test_texts_may_hold_any_number_of_commas() -> None:
    content = 'a,[{"\\' * 100_000
    messages = [{"role": "user", "content": content}]
    assert json_body.parse(json.dumps({"messages": messages}).encode(), ChatBody).messages == messages
