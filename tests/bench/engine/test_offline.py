"""Offline throughput: the workload is nano-vllm's, and every token of it is sampled."""

import json
from pathlib import Path

import pytest

from tests.engine.tiny import tiny_directory
from weft.bench.engine.offline import WORKLOADS, OfflineRequest, measure, uniform256
from weft.bench.engine.shapes import closing_engine
from weft.cli import main
from weft.engine.options import EngineOptions
from weft.errors import OptionError

OPTIONS = EngineOptions(load_format="dummy", device="cpu", kv_cache_memory_bytes=10**6, enable_prefix_caching=False)


def test_uniform256_is_the_yardstick_of_nano_vllm() -> None:
    requests = uniform256()
    assert len(requests) == 256
    assert sum(request.max_tokens for request in requests) == 133_966
    assert sum(len(request.prompt) for request in requests) == 142_827
    assert all(100 <= len(request.prompt) <= 1024 and 100 <= request.max_tokens <= 1024 for request in requests)
    assert (
        0
        <= min(min(request.prompt) for request in requests)
        <= max(max(request.prompt) for request in requests)
        <= 10_000
    )


def test_all_tokens_are_sampled_and_counted(tmp_path: Path) -> None:
    seen: list[int] = []
    with closing_engine(OPTIONS, tiny_directory(tmp_path)) as engine:
        listener = engine.loop.on_record
        result = measure(engine, [OfflineRequest([5000] * 20, 7), OfflineRequest([1] * 90, 38)], seen.append)
        assert engine.loop.on_record is listener
    assert (result.prompts, result.input_tokens, result.output_tokens) == (2, 110, 45)
    assert seen == sorted(seen)
    assert seen[-1] == 45
    assert result.steps == 38
    assert result.total_rate == pytest.approx(result.output_rate * 155 / 45)


def test_a_context_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with closing_engine(OPTIONS, tiny_directory(tmp_path)) as engine:
        with pytest.raises(OptionError, match=r"needs a context of 129 tokens, but the engine's is 128"):
            measure(engine, [OfflineRequest([1] * 100, 29)])
        assert not engine.loop.has_work


def test_the_command_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        WORKLOADS,
        "uniform256",
        lambda: [OfflineRequest([1] * 30, 9), OfflineRequest([2] * 40, 5), OfflineRequest([3] * 50, 90)],
    )
    path, file = tiny_directory(tmp_path / "m"), tmp_path / "offline.json"
    line = ["bench", "offline", "--shape", str(path), "--device", "cpu", "--num-prompts", "2", "--json", str(file)]
    assert main(line) == 0
    data = json.loads(file.read_text())
    assert (data["prompts"], data["input_tokens"], data["output_tokens"], data["steps"]) == (2, 70, 14, 9)
    assert data["dtype"] == "float32"
    assert 0 < data["ready_s"] < data["startup_s"]
    parts = data["startup_parts_s"]
    assert list(parts) == ["imports", "weights", "KV cache"]
    assert min(parts.values()) >= 0
    assert sum(parts.values()) <= data["ready_s"]
    assert min(data["output_tokens_per_s"], data["total_tokens_per_s"], data["seconds"], data["copy_tb_per_s"]) > 0
    out = capsys.readouterr().out
    assert "first token after" in out
    assert "(imports " in out
    assert "tokens/s" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts 0 must be at least 1"),
        (["--num-prompts", "257"], "--num-prompts 257 is more than the 256 of uniform256: lower it"),
        (["--shape", "gpt-9"], "--shape gpt-9 is unknown: choose qwen3-0.6b, llama-3-8b, or a directory"),
        (["--load-format", "auto"], "the shape qwen3-0.6b has no weights"),
        (["--max-num-seqs", "0"], "max_num_seqs=0 must be a whole number of at least 1"),
        (["--gpu-memory-utilization", "2"], "gpu_memory_utilization=2.0 must be above 0 and at most 1"),
        (["--max-num-batched-tokens", "5"], "max_num_batched_tokens=5 is below max_num_seqs=256"),
        (["--device", "tpu", "--num-prompts", "1"], "device='tpu' is not supported"),
        (["--dtype", "int4"], "dtype 'int4' is not supported"),
    ],
)
def test_nonsense_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", *options]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
