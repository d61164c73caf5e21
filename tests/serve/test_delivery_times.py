"""DeliveryTimes: which chunks reached their client late, and why."""

from types import SimpleNamespace
from typing import Any

import pytest

from weft.core import Targets
from weft.observe.frames import RequestFrame, decode_frame
from weft.observe.recording_buffer import RecordingBuffer
from weft.serve.endpoints import delivery_times
from weft.serve.endpoints.delivery_times import DeliveryTimes
from weft.serve.endpoints.response_generator import ResponseGenerator
from weft.serve.engines.messages import SequenceEnd
from weft.serve.engines.request_output_collector import RequestOutputCollector, SequenceUpdate
from weft.serve.errors import ApiError


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


def test_an_id_that_the_server_made_is_recorded_in_part() -> None:
    """It opens the stored response with that id."""
    made = parsed_request(1, gap=1.0)
    made.prompts[0].request_id = "0123456789abcdef01234567-1"
    (frame,) = recorded(DeliveryTimes(made, 99.5), [1])
    assert frame.request_id == "01234567-1"


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


def test_a_refused_request_is_recorded_as_refused_with_its_prediction(clock: Clock) -> None:
    parsed = parsed_request(1, gap=1.0)
    parsed.promise = Targets(ttft=1.0).promise(100)
    parsed.choices[0].finish_reason = None
    unused: Any = SimpleNamespace()
    generator = ResponseGenerator(parsed, unused, RequestOutputCollector(), unused, 99.5)
    end = SequenceEnd(7, None, "refused", 100.0, 0, 2.5)
    with pytest.raises(ApiError, match=r"would have come after 2\.5 s"):
        generator._check(SequenceUpdate(0, None, end))
    buffer = RecordingBuffer()
    generator.sent.record(buffer, "0", [7], {}, generator.sequence_ends, "deadline")
    (frame,) = (decode_frame(entry) for entry, *_ in buffer._entries)
    assert isinstance(frame, RequestFrame)
    assert (frame.reason, frame.predicted_ttft) == ("refused", 2.5)
