"""Facts of hand-made recordings, and rules on hand-made facts."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.diagnose import situations
from weft.diagnose.facts import BlamedPrompt, Facts, Lateness, Yardsticks, facts_of
from weft.diagnose.finding import Symptom
from weft.diagnose.prefixes import prefix_facts
from weft.diagnose.replay import recorded, replayable
from weft.diagnose.rules import diagnose
from weft.diagnose.step_times import StepTimes
from weft.observe.blame import NEEDED, Cause, LateToken, Part
from weft.observe.blame_summary import excess
from weft.observe.frames import PromptFrame, StepFrame
from weft.observe.recording import EngineRun, Recording

BLOCK = 16


def step(
    number: int, decodes: list[int], slices: list[tuple[int, int, int, bool]], started: float, finished: float
) -> StepFrame:
    shape = (len(decodes) + sum(one[2] for one in slices), 0.0, len(slices), len(decodes), 0.0, 0.0)
    keys = np.array(decodes, np.int32).tobytes()
    host = (0.001, 0.001, 0.0, 0.0)
    return StepFrame(
        "0", number, started, finished, None, keys, slices, shape, host, "", "", [], 1, 0, 0, 10, 0, 0, False
    )


def prompt(key: int, arrival: float, tokens: int, prefix: list[int]) -> PromptFrame:
    numbers = np.array(prefix, np.int32).tobytes()
    return PromptFrame("0", key, arrival, arrival, tokens, 10, 0.05, True, 1.0, True, False, 0, False, numbers)


def test_times_of_tokens() -> None:
    run = EngineRun(
        steps=[
            step(1, [], [(7, 0, 32, False)], 0.0, 0.1),
            step(2, [], [(7, 32, 8, True), (9, 16, 4, True)], 0.1, 0.2),
            step(3, [9, 7], [], 0.25, 0.3),
            step(4, [7], [], 0.3, 0.4),
        ]
    )
    times = StepTimes.of(run)
    assert times.first_tokens() == {7: 0.2, 9: 0.2}
    assert times.output_tokens() == {7: 3, 9: 2}
    keys, gaps = times.gaps()
    assert keys.tolist() == [7, 7, 9]
    assert gaps == pytest.approx([0.1, 0.1, 0.1])
    assert times.first_slices() == {7: (0.0, 0), 9: (0.1, 16)}
    assert times.busy_seconds() == pytest.approx(0.35)


@given(st.lists(st.lists(st.integers(0, 5), unique=True, max_size=6), min_size=1, max_size=30))
def test_gaps_are_those_of_a_simple_loop(batches: list[list[int]]) -> None:
    run = EngineRun(steps=[step(index, keys, [], index, index + 0.5) for index, keys in enumerate(batches)])
    last: dict[int, float] = {}
    expected: list[tuple[int, float]] = []
    for index, keys in enumerate(batches):
        for key in keys:
            if key in last:
                expected.append((key, index + 0.5 - last[key]))
            last[key] = index + 0.5
    times = StepTimes.of(run)
    found = zip(*(one.tolist() for one in times.gaps()), strict=True)
    assert sorted(found) == sorted(expected)
    assert sum(times.output_tokens().values()) == sum(map(len, batches))


def turn(number: int, key: int, cached: int, tokens: int) -> StepFrame:
    return step(number, [], [(key, cached, tokens - cached, True)], float(number), number + 0.5)


def test_a_prefix_that_was_overwritten() -> None:
    blocks = list(range(100, 164))  # 64 blocks
    run = EngineRun(
        prompts={
            1: prompt(1, 0.0, 1024, blocks),
            2: prompt(2, 1.0, 1040, [*blocks, 7]),
            3: prompt(3, 2.0, 1040, [*blocks, 8]),
        },
        steps=[turn(1, 1, 0, 1024), turn(2, 2, 1024, 1040), turn(3, 3, 0, 1040)],
    )
    found = prefix_facts(run, StepTimes.of(run), BLOCK)
    assert (found.prompts, found.cached_tokens, found.seen_tokens) == (3, 1024, 2048)
    assert (found.evicted_prompts, found.evicted_tokens) == (1, 1024)
    assert found.broken_prompts == 0
    assert found.known_tokens == {1: 0, 2: 1024, 3: 1024}


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    blocks = list(range(64))
    run = EngineRun(
        prompts={1: prompt(1, 0.0, 1024, blocks), 2: prompt(2, 1.0, 1024, blocks)},
        steps=[turn(1, 1, 0, 1024), turn(2, 2, 0, 1024)],
    )
    assert prefix_facts(run, StepTimes.of(run), BLOCK).known_tokens == {1: 0, 2: 1024 - BLOCK}


def test_a_prefix_that_is_still_being_computed_is_not_overwritten() -> None:
    blocks = list(range(64))
    run = EngineRun(
        prompts={1: prompt(1, 0.0, 1024, blocks), 2: prompt(2, 0.0, 1024, blocks)},
        steps=[step(1, [], [(1, 0, 512, False), (2, 0, 512, False)], 1.0, 1.5), turn(2, 1, 512, 1024)],
    )
    assert prefix_facts(run, StepTimes.of(run), BLOCK).evicted_tokens == 0


def test_a_turn_that_differs_early() -> None:
    """The next prompt is as long as prompt and answer, but its third block is another one."""
    run = EngineRun(
        prompts={
            1: prompt(1, 0.0, 1024, list(range(64))),
            2: prompt(2, 1.0, 1100, [0, 1, *range(1000, 1066)]),
            3: prompt(3, 2.0, 5000, [0, 1, *range(2000, 2300)]),  # far longer: not its next turn
        },
        steps=[turn(1, 1, 0, 1024), turn(2, 2, 32, 1100), turn(3, 3, 32, 5000)],
    )
    found = prefix_facts(run, StepTimes.of(run), BLOCK)
    assert (found.broken_prompts, found.broken_block, found.broken_tokens) == (1, 2, (64 - 2) * BLOCK)
    assert found.evicted_prompts == 0


def late(target: float, **seconds: float) -> LateToken:
    parts = tuple(Part(Cause(cause), value) for cause, value in seconds.items())
    return LateToken(1, 3, 0.0, sum(seconds.values()), target, True, parts, 10)


def test_late_seconds_go_to_what_a_token_could_do_without() -> None:
    assert excess(late(0.02, decodes=0.01, prefill=0.04)) == pytest.approx({Cause.PREFILL: 0.03})
    assert excess(late(0.02, decodes=0.05, prefill=0.01)) == pytest.approx(
        {Cause.PREFILL: 0.01, Cause.DECODES: 0.03}
    ), "the batch alone is too slow"
    assert excess(late(0.02, decodes=0.05)) == pytest.approx({Cause.DECODES: 0.03})


@given(st.dictionaries(st.sampled_from(Cause), st.floats(0.001, 10), min_size=1), st.floats(0.01, 0.99))
def test_late_seconds_add_up(parts: dict[Cause, float], share: float) -> None:
    target = share * sum(parts.values())
    found = excess(late(target, **{str(cause): seconds for cause, seconds in parts.items()}))
    assert sum(found.values()) == pytest.approx(sum(parts.values()) - target)
    assert all(0 <= seconds <= parts[cause] * (1 + 1e-9) for cause, seconds in found.items())
    if found.keys() & set(NEEDED):
        assert all(found[cause] == pytest.approx(parts[cause]) for cause in parts.keys() - set(NEEDED))


def sick(first: dict[str, float] | None = None, gaps: dict[str, float] | None = None, **others: object) -> Facts:
    """Facts of an engine in which half of the tokens are late for these reasons."""
    of_first = Lateness(tokens=100, late=50 if first else 0, seconds=first or {})
    of_gaps = Lateness(tokens=1000, late=500 if gaps else 0, seconds=gaps or {})
    return replace(Facts(prompts=100, finished=100, policy="chunked"), first_tokens=of_first, gaps=of_gaps, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cause", "symptom"),
    [
        (Cause.GRAMMAR, Symptom.GRAMMAR_MASKS),
        (Cause.TRANSFER, Symptom.TRANSFERS),
        (Cause.SLOW_STEP, Symptom.SLOW_STEPS),
        (Cause.UNEXPLAINED, Symptom.UNEXPLAINED),
        (Cause.CLIENT, Symptom.SLOW_CLIENTS),
        (Cause.API, Symptom.API_PROCESS),
        (Cause.SEATS, Symptom.FEW_SEATS),
        (Cause.BLOCKS, Symptom.KV_PRESSURE),
        (Cause.PREEMPTION, Symptom.KV_PRESSURE),
        (Cause.HOST, Symptom.HOST_BOUND),
    ],
)
def test_a_cause_is_a_symptom(cause: Cause, symptom: Symptom) -> None:
    for facts in (sick(first={cause: 5.0}), sick(gaps={cause: 5.0})):
        assert [finding.symptom for finding in diagnose(facts)] == [symptom]


def test_every_cause_has_a_symptom() -> None:
    for cause in Cause:
        assert diagnose(sick(first={cause: 5.0})) or diagnose(sick(gaps={cause: 5.0})), cause


def test_the_symptom_with_the_most_late_time_comes_first_and_small_ones_are_left_out() -> None:
    facts = sick(first={Cause.QUEUE: 4.0}, gaps={Cause.HOST: 5.0, Cause.API: 0.5})
    found = diagnose(facts)
    assert [finding.symptom for finding in found] == [Symptom.HOST_BOUND, Symptom.PREFILL_QUEUEING]
    assert [round(finding.weight, 2) for finding in found] == [0.53, 0.42]


def test_few_late_tokens_are_healthy() -> None:
    facts = sick(gaps={Cause.PREFILL: 5.0})
    assert diagnose(facts)
    assert diagnose(replace(facts, gaps=replace(facts.gaps, late=10))) == [], "a promise allows 1%"
    assert diagnose(replace(facts, gaps=replace(facts.gaps, late=10, stalls=2))), "but a reader notices stalls"
    assert diagnose(replace(facts, gaps=replace(facts.gaps, late=10, broken=2))), "and 2% of the requests"


def test_an_idle_device_is_a_finding_where_tokens_are_late() -> None:
    """Also if the host's own time is a small part of what is late. A small model leaves a device idle."""
    parts = {"plan": 0.001, "submit": 0.01}
    facts = sick(gaps={Cause.API: 5.0}, steps=1000, idle_share=0.5, host_parts=parts)
    _, finding = diagnose(facts)
    assert finding.symptom is Symptom.HOST_BOUND
    assert "slowest part is submit" in finding.inspect
    assert [one.symptom for one in diagnose(replace(facts, idle_share=0.1))] == [Symptom.API_PROCESS]
    assert diagnose(replace(Facts(prompts=100, steps=1000), idle_share=0.5, host_parts=parts)) == []


def test_a_request_id_cannot_write_to_the_terminal() -> None:
    assert str(BlamedPrompt(3, "a\x1b[2Jb\n", 100, 1.0)) == "a?[2Jb? (100 tokens: 1 s)"
    assert str(BlamedPrompt(3, "", 100, 1.0)) == "sequence 3 (100 tokens: 1 s)"


def test_a_ring_that_begins_in_the_middle() -> None:
    """The first frames are lost: no EngineFrame, sequences without a PromptFrame, first slices missing."""
    (whole,) = situations.interference().runs
    lost = sorted(whole.prompts)[:20]
    run = EngineRun(
        None,
        whole.steps[600:],
        {key: one for key, one in whole.prompts.items() if key not in lost},
        whole.requests,
    )
    facts = facts_of(run, Recording([run]), Yardsticks())
    assert [finding.symptom for finding in diagnose(facts)] == [Symptom.INTERFERENCE]
    assert "begins after the engine's start" in replayable(run, None)
    assert recorded(run).requests > 50
