"""Blame, on recordings of the simulator: the parts add up, every late token is found, and the culprit is named."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.smooth import SMOOTH
from tests.strength import examples
from weft.core import HostCost, Targets
from weft.observe.blame import Cause, LateToken, late_tokens
from weft.observe.recording import Recording
from weft.sim.profiles import Profile, load_profile
from weft.sim.record import record_policy
from weft.sim.simulator import Played, Truth
from weft.sim.traces import Arrival, Trace

HOST = HostCost(step=0.0008, row=4e-7, prefill=0.002, commit=2e-5, token=3e-5, request=0.0005, arrival=4e-5)


def blamed(recording: Recording) -> list[LateToken]:
    (run,) = recording.runs
    return list(late_tokens(run, recording))


def seconds(late: LateToken, *causes: Cause) -> float:
    return sum(part.seconds for part in late.parts if part.cause in causes)


def without_profile(recording: Recording) -> Recording:
    (run,) = recording.runs
    assert run.info is not None
    return replace(recording, runs=[replace(run, info=_copy(run.info, profile=None))])


def _copy(struct, **changes):  # type: ignore[no-untyped-def]
    import msgspec

    return msgspec.structs.replace(struct, **changes)


def without_requests(recording: Recording) -> Recording:
    """As if the API process had reported nothing: the engine's side alone."""
    (run,) = recording.runs
    return replace(recording, runs=[replace(run, requests={})])


arrivals = st.builds(
    Arrival,
    time=st.sampled_from([0.0, 0.0, 0.03, 0.1, 0.4, 1.0]),
    prompt_tokens=st.integers(1, 3000),
    output_tokens=st.integers(1, 60),
    prefix_ids=st.sampled_from([(), (), (1, 2, 3, 4, 5, 6)]),
    flex=st.sampled_from([False, False, False, True]),
)


@settings(max_examples=examples(150))
@given(
    traffic=st.lists(arrivals, min_size=1, max_size=30),
    policy=st.sampled_from(["monolithic", "chunked:256", "chunked:2048", "slo"]),
    seats=st.integers(1, 20),
    spare=st.integers(0, 200),
    host=st.sampled_from([HostCost(), HOST, replace(HOST, token=0.004), replace(HOST, step=0.02)]),
    noise=st.sampled_from([0.0, 0.1]),
    profiled=st.booleans(),
    gap=st.sampled_from([0.006, 0.02, 0.1]),
)
def test_parts_add_up_and_every_late_token_is_there(
    traffic: list[Arrival],
    policy: str,
    seats: int,
    spare: int,
    host: HostCost,
    noise: float,
    profiled: bool,
    gap: float,
) -> None:
    trace = Trace("t", tuple(sorted(traffic, key=lambda arrival: arrival.time)))
    blocks = max(-(-(one.prompt_tokens + one.output_tokens) // 16) for one in traffic) + spare
    profile = replace(SMOOTH, host=host, kv_tokens=16 * blocks, max_num_seqs=seats)
    targets = Targets(gap=gap, ttft=0.05)
    played, recording = record_policy(policy, trace, profile, targets, Truth(profile.coefficients, noise=noise))
    if not profiled:
        recording = without_profile(recording)
    late = blamed(recording)
    for token in late:
        assert sum(part.seconds for part in token.parts) == pytest.approx(token.seconds, rel=1e-6)
        assert token.seconds > token.target
        for part in token.parts:
            assert part.seconds > 0
            assert len(part.keys) == len(part.shares)
            assert token.key not in part.keys
            assert part.cause is not Cause.UNEXPLAINED or not profiled
            if part.cause in (Cause.PREFILL, Cause.QUEUE):
                assert sum(part.shares) <= part.seconds * (1 + 1e-6)
    assert _times(late) == _late_times(played, targets, trace)
    engine_side = blamed(without_requests(recording))
    for token in engine_side:
        assert sum(part.seconds for part in token.parts) == pytest.approx(token.seconds, rel=1e-6)
        assert not seconds(token, Cause.CLIENT)


def _times(late: list[LateToken]) -> list[tuple[int, bool, float]]:
    return sorted((token.key, token.token_index > 0, round(token.seconds, 7)) for token in late)


def _late_times(played: Played, targets: Targets, trace: Trace) -> list[tuple[int, bool, float]]:
    """The same, from what the clients saw."""
    found = []
    for owner, gap in zip(played.gap_owner.tolist(), played.gaps.tolist(), strict=True):
        if gap > targets.gap * (1 + 1e-9) and not trace.arrivals[owner].flex:
            found.append((owner, True, round(gap, 7)))
    for key, ttft in enumerate(played.ttft.tolist()):
        if np.isfinite(ttft) and not trace.arrivals[key].flex and ttft > targets.ttft * (1 + 1e-9):
            found.append((key, False, round(ttft, 7)))
    return sorted(found)


# 32 streams decode, and a long prompt arrives: what `weft bench interference` measures.
H200 = load_profile("h200-llama-3-8b")
STREAMS = tuple(Arrival(0.0, 512, 400) for _ in range(32))
INJECTED = 32  # key of the long prompt
INTERFERENCE = Trace("interference", (*STREAMS, Arrival(2.0, 16_000, 5)))
GAPS = Targets(gap=0.025)


def interfered(policy: str, profile: Profile = H200) -> tuple[list[LateToken], Recording]:
    """The late gaps of the streams after the long prompt's arrival."""
    _, recording = record_policy(policy, INTERFERENCE, profile, GAPS, Truth(profile.coefficients))
    late = [token for token in blamed(recording) if token.ended > 2.0 and token.key != INJECTED]
    assert {token.key for token in late} == set(range(32))
    return late, recording


@pytest.mark.parametrize("policy", ["monolithic", "chunked:2048"])
@pytest.mark.parametrize("host", [H200.host, HostCost()], ids=["host", "no host"])
def test_the_injected_prompt_is_blamed_and_almost_nothing_is_unexplained(policy: str, host: HostCost) -> None:
    profile = replace(H200, host=host)
    late, _ = interfered(policy, profile)
    _, quiet = record_policy(policy, Trace("quiet", STREAMS), profile, GAPS, Truth(profile.coefficients))
    (run,) = quiet.runs
    assert not [token for token in blamed(quiet) if token.ended > 2.0], "without the prompt, no gap is late"
    for token in late:
        assert seconds(token, Cause.UNEXPLAINED) <= 0.05 * token.seconds
        assert token.parts[0].cause is Cause.PREFILL
        assert token.parts[0].keys == (INJECTED,)
        # What is not blamed on the prompt is what the same gap takes without it, apart from the host's part.
        number = token.token_index
        ends = [step.finished for step in run.steps if token.key in step.decode_keys.tolist()]
        alone = ends[number - 1] - ends[number - 2]
        rest = token.seconds - seconds(token, Cause.PREFILL, Cause.HOST, Cause.API)
        assert rest == pytest.approx(alone, rel=0.1, abs=profile.host.step)
        assert rest < token.target
    assert seconds(late[0], Cause.HOST) > 0 or not host.step


def test_without_a_profile_the_measured_steps_say_as_much() -> None:
    late, recording = interfered("chunked:2048")
    guessed = [token for token in blamed(without_profile(recording)) if token.ended > 2.0 and token.key != INJECTED]
    assert len(late) == len(guessed)
    for one, other in zip(late, guessed, strict=True):
        assert seconds(other, Cause.PREFILL) == pytest.approx(seconds(one, Cause.PREFILL), rel=0.1)
        assert seconds(other, Cause.UNEXPLAINED) <= 0.05 * other.seconds
