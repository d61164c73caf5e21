"""A request's tokens do not depend on its company: exactly, on the toy model, with many examples."""

from collections import Counter

import pytest
from hypothesis import given, settings

from tests.company import (
    BLOCK,
    Arrival,
    Case,
    assert_it_really_happened,
    cases,
    has_really_happened,
    play,
    repeat_until,
)
from tests.strength import examples
from tests.toy import ReluctantExecutor, ToyExecutor, ToyMatcher, solo, toy_loop, toy_stream
from weft.engine.sequence import Sequence


def open_stream(name: str, arrival: Arrival, now: float) -> Sequence:
    return toy_stream(
        name,
        arrival.prompt,
        arrival.max_tokens,
        block_size=BLOCK,
        arrival=now,
        **arrival.scheduling._asdict(),
        salt=arrival.salt,
        matcher=ToyMatcher() if is_constrained(arrival) else None,
    )


def is_constrained(arrival: Arrival) -> bool:
    return arrival.seed in (4, 5)  # as in tests/engine


@pytest.mark.parametrize("executor", [ToyExecutor, ReluctantExecutor])
def test_company_never_changes_tokens(executor: type[ToyExecutor]) -> None:
    seen: Counter[str] = Counter()
    streams: list[Sequence] = []

    @settings(max_examples=examples(500), deadline=None)
    @given(cases)
    def plays(case: Case) -> None:
        loop = toy_loop(
            num_blocks=case.num_blocks,
            block_size=BLOCK,
            policy=case.policy,
            seqs=case.seqs,
            depth=case.depth,
            caching=case.caching,
            make_executor=executor,
        )

        def alone(arrival: Arrival) -> list[int]:
            return solo(arrival.prompt, arrival.max_tokens, constrained=is_constrained(arrival))

        def opened(name: str, arrival: Arrival, now: float) -> Sequence:
            streams.append(open_stream(name, arrival, now))
            return streams[-1]

        play(case, loop, opened, alone, seen)
        seen["refused decodes"] += getattr(loop.executor, "refusals", 0)
        loop.close()

    def preempted() -> int:
        return sum(stream.request.preemptions for stream in streams if stream.request.constrained)

    repeat_until(lambda: preempted() >= 5 and has_really_happened(seen), plays)
    assert_it_really_happened(seen)
    assert preempted() >= 5, "masks are computed in threads: constrained requests may have run alone"
    assert (seen["refused decodes"] > examples(1000)) == (executor is ReluctantExecutor)
