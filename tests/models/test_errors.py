"""Bad directories, configs and weights: one line that names what is wrong."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import tiny
from tests.models.conftest import Saved
from tests.models.test_config import LLAMA
from tests.models.test_logits import load
from weft.errors import ModelError
from weft.files import MOST_DEPTH
from weft.hub import resolve_model
from weft.models import ARCHITECTURES, load_config

INDEX = "model.safetensors.index.json"


@pytest.fixture
def copied(saved: Saved, tmp_path: Path) -> Callable[[str], Path]:
    """A saved family in a directory that the test may damage."""

    def copy(family: str) -> Path:
        return Path(shutil.copytree(saved(family)[1], tmp_path / family))

    return copy


def complaint(action: Callable[[], Any]) -> str:
    with pytest.raises(ModelError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


def config_complaint(path: Path, **changes: Any) -> str:
    raw = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(raw))
    message = complaint(lambda: load_config(path))
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_no_directory_no_config_no_json(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    assert complaint(lambda: load_config(missing)).startswith(f"{missing} is not a readable directory")
    assert "has no config.json" in complaint(lambda: load_config(tmp_path))
    for text, reason in (("{", "not valid JSON"), ("[1]", "not an object"), ("\xff", "not valid JSON")):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        assert reason in complaint(lambda: load_config(tmp_path))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert "cannot read" in complaint(lambda: load_config(tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_may_not_be_read(tmp_path: Path) -> None:
    model = tmp_path / "closed" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for closed in (model, model.parent):
        closed.chmod(0)
        assert "read" in complaint(lambda: load_config(resolve_model(str(model))))
        closed.chmod(0o700)


def test_unknown_architectures_are_told_the_known_ones(tmp_path: Path) -> None:
    message = config_complaint(tmp_path, architectures=["MambaForCausalLM"])
    assert message == f"unknown architecture (MambaForCausalLM); known: {', '.join(ARCHITECTURES)}"
    assert "unknown architecture (none)" in config_complaint(tmp_path, architectures=...)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "config.json has no 'hidden_size'"),
        ({"max_position_embeddings": ...}, "config.json has no 'max_position_embeddings'"),
        ({"vocab_size": "many"}, "config.json says 'vocab_size' is 'many'; it must be a positive integer"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantized checkpoints are not supported (quant_method gptq)",
        ),
        (
            {"rope_scaling": {"type": "ntk-parts", "factor": 2.0}},
            "unknown rope type 'ntk-parts'; known: default, linear",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs 'factor'"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "rope type 'longrope' needs 'short_factor'"),
        (
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
            "64 rotated dimensions are odd or do not fit its factors",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "four"}}, "config.json has a value of the wrong kind"),
        ({"rope_scaling": "linear"}, "config.json has a value of the wrong kind"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 2 layers"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "unknown layer type 'chunked_attention'"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4},
            "num_experts_per_tok 8 is more than the 4 experts",
        ),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "is an embedding model"),
    ],
)
def test_configs_that_cannot_be_used(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in config_complaint(tmp_path, **changes)


@pytest.mark.parametrize("levels", [400, 900, 980, 100_000])
@pytest.mark.parametrize("key", ["num_hidden_layers", "architectures", "layer_types", "rope_scaling", "eos_token_id"])
def test_configs_that_are_nested_deep(key: str, levels: int, tmp_path: Path) -> None:
    deep = "[" * levels + "]" * levels
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, key: "?"}).replace('"?"', deep))
    message = complaint(lambda: load_config(tmp_path))
    assert len(message) < 500
    if levels > MOST_DEPTH:
        assert f"config.json is nested more than {MOST_DEPTH} levels deep" in message


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_more_layers_than_any_model_has(family: str, tmp_path: Path) -> None:
    """Nothing is made for each of them: this would take all memory."""
    message = config_complaint(tmp_path, architectures=[family], num_hidden_layers=10**9)
    assert message == "config.json says 'num_hidden_layers' is 1000000000; it must be at most 10000"
    experts = config_complaint(tmp_path, architectures=["Qwen3MoeForCausalLM"], num_experts=10**9)
    assert experts == "config.json says 'num_experts' is 1000000000; it must be at most 10000"
    assert "'vocab_size' is 1000000" in config_complaint(tmp_path, vocab_size=10**4000)


def test_a_header_of_weights_that_is_nested_deep_or_has_no_end(copied: Callable[[str], Path]) -> None:
    path = copied("llama")
    file = path / "model.safetensors"
    deep = b"[" * 100_000 + b"]" * 100_000
    file.write_bytes(len(deep).to_bytes(8, "little") + deep)
    assert "its header is nested too deep; download it again" in complaint(lambda: load(path))
    with file.open("wb") as stream:
        stream.write((8 << 30).to_bytes(8, "little"))
        stream.truncate(9 << 30)  # it takes no room
    assert "its header is said to have 8589934592 bytes; download it again" in complaint(lambda: load(path))


def test_an_unknown_activation(copied: Callable[[str], Path]) -> None:
    path = copied("llama")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "hidden_act": "xielu"}))
    assert "unknown activation 'xielu'; known: silu" in complaint(lambda: load(path))


def test_no_weights(copied: Callable[[str], Path]) -> None:
    path = copied("llama")
    (path / "model.safetensors").unlink()
    assert complaint(lambda: load(path)) == f"{path} has no .safetensors files"
    (path / "pytorch_model.bin").touch()
    assert ".bin and .pth files are not supported" in complaint(lambda: load(path))


def test_a_truncated_file_names_the_tensor(copied: Callable[[str], Path]) -> None:
    file = copied("llama") / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    message = complaint(lambda: load(file.parent))
    last = sorted(load_names(whole), key=lambda name: load_names(whole)[name])[-1]
    assert f"{file} is unreadable: it ends within tensor {last}; download it again" == message
    file.write_bytes(whole[:100])
    assert "it ends within its header" in complaint(lambda: load(file.parent))
    for rest in (b"", b"garbage that is no safetensors header at all"):
        file.write_bytes(rest)
        assert f"{file} is unreadable" in complaint(lambda: load(file.parent))


def load_names(whole: bytes) -> dict[str, int]:
    """Where each tensor of a safetensors file ends."""
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    return {name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}


@pytest.mark.parametrize(
    ("family", "name", "hint"),
    [
        ("llama", "model.layers.1.self_attn.k_proj.weight", " (nor model.layers.1.self_attn.qkv_proj.weight)"),
        ("llama", "lm_head.weight", ""),
        ("qwen2", "model.layers.0.self_attn.q_proj.bias", " (nor model.layers.0.self_attn.qkv_proj.bias)"),
        (
            "mixtral",
            "model.layers.2.block_sparse_moe.experts.3.w2.weight",
            " (nor model.layers.2.mlp.experts.down_proj)",
        ),
    ],
)
def test_a_missing_tensor(family: str, name: str, hint: str, copied: Callable[[str], Path]) -> None:
    path = copied(family)
    tensors = load_file(path / "model.safetensors")
    del tensors[name]
    save_file(tensors, path / "model.safetensors")
    assert complaint(lambda: load(path)) == f"{path}: tensor {name} is missing{hint}"


def test_a_tensor_of_the_wrong_shape_or_type(copied: Callable[[str], Path]) -> None:
    path = copied("llama")
    file, name = path / "model.safetensors", "model.layers.0.self_attn.v_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, name: torch.zeros(32, 63)}, file)
    assert complaint(lambda: load(path)) == (
        f"{file}: tensor {name} has shape [32, 63], but config.json asks for [32, 64]"
    )
    save_file({**tensors, name: torch.zeros(32, 64, dtype=torch.int8)}, file)
    assert "is I8; only floating-point weights are supported" in complaint(lambda: load(path))


def test_a_broken_index(saved: Saved, tmp_path: Path) -> None:
    tiny.save(saved("llama")[0], tmp_path, max_shard_size="50KB")
    index = json.loads((tmp_path / INDEX).read_text())
    shard = index["weight_map"]["model.norm.weight"]
    wrong = next(other for other in index["weight_map"].values() if other != shard)
    moved = {"weight_map": {**index["weight_map"], "model.norm.weight": wrong}}
    (tmp_path / INDEX).write_text(json.dumps(moved))
    assert f"tensor model.norm.weight is in {wrong}, but it is not" in complaint(lambda: load(tmp_path))
    (tmp_path / INDEX).write_text("{}")
    assert "has no weight_map" in complaint(lambda: load(tmp_path))
    (tmp_path / INDEX).write_text(json.dumps(index))
    (tmp_path / shard).unlink()
    assert f"{INDEX} names {shard}, which is missing" in complaint(lambda: load(tmp_path))
