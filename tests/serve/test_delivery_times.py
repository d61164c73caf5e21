"""DeliveryTimes: which chunks reached their client late, and why."""

from types import SimpleNamespace
from typing import Any

import pytest

from weft.observe.frames import RequestFrame, decode_frame
from weft.observe.recording_buffer import RecordingBuffer
from weft.serve.endpoints import delivery_times
from weft.serve.endpoints.delivery_times import DeliveryTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(delivery_times, "clock", found)
    return found


def parsed_request(choices: int, gap: float) -> Any:
    options = SimpleNamespace(tenant="t")
    prompt = SimpleNamespace(request_id="r", options=options, tokens=b"\0" * 40)
    chosen = [SimpleNamespace(finish_reason="length") for _ in range(choices)]
    promise = SimpleNamespace(gap=gap)
    return SimpleNamespace(choices=chosen, prompts=[prompt], promise=promise, arrival=99.0, stream=True)


def recorded(times: DeliveryTimes, keys: list[int]) -> list[RequestFrame]:
    buffer = RecordingBuffer()
    times.record(buffer, "0", keys, {}, {}, "error")
    entries = [decode_frame(frame) for frame, *_ in buffer._entries]
    assert all(isinstance(entry, RequestFrame) for entry in entries)
    return entries  # type: ignore[return-value]


def test_a_chunk_is_late_after_the_one_before_and_says_how_long_the_socket_took(clock: Clock) -> None:
    times = DeliveryTimes(parsed_request(2, gap=0.05), 99.5)
    # (choice, seconds until its token is received, until writing begins, until it is written)
    plan = [(0, 0.01, 0.0, 0.0), (1, 0.2, 0.0, 0.0), (0, 0.0, 0.0, 0.0), (0, 0.01, 0.0, 0.3), (0, 0.01, 0.1, 0.0)]
    for index, until_received, until_begun, until_sent in plan:
        clock.now += until_received
        received = clock.now
        times.tokens[index] += 1
        clock.now += until_begun
        began = clock.now
        clock.now += until_sent
        times.note_sent(index, received, began)
    first, second = recorded(times, [7, 8])
    late = [
        (chunk.token_index, round(chunk.sent - chunk.received, 3), round(chunk.waited, 3))
        for chunk in first.late_chunks
    ]
    assert late == [(1, 0.0, 0.0), (2, 0.3, 0.3), (3, 0.1, 0.0)]  # late engine, slow reader, busy API process
    assert [round(one.sent - (one.previous_sent or 0), 3) for one in first.late_chunks] == [0.2, 0.31, 0.11]
    assert not second.late_chunks  # its only chunk
    assert (first.key, second.key, first.tenant, first.parsed) == (7, 8, "t", 99.5)
    assert (first.output_tokens, second.output_tokens, first.prompt_tokens) == (4, 1, 10)
    assert first.first_sent == pytest.approx(100.01)


def test_without_a_target_no_chunk_is_late(clock: Clock) -> None:
    times = DeliveryTimes(parsed_request(1, gap=float("inf")), 99.5)
    for _ in range(3):
        clock.now += 1000
        times.note_sent(0, clock.now, clock.now)
    assert not recorded(times, [1])[0].late_chunks


def test_late_chunks_are_bounded(clock: Clock) -> None:
    times = DeliveryTimes(parsed_request(1, gap=0.05), 99.5)
    for _ in range(3 * delivery_times.MOST_LATE_CHUNKS):
        clock.now += 1
        times.note_sent(0, clock.now, clock.now)
    assert len(recorded(times, [1])[0].late_chunks) == delivery_times.MOST_LATE_CHUNKS
