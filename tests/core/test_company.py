"""A request's tokens do not depend on its company: exactly, on the toy model, with many examples."""

from collections import Counter

from hypothesis import given, settings

from tests.company import BLOCK, Arrival, Case, assert_it_really_happened, cases, play
from tests.toy import solo, toy_loop, toy_stream
from weft.engine.stream import Stream


def open_stream(name: str, arrival: Arrival, now: float) -> Stream:
    return toy_stream(
        name,
        arrival.prompt,
        arrival.max_tokens,
        block_size=BLOCK,
        arrival=now,
        **arrival.standing._asdict(),
        salt=arrival.salt,
    )


def test_company_never_changes_tokens() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=500, deadline=None)
    @given(cases)
    def plays(case: Case) -> None:
        loop = toy_loop(
            num_blocks=case.num_blocks,
            block_size=BLOCK,
            policy=case.policy,
            seqs=case.seqs,
            depth=case.depth,
            caching=case.caching,
        )
        play(case, loop, open_stream, lambda arrival: solo(arrival.prompt, arrival.max_tokens), seen)

    plays()
    assert_it_really_happened(seen)
