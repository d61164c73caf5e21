import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strength import examples
from weft.errors import RequestError
from weft.text.stops import StopStrings


def oracle(text: str, silent: set[int], stops: list[str]) -> tuple[str, str | None]:
    """The definition, on the whole text: the match that ends first, then the longest; none ends where it is silent."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete and end - 1 not in silent:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


few_letters = st.text("ab", min_size=1, max_size=6)
chunks_and_activity = st.lists(st.tuples(st.text("abc", max_size=5), st.booleans()), max_size=12)


@given(stops=st.lists(few_letters, max_size=4), chunks=chunks_and_activity, include=st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_chunks_give_what_the_whole_text_gives(stops, chunks, include):
    text, silent = "", set()
    watch, given_out = StopStrings(stops, include_in_output=include), ""
    for chunk, active in chunks:
        silent |= set() if active else set(range(len(text), len(text) + len(chunk)))
        text += chunk
        given_out += watch.push(chunk, active=active)
        expected, stopped = oracle(text, silent, stops)
        assert watch.stopped == stopped
        if stopped is None:  # kept back: the longest end that may still become a stop string, and nothing more
            hold = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
            assert given_out == text[: len(text) - hold]
    assert given_out + watch.flush() == expected + (stopped or "") * include if chunks else given_out == ""
    assert watch.flush() == ""


def test_a_stop_string_across_token_borders_never_leaks():
    watch = StopStrings(["\n\nUser:"])
    assert [watch.push(piece) for piece in ("Yes.", "\n", "\nUs", "ing it.\n", "\nUse", "r: hi")] == [
        *("Yes.", "", "", "\n\nUsing it.", "", ""),
    ]
    assert watch.stopped == "\n\nUser:"
    assert watch.push("more") == watch.flush() == ""


def test_min_tokens_ignores_complete_matches_but_not_one_that_is_completed_later():
    watch = StopStrings(["END"])
    assert watch.push("END EN", active=False) == "END "
    assert watch.push("D") == ""
    assert watch.stopped == "END"


def test_the_end_of_the_stream_gives_back_what_was_no_stop_string():
    watch = StopStrings(["</s>"], include_in_output=True)
    assert watch.push("a </s") == "a "
    assert watch.flush() == "</s"
    assert watch.stopped is None


def test_without_stop_strings_text_passes_through():
    watch = StopStrings([])
    assert watch.push("anything") == "anything"
    assert watch.flush() == ""


def test_a_very_long_stop_string_costs_no_more_per_character():
    watch = StopStrings(["a" * 20_000 + "b"])
    given_out = sum(len(watch.push("a")) for _ in range(60_000))
    assert given_out == 40_000
    assert watch.push("b") == ""
    assert watch.stopped is not None


@pytest.mark.parametrize("stops", [[""], ["a", ""], [None], [3]])
def test_nonsense_is_refused(stops):
    with pytest.raises(RequestError, match="non-empty strings"):
        StopStrings(stops)
