"""StepRecorder on a real loop: the frames tell of every token of every request, once and in its step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_scheduler import prompt
from tests.toy import toy_loop, toy_stream
from weft.core import Request, StepRecord
from weft.observe.frames import PromptFrame, StepFrame, decode_frame
from weft.observe.step_recorder import StepRecorder


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=8),
    blocks=st.integers(16, 40),
    seats=st.integers(1, 4),
    depth=st.integers(0, 1),
    aborted=st.integers(0, 20),
)
def test_frames_tell_of_every_token_and_slice(
    lengths: list[tuple[int, int, int]], blocks: int, seats: int, depth: int, aborted: int
) -> None:
    """Also if requests are preempted (few blocks), share slots one after the other (few seats), or are aborted."""
    loop = toy_loop(num_blocks=blocks, budget=8, seqs=seats, depth=depth, caching=False)
    keys: dict[Request, int] = {}
    recorder = StepRecorder("e", loop.scheduler.slots.size, keys.__getitem__)
    frames: list[StepFrame] = []
    preempted: list[int] = []

    def note(record: StepRecord) -> None:
        frame = decode_frame(recorder.step(record, loop.scheduler.queued_tokens))
        assert isinstance(frame, StepFrame)
        assert len(frame.decode_keys) == frame.shape[3]
        assert sum(tokens for _, _, tokens, _ in frame.slices) == record.prefill_tokens
        frames.append(frame)
        preempted.extend(frame.preempted)

    loop.on_record = note
    tokens: dict[int, int] = {}
    streams = []
    for number, (length, output, _) in enumerate(lengths):
        stream = toy_stream(f"r{number}", prompt(number, length), output)
        keys[stream.request] = number
        streams.append(stream)
    calls, waiting = 0, list(enumerate(lengths))
    while waiting or loop.has_work:
        for number, (_, _, begins) in list(waiting):
            if begins <= calls:
                loop.add(streams[number])
                waiting.remove((number, lengths[number]))
        if calls == aborted and streams[0].request.arrival_index:
            loop.abort(streams[0])
        for event in loop.step():
            if event.token is not None:
                key = keys[event.sequence.request]
                tokens[key] = tokens.get(key, 0) + 1
        calls += 1
    seen: dict[int, int] = {}
    for frame in frames:
        for key in [*frame.decode_keys.tolist(), *(key for key, _, _, ends in frame.slices if ends)]:
            seen[key] = seen.get(key, 0) + 1
    for key, stream in enumerate(streams):
        # A row that was in flight when its request ended is surplus: its token is dropped.
        assert tokens.get(key, 0) <= seen.get(key, 0) <= tokens.get(key, 0) + 2
        assert stream.request.finish_reason == "abort" or preempted.count(key) == stream.request.preemptions
        ends = [first + count for frame in frames for one, first, count, _ in frame.slices if one == key]
        if tokens.get(key):
            assert lengths[key][0] in ends or stream.request.preemptions


@pytest.mark.parametrize(("blocks", "seats", "reason"), [(64, 1, "seats"), (8, 4, "blocks"), (64, 4, "")])
def test_a_frame_says_what_the_first_waiting_request_waits_for(blocks: int, seats: int, reason: str) -> None:
    loop = toy_loop(num_blocks=blocks, budget=64, seqs=seats, caching=False)
    records: list[StepRecord] = []
    loop.on_record = records.append
    for number in range(2):
        loop.add(toy_stream(f"r{number}", prompt(number, 20), 4))
    while loop.has_work:
        loop.step()
    assert [record.waits_for for record in records[:3]] == [reason] * 3
    assert records[-1].waits_for == ""


def test_a_prompt_frame_names_equal_prefixes_equally() -> None:
    keys = {"a": 1, "b": 2, "c": 3}
    recorder = StepRecorder("e", 8, lambda request: keys[request.id])
    shared = prompt(1, 8)
    found = []
    for name, ids in (("a", [*shared, 9, 9, 9, 9]), ("b", [*shared, 8, 8, 8, 8, 8]), ("c", [7, *shared])):
        frame = decode_frame(recorder.prompt(toy_stream(name, ids).request, 5.0))
        assert isinstance(frame, PromptFrame)
        found.append([frame.prefix[i : i + 4] for i in range(0, len(frame.prefix), 4)])
    assert [len(blocks) for blocks in found] == [3, 3, 2]  # full blocks of four tokens
    assert found[0][:2] == found[1][:2]
    assert found[0][2] != found[1][2]
    assert not set(found[2]) & set(found[0])
