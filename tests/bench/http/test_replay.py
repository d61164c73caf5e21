"""What a replay measures before it plays."""

import pytest

from weft.bench.http.replay import between_tokens


def streams(count: int, steps: int, step: float, token: float, late: int = 0) -> list[list[float]]:
    """Times at which the tokens of streams come; the last stream begins `late` steps after the others."""
    firsts = [late if number == count - 1 else 0 for number in range(count)]
    return [[at * step + number * token for at in range(first, first + steps)] for number, first in enumerate(firsts)]


def test_the_time_between_tokens_of_a_step_is_found() -> None:
    assert between_tokens(streams(32, 64, 0.005, 40e-6)) == pytest.approx(40e-6)


def test_a_stream_that_begins_later_changes_nothing() -> None:
    assert between_tokens(streams(32, 64, 0.005, 40e-6, late=9)) == pytest.approx(40e-6)


def test_where_steps_cannot_be_told_apart_nothing_is_claimed() -> None:
    assert between_tokens(streams(1, 64, 0.005, 40e-6)) is None
    assert between_tokens(streams(32, 64, 0.005, 0.005 / 32)) is None, "the client is never done with a step"
