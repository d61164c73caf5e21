"""Draws traffic and plays it: arrivals, lengths, shared prefixes, budgets, tiny pools, aborts. Used with the toy model
(exact, fast) and with a real one.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st

from tests.strength import QUICK_PART, is_long
from weft.core import Coefficients, CostModel, Policy, State, chunked, slo
from weft.engine.loop import Loop
from weft.engine.sequence import SchedulingParams, Sequence

BLOCK = 4
TOY_COST = Coefficients(fixed=0.1, weights=0.2, token=0.05, pair=0.001, slice=0.01, decode=0.01, context=0.001)


@dataclass(frozen=True)
class Arrival:
    turn: int  # of the loop, before which it arrives
    prompt: tuple[int, ...]
    max_tokens: int
    scheduling: SchedulingParams
    salt: str
    seed: int | None  # None: greedy
    life: int | None  # turns until it is aborted


@dataclass(frozen=True)
class Case:
    arrivals: tuple[Arrival, ...]
    depth: int
    budget: int
    seqs: int
    spare: int  # blocks beyond what the largest request needs
    caching: bool
    by_slack: bool  # the order, classes and shares of `slo`, and its step times; else first come, first served

    @property
    def policy(self) -> Policy:
        return slo(CostModel(TOY_COST), self.budget) if self.by_slack else chunked(self.budget)

    @property
    def num_blocks(self) -> int:
        return self.spare + max(-(-(len(a.prompt) + a.max_tokens - 1) // BLOCK) for a in self.arrivals)


# Often the same beginning, so that prefixes are shared, at block borders and between them.
_prompts = st.builds(
    lambda shared, tail: tuple(1 + i % 49 for i in range(shared)) + tuple(tail),
    st.integers(0, 20),
    st.lists(st.integers(1, 49), min_size=1, max_size=10),
)
_arrivals = st.builds(
    Arrival,
    turn=st.integers(0, 8),
    prompt=_prompts,
    max_tokens=st.integers(1, 24),
    scheduling=st.builds(
        SchedulingParams,
        priority=st.integers(0, 1),
        tenant=st.sampled_from(["", "", "a", "b"]),
        flex=st.sampled_from([False, False, True]),
        ttft_target=st.just(math.inf),  # promised nothing, so nobody is refused
        gap_target=st.just(math.inf),
    ),
    salt=st.sampled_from(["", "", "", "salt"]),
    seed=st.one_of(st.none(), st.integers(0, 5)),
    life=st.one_of(st.none(), st.none(), st.integers(0, 3), st.integers(0, 14)),
)
cases = st.builds(
    Case,
    arrivals=st.lists(_arrivals, min_size=2, max_size=8).map(tuple),
    depth=st.integers(0, 1),
    budget=st.integers(6, 30),
    seqs=st.integers(2, 6),
    spare=st.integers(0, 6),
    caching=st.sampled_from([True, True, True, False]),
    by_slack=st.booleans(),
)


def play(
    case: Case,
    loop: Loop,
    open_stream: Callable[[str, Arrival, float], Sequence],
    solo: Callable[[Arrival], list[int]],
    seen: Counter[str],
) -> None:
    """Plays a case to its end, compares every request with its solo run, and counts in `seen` what happened."""
    streams: list[tuple[Sequence, Arrival]] = []
    turn = 0
    while loop.has_work or len(streams) < len(case.arrivals):
        for number, arrival in enumerate(case.arrivals):
            if arrival.turn == turn:
                stream = open_stream(f"r{number}", arrival, float(turn))
                loop.add(stream)
                streams.append((stream, arrival))
        for stream, arrival in streams:
            if arrival.life is not None and arrival.turn + arrival.life == turn:
                _abort(loop, stream, seen)
        loop.step()
        loop.scheduler.check_integrity()
        turn += 1
        assert turn < 3000, f"the loop does not come to an end: {[stream.request for stream, _ in streams]}"
    for stream, arrival in streams:
        expected = solo(arrival)
        if stream.request.finish_reason == "abort":
            assert stream.output == expected[: len(stream.output)]
        else:
            assert stream.output == expected
        seen["preemptions"] += stream.request.preemptions
        seen["prefix hits"] += stream.request.cached_tokens > 0
    assert loop.scheduler.kv.block_pool.num_free == loop.scheduler.kv.block_pool.num_blocks, "blocks were lost"
    assert not loop.sequences


RARE = ("preemptions", "prefix hits", "mid-prefill aborts", "aborts with a step in flight")


def repeat_until(enough: Callable[[], bool], draw: Callable[[], None], rounds: int = 5) -> None:
    """Draws examples again until `enough`: what is rare is rarer in some batches of examples than in others.

    `rounds` counts batches of the long run; the default run draws as many examples in more and smaller batches.
    """
    for _ in range(rounds if is_long() else rounds * QUICK_PART):
        draw()
        if enough():
            return


def has_really_happened(seen: Counter[str]) -> bool:
    return all(seen[what] >= 5 for what in RARE)


def assert_it_really_happened(seen: Counter[str]) -> None:
    for what in RARE:
        assert seen[what] >= 5, f"only {seen[what]} {what} over all examples"


def _abort(loop: Loop, stream: Sequence, seen: Counter[str]) -> None:
    slot = stream.request.slot
    if stream.request.state is State.RUNNING:
        slots = loop.scheduler.slots
        seen["mid-prefill aborts"] += bool(0 < slots.planned[slot] < stream.request.prompt_tokens)
        seen["aborts with a step in flight"] += bool(slots.num_in_flight[slot])
    loop.abort(stream)
