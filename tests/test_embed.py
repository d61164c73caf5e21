"""Embeddings beside Transformers' hidden states, whatever the slices, the company and the cache."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.models import tiny
from tests.models.conftest import Saved, saved
from tests.serve.running import MEASURED
from weft import LLM, ModelError, RequestError, SamplingParams
from weft.engine.pooling import pooling_of
from weft.hub import NEEDED_FILES

__all__ = ["saved"]
LENGTHS = (1, 7, 40, 61)


def hidden_states(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model.model(torch.tensor([ids])).last_hidden_state[0]


def prompts() -> list[list[int]]:
    return [tiny.prompt(length, seed=length).tolist() for length in LENGTHS]


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_embeddings_agree_with_transformers(family: str, saved: Saved) -> None:
    model, path = saved(family)
    with LLM(path, dtype="float32", max_num_batched_tokens=24, max_num_seqs=8, kv_cache_memory_bytes=2**24) as llm:
        for pooling in ("last", "mean"):
            found = llm.embed(prompts(), pooling=pooling, normalize=False, progress=False)
            for ids, one in zip(prompts(), found, strict=True):
                states = hidden_states(model, ids)
                expected = states[-1] if pooling == "last" else states.mean(0)
                assert np.abs(one.vector - expected.numpy()).max() < 1e-4
                assert one.prompt_token_ids == ids


def test_a_cached_prefix_changes_nothing(saved: Saved) -> None:
    _, path = saved("llama")
    prompt = tiny.prompt(60).tolist()
    with LLM(path, dtype="float32", max_num_batched_tokens=32, max_num_seqs=8, kv_cache_memory_bytes=2**24) as llm:
        first = {kind: llm.embed(prompt, pooling=kind, progress=False)[0] for kind in ("last", "mean")}
        again = {kind: llm.embed(prompt, pooling=kind, progress=False)[0] for kind in ("last", "mean")}
    for kind in first:
        assert np.abs(first[kind].vector - again[kind].vector).max() < 1e-5
    assert again["last"].metrics.cached_tokens > 0
    assert again["mean"].metrics.cached_tokens == 0, "what is cached has no hidden states"


def test_beside_running_streams(saved: Saved) -> None:
    model, path = saved("qwen3")
    prompt = tiny.prompt(50).tolist()
    with LLM(path, dtype="float32", max_num_batched_tokens=16, max_num_seqs=8, kv_cache_memory_bytes=2**24) as llm:
        stream = llm.stream(tiny.prompt(9, seed=3).tolist(), SamplingParams(max_tokens=40, ignore_eos=True))
        next(stream)
        found = llm.embed([prompt, prompt[:20]], pooling="mean", normalize=False, progress=False)
        assert sum(len(delta.token_ids) for delta in stream) <= 40
    for ids, one in zip((prompt, prompt[:20]), found, strict=True):
        assert np.abs(one.vector - hidden_states(model, ids).mean(0).numpy()).max() < 1e-4


def test_dimensions_and_length(saved: Saved) -> None:
    _, path = saved("llama")
    with LLM(path, dtype="float32", kv_cache_memory_bytes=2**24) as llm:
        whole = llm.embed([1, 2, 3], normalize=False, progress=False)[0].vector
        short = llm.embed([1, 2, 3], dimensions=4, progress=False)[0].vector
        assert short.shape == (4,)
        assert np.linalg.norm(short) == pytest.approx(1.0, abs=1e-5)
        assert short == pytest.approx(whole[:4] / np.linalg.norm(whole[:4]), abs=1e-5)
        with pytest.raises(RequestError, match="dimensions=5000"):
            llm.embed([1], dimensions=5000, progress=False)
        with pytest.raises(RequestError, match="pooling='max'"):
            llm.embed([1], pooling="max", progress=False)


def test_the_model_says_how_it_pools(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) == "last"
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    file.write_text('{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false}')
    assert pooling_of(tmp_path) == "mean"
    file.write_text('{"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true}')
    assert pooling_of(tmp_path) == "last"
    file.write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')
    with pytest.raises(ModelError, match="pooling_mode_cls_token"):
        pooling_of(tmp_path)


def test_the_file_that_says_it_is_downloaded() -> None:
    assert "1_Pooling/config.json" in NEEDED_FILES


def test_no_embedding_is_refused_for_a_promise(saved: Saved, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, path = saved("llama")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("weft.engine.build.calibrate", lambda *args, **options: MEASURED)
    with LLM(path, dtype="float32", kv_cache_memory_bytes=2**24, gap_target_ms=500, ttft_target_ms=1) as llm:
        assert len(llm.embed([[1, 2, 3]] * 300, progress=False)) == 300


def test_a_vector_does_not_hold_its_step(saved: Saved) -> None:
    _, path = saved("llama")
    with LLM(path, dtype="float32", kv_cache_memory_bytes=2**24) as llm:
        for pooling in ("last", "mean"):
            (found,) = llm.embed([list(range(50))], pooling=pooling, normalize=False, progress=False)
            assert found.vector.base is None or found.vector.base.nbytes == found.vector.nbytes
