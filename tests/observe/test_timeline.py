"""The timeline of simulated runs: events nest, the phases of a request follow each other without a hole, and stalls
name the prompt that caused them.
"""

import io
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.observe.test_blame import H200, HOST, INJECTED, INTERFERENCE
from tests.smooth import SMOOTH
from weft.core import Targets
from weft.observe.frames import EngineFrame, Frame, LagFrame, PromptFrame, RequestFrame, StepFrame, decode_frame
from weft.observe.timeline import last_time, write_timeline
from weft.sim.profiles import Profile
from weft.sim.record import write_recording
from weft.sim.simulator import Truth
from weft.sim.traces import Arrival, Trace

BUSY = Trace("t", tuple(Arrival(0.004 * i, 200 + 613 * i % 3000, 3 + 7 * i % 150) for i in range(80)))
SMALL = replace(SMOOTH, host=HOST, kv_tokens=9_600, max_num_seqs=24)
PHASES = {"api", "queue", "prefill", "recompute", "between slices", "decode", "stall", "preempted", "send"}
Event = dict[str, Any]


def recorded(
    policy: str, trace: Trace = BUSY, profile: Profile = SMALL, gap: float = 0.02, ttft: float = 0.5
) -> list[Frame]:
    frames: list[bytes] = []
    targets = Targets(gap=gap, ttft=ttft)
    write_recording(frames.append, policy, trace, profile, targets, Truth(profile.coefficients, noise=0.02))
    return [decode_frame(frame) for frame in frames]


def events_of(frames: Iterable[Frame], since: float = -math.inf) -> list[Event]:
    file = io.BytesIO()
    count = write_timeline(frames, file, since)
    events: list[Event] = json.loads(file.getvalue())["traceEvents"]
    assert count == sum(event["ph"] != "M" for event in events)
    return events


def span(event: Event) -> tuple[int, int]:
    """Nanoseconds of the begin and the end."""
    begin = round(event["ts"] * 1000)
    return begin, begin + round(event["dur"] * 1000)


def tracks(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def assert_they_nest(events: list[Event]) -> None:
    open_ends: list[int] = []
    for begin, end in sorted(map(span, events), key=lambda one: (one[0], -one[1])):
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)


def phase(event: Event) -> str:
    return str(event["name"]).partition(":")[0]


