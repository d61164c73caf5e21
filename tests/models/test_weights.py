"""Types, tied heads and harmless extras of checkpoints; random weights; where models are found."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import tiny
from tests.models.conftest import Saved
from tests.models.test_logits import CPU, difference, load
from weft.errors import ModelError
from weft.hub import resolve_model
from weft.models import CausalLM, Dtypes, load_config, load_model


def dummy(path: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> CausalLM:
    options: dict[str, Any] = {"dtypes": Dtypes.of(dtype), "load_format": "dummy", "seed": seed}
    return load_model(path, load_config(path), device=CPU, max_model_len=tiny.CONTEXT, **options)


def rewrite(source: Path, target: Path, **changes: torch.Tensor) -> Path:
    """A copy of a saved model with some tensors added or replaced."""
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file({**load_file(source / "model.safetensors"), **changes}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_cast_to_the_type_asked_for(stored: torch.dtype, saved: Saved, tmp_path: Path) -> None:
    _, path = saved("qwen2")
    cast = {name: tensor.to(stored) for name, tensor in load_file(path / "model.safetensors").items()}
    model = load(rewrite(path, tmp_path, **cast))
    for wide, narrow in zip(load(path).parameters(), model.parameters(), strict=True):
        assert narrow.dtype == torch.float32
        assert torch.equal(wide.to(stored).float(), narrow)


def test_a_narrow_model_gives_float32_logits(saved: Saved) -> None:
    reference, path = saved("llama")
    found = tiny.weft_logits(load(path, dtype=torch.float16), tiny.prompt(20))[0]
    assert found.dtype == torch.float32
    assert difference(found, tiny.reference_logits(reference, tiny.prompt(20))) < 0.1


def test_harmless_extras_are_ignored(saved: Saved, tmp_path: Path) -> None:
    """An old buffer, and a head beside tied embeddings."""
    reference, path = saved("llama-tied")
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "lm_head.weight": torch.ones(tiny.VOCAB, 64),
    }
    found = tiny.weft_logits(load(rewrite(path, tmp_path, **extras)), tiny.prompt(20))[0]
    assert difference(found, tiny.reference_logits(reference, tiny.prompt(20))) < 1e-4


def test_nothing_wants_a_gradient(saved: Saved) -> None:
    model = load(saved("mixtral")[1])
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3-moe", "gemma3", "phi3"])
def test_dummy_weights_need_only_a_config(family: str, saved: Saved, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((saved(family)[1] / "config.json").read_bytes())
    logits = tiny.weft_logits(dummy(tmp_path), tiny.prompt(50))[0]
    assert 0.3 < logits.std() < 10
    assert len(logits.argmax(dim=-1).unique()) > 5


def test_dummy_weights_follow_the_seed_and_not_the_type(saved: Saved) -> None:
    path = saved("qwen3-moe")[1]
    first, again, other, narrow = dummy(path), dummy(path), dummy(path, seed=1), dummy(path, torch.bfloat16)
    for a, b, c in zip(first.parameters(), again.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.bfloat16(), c)
    assert not torch.equal(first.embed_tokens.weight, other.embed_tokens.weight)


def test_resolving_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model("~/org/name") == tmp_path / "org" / "name"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")


def test_resolving_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("some-org/Some.Model-1B") == tmp_path
    assert asked["name"] == "some-org/Some.Model-1B"
    assert {"config.json", "model*.safetensors", "tokenizer.json"} <= set(asked["patterns"])


def test_a_failing_download_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no network\nand a long story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError) as caught:
        resolve_model("org/name")
    assert str(caught.value) == "org/name is not a directory here, and downloading it from the hub failed: no network"


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/place", "nowhere", "a/b/c", "../x"])
def test_a_missing_directory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # beside which there is nothing
    with pytest.raises(
        ModelError, match="does not exist or is not readable; give a directory or a hub id like org/name"
    ):
        resolve_model(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_fills_name_every_tensor_of_a_checkpoint(saved: Saved) -> None:
    """Nothing that Transformers saved is left unread."""
    for family in tiny.FAMILIES:
        path = saved(family)[1]
        stored = set(load_file(path / "model.safetensors"))
        for fill in load(path).parameter_sources():
            stored -= {fill.name} if fill.name in stored else set(fill.parts)
        assert stored == set(), family


def test_a_single_file_wins_over_an_index(saved: Saved, tmp_path: Path) -> None:
    path = rewrite(saved("llama")[1], tmp_path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    assert load(path).config == load_config(path)


def test_loading_imports_no_computer_algebra(saved: Saved) -> None:
    """Torch does so for some operations on tensors without memory, which takes seconds of every start."""
    _, path = saved("llama")
    code = (
        "import sys, torch; from weft.models import Dtypes, load_config, load_model; path = sys.argv[1]; "
        "options = {'dtypes': Dtypes.of(torch.float32), 'device': torch.device('cpu'), 'max_model_len': 64}; "
        "load_model(path, load_config(path), **options); "
        "sys.exit('sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == 0
