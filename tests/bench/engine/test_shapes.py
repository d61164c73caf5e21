"""Shapes from a config alone, and the least that a step of them must read and compute."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.tiny import tiny_directory
from weft.bench.engine.limits import Ceilings, Work, decode_work, measure_ceilings, prefill_work
from weft.bench.engine.shapes import SHAPES, process_seconds, shape_directory, warm_engine
from weft.engine.options import EngineOptions
from weft.engine.params import SamplingParams
from weft.errors import ModelError, OptionError
from weft.models import ARCHITECTURES, Dtypes, ModelConfig, load_config

# torch itself depends on jinja2, so that one is always there.
SERVER = ["zmq", "starlette", "uvicorn", "msgspec", "httptools", "uvloop", "llguidance", "huggingface_hub", "rich"]
WITHOUT_SERVER = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {SERVER}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.stderr.isatty = lambda: True  # there would be a progress bar

from weft.bench.engine.offline import WORKLOADS, OfflineRequest
from weft.cli import main

WORKLOADS["uniform256"] = lambda: [OfflineRequest([1] * 8, 4)]
shape = ["--device", "cpu", "--shape", sys.argv[1]]
assert main(["bench", "offline", *shape]) == 0
assert main(["bench", "latency", "--batch", "1", "--prompt", "16", "--decode-steps", "8", *shape]) == 0
assert main(["bench", "interference", "--simulated-only"]) == 0
"""


def config_of(shape: str) -> ModelConfig:
    with shape_directory(shape) as path:
        return load_config(path)


def matrices(config: ModelConfig) -> int:
    """Parameters of the real model that a decode step reads: all matrices but an embedding that is not the head."""
    with torch.device("meta"):
        model = ARCHITECTURES[config.architecture](config, Dtypes.of(torch.float32))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.dim() > 1}
    return sum(sizes.values()) - (0 if config.tie_embeddings else sizes["embed_tokens.weight"])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decode_step_reads_every_weight_of_the_model_once(shape: str) -> None:
    config = config_of(shape)
    work = decode_work(config, 2, 1, 0)
    assert work.read == 2 * matrices(config)
    assert work.flops == work.read
    assert decode_work(config, 2, 64, 0) == Work(work.read, 64 * work.flops)


def test_the_shapes_are_those_of_the_published_models() -> None:
    qwen, llama = config_of("qwen3-0.6b"), config_of("llama-3-8b")
    assert matrices(qwen) == pytest.approx(0.596e9, rel=1e-3)
    assert matrices(llama) + llama.vocab_size * llama.hidden_size == pytest.approx(8.03e9, rel=1e-3)
    assert (qwen.max_context, llama.max_context) == (40_960, 131_072)
    assert (llama.layer_ropes[0].kind, llama.layer_ropes[0].original_positions) == ("llama3", 8192)
    assert (qwen.dtype, llama.dtype) == ("bfloat16", "bfloat16")


def test_the_context_is_read_by_decodes_and_multiplied_by_prefills() -> None:
    config = config_of("llama-3-8b")
    per_token = 32 * 2 * 8 * 128 * 2  # bytes: layers, keys and values, heads, their size, bfloat16
    alone, behind = decode_work(config, 2, 16, 0), decode_work(config, 2, 16, 1000)
    assert behind.read - alone.read == 16 * 1000 * per_token
    assert behind.flops - alone.flops == 16 * 1000 * 4 * 32 * 32 * 128
    whole, chunks = prefill_work(config, 2, 30_000, 30_000), prefill_work(config, 2, 30_000, 16_384)
    layers = matrices(config) - config.vocab_size * config.hidden_size
    assert chunks.read - whole.read == 2 * layers
    attention = 4 * 32 * 32 * 128 * 30_000 * 30_001 // 2
    assert chunks.flops == whole.flops == 2 * (30_000 * layers + 4096 * 128_256) + attention


def test_windows_and_experts_count_for_what_they_are(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    sparse = load_config(tiny_directory(tmp_path / "moe", architectures=["Qwen3MoeForCausalLM"], **experts))
    one, many = decode_work(sparse, 4, 1, 0), decode_work(sparse, 4, 10_000, 0)
    assert one.read == one.flops * 4 / 2
    assert many.read == pytest.approx(4 * matrices(sparse))
    window = load_config(tiny_directory(tmp_path / "w", architectures=["MistralForCausalLM"], sliding_window=10))
    assert decode_work(window, 4, 1, 10) == decode_work(window, 4, 1, 100)
    full = load_config(tiny_directory(tmp_path / "f"))
    pairs = 100 * 101 // 2 - (10 * 11 // 2 + 90 * 10)
    assert prefill_work(full, 4, 100, 100).flops - prefill_work(window, 4, 100, 100).flops == 2 * 4 * 4 * 8 * pairs


def test_the_floor_is_the_longer_of_reading_and_computing() -> None:
    assert Work(read=10.0, flops=4.0).floor(Ceilings(copy=5.0, matmul=4.0)) == 2.0
    assert Work(read=10.0, flops=40.0).floor(Ceilings(copy=5.0, matmul=4.0)) == 10.0
    found = measure_ceilings(torch.device("cpu"), torch.float32)
    assert min(found) > 0


def test_a_subject_has_answered_once_and_is_closed_afterwards(tmp_path: Path) -> None:
    path = tiny_directory(tmp_path)
    options = EngineOptions(load_format="dummy", device="cpu", kv_cache_memory_bytes=10**6)
    with warm_engine(str(path), options) as found:
        assert 0 < found.ready < found.first_token < process_seconds()
        assert (found.dtype_name, found.device.type) == ("float32", "cpu")
        assert not found.engine.loop.has_work
    found.engine.loop.add(*found.engine.create_sequences([1], SamplingParams(max_tokens=1)))
    with pytest.raises(RuntimeError):
        found.engine.loop.step()


def test_what_is_no_shape_is_told_what_is(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"--shape gpt-9 is unknown: choose qwen3-0.6b, llama-3-8b, or a directory"):
        config_of("gpt-9")
    with pytest.raises(ModelError, match=r"has no config.json"):
        config_of(str(tmp_path))
    with (
        pytest.raises(OptionError, match=r"the shape qwen3-0.6b has no weights; give a DIRECTORY"),
        shape_directory("qwen3-0.6b", "auto"),
    ):
        pass


def test_a_named_shape_leaves_nothing_behind() -> None:
    with shape_directory("llama-3-8b") as path:
        assert path.name == "llama-3-8b"
        assert json.loads((path / "config.json").read_text()) == SHAPES["llama-3-8b"]
    assert not path.parent.exists()


def test_the_benchmarks_need_nothing_of_the_server(tmp_path: Path) -> None:
    path = tiny_directory(tmp_path, max_position_embeddings=512)
    command = [sys.executable, "-c", WITHOUT_SERVER, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
