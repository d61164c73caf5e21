"""Calibration against devices whose costs are known, and on a real executor."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.tiny import tiny_directory
from weft import LLM, EngineError, SamplingParams
from weft.core import Coefficients, StepBatch, StepShape
from weft.engine.calibration import (
    FORMAT,
    Calibration,
    calibration_file,
    load_calibration,
    save_calibration,
)
from weft.engine.executor import ExecutorFacts, StepInputs, StepMasks, StepResult
from weft.engine.executor_facts import device_name
from weft.engine.rehearsal import BURSTS, FULL_STEPS, PHASES
from weft.engine.run_calibration import REHEARSAL_SHARE, calibrate
from weft.engine.simulated import VIRTUAL_LAYOUT, SimulatedExecutor, VirtualClock

SLOW = Coefficients(fixed=2e-3, weights=3e-3, token=2e-4, pair=3e-8, slice=2e-4, decode=5e-5, context=1e-6)
FAST = Coefficients(fixed=2e-3, weights=6e-3, token=2e-5, pair=8e-10, slice=2e-5, decode=1e-5, context=3e-8)
LIMITS: dict[str, int] = {
    "max_num_seqs": 256,
    "num_blocks": 8192,
    "block_size": 16,
    "max_model_len": 16384,
    "max_num_batched_tokens": 2048,
}
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "device": "a machine",
    "block_size": 16,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "max_model_len": 16384,
}
SAMPLE = Calibration(SLOW, mean=0.01, spread=0.05, error_p50=0.03, error_p99=0.4, steps=70, largest=512, device="abc")


@dataclass
class Pending:
    run: Callable[[], StepResult]

    def result(self) -> StepResult:
        return self.run()


FACTS = ExecutorFacts("a machine", "cpu", VIRTUAL_LAYOUT, vocab_size=100, dtypes="none")


class Device(SimulatedExecutor):
    """Takes the time that its coefficients say, give or take; checks that plans are what a scheduler could make."""

    def __init__(
        self,
        coefficients: Coefficients,
        limits: dict[str, int],
        noise: float = 0.0,
        hiccups: float = 0.0,
        seed: int = 5,
        facts: ExecutorFacts = FACTS,
    ):
        super().__init__(VirtualClock(), facts=facts)
        self.coefficients = coefficients
        self.limits = limits
        self.noise, self.hiccups = noise, hiccups
        self.random = np.random.default_rng(seed)
        self.now = 100.0
        self.in_flight = 0
        size = limits["block_size"]
        self.tables = np.full((2 * limits["max_num_seqs"], -(-limits["max_model_len"] // size)), -1)
        self.written = np.zeros(limits["num_blocks"] * size, np.bool_)
        self.shapes: list[StepShape] = []

    def fill_kv_cache_with_noise(self) -> None:
        self.written[:] = True

    def submit(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None = None) -> Any:
        assert self.in_flight < 2
        self.in_flight += 1
        return Pending(lambda: self.run(batch, inputs))

    def run(self, batch: StepBatch, inputs: StepInputs) -> StepResult:
        self.in_flight -= 1
        self.check(batch, inputs)
        self.shapes.append(batch.shape)
        started = self.now
        seconds = self.coefficients.predict(batch.shape) * self.random.normal(1, self.noise)
        self.now += seconds * (5 if self.random.random() < self.hiccups else 1)
        return StepResult(tokens=[0] * int(batch.is_sampled.sum()), started=started, finished=self.now)

    def check(self, batch: StepBatch, inputs: StepInputs) -> None:
        rows, size = len(batch.slots), self.limits["block_size"]
        assert 0 < rows <= self.limits["max_num_seqs"]
        assert len(set(batch.slots.tolist())) == rows
        assert batch.shape.tokens == batch.count.sum() <= self.limits["max_num_batched_tokens"]
        assert batch.shape.context == (batch.first + 1)[: batch.num_decodes].sum()
        assert len(inputs.prefill_tokens) == batch.count[batch.num_decodes :].sum()
        assert (batch.first + batch.count).max() <= self.limits["max_model_len"]
        self.tables[batch.new_blocks.slots, batch.new_blocks.columns] = batch.new_blocks.blocks
        places = []
        for slot, first, count in zip(batch.slots, batch.first, batch.count, strict=True):
            positions = np.arange(first + count)
            blocks = self.tables[slot, positions // size]
            assert blocks.min() >= 0
            places.append(blocks * size + positions % size)
        fresh = np.concatenate([where[first:] for where, first in zip(places, batch.first, strict=True)])
        assert len(np.unique(fresh)) == len(fresh), "two rows write to one place"
        self.written[fresh] = True
        assert self.written[np.concatenate(places)].all(), "something is read that nobody wrote"


SHAPES = [
    StepShape(tokens=1, decodes=1, context=1000),
    StepShape(tokens=64, decodes=64, context=64 * 500),
    StepShape(tokens=256, pairs=256 * 1128.5, slices=1),
    StepShape(tokens=544, pairs=512 * 256.5, slices=1, decodes=32, context=32 * 800),
]


@pytest.mark.parametrize("truth", [SLOW, FAST])
def test_known_costs_are_recovered_through_noise_and_hiccups(truth: Coefficients) -> None:
    device = Device(truth, LIMITS, noise=0.03, hiccups=0.03)
    found = calibrate(device, **LIMITS)
    for shape in SHAPES:
        assert found.coefficients.predict(shape) == pytest.approx(truth.predict(shape), rel=0.06)
    assert abs(found.mean) < 0.03
    assert 0.02 < found.spread < 0.08
    assert found.error_p50 < 0.05
    assert found.error_p50 < found.error_p99
    assert found.decode_step == pytest.approx(truth.predict(SHAPES[0]), rel=0.06)
    assert found.device == "a machine"


def test_a_gpu_has_sizes_and_residuals() -> None:
    truth = replace(FAST, grain=128, wave=512, reach=1e-7, sizes=(1.15, 1.0, 0.9, 1.1))
    limits = {**LIMITS, "max_num_batched_tokens": 512}
    device = PreparedAhead(Device(truth, limits, noise=0.01), grain=128, wave=512)
    found = calibrate(device, **limits)
    assert len(found.coefficients.sizes) == 4
    steps = [truth.with_slice(StepShape(8, decodes=8, context=4000.0), 0, tokens) for tokens in (100, 200, 350, 500)]
    for step in steps:
        assert found.coefficients.predict(step) == pytest.approx(truth.predict(step), rel=0.05)
    line = replace(found.coefficients, sizes=())
    assert max(abs(line.predict(step) / truth.predict(step) - 1) for step in steps) > 0.06
    assert found.residuals is not None
    assert abs(found.residuals.hot) < 0.05
    plain = calibrate(PreparedAhead(Device(FAST, LIMITS), wave=512), **LIMITS)
    assert plain.coefficients.sizes == (), "as many sizes as tokens would say nothing"


class PreparedAhead(SimulatedExecutor):
    """A device with a host that takes long to prepare a step, unless it can do so while another one runs."""

    def __init__(self, device: Device, **facts: int) -> None:
        super().__init__(VirtualClock(), facts=FACTS._replace(prepares_ahead=True, **facts))  # type: ignore[arg-type]
        self.device = device
        self.fill_kv_cache_with_noise = self.device.fill_kv_cache_with_noise
        self.in_flight = 0
        self.waits = 0  # steps for which the device waited

    def submit(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None = None) -> Any:
        waited = 0.0 if self.in_flight else 5e-3
        self.waits += not self.in_flight
        self.device.now += waited
        result = self.device.submit(batch, inputs).result()
        self.in_flight += 1
        assert self.in_flight <= 2

        def take() -> StepResult:
            self.in_flight -= 1
            return replace(result, started=result.started - waited)

        return Pending(take)


def test_where_steps_are_prepared_ahead_the_host_costs_nothing() -> None:
    device = PreparedAhead(Device(FAST, LIMITS, noise=0.01))
    found = calibrate(device, **LIMITS)
    assert device.waits == 1 + len(PHASES) + len(FULL_STEPS) + len(BURSTS), (
        "but for the beginnings, the device is to be as busy as it is in service"
    )
    assert device.in_flight == 0
    for shape in SHAPES:
        assert found.coefficients.predict(shape) == pytest.approx(FAST.predict(shape), rel=0.06)


class Contended(Device):
    """Takes longer for a step while the next one is planned, as two cores do that have both to do."""

    def run(self, batch: StepBatch, inputs: StepInputs) -> StepResult:
        is_served = self.in_flight > 1
        result = super().run(batch, inputs)
        if is_served:
            self.now += 0.25 * (result.finished - result.started)
        return replace(result, finished=self.now)


def test_steps_are_expected_to_take_what_they_take_in_service() -> None:
    found = calibrate(Contended(SLOW, LIMITS, noise=0.02), **LIMITS)
    for shape in SHAPES:
        assert found.coefficients.predict(shape) == pytest.approx(1.25 * SLOW.predict(shape), rel=0.06)
    assert found.error_p50 < 0.05


def test_it_keeps_to_its_time_and_mixes_decodes_with_slices() -> None:
    device = Device(SLOW, LIMITS, noise=0.03)
    shares: list[float] = []
    found = calibrate(device, **LIMITS, seconds=3.0, progress=shares.append)
    assert 2.7 < device.now - 100 - REHEARSAL_SHARE * 3.0 < 3.6
    assert device.in_flight == 0
    assert len(shares) < found.steps <= len(device.shapes)
    assert found.largest == max(shape.tokens for shape in device.shapes)
    assert shares == sorted(shares)
    assert shares[-1] <= 1
    mixed = [shape for shape in device.shapes if shape.decodes and shape.slices]
    assert len(mixed) >= 10


@pytest.mark.parametrize("seed", range(12))
def test_what_the_steps_do_not_tell_of_does_not_become_absurd(seed: int) -> None:
    truth = replace(SLOW, weights=0.0, fixed=5e-3)  # no step is bound by bytes
    device = Device(truth, LIMITS, noise=0.1, seed=seed)
    found = calibrate(device, **LIMITS, seconds=2.0)
    for shape in SHAPES:
        assert found.coefficients.predict(shape) == pytest.approx(truth.predict(shape), rel=0.3)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 1},
        {"max_model_len": 2, "num_blocks": 1},
        {"num_blocks": 1, "max_model_len": 17},
        {"num_blocks": 3, "max_model_len": 40},
        {"max_num_batched_tokens": 4, "max_num_seqs": 4},
        {"block_size": 1},
        {"block_size": 4096, "num_blocks": 32},
    ],
)
def test_small_engines_are_measured_within_their_limits(changes: dict[str, int]) -> None:
    limits = LIMITS | changes
    device = Device(FAST, limits)
    found = calibrate(device, **limits, seconds=1.0)
    measured = device.shapes[-1]
    assert found.coefficients.predict(measured) == pytest.approx(FAST.predict(measured), rel=0.1)


def test_too_little_time_is_an_error_that_says_how_much_is_needed() -> None:
    with pytest.raises(EngineError, match=r"^0.02 seconds are too short: \d+ different steps .* --seconds 1\)$"):
        calibrate(Device(SLOW, LIMITS), **LIMITS, seconds=0.02)


def test_a_real_executor_is_measured_and_then_serves_as_before(tmp_path: Path) -> None:
    prompts, params = [[1, 2, 3], list(range(60))], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(tiny_directory(tmp_path), load_format="dummy", max_num_seqs=8, kv_cache_memory_bytes=1 << 20) as llm:
        before = llm.generate(prompts, params, progress=False)
    with LLM(tiny_directory(tmp_path), load_format="dummy", max_num_seqs=8, kv_cache_memory_bytes=1 << 20) as llm:
        scheduler = llm.engine.loop.scheduler
        found = calibrate(
            llm.engine.loop.executor,
            max_num_seqs=scheduler.max_num_seqs,
            num_blocks=scheduler.num_blocks,
            block_size=scheduler.block_size,
            max_model_len=llm.engine.max_model_len,
            max_num_batched_tokens=llm.options.max_num_batched_tokens,
            seconds=2.0,
        )
        after = llm.generate(prompts, params, progress=False)
    assert found.steps >= 16
    assert found.largest >= 128
    assert found.decode_step > 0
    assert found.spread > 0
    assert [g.token_ids for g in after] == [g.token_ids for g in before]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "down" / "x.json"
    save_calibration(file, SAMPLE)
    assert load_calibration(file) == SAMPLE
    better = replace(SAMPLE, steps=80)
    save_calibration(file, better)
    assert load_calibration(file) == better
    assert list(file.parent.iterdir()) == [file]


def _saved(**changes: Any) -> str:
    coefficients = {name: getattr(SLOW, name) for name in SLOW.__slots__}
    whole = {"format": FORMAT, **{name: getattr(SAMPLE, name) for name in SAMPLE.__dataclass_fields__}}
    return json.dumps(whole | {"coefficients": coefficients} | changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        _saved()[:-20],
        _saved(format=0),
        _saved(unknown=1),
        _saved(mean=float("nan")),
        _saved(spread=-1.0),
        _saved(steps="many"),
        _saved(coefficients={"fixed": 1.0}),
        _saved(coefficients=dict.fromkeys(SLOW.__slots__, -1.0)),
        "\0\xff",
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_a_file_that_cannot_be_used_counts_as_absent(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    assert load_calibration(file) is None
    file.write_text(_saved())
    assert load_calibration(file) == SAMPLE
    file.write_bytes(text.encode("latin-1"))
    assert load_calibration(file) is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "weft").write_text("a file where a folder should be")
    with pytest.raises(EngineError, match=r"cannot be saved as .*weft/x.json: "):
        save_calibration(tmp_path / "weft" / "x.json", SAMPLE)


def test_the_file_depends_on_all_that_changes_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tiny_directory(tmp_path / "My Model")
    file = calibration_file(model, **SETTINGS)
    assert file.parent == tmp_path / "cache" / "weft" / "calibration"
    assert file.name.startswith("My-Model-")
    assert calibration_file(model, **SETTINGS | {"dtype": "torch.bfloat16"}) == file
    for change in ({"dtype": "float32"}, {"device": "another"}, {"block_size": 32}, {"max_num_batched_tokens": 64}):
        assert calibration_file(model, **SETTINGS | change) != file
    tiny_directory(model, hidden_size=64)
    assert calibration_file(model, **SETTINGS) != file


def test_a_download_of_the_hub_is_named_by_its_id(tmp_path: Path) -> None:
    model = tiny_directory(tmp_path / "hub" / "models--org--name" / "snapshots" / "0123abcd")
    assert calibration_file(model, **SETTINGS).name.startswith("org--name-")


def test_a_device_has_a_name() -> None:
    import torch

    assert device_name(torch.device("cpu"))


def test_what_steps_take_longer_after_an_idle_time_is_found() -> None:
    """As on a processor whose clock falls while it has nothing to do."""

    class Sleepy(Device):
        last = math.inf

        def run(self, batch: StepBatch, inputs: StepInputs) -> StepResult:
            rested, self.last = time.monotonic() - self.last > 0.05, time.monotonic()
            result = super().run(batch, inputs)
            self.now += 0.4 * (result.finished - result.started) * rested
            return replace(result, finished=self.now)

    assert calibrate(Sleepy(FAST, LIMITS, noise=0.01), **LIMITS).wake == pytest.approx(0.4, abs=0.1)
    assert calibrate(Device(FAST, LIMITS, noise=0.01), **LIMITS).wake < 0.1
