"""Each situation, made in the simulator, gives its finding and no other; its replay shows the gain of the change."""

from collections.abc import Callable
from functools import cache

import pytest

from tests.diagnose import situations
from weft.core import Coefficients
from weft.diagnose.facts import Facts, Yardsticks, facts_of, profile_of_run
from weft.diagnose.finding import Change, Symptom
from weft.diagnose.replay import START, Scores, recorded, replay, replayable
from weft.diagnose.rules import diagnose
from weft.observe.recording import Recording

EXPECTED: dict[Callable[[], Recording], Symptom | None] = {
    situations.healthy: None,
    situations.prefill_queueing: Symptom.PREFILL_QUEUEING,
    situations.decode_scheduling: Symptom.DECODE_SCHEDULING,
    situations.kv_pressure: Symptom.KV_PRESSURE,
    situations.interference: Symptom.INTERFERENCE,
    situations.prefix_reuse: Symptom.PREFIX_REUSE,
    situations.broken_prefixes: Symptom.PREFIX_REUSE,
    situations.host_bound: Symptom.HOST_BOUND,
    situations.large_batches: Symptom.LARGE_BATCHES,
    situations.impossible_target: Symptom.IMPOSSIBLE_TARGET,
    situations.slow_clients: Symptom.SLOW_CLIENTS,
    situations.api_process: Symptom.API_PROCESS,
    situations.few_seats: Symptom.FEW_SEATS,
}


@cache
def found(make: Callable[[], Recording]) -> tuple[Recording, Facts]:
    recording = make()
    return recording, facts_of(recording.runs[0], recording, Yardsticks())


def scores(make: Callable[[], Recording], change: Change) -> Scores:
    (run,) = found(make)[0].runs
    profile = profile_of_run(run)
    assert profile is not None
    assert replayable(run) == ""
    return replay(run, profile, change)


@pytest.mark.parametrize("make", EXPECTED, ids=lambda make: make.__name__)
def test_a_situation_gives_its_finding_and_no_other(make: Callable[[], Recording]) -> None:
    expected = EXPECTED[make]
    findings = diagnose(found(make)[1])
    assert [finding.symptom for finding in findings] == ([] if expected is None else [expected])
    for finding in findings:
        assert any(character.isdigit() for line in finding.evidence for character in line)
        assert finding.setting


# Situations in which a setting helps. (A change of the host, the clients or the prompts is no setting.)
HELPED = [make for make, symptom in EXPECTED.items() if symptom is not None and diagnose(found(make)[1])[0].changes]


@pytest.mark.parametrize("make", HELPED, ids=lambda make: make.__name__)
def test_a_proposed_change_helps_in_the_replay(make: Callable[[], Recording]) -> None:
    (finding,) = diagnose(found(make)[1])
    before = scores(make, START)
    after = [scores(make, change) for change in finding.changes]
    assert max(one.kept for one in after) > before.kept
    assert before.kept < 0.99 or finding.symptom is Symptom.INTERFERENCE


def test_most_situations_have_a_change_to_replay() -> None:
    assert len(HELPED) >= 7


@pytest.mark.parametrize("make", [situations.healthy, situations.interference, situations.prefix_reuse])
def test_a_replay_without_a_change_is_the_recorded_run(make: Callable[[], Recording]) -> None:
    """Recorded in the simulator, so the replay is exact, but for the time from the device to the client."""
    (run,) = found(make)[0].runs
    was, again = recorded(run), scores(make, START)
    assert again.requests == was.requests > 0
    for one, other in ((was.ttft, again.ttft), (was.gap, again.gap)):
        assert other.p50 == pytest.approx(one.p50, rel=0.02, abs=0.002)
        assert other.p99 == pytest.approx(one.p99, rel=0.02, abs=0.002)


def test_interference_names_the_documents_and_without_them_the_gaps_are_in_time() -> None:
    recording, facts = found(situations.interference)
    run = recording.runs[0]
    documents = {key for key, prompt in run.prompts.items() if prompt.prompt_tokens == 30_000}
    assert {key for key, _, _ in facts.blamed} == documents
    (finding,) = diagnose(facts)
    isolation = next(change for change in finding.changes if change.without)
    assert isolation.without == documents
    after = scores(situations.interference, isolation)
    assert after.gap.p99 < 0.05
    assert after.requests == len(run.prompts) - len(documents)
    assert after.kept == 1.0


def test_evicted_and_broken_prefixes_are_told_apart() -> None:
    evicted, broken = (found(make)[1].prefix for make in (situations.prefix_reuse, situations.broken_prefixes))
    assert evicted.evicted_prompts == 160, "all turns but the first of 40 sessions"
    assert evicted.broken_prompts == 0
    assert broken.broken_prompts == 160
    assert broken.evicted_prompts == 0
    assert broken.broken_block == 512 // 16, "what changes is behind the first 512 tokens"


def test_the_cache_of_a_replay_holds_what_the_recorded_one_held() -> None:
    """Sessions whose beginnings are cached: the prefixes of the recording are those of the replay."""
    arrivals = situations.sessions(lambda session, turn, block: 1000 * session + block)
    recording = situations.record("chunked:2048", arrivals, targets=situations.SHORT)
    facts = facts_of(recording.runs[0], recording, Yardsticks())
    assert facts.prefix.hit_rate > 0.6
    assert facts.prefix.evicted_tokens == 0
    assert diagnose(facts) == []
    profile = profile_of_run(recording.runs[0])
    assert profile is not None
    assert isinstance(profile.coefficients, Coefficients)
    assert replay(recording.runs[0], profile, START).kept == recorded(recording.runs[0]).kept == 1.0


def test_requests_without_targets_are_measured_by_the_yardsticks() -> None:
    no_targets = situations.Targets()
    recording = situations.record("monolithic", situations.chats(6, 12, prompt=3000, output=120), targets=no_targets)
    run = recording.runs[0]
    assert all(prompt.gap_target is None for prompt in run.prompts.values())
    facts = facts_of(run, recording, Yardsticks())
    assert [finding.symptom for finding in diagnose(facts)] == [Symptom.DECODE_SCHEDULING]
    assert not facts.has_own_targets
    assert diagnose(facts_of(run, recording, Yardsticks(gap=1.0, ttft=9.0))) == []
