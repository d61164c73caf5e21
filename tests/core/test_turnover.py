"""What comes free where memory is scarce."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.turnover import (
    FEWEST_FINISHED,
    RATE_WINDOW_S,
    SCARCE_MEMORY_SHARE,
    USUAL_OUTPUT_TOKENS,
    OutputLengths,
    Turnover,
)


def serve(turnover: Turnover, steps: int, *, seconds: float, tokens: int, grown: int = 0, free: float = 0.1) -> None:
    """In each step one ends, which gives `tokens` back."""
    for _ in range(steps):
        turnover.note_finished(tokens)
        turnover.note_step(seconds, grown, free)


@given(st.integers(FEWEST_FINISHED + 1, 400), st.floats(0.001, 0.1), st.integers(100, 10**5), st.integers(0, 50))
def test_a_steady_turnover_is_known_as_soon_as_enough_have_ended(
    count: int, seconds: float, tokens: int, grown: int
) -> None:
    turnover = Turnover()
    serve(turnover, count, seconds=seconds, tokens=tokens, grown=grown, free=SCARCE_MEMORY_SHARE / 2)
    if FEWEST_FINISHED * seconds < RATE_WINDOW_S / 10:
        assert turnover.freed_per_second == pytest.approx((tokens - grown) / seconds)


def test_nothing_is_known_of_scarce_memory_while_there_is_plenty() -> None:
    turnover = Turnover()
    serve(turnover, 100, seconds=0.1, tokens=1000, grown=10, free=0.5)
    assert turnover.freed_per_second is None
    serve(turnover, FEWEST_FINISHED - 1, seconds=0.01, tokens=1000, grown=10)
    assert turnover.freed_per_second is None, "one more has to end"


def test_nothing_comes_free_where_more_is_taken() -> None:
    turnover = Turnover()
    serve(turnover, 50, seconds=0.01, tokens=10, grown=20)
    assert turnover.freed_per_second is None


def test_what_was_long_ago_is_forgotten() -> None:
    turnover = Turnover()
    for tokens in (100, 900):
        serve(turnover, 1000, seconds=0.1, tokens=tokens)
    assert turnover.freed_per_second == pytest.approx(9000, rel=0.01)
    for _ in range(1000):
        turnover.note_step(0.1, 0, free_share=0.1)
    assert turnover.freed_per_second is None


def test_a_request_must_have_ended_when_it_has_written_all_at_its_own_gap() -> None:
    """Not at the tightest gap of all: a constrained one has a token every second step, and steps may be as long as the
    gaps of those that stay."""
    gaps = np.array([0.025, 0.5, 2 * 0.025, math.inf])
    ends = OutputLengths().end_forecast(
        np.zeros(4, np.int64), np.array([5, 100, 40, 1]), gaps, np.array([10, 20, 30, 40])
    )
    assert ends.latest.after.tolist() == pytest.approx([0.125, 2.0, 50.0, math.inf])
    assert ends.latest.context.tolist() == [10, 30, 20, 40]


def test_requests_are_expected_to_end_as_others_did() -> None:
    lengths = OutputLengths()
    many = np.full(50, 4000)
    alike = (np.zeros(50, np.int64), many, np.full(50, 0.05), many)
    assert lengths.end_forecast(*alike).expected.after.tolist() == [USUAL_OUTPUT_TOKENS] * 50
    for tokens in range(20, 61):
        lengths.note_finished(tokens)
    after = lengths.end_forecast(*alike).expected.after
    assert after[0] <= 21
    assert after[-1] >= 59
    written = np.full(50, 50)
    assert lengths.end_forecast(written, *alike[1:]).expected.after.max() <= 10
    assert lengths.end_forecast(np.full(50, 1000), *alike[1:]).expected.after.max() <= 60
    assert lengths.end_forecast(alike[0], np.full(50, 3), *alike[2:]).expected.after.max() == 3
