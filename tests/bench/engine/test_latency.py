"""Latency: what is counted as a decode step and as a first token, and what is left out. No speeds are tested."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.engine.tiny import tiny_directory
from weft.bench.engine.latency import (
    DECODE_PROMPT_TOKENS,
    WARM_UP_STEPS,
    decode_obstacle,
    measure_decode,
    measure_prefill,
    prefill_obstacle,
)
from weft.bench.engine.limits import Ceilings, decode_work, prefill_work
from weft.bench.engine.shapes import WarmEngine, warm_engine
from weft.cli import main
from weft.core import StepRecord
from weft.engine.options import EngineOptions
from weft.engine.params import SamplingParams
from weft.engine.sequence import Sequence
from weft.errors import EngineError

SLOW = Ceilings(copy=1e6, matmul=1e6)


def options(**changes: int) -> EngineOptions:
    own = {"kv_cache_memory_bytes": 10**7, "max_num_seqs": 8, "max_num_batched_tokens": 256, **changes}
    return EngineOptions.of(load_format="dummy", device="cpu", enable_prefix_caching=False, **own)


def watched(found: WarmEngine) -> list[StepRecord]:
    """Every step that is committed from now on."""
    records: list[StepRecord] = []
    commit = found.engine.loop.scheduler.commit

    def note(*arguments):  # type: ignore[no-untyped-def]
        records.append(commit(*arguments))
        return records[-1]

    found.engine.loop.scheduler.commit = note  # type: ignore[method-assign]
    return records


def test_only_steps_with_the_whole_batch_and_no_prefill_count(tmp_path: Path) -> None:
    with warm_engine(str(tiny_directory(tmp_path, max_position_embeddings=1024)), options()) as found:
        records = watched(found)
        step = measure_decode(found, SLOW, batch=5, steps=20)
        full = [record for record in records if record.decode_tokens == 5 and not record.prefill_tokens]
        assert len(records) > len(full) >= 1 + WARM_UP_STEPS + 20
        assert not found.engine.loop.sequences
        assert not found.engine.loop.has_work
        assert found.engine.loop.scheduler.kv.block_pool.num_free == found.engine.loop.scheduler.num_blocks
        least, most = (
            decode_work(found.config, 4, 5, DECODE_PROMPT_TOKENS + context).floor(SLOW) * 1000
            for context in (WARM_UP_STEPS, 40)
        )
    assert 0 < step.ms <= step.p99_ms
    assert least < step.floor_ms < most
    assert step.fraction == pytest.approx(step.floor_ms / step.ms)


def test_a_step_is_the_median_time_between_commits(tmp_path: Path) -> None:
    with warm_engine(str(tiny_directory(tmp_path, max_position_embeddings=1024)), options()) as found:
        ticks = iter(np.arange(10**6) * 0.25)
        found.engine.loop.clock = lambda: float(next(ticks))  # asked seven times a turn
        step = measure_decode(found, SLOW, batch=1, steps=10)
        found.engine.loop.clock = lambda: 0.0
    assert step.ms == step.p99_ms == 7 * 250


def test_a_first_token_counts_every_chunk(tmp_path: Path) -> None:
    with warm_engine(str(tiny_directory(tmp_path, max_position_embeddings=1024)), options()) as found:
        records = watched(found)
        first = measure_prefill(found, SLOW, tokens=600, chunk=256)
        assert [record.prefill_tokens for record in records[:3]] == [256, 256, 88]
        assert len(records) == 6 * 3
        assert not found.engine.loop.has_work
        assert first.floor_ms == pytest.approx(prefill_work(found.config, 4, 600, 256).floor(SLOW) * 1000)
    assert first.fraction == pytest.approx(first.floor_ms / first.ms)


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    with warm_engine(str(tiny_directory(tmp_path, max_position_embeddings=1024)), options()) as found:
        engine = found.engine
        assert decode_obstacle(engine, 8, 256) is None
        assert decode_obstacle(engine, 9, 256) == "the engine runs at most 8 requests at once"
        assert "takes a context of" in str(decode_obstacle(engine, 8, 1000))
        assert prefill_obstacle(engine, 1023) is None
        assert prefill_obstacle(engine, 1024) == "the context is 1024 tokens, one of them for the answer"
    small = options(kv_cache_memory_bytes=425_000)
    with warm_engine(str(tiny_directory(tmp_path, max_position_embeddings=1024)), small) as found:
        assert decode_obstacle(found.engine, 8, 256) == "the KV cache holds 4 requests of 400 tokens"
        with pytest.raises(EngineError, match="the KV cache is too small for 8 requests at once"):
            measure_decode(found, SLOW, batch=8, steps=800)
        assert not found.engine.loop.has_work


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = tiny_directory(tmp_path / "m", max_position_embeddings=512), tmp_path / "latency.json"
    line = ["bench", "latency", "--shape", str(path), "--device", "cpu", "--json", str(file)]
    assert main([*line, "--batch", "1", "3", "--prompt", "16", "300", "4096", "--decode-steps", "8"]) == 0
    data = json.loads(file.read_text())
    assert [row["batch"] for row in data["decode"]] == [1, 3]
    assert list(data["decode"][0]) == ["batch", "ms", "p99_ms", "floor_ms", "fraction"]
    assert [row["tokens"] for row in data["prefill"]] == [16, 300]
    assert list(data["prefill"][0]) == ["tokens", "ms", "floor_ms", "fraction"]
    assert data["left_out"] == ["prompt of 4096: the context is 512 tokens, one of them for the answer"]
    assert min(data["startup_s"], data["copy_tb_per_s"], data["matmul_tflop_per_s"]) > 0
    out = capsys.readouterr().out
    assert "left out: prompt of 4096" in out
    assert "TFLOP/s" in out


@pytest.mark.parametrize("option", ["--batch", "--prompt", "--decode-steps"])
def test_nonsense_is_one_line(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", option, "0"]) == 2
    assert f"{option} 0 must be at least 1" in capsys.readouterr().err


def test_tokens_are_drawn_as_the_command_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file = tiny_directory(tmp_path / "m", max_position_embeddings=512), tmp_path / "latency.json"
    line = ["bench", "latency", "--shape", str(path), "--device", "cpu", "--json", str(file)]
    line += ["--batch", "2", "--prompt", "16", "--decode-steps", "4", "--sampling"]
    assert main([*line, '{"top_k": 3, "logprobs": 1}']) == 0
    sampling = json.loads(file.read_text())["sampling"]
    assert (sampling["temperature"], sampling["top_k"], sampling["logprobs"]) == (0.6, 3, 1)
    for wrong, told in (
        ('{"top_k": ', "is not valid JSON"),
        ("3", "is not a JSON object"),
        ('{"max_tokens": 3}', "unknown parameter 'max_tokens'; known: temperature, top_k"),
        ('{"top_p": 2}', "top_p=2 is out of range"),
    ):
        with pytest.raises(SystemExit):
            main([*line, wrong])
        assert told in capsys.readouterr().err


def test_a_step_samples_as_it_is_told(tmp_path: Path) -> None:
    with warm_engine(str(tiny_directory(tmp_path, max_position_embeddings=1024)), options()) as found:
        opened: list[SamplingParams] = []
        create_sequences = found.engine.create_sequences

        def note(prompt: list[int], params: SamplingParams) -> list[Sequence]:
            opened.append(params)
            return create_sequences(prompt, params)

        found.engine.create_sequences = note  # type: ignore[method-assign,assignment]
        asked = SamplingParams(temperature=0.5, top_p=0.9, logprobs=2)
        measure_decode(found, SLOW, batch=2, steps=4, sampling=asked)
        measure_prefill(found, SLOW, tokens=16, chunk=256, sampling=asked)
    assert len(opened) == 2 + 6
    assert {(one.temperature, one.top_p, one.logprobs, one.ignore_eos) for one in opened} == {(0.5, 0.9, 2, True)}
