"""Logits of every family and rope against Transformers, float32, within 1e-4."""

from pathlib import Path

import pytest
import torch

from tests.models import tiny
from tests.models.conftest import Saved
from weft.models import CausalLM, Dtypes, load_config, load_model

CPU = torch.device("cpu")
TOLERANCE = 1e-4  # the largest absolute difference of any logit


def load(path: Path, max_model_len: int = tiny.CONTEXT, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(path, load_config(path), dtypes=Dtypes.of(dtype), device=CPU, max_model_len=max_model_len)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_family_agrees_with_transformers(family: str, saved: Saved) -> None:
    reference, path = saved(family)
    prompts = tiny.prompt(40), tiny.prompt(17, seed=1)
    for tokens, found in zip(prompts, tiny.weft_logits(load(path), *prompts), strict=True):
        expected = tiny.reference_logits(reference, tokens)
        assert found.dtype == torch.float32
        assert expected.std() > 0.5, "flat logits would prove nothing"
        assert difference(found, expected) < TOLERANCE


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_sharded_checkpoint_gives_the_same_model(family: str, saved: Saved, tmp_path: Path) -> None:
    reference, path = saved(family)
    tiny.save(reference, tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    for whole, sharded in zip(load(path).parameters(), load(tmp_path).parameters(), strict=True):
        assert torch.equal(whole, sharded)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_may_be_stacked_in_the_checkpoint(family: str, saved: Saved, tmp_path: Path) -> None:
    reference, path = saved(family)
    tiny.save(reference, tmp_path, save_original_format=False)
    for split, stacked in zip(load(path).parameters(), load(tmp_path).parameters(), strict=True):
        assert torch.equal(split, stacked)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "qwen2-window", "phi3-partial"])
def test_the_window_matters(family: str, saved: Saved) -> None:
    """A token inside changes the logits, one that no chain of windows reaches does not."""
    _, path = saved(family)
    config = load_config(path)
    windows = {window for window in config.layer_windows if window is not None}
    assert windows == {tiny.WINDOW}
    model = load(path)
    tokens = tiny.prompt(64)
    changed = tokens.clone()
    changed[0] = (changed[0] + 1) % tiny.VOCAB
    before, after = (tiny.weft_logits(model, prompt)[0] for prompt in (tokens, changed))
    assert not torch.equal(before[tiny.WINDOW - 1], after[tiny.WINDOW - 1])
    if None not in config.layer_windows:
        reach = config.num_layers * (tiny.WINDOW - 1)
        assert torch.equal(before[reach + 1 :], after[reach + 1 :])


@pytest.mark.parametrize("kind", tiny.ROPES)
def test_a_rope_agrees_with_transformers(kind: str, saved: Saved) -> None:
    reference, path = saved(kind)
    tokens = tiny.prompt(100)  # within the original context of dynamic and longrope
    found = tiny.weft_logits(load(path, max_model_len=100), tokens)[0]
    assert difference(found, tiny.reference_logits(reference, tokens)) < TOLERANCE


@pytest.mark.parametrize(("kind", "length"), [("dynamic", 700), ("longrope", 200), ("yarn", 400), ("llama3", 400)])
def test_a_rope_agrees_beyond_the_original_context(kind: str, length: int, saved: Saved) -> None:
    """Transformers scales for the length of the prompt, weft for max_model_len: equal when these are equal."""
    reference, path = saved(kind)
    tokens = tiny.prompt(length)
    found = tiny.weft_logits(load(path, max_model_len=length), tokens)[0]
    assert difference(found, tiny.reference_logits(reference, tokens)) < TOLERANCE


@pytest.mark.parametrize(("kind", "limit"), [("dynamic", 700), ("longrope", 512)])
def test_frequencies_do_not_depend_on_the_sequence(kind: str, limit: int, saved: Saved) -> None:
    """A prefix of a prompt gives the prefix of its logits, on whichever side of the original context both end."""
    model = load(saved(kind)[1], max_model_len=limit)
    tokens = tiny.prompt(limit)
    short, long = tiny.weft_logits(model, tokens[:50])[0], tiny.weft_logits(model, tokens)[0]
    assert difference(short, long[:50]) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3-moe", "gemma3"])
def test_company_changes_nothing_but_rounding(family: str, saved: Saved) -> None:
    model = load(saved(family)[1], dtype=torch.float64)
    prompts = [tiny.prompt(length, seed=length) for length in (1, 30, 12)]
    together = tiny.weft_logits(model, *prompts)
    for tokens, found in zip(prompts, together, strict=True):
        assert found.dtype == torch.float64
        assert difference(found, tiny.weft_logits(model, tokens)[0]) < 1e-12


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "gemma3"])
def test_float32_is_close_to_float64(family: str, saved: Saved) -> None:
    path = saved(family)[1]
    narrow, exact = (tiny.weft_logits(load(path, dtype=t), tiny.prompt(20))[0] for t in (torch.float32, torch.float64))
    assert 0 < difference(narrow.double(), exact) < TOLERANCE
