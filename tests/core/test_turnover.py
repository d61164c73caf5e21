"""What comes free where memory is scarce."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.turnover import FEWEST, MEMORY, SCARCE, Turnover


def serve(turnover: Turnover, steps: int, *, seconds: float, tokens: int, grown: int = 0, free: float = 0.1) -> None:
    """In each step one ends, which gives `tokens` back."""
    for _ in range(steps):
        turnover.ended(tokens)
        turnover.step(seconds, grown, free)


@given(st.integers(FEWEST + 1, 400), st.floats(0.001, 0.1), st.integers(100, 10**5), st.integers(0, 50))
def test_a_steady_turnover_is_known_as_soon_as_enough_have_ended(
    count: int, seconds: float, tokens: int, grown: int
) -> None:
    turnover = Turnover()
    serve(turnover, count, seconds=seconds, tokens=tokens, grown=grown, free=SCARCE / 2)
    if FEWEST * seconds < MEMORY / 10:
        assert turnover.rate == pytest.approx((tokens - grown) / seconds)


def test_nothing_is_known_of_scarce_memory_while_there_is_plenty() -> None:
    turnover = Turnover()
    serve(turnover, 100, seconds=0.1, tokens=1000, grown=10, free=0.5)
    assert turnover.rate is None
    serve(turnover, FEWEST - 1, seconds=0.01, tokens=1000, grown=10)
    assert turnover.rate is None, "one more has to end"


def test_nothing_comes_free_where_more_is_taken() -> None:
    turnover = Turnover()
    serve(turnover, 50, seconds=0.01, tokens=10, grown=20)
    assert turnover.rate is None


def test_what_was_long_ago_is_forgotten() -> None:
    turnover = Turnover()
    for tokens in (100, 900):
        serve(turnover, 1000, seconds=0.1, tokens=tokens)
    assert turnover.rate == pytest.approx(9000, rel=0.01)
    for _ in range(1000):
        turnover.step(0.1, 0, free=0.1)
    assert turnover.rate is None