def requests(events: list[Event]) -> dict[int, tuple[Event, list[Event]]]:
    """By key: the piece around a request, and its phases in order of time."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found = {}
    for (pid, tid), pieces in tracks(events).items():
        if names[pid].endswith("requests"):
            (outer,) = [piece for piece in pieces if phase(piece) not in PHASES]
            found[tid - 1] = outer, sorted((one for one in pieces if one is not outer), key=span)
    return found


@pytest.mark.parametrize("policy", ["monolithic", "chunked:512", "slo"])
@pytest.mark.parametrize("last", [None, 0.7])
def test_events_nest_and_phases_tile_each_request(policy: str, last: float | None) -> None:
    frames = recorded(policy)
    frames.append(LagFrame(0.4, 0.03))
    since = -math.inf if last is None else last_time(frames) - last
    events = events_of(frames, since)
    for pieces in tracks(events).values():
        assert_they_nest(pieces)
        assert min(span(piece)[0] for piece in pieces) >= 0
    found = requests(events)
    ends = {frame.key: frame.finished for frame in frames if isinstance(frame, RequestFrame)}
    arrivals = {frame.key: frame.arrival for frame in frames if isinstance(frame, PromptFrame)}
    assert found.keys() == {key for key, end in ends.items() if end > since}
    zero = max(since, 0.0)
    for key, (outer, phases) in found.items():
        begin, end = span(outer)
        assert begin == pytest.approx(1e9 * max(0.0, arrivals[key] - zero), abs=1)
        assert end == pytest.approx(1e9 * (ends[key] - zero), abs=1)
        upto = begin
        for one in phases:
            assert span(one)[0] == upto
            upto = span(one)[1]
        assert upto == end


def test_phases_say_what_happened() -> None:
    frames = recorded("monolithic")
    seen = Counter(phase(one) for _, phases in requests(events_of(frames)).values() for one in phases)
    assert seen.keys() == PHASES - {"between slices"}
    streams, short = [Arrival(0.0, 256, 400)] * 4, [Arrival(0.55 + 0.001 * i, 3000, 5) for i in range(40)]
    overtaken = Trace("t", (*streams, Arrival(0.5, 60_000, 5), *short))
    _, phases = requests(events_of(recorded("slo", overtaken, SMOOTH, ttft=3.0)))[len(streams)]
    assert "between slices" in [phase(one) for one in phases]
    steps = [frame for frame in frames if isinstance(frame, StepFrame)]
    for key, (outer, phases) in requests(events_of(frames)).items():
        slices = [count for step in steps for owner, _, count, _ in step.slices if owner == key]
        assert [one["args"]["tokens"] for one in phases if phase(one) in ("prefill", "recompute")] == slices
        tokens = sum(key in step.decode_keys for step in steps)
        decoded = sum(one["args"]["tokens"] for one in phases if phase(one) == "decode")
        assert decoded + outer["args"]["stalls"] == tokens
        assert outer["args"]["stalls"] == sum(phase(one) == "stall" for one in phases)


@pytest.mark.parametrize("policy", ["monolithic", "chunked:2048"])
def test_stalls_name_the_injected_prompt(policy: str) -> None:
    found = requests(events_of(recorded(policy, INTERFERENCE, H200, gap=0.025)))
    for key in range(32):
        stalls = [one for one in found[key][1] if phase(one) == "stall" and one["ts"] > 2e6]
        assert stalls
        assert {one["name"] for one in stalls} == {f"stall: prefill of #{INJECTED}"}
        for one in stalls:
            parts = {name: ms for name, ms in one["args"].items() if name.endswith("_ms") and name != "target_ms"}
            gap = parts.pop("gap_ms")
            assert gap > one["args"]["target_ms"] == 25
            assert sum(parts.values()) == pytest.approx(gap, abs=1e-3)


def test_the_tracks_of_steps_host_and_counters() -> None:
    frames = recorded("slo")
    steps = [frame for frame in frames if isinstance(frame, StepFrame)]
    events = events_of(frames)
    found = tracks(events)
    assert [event["args"]["step"] for event in found[2, 1]] == [step.number for step in steps]
    for event, step in zip(found[2, 1], steps, strict=True):
        assert event["args"]["predicted_ms"] == pytest.approx((step.predicted or 0) * 1000)
        assert event["dur"] == pytest.approx((step.finished - step.started) * 1e6, abs=0.01)
    host = sum(event["dur"] for event in found[2, 2])
    assert host == pytest.approx(1e6 * sum(sum(step.host) for step in steps), rel=0.01)
    info = next(frame for frame in frames if isinstance(frame, EngineFrame))
    used = [event["args"]["value"] for event in events if event["name"] == "KV blocks in use"]
    assert max(used) == info.num_blocks - min(step.free_blocks for step in steps)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"KV blocks in use", "queue", "running"}


def test_a_recording_that_begins_in_the_middle_and_one_that_breaks_off() -> None:
    frames = recorded("slo")
    for part in (frames[:1] + frames[len(frames) // 2 :], frames[: len(frames) // 2], frames[len(frames) // 2 :]):
        events = events_of(part)
        for pieces in tracks(events).values():
            assert_they_nest(pieces)
        for outer, phases in requests(events).values():
            assert [span(one)[0] for one in phases[1:]] == [span(one)[1] for one in phases[:-1]]
            assert span(outer)[0] <= span(phases[0])[0]


def test_a_restarted_engine_has_tracks_of_its_own() -> None:
    first, second = recorded("slo"), recorded("monolithic")
    assert isinstance(second[0], EngineFrame)
    second[0].time = 5.0
    events = events_of([*first, *second])
    assert {pid for pid, _ in tracks(events)} == {2, 3, 4, 5}
