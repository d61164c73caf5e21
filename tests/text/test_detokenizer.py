import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strength import examples
from tests.text.conftest import BACKENDS, TEXTS
from weft.text.detokenizer import StreamDetokenizer
from weft.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizers(backends):
    return {name: Tokenizer(backend) for name, backend in backends.items()}


def stream(tokenizer, ids, cuts=None, **options):
    """The pieces of text that come out, the flush last; `cuts` are chunk sizes, one token each where they run out."""
    detokenizer, pieces, ids = StreamDetokenizer(tokenizer, **options), [], list(ids)
    for size in [*(cuts or []), *[1] * len(ids)]:
        pieces.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    return [*pieces, detokenizer.flush()]


any_ids = st.lists(st.integers(0, 450), max_size=40)
any_cuts = st.lists(st.integers(0, 5), max_size=10)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "byte_fallback"])
@given(ids=any_ids, cuts=any_cuts, skip=st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_any_ids_in_any_pieces_give_the_text_of_the_whole(tokenizers, name, ids, cuts, skip):
    tokenizer = tokenizers[name]
    pieces = stream(tokenizer, ids, cuts, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


# Byte-fallback sequences in which every run of bytes is either text, or nothing but bytes that are not; a piece of text
# ends every run.
whole = st.text(max_size=5).map(lambda text: list(text.encode()))
garbage = st.lists(st.sampled_from([0x80, 0xBF, 0xC0, 0xFF]), max_size=5)
cut_off = st.sampled_from("é€🎉").map(lambda char: list(char.encode()[:-1]))
runs_of_bytes = st.lists(st.tuples(whole | garbage | cut_off, st.integers(0, 1000)), max_size=8)


@given(runs=runs_of_bytes, cuts=any_cuts, skip=st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_byte_fallback_in_any_pieces_gives_the_text_of_the_whole(tokenizers, runs, cuts, skip):
    tokenizer = tokenizers["byte_fallback"]
    byte_ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in range(256)]
    pieces = sorted(set(range(tokenizer.vocab_size)) - set(byte_ids) - tokenizer.special_token_ids)
    ids = [i for run, piece in runs for i in [*(byte_ids[byte] for byte in run), pieces[piece % len(pieces)]]]
    assert "".join(stream(tokenizer, ids, cuts, skip_special_tokens=skip)) == tokenizer.decode(ids, skip)


def test_the_documented_exception_keeps_the_valid_characters_of_a_broken_run(tokenizers):
    tokenizer = tokenizers["byte_fallback"]
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "€".encode() + b"\xe2\x82"] + tokenizer.encode(
        "the", False
    )
    assert tokenizer.decode(ids) == "\ufffd" * 5 + " the"
    assert "".join(stream(tokenizer, ids)) == "€\ufffd\ufffd the"


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@given(text=st.text(max_size=30), cuts=any_cuts)
@settings(deadline=None)
def test_whole_characters_come_as_soon_as_they_are_whole(tokenizers, name, text, cuts):
    tokenizer, given_out, taken = tokenizers[name], "", 0
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids, cuts, skip_special_tokens=False)
    for piece, size in zip(pieces, [*cuts, *[1] * len(ids)], strict=False):
        given_out, taken = given_out + piece, taken + size
        data = b"".join(tokenizer.token_bytes(i, first=n == 0) for n, i in enumerate(ids[:taken]))
        assert given_out == data.decode(errors="ignore")
    assert pieces[-1] == ""


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_undecodable_tokens_are_neither_kept_back_nor_the_end_of_the_stream(tokenizers, name):
    tokenizer = tokenizers[name]
    stray = tokenizer.token_id({"byte_level": "Ģ", "byte_fallback": "<0x80>"}[name])
    assert tokenizer.token_bytes(stray) == b"\x80"
    detokenizer = StreamDetokenizer(tokenizer)
    assert all(detokenizer.push([stray]) == "\ufffd" for _ in range(20_000))
    assert detokenizer.push(tokenizer.encode("over", add_special_tokens=False)).strip() == "over"


@pytest.mark.parametrize("name", BACKENDS)
@given(cut=st.integers(0, 60), text=st.sampled_from(TEXTS))
@settings(deadline=None)
def test_a_stream_continues_its_prompt(tokenizers, name, cut, text):
    """The text of a reply is what it adds to the text of the prompt, its leading space included."""
    tokenizer = tokenizers[name]
    ids = tokenizer.encode(text)
    while "\ufffd" in tokenizer.decode(ids[:cut]):
        cut += 1  # do not cut a character
    reply = "".join(stream(tokenizer, ids[cut:], context=ids[:cut]))
    assert tokenizer.decode(ids[:cut]) + reply == tokenizer.decode(ids)


def test_a_prompt_that_ends_in_half_a_character_is_completed(tokenizers):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("fox \u2603!")
    cut = next(n for n in range(len(ids)) if tokenizer.decode(ids[:n]).endswith("\ufffd"))
    assert "".join(stream(tokenizer, ids[cut:], context=ids[:cut])) == "\u2603!"


def test_an_unfinished_character_is_flushed_once(tokenizers):
    tokenizer = tokenizers["byte_level"]
    detokenizer = StreamDetokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("a\u2603")[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
