"""RecordingBuffer and RecordingFile: bounded, read in parts, without what a tenant must not see."""

import io
from pathlib import Path

import pytest

from weft.errors import OptionError
from weft.observe import recording_buffer, recording_file
from weft.observe.frames import (
    HEADER,
    EngineFrame,
    Frame,
    LagFrame,
    PromptFrame,
    RecordingError,
    RequestFrame,
    encode_frame,
    packed,
    read_frames,
)
from weft.observe.recording import Recording
from weft.observe.recording_buffer import RecordingBuffer
from weft.observe.recording_file import RecordingFile


def lag(number: int) -> bytes:
    return encode_frame(LagFrame(float(number), 0.5))


def frames(data: bytes) -> list[Frame]:
    return list(read_frames(io.BytesIO(HEADER + data)))


def numbers(data: bytes) -> list[float]:
    return [frame.time for frame in frames(data) if isinstance(frame, LagFrame)]


def request(tenant: str) -> bytes:
    times = (1.0, 1.0, 1.5, 1.6, 1.7, 2.0)
    return encode_frame(RequestFrame("0", 1, "req-" + tenant, tenant, 0, *times, "stop", 3, 4, 0, 0, None, stream=True))


def test_a_reader_gets_every_frame_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_buffer, "MOST_ANSWER_BYTES", 100)
    buffer, found, since = RecordingBuffer(), [], None
    for number in range(50):
        buffer.add(lag(number), "lag", float(number))
        if number % 20 == 19:
            for _ in range(100):
                data, following, has_more = buffer.read(since)
                found += numbers(data)
                since = following
                if not has_more:
                    break
    assert found == list(range(40))


def test_old_frames_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(lag(1)) + recording_buffer.ENTRY_BYTES
    monkeypatch.setattr(recording_buffer, "MOST_BYTES", 10 * size)
    buffer = RecordingBuffer()
    buffer.add_engine("0", b"\x95engine", 0.0)
    for number in range(30):
        buffer.add(lag(number), "lag", float(number))
    data, following, _ = buffer.read(3)  # the reader was away for too long
    assert numbers(data) == list(range(20, 30))
    assert following == 31
    data = buffer.read().data
    assert b"\x95engine" in data  # though it was the first frame of all
    data = buffer.read(earliest=27.0).data
    assert b"\x95engine" in data
    assert buffer.read(10**9) == (b"", 31, False)


def test_frames_of_two_processes_of_an_engine_are_told_apart() -> None:
    """Keys begin anew with each process. Read whole, from a time on, and after the frames of the first are gone."""
    buffer = RecordingBuffer()
    for process in range(2):
        buffer.add_engine("0", encode_frame(engine_frame(policy=f"p{process}")), 10.0 * process)
        for number in range(3):
            buffer.add(encode_frame(prompt_frame(key=number)), "prompt", 10.0 * process + number)
    for earliest, expected in (
        (None, [("p0", 3), ("p1", 3)]),
        (2.0, [("p0", 1), ("p1", 3)]),
        (11.0, [("p1", 2)]),
        (99.0, [("p1", 0)]),
    ):
        runs = Recording.of(frames(buffer.read(earliest=earliest).data)).runs
        assert [(run.info.policy, len(run.prompts)) for run in runs if run.info is not None] == expected
        assert all(run.info is not None for run in runs)


def engine_frame(policy: str) -> EngineFrame:
    limits = (8, 64, 16)
    return EngineFrame("0", 0.0, 0.0, "1", "m", "cpu", policy, None, False, None, 0.0, False, *limits, True, 512)


def prompt_frame(key: int) -> PromptFrame:
    return PromptFrame("0", key, 1.0, 1.0, 32, 4, None, False, None, False, False, 0, False)


