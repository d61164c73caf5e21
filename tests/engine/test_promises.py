"""What an engine promises: calibrated once, targets raised to what can be kept, refusals that say why."""

import math
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.engine.tiny import tiny_directory
from weft.bench.engine.virtual import virtual_engine
from weft.core import Coefficients, Source
from weft.engine import build
from weft.engine.calibration import Calibration
from weft.engine.engine import Engine, RequestOptions
from weft.errors import EngineError, OptionError, QueueFullError, RequestError
from weft.sim.profiles import load_profile
from weft.sim.simulator import Truth

# A token of a prompt takes a tenth of a second, a decode step ten milliseconds.
COST = Coefficients(fixed=0.01, weights=0.0, token=0.1, pair=0.0, slice=0.0, decode=0.0, context=0.0)
MEASURED = Calibration(COST, mean=0.0, spread=0.0, error_p50=0, error_p99=0, steps=9, largest=9, device="a machine")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Calibrations that were made, without their taking time."""
    made: list[Any] = []

    def measure(*args: Any, **options: Any) -> Calibration:
        made.append(options)
        return MEASURED

    monkeypatch.setattr(build, "calibrate", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def tiny(tmp_path: Path, **options: Any) -> weft.LLM:
    return weft.LLM(tiny_directory(tmp_path / "model"), load_format="dummy", max_num_seqs=4, **options)


def test_a_target_is_what_makes_an_engine_measure_itself_and_only_once(tmp_path: Path, measured: list[Any]) -> None:
    with tiny(tmp_path) as llm:
        assert llm.engine.calibrated_targets is None
    assert not measured
    for _ in range(2):
        with tiny(tmp_path, gap_target_ms=500.0) as llm:
            assert llm.engine.calibrated_targets is not None
            assert llm.engine.calibrated_targets.targets.gap == 0.5
            assert llm.engine.loop.scheduler.policy.cost is not None
    assert len(measured) == 1


def test_a_folder_that_cannot_be_written_to_does_not_stop_the_engine(
    tmp_path: Path, measured: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with tiny(tmp_path, gap_target_ms=500.0):
        pass
    assert "cannot be saved" in capsys.readouterr().err


def test_what_cannot_be_in_time_is_refused_with_the_prediction(tmp_path: Path, measured: list[Any]) -> None:
    params = weft.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with tiny(tmp_path, ttft_target_ms=60_000.0, gap_target_ms=500.0) as llm:
        fine, late = llm.generate([[1] * 5, [2] * 60], params, progress=False, ttft_target_ms=2000.0)
    assert fine.finish_reason == "length"
    assert late.finish_reason == "refused"
    assert late.token_ids == []
    assert late.metrics is not None
    assert late.metrics.predicted_ttft == pytest.approx(6.0, rel=0.2)
    assert (late.metrics.ttft_target, late.metrics.gap_target) == (2.0, 0.5)


def test_what_an_idle_machine_could_not_read_in_the_operators_time_is_served_without_a_promise(
    tmp_path: Path, measured: list[Any]
) -> None:
    params = weft.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with tiny(tmp_path, ttft_target_ms=2000.0, gap_target_ms=500.0) as llm:
        fine, long = llm.generate([[1] * 5, [2] * 60], params, progress=False)
    for one in (fine, long):
        assert one.finish_reason == "length"
        assert one.metrics is not None
    assert fine.metrics is not None
    assert fine.metrics.ttft_target == 2.0
    assert long.metrics is not None
    assert long.metrics.ttft_target is None
    assert long.metrics.gap_target == 0.5


def test_default_targets_refuse_nothing(tmp_path: Path, measured: list[Any]) -> None:
    """Thirty prompts of six seconds each, where a first token in 1 s is aimed at."""
    params = weft.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    with tiny(tmp_path, default_targets=True) as llm:
        assert llm.engine.calibrated_targets is not None
        assert llm.engine.calibrated_targets.targets.ttft_source is Source.DEFAULT
        done = llm.generate([[number + 1] * 60 for number in range(30)], params, progress=False)
        (late,) = llm.generate([[2] * 60], params, progress=False, ttft_target_ms=1000.0)  # its own: a promise
    assert {one.finish_reason for one in done} == {"length"}
    assert late.finish_reason == "refused"


def test_a_request_may_have_its_own_targets(tmp_path: Path, measured: list[Any]) -> None:
    params = weft.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    with tiny(tmp_path, ttft_target_ms=2000.0) as llm:
        (patient,) = llm.generate([3] * 60, params, progress=False, ttft_target_ms=60_000.0)
        (hasty,) = llm.generate([4] * 60, params, progress=False, gap_target_ms=0.001, ttft_target_ms=60_000.0)
        (batch,) = llm.generate([5] * 60, params, progress=False, batch=True)
    for one in (patient, hasty, batch):
        assert one.finish_reason == "length"
        assert one.metrics is not None
    assert hasty.metrics is not None
    assert hasty.metrics.gap_target == pytest.approx(1.5 * MEASURED.decode_step)  # what was promised instead
    assert batch.metrics is not None
    assert batch.metrics.ttft_target is None


def test_a_full_queue_turns_a_batch_away_and_the_engine_goes_on(tmp_path: Path) -> None:
    params = weft.SamplingParams(max_tokens=2, temperature=0)
    with tiny(tmp_path, max_queued_requests=3) as llm:
        with pytest.raises(QueueFullError, match="3 requests wait already"):
            llm.generate([[number] for number in range(1, 9)], params, progress=False)  # four seats, and one too many
        assert len(llm.generate([[number] for number in range(1, 8)], params, progress=False)) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fair"}, "policy='fair' is unknown: choose slo, chunked, monolithic"),
        ({"gap_target_ms": 0}, "gap_target_ms=0 must be a number of milliseconds above 0"),
        ({"ttft_target_ms": -1.0}, "ttft_target_ms=-1.0 must be"),
        ({"ttft_target_per_1k_ms": 250.0}, "ttft_target_per_1k_ms=250 adds to ttft_target_ms"),
        ({"policy": "chunked", "gap_target_ms": 50.0}, "policy='chunked' keeps no promises"),
        ({"max_queued_requests": 0}, "max_queued_requests=0 must be a whole number of at least 1"),
        ({"min_gap_target_ms": math.inf}, "min_gap_target_ms=inf must be"),
    ],
)
def test_nonsensical_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as error:
        tiny(tmp_path, **options)
    assert message in str(error.value)


@pytest.fixture
def engine() -> Engine:
    profile = load_profile("h200-llama-3-8b")
    return virtual_engine(profile, Truth(profile.coefficients))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RequestOptions(gap_target_ms=-5), "gap_target_ms=-5 must be"),
        (RequestOptions(ttft_target_ms=True), "ttft_target_ms=True must be"),
        (RequestOptions(flex=True, gap_target_ms=50), "gap_target_ms=50: a batch request promises nothing"),
        (RequestOptions(priority=1.5), "priority=1.5 must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_nonsensical_request_options_are_refused(engine: Engine, options: RequestOptions, message: str) -> None:
    with pytest.raises(RequestError) as error:
        engine.scheduling_params(options, 10)
    assert message in str(error.value)


def test_an_engine_without_targets_promises_nothing_to_anybody(engine: Engine) -> None:
    engine.calibrated_targets = None
    with pytest.raises(RequestError, match="an engine that was started without targets promises nothing"):
        engine.scheduling_params(RequestOptions(gap_target_ms=50), 10)
    assert engine.scheduling_params(RequestOptions(tenant="a"), 10).gap_target == math.inf


def test_a_calibration_that_fails_is_tried_again_with_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = []

    def measure(*args: Any, seconds: float, **options: Any) -> Calibration:
        budgets.append(seconds)
        if len(budgets) == 1:
            raise EngineError("too few steps")
        return MEASURED

    monkeypatch.setattr(build, "calibrate", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with tiny(tmp_path, gap_target_ms=500.0):
        pass
    assert budgets[1] > budgets[0]
