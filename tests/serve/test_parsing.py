"""Large bodies are read in pieces, and come out as if they had been read at once."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.serve import parsing
from weft.serve.fields import ChatBody, CompletionBody

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner))


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=8), values | st.lists(st.integers(-9, 10**6))), st.integers(1, 40))
def test_pieces_make_the_whole(body: dict, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parsing, "LARGE", 0)
        patch.setattr(parsing, "PIECE", piece)
        assert parsing.parse(json.dumps(body).encode(), dict) == body


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [1, 2,, 3]}',
        b'{"prompt": [1, 2, ]}',
        b'{"prompt": [1 2]}',
        b'{"prompt": [01]}',
        b'{"prompt": [-]}',
        b'{"prompt": [1]',
        b'{"prompt": 7}',
    ],
)
def test_what_is_wrong_is_wrong_in_pieces_too(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "LARGE", 0)
    monkeypatch.setattr(parsing, "PIECE", 2)
    with pytest.raises(msgspec.MsgspecError):
        parsing.parse(body, CompletionBody)


def test_large_bodies_of_both_kinds() -> None:
    ids = list(range(100_000))
    assert parsing.parse(json.dumps({"prompt": ids, "max_tokens": 3}).encode(), CompletionBody).prompt == ids
    messages = [{"role": "user", "content": "word " * 50}] * 2000
    assert parsing.parse(json.dumps({"messages": messages}).encode(), ChatBody).messages == messages
    with pytest.raises(msgspec.ValidationError, match="messages"):
        parsing.parse(json.dumps({"messages": [*messages, "no object"]}).encode(), ChatBody)