def test_a_tenant_sees_ids_of_its_own_requests_only() -> None:
    buffer = RecordingBuffer()
    prompt = PromptFrame("0", 1, 1.0, 1.0, 32, 4, None, False, None, False, False, 0, False, b"\1\0\0\0\2\0\0\0")
    buffer.add(encode_frame(prompt), "prompt", 1.0)
    for tenant in ("a", "b"):
        buffer.add(request(tenant), "request", 2.0, tenant)
    seen, *requests = frames(buffer.read(tenant="a")[0])
    assert isinstance(seen, PromptFrame)
    assert (seen.prompt_tokens, seen.prefix) == (32, b"")
    assert [(one.request_id, one.tenant) for one in requests if isinstance(one, RequestFrame)] == [
        ("req-a", "a"),
        ("", ""),
    ]
    everything = frames(buffer.read()[0])
    assert [one.request_id for one in everything if isinstance(one, RequestFrame)] == ["req-a", "req-b"]


def test_a_file_is_bounded_and_each_half_can_be_read_alone(tmp_path: Path) -> None:
    path, size = tmp_path / "r", len(lag(1)) + 4
    file = RecordingFile(path, 2 * (len(HEADER) + 100 * size))
    file.start_engine(packed([lag(-1)]))
    for number in range(250):
        file.write(lag(number))
    file.close()
    new = numbers(path.read_bytes().removeprefix(HEADER))
    old = numbers((tmp_path / "r.old").read_bytes().removeprefix(HEADER))
    assert old[0] == new[0] == -1  # engines come first in every file
    assert [*old[1:], *new[1:]] == list(range(int(old[1]), 250))
    assert path.stat().st_size + (tmp_path / "r.old").stat().st_size <= 2 * (len(HEADER) + 101 * size)


def test_what_a_file_held_before_is_kept(tmp_path: Path) -> None:
    for _ in range(2):
        file = RecordingFile(tmp_path / "r", 1 << 20)
        file.write(lag(7))
        file.close()
    assert (tmp_path / "r").read_bytes() == (tmp_path / "r.old").read_bytes() == HEADER + packed([lag(7)])


def test_a_server_that_does_not_come_up_displaces_no_recording(tmp_path: Path) -> None:
    path = tmp_path / "r"
    first = RecordingFile(path, 1 << 20)
    first.write(lag(7))
    first.close()
    for _ in range(3):  # they end before an engine is ready
        RecordingFile(path, 1 << 20).close()
    assert (tmp_path / "r.old").read_bytes() == HEADER + packed([lag(7)])


def test_a_recording_is_for_its_owner_alone(tmp_path: Path) -> None:
    file = RecordingFile(tmp_path / "r", 2 * (len(HEADER) + 60))
    for number in range(20):
        file.write(lag(number))
    file.close()
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("r", "r.old")] == [0o600, 0o600]


def test_a_folder_is_not_moved_away(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no ordinary file"):
        RecordingFile(tmp_path, 1 << 20)
    assert tmp_path.is_dir()


def test_a_file_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--record .*nowhere/r.*: No such file.*name a file"):
        RecordingFile(tmp_path / "nowhere" / "r", 1 << 20)


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: RecordingFile, frames: list[bytes]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordingFile, "_write", full)
    file = RecordingFile(tmp_path / "r", 1 << 20)
    file.write(lag(1))
    file.close()
    assert "No space left on device; the recording ends here" in capsys.readouterr().err
    for _ in range(recording_file.MOST_PENDING + 5):
        file.write(lag(2))
    assert not file.dropped


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no recording of weft"),
        (b"{'a': 1}\n" * 20, "no recording of weft"),
        (b"weft-recording 99\n", "format 99, and this version of weft reads format 1"),
        (HEADER + (1 << 31).to_bytes(4, "little"), "damaged: a frame of 2147483648 bytes"),
        (HEADER + packed([b"\x93\x63\x01\x02"]), "damaged"),
        (HEADER + packed([b"\xff"]), "damaged"),
    ],
)
def test_files_that_are_no_recordings(data: bytes, message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        list(read_frames(io.BytesIO(data), "FILE"))


def test_a_cut_off_recording_is_read_up_to_the_cut() -> None:
    data = HEADER + packed([lag(1), lag(2)])
    for cut in range(len(HEADER), len(data)):
        whole = (cut - len(HEADER)) // (len(lag(1)) + 4)
        assert len(list(read_frames(io.BytesIO(data[:cut])))) == whole
