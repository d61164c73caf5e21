"""What comes free: seats and memory in a second."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.room import NOTHING, PLENTY, Room, Turnover


@given(st.floats(-1e6, 1e6), st.integers(2, 200), st.integers(0, 50), st.integers(0, 10**5))
def test_a_steady_turnover_is_known_from_its_first_second_on(start: float, count: int, seats: int, tokens: int) -> None:
    turnover = Turnover()
    for number in range(count + 1):  # ten in a second
        turnover.add(start + number / 10, seats if number else 0, tokens if number else 0)
    found = turnover.rate(start + count / 10)
    assert found.seats == pytest.approx(10 * seats, rel=0.01)
    assert found.tokens == pytest.approx(10 * tokens, rel=0.01)


def test_what_ended_is_forgotten_and_nothing_comes_free_where_more_is_taken() -> None:
    turnover = Turnover()
    assert turnover.rate(5.0) == NOTHING
    turnover.add(0.0, 0, 0)
    turnover.add(1.0, 3, -50)
    assert turnover.rate(1.0).seats > 2
    assert turnover.rate(1.0).tokens == 0
    assert turnover.rate(100.0).seats < 0.01


def test_what_is_lacking_longest_counts() -> None:
    assert Room(1, 100).without(40) == Room(0, 60)
    assert Room(0, 60).lacking(NOTHING) == 0
    assert Room(-1, -100).lacking(Room(2, 10)) == 10
    assert Room(-1, 60).lacking(NOTHING) == math.inf
    assert PLENTY.without(10**9) == PLENTY
