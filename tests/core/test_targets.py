"""Who is promised what: one definition for the scheduler, the headers and the metrics."""

import math

from weft.core import Request, Source, Targets

SERVER = Targets(gap=0.05, ttft=1.0, ttft_per_1k=0.25, min_gap=0.01)
DEFAULTS = Targets(0.05, 1.0, 0.25, Source.DEFAULT, Source.DEFAULT, min_gap=0.01)


def test_what_the_operator_sets_is_promised() -> None:
    promise = SERVER.promise(2000)
    assert (promise.promised_ttft, promise.promised_gap) == (1.5, 0.05)
    assert promise.gap_wish == math.inf


def test_defaults_are_aimed_at_and_not_promised() -> None:
    promise = DEFAULTS.promise(2000)
    assert (promise.ttft, promise.gap) == (1.5, 0.05)
    assert (promise.promised_ttft, promise.promised_gap) == (math.inf, math.inf)


def test_a_request_may_have_more_time_and_is_promised_it() -> None:
    for targets in (SERVER, DEFAULTS):
        promise = targets.promise(10, ttft=3.0, gap=0.2)
        assert (promise.promised_ttft, promise.promised_gap, promise.gap_wish) == (3.0, 0.2, math.inf)


def test_a_smaller_gap_is_a_wish_behind_the_servers() -> None:
    promise = SERVER.promise(10, gap=0.02)
    assert (promise.promised_gap, promise.gap_wish) == (0.05, 0.02)
    promise = DEFAULTS.promise(10, gap=0.02)  # no client makes a promise of what was only aimed at
    assert (promise.promised_gap, promise.gap, promise.gap_wish) == (math.inf, 0.05, 0.02)
    assert SERVER.promise(10, gap=0.001).gap_wish == 0.01, "no less than the least"


def test_own_targets_are_promises_of_their_own() -> None:
    promise = DEFAULTS.promise(10, ttft=0.3)
    assert (promise.promised_ttft, promise.ttft_source) == (0.3, Source.REQUEST)
    assert promise.promised_gap == math.inf


def test_a_constrained_request_is_promised_the_time_of_two_steps() -> None:
    promise = SERVER.promise(10, constrained=True)
    assert promise.promised_gap == 0.1
    request = Request("a", 10, 5, gap_target=promise.gap, constrained=True)
    assert request.promised_max_step == 0.05, "no step is longer than it is for the others"
