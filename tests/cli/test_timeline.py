"""`weft timeline`: the file it writes, and recordings that it cannot read."""

import json
from pathlib import Path

import pytest

from tests.smooth import SMOOTH
from weft.cli import main
from weft.core import Targets
from weft.observe.frames import HEADER, packed
from weft.sim.record import write_recording
from weft.sim.simulator import Truth
from weft.sim.traces import Arrival, Trace


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "r.weft"
    frames: list[bytes] = []
    trace = Trace("t", tuple(Arrival(0.1 * i, 500, 20) for i in range(20)))
    write_recording(frames.append, "slo", trace, SMOOTH, Targets(gap=0.02), Truth(SMOOTH.coefficients))
    path.write_bytes(HEADER + packed(frames))
    return path


def run(*arguments: str | Path) -> int:
    return main(["timeline", "--no-progress", *map(str, arguments)])


def test_it_writes_json_that_loads(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(recording, "-o", tmp_path / "all.json") == 0
    assert run(recording, "-o", tmp_path / "last.json", "--last", "0.5") == 0
    whole, last = (json.loads((tmp_path / name).read_text())["traceEvents"] for name in ("all.json", "last.json"))
    assert 0 < len(last) < len(whole)
    longest = max(event["ts"] + event.get("dur", 0) for event in last if "ts" in event)
    assert longest == pytest.approx(0.5e6, abs=1)
    assert "all.json: " in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.json", "last.json"]


def test_a_recording_that_is_cut_off_is_read_up_to_there(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.weft"
    cut.write_bytes(recording.read_bytes()[:-5])
    assert run(cut, "-o", tmp_path / "t.json") == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "cut.weft ends in the middle of a frame" in capsys.readouterr().err
    assert run(recording, "-o", tmp_path / "t.json") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"TIMESTAMP,ContextTokens\n", "is no recording of weft: weft serve --record FILE makes one"),
        (b"", "is no recording of weft"),
        (b"weft-recording 999\n", "has format 999, and this version of weft reads format"),
        (HEADER, "is empty"),
        (HEADER + b"\xff\xff\xff\xff", "is damaged: a frame of 4294967295 bytes"),
        (HEADER + packed([b"\x93\x01\x02\x03"]), "the recording is damaged"),
        (None, "cannot read the recording"),
    ],
)
def test_what_is_no_recording_is_one_line(
    data: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "r.weft", tmp_path / "t.json"
    if data is not None:
        source.write_bytes(data)
    for last in ((), ("--last", "5")):
        assert run(source, "-o", output, *last) == 2
        error = capsys.readouterr().err
        assert message in error
        assert str(source) in error
        assert error.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == (["r.weft"] if data is not None else [])


def test_bad_options_are_one_line(recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(recording, "-o", tmp_path / "no" / "t.json") == 2
    assert "No such file or directory; name a file that can be written" in capsys.readouterr().err
    assert run(recording, "-o", tmp_path / "t.json", "--last", "-1") == 2
    assert "--last -1 must be above 0 seconds" in capsys.readouterr().err
