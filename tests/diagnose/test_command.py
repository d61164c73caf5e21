"""`weft diagnose` on recordings: files and a server's frames give the same answer, with a replay."""

import json
from pathlib import Path

import pytest

from tests.commands import Done, run_here
from tests.diagnose import situations
from tests.diagnose.test_download import serving
from weft.observe.frames import HEADER, encode_frame, packed
from weft.observe.recording import Recording


def frames(recording: Recording) -> bytes:
    """The frames of a recording, as a server sends them."""
    found = []
    for run in recording.runs:
        parts = (*([run.info] if run.info else []), *run.prompts.values(), *run.steps, *run.requests.values())
        found += [encode_frame(one) for one in parts]
    return packed([*found, *map(encode_frame, recording.lags)])


@pytest.fixture(scope="module")
def interference() -> bytes:
    return frames(situations.interference())


def diagnose(*arguments: str | Path) -> Done:
    return run_here("diagnose", "--no-progress", *arguments)


def test_a_file_is_diagnosed_and_replayed(tmp_path: Path, interference: bytes) -> None:
    (tmp_path / "r.weft").write_bytes(HEADER + interference)
    done = diagnose("--file", tmp_path / "r.weft", "--json", tmp_path / "d.json")
    assert done.returncode == 1, done.stderr
    assert "PHASE INTERFERENCE" in done.stdout
    assert "simulated as it was" in done.stdout
    assert "prefill isolation" in done.stdout
    assert "against served traffic" in done.stdout, "the simulator's known error"
    data = json.loads((tmp_path / "d.json").read_text())
    assert data["findings"][0]["symptom"] == "phase interference"
    assert [one["name"] for one in data["replay"]][:2] == ["recorded", "as it was"]
    assert data["replay"][-1]["kept"] > data["replay"][1]["kept"]
    isolation = next(change for change in data["findings"][0]["changes"] if change["without"])
    assert len(isolation["without"]) == 3


def test_a_server_gives_the_same_answer_as_a_file(tmp_path: Path, interference: bytes) -> None:
    (tmp_path / "r.weft").write_bytes(HEADER + interference)
    from_file = diagnose("--file", tmp_path / "r.weft")
    with serving(lambda path, key: (200, interference) if path == "/observe/frames" else (404, b"")) as url:
        from_server = diagnose("--url", url + "/")
    assert from_server.returncode == 1
    assert from_server.stdout.splitlines()[1:] == from_file.stdout.splitlines()[1:]


def test_a_recording_without_a_calibration_is_replayed_with_a_profile(tmp_path: Path) -> None:
    recording = situations.interference()
    (run,) = recording.runs
    assert run.info is not None
    run.info.profile = None
    (tmp_path / "r.weft").write_bytes(HEADER + frames(recording))
    done = diagnose("--file", tmp_path / "r.weft")
    assert done.returncode == 1
    assert "the engine was not calibrated" in done.stdout
    done = diagnose("--file", tmp_path / "r.weft", "--profile", "h200-llama-3-8b")
    assert "simulated as it was" in done.stdout


def test_no_replay(tmp_path: Path, interference: bytes) -> None:
    (tmp_path / "r.weft").write_bytes(HEADER + interference)
    done = diagnose("--file", tmp_path / "r.weft", "--no-replay")
    assert done.returncode == 1
    assert "simulated" not in done.stdout


def test_a_recording_whose_end_is_cut_off(tmp_path: Path, interference: bytes) -> None:
    (tmp_path / "r.weft").write_bytes(HEADER + interference[:-3])
    assert diagnose("--file", tmp_path / "r.weft", "--no-replay").returncode == 1


def test_a_healthy_recording(tmp_path: Path) -> None:
    (tmp_path / "r.weft").write_bytes(HEADER + frames(situations.healthy()))
    done = diagnose("--file", tmp_path / "r.weft")
    assert done.returncode == 0, done.stderr
    assert "Healthy" in done.stdout


def test_a_symptom_without_a_setting_has_no_replay(tmp_path: Path) -> None:
    (tmp_path / "r.weft").write_bytes(HEADER + frames(situations.slow_clients()))
    done = diagnose("--file", tmp_path / "r.weft")
    assert done.returncode == 1
    assert "SLOW CLIENTS" in done.stdout
    assert "No replay: no setting of the scheduler would change it." in done.stdout


def test_the_worst_of_two_engines_comes_first(tmp_path: Path) -> None:
    both = Recording()
    for name, make in (("0", situations.healthy), ("1", situations.few_seats)):
        for run in make().runs:
            for frame in (run.info, *run.prompts.values(), *run.steps, *run.requests.values()):
                assert frame is not None
                frame.engine = name
            both.runs.append(run)
    (tmp_path / "r.weft").write_bytes(HEADER + frames(both))
    done = diagnose("--file", tmp_path / "r.weft", "--no-replay")
    assert done.returncode == 1
    assert "engine 0: 50 requests" in done.stdout
    assert "TOO FEW SEATS (ENGINE 1)" in done.stdout
