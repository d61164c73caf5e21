"""config.json in both spellings, and what each family's means."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import tiny
from tests.models.conftest import Saved
from weft.errors import OptionError
from weft.models import ModelConfig, load_config, resolve_dtype


def read(raw: dict[str, Any], path: Path, generation: dict[str, Any] | None = None) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return load_config(path)


def as_published(raw: dict[str, Any]) -> dict[str, Any]:
    """A config of Transformers 5 in the spelling of the years before."""
    raw = {key: value for key, value in raw.items() if value is not None}
    raw["torch_dtype"] = raw.pop("dtype")
    ropes = raw.pop("rope_parameters")
    if "full_attention" in ropes:
        raw["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        raw["sliding_window_pattern"] = 2
        ropes = ropes["full_attention"]
    raw["rope_theta"] = ropes.pop("rope_theta")
    if "partial_rotary_factor" in ropes:
        raw["partial_rotary_factor"] = ropes.pop("partial_rotary_factor")
    kind = ropes.pop("rope_type")
    raw["rope_scaling"] = {"type": kind, **ropes} if kind != "default" else None
    for key in ("layer_types", "_sliding_window_pattern"):
        raw.pop(key, None)
    if raw["model_type"] == "qwen3_moe":
        raw["num_experts"] = raw.pop("num_local_experts")
    if raw["model_type"] == "gemma3_text":
        del raw["tie_word_embeddings"]  # its default, which older versions did not write
    if raw["model_type"] in ("mistral", "mixtral", "phi3"):
        raw.setdefault("sliding_window", None)
    return raw


@pytest.mark.parametrize("name", [*tiny.FAMILIES, *tiny.ROPES])
def test_both_spellings_mean_the_same(name: str, saved: Saved, tmp_path: Path) -> None:
    path = saved(name)[1]
    raw = json.loads((path / "config.json").read_text())
    published = as_published(raw)
    assert published != raw
    assert read(published, tmp_path) == load_config(path)


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
PLAIN = {**LLAMA, "rope_scaling": None}


def test_llama_as_published(tmp_path: Path) -> None:
    config = read(LLAMA, tmp_path, {"eos_token_id": [128001, 128008, 128009]})
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 64)
    assert config.attention_scale == 64**-0.5
    assert config.max_context == config.longest_context == 131072
    assert config.layer_windows == (None, None)
    assert config.layer_ropes[0].kind == "llama3"
    assert config.layer_ropes[0].original_positions == 8192
    assert config.tie_embeddings
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.bos_token_id == 128000
    assert config.moe is None


def test_defaults_of_early_configs(tmp_path: Path) -> None:
    missing = (
        "num_key_value_heads",
        "rope_theta",
        "rope_scaling",
        "tie_word_embeddings",
        "torch_dtype",
        "eos_token_id",
    )
    config = read({key: value for key, value in LLAMA.items() if key not in missing}, tmp_path)
    assert config.num_kv_heads == 32
    assert config.layer_ropes[0].theta == 10_000.0
    assert config.dtype == "float32"
    assert config.eos_token_ids == ()
    assert not config.tie_embeddings


def test_token_ids_that_the_model_cannot_produce_end_nothing(tmp_path: Path) -> None:
    assert read({**PLAIN, "eos_token_id": [7, 200_000]}, tmp_path, {"eos_token_id": 7}).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("architecture", "settings", "windows"),
    [
        ("Llama", {"sliding_window": 64}, (None, None)),
        ("Mistral", {}, (4096, 4096)),
        ("Mistral", {"sliding_window": None}, (None, None)),
        ("Qwen2", {"sliding_window": 64}, (None, None)),
        ("Qwen2", {"sliding_window": 64, "use_sliding_window": False, "max_window_layers": 0}, (None, None)),
        ("Qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, (None, 64)),
        ("Qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 28}, (None, None)),
        ("Qwen3Moe", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, (64, 64)),
        ("Gemma3", {"sliding_window": 64, "sliding_window_pattern": 2}, (64, None)),
        ("Gemma3", {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, (None, 64)),
        ("Phi3", {"sliding_window": 2047}, (2047, 2047)),
    ],
)
def test_windows(architecture: str, settings: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    config = read({**PLAIN, "architectures": [f"{architecture}ForCausalLM"], **settings}, tmp_path)
    assert config.layer_windows == windows


def test_gemma_has_a_rope_for_each_kind_of_layer(tmp_path: Path) -> None:
    raw = {**PLAIN, "architectures": ["Gemma3ForCausalLM"], "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    raw |= {"sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    local, globally = read(raw, tmp_path).layer_ropes
    assert (local.kind, local.theta) == ("default", 1e4)
    assert (globally.kind, globally.theta, globally.factor) == ("linear", 1e6, 8.0)


def test_mixture_of_experts(tmp_path: Path) -> None:
    raw = {**PLAIN, "num_hidden_layers": 4, "num_experts_per_tok": 2}
    mixtral = read({**raw, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, tmp_path).moe
    assert mixtral is not None
    assert mixtral.normalize
    assert mixtral.intermediate_size == 8192
    assert mixtral.sparse_layers == {0, 1, 2, 3}
    sparse = {"num_experts": 16, "moe_intermediate_size": 768, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    qwen = read({**raw, "architectures": ["Qwen3MoeForCausalLM"], **sparse}, tmp_path).moe
    assert qwen is not None
    assert not qwen.normalize
    assert (qwen.num_experts, qwen.intermediate_size) == (16, 768)
    assert qwen.sparse_layers == {1}


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi_has_had_three_names_for_longrope(name: str, tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
    raw = {**PLAIN, "architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": name, **factors}}
    rope = read(raw, tmp_path).layer_ropes[0]
    assert (rope.kind, rope.original_positions, rope.factor) == ("longrope", 4096, 32.0)


def test_contexts_of_stretched_ropes(tmp_path: Path) -> None:
    raw = {**PLAIN, "max_position_embeddings": 32768}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read({**raw, "rope_scaling": yarn}, tmp_path).max_context == 131072
    dynamic = read({**raw, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, tmp_path)
    assert (dynamic.max_context, dynamic.longest_context) == (32768, 65536)


def test_dtypes(tmp_path: Path) -> None:
    config, cpu = read(LLAMA, tmp_path), torch.device("cpu")
    assert resolve_dtype("auto", config, cpu) == torch.bfloat16
    assert resolve_dtype("float16", config, cpu) == torch.float16
    assert resolve_dtype("float64", config, cpu) == torch.float64
    with pytest.raises(OptionError, match="'int8' is not supported; choose auto, float32, float16 or bfloat16"):
        resolve_dtype("int8", config, cpu)
    odd = read({**LLAMA, "torch_dtype": "float8_e4m3fn"}, tmp_path)
    with pytest.raises(OptionError, match="float8_e4m3fn"):
        resolve_dtype("auto", odd, cpu)
