"""A model without the layers that only repeat others: what it is warmed up with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import tiny
from weft.kernels.attention import AttentionParams
from weft.models import CausalLM, Dtypes, load_config, load_model
from weft.models.layers import SparseMLP

CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "one layer": ({"num_hidden_layers": 1}, [0]),
    "two layers": ({"num_hidden_layers": 2}, [0, 1]),
    "all alike": ({"num_hidden_layers": 9}, [0, 1, 8]),
    "windows": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "num_hidden_layers": 9,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 4,
        },
        [0, 1, 4, 8],
    ),
    "windows with their ropes": ({"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 15}, [0, 1, 5, 14]),
    "experts": (
        {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 9, "decoder_sparse_step": 3, **tiny.MOE},
        [0, 1, 2, 8],
    ),
}


class Recorded:
    """Attention that remembers who called; nobody sees anybody."""

    def __init__(self) -> None:
        self.calls: list[AttentionParams] = []

    def __call__(self, params: AttentionParams, qkv: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append(params)
        return qkv[:, : params.num_heads * params.head_dim], residual


def called(model: CausalLM) -> list[AttentionParams]:
    recorded = Recorded()
    with torch.inference_mode():
        assert model(torch.arange(3), recorded).shape == (3, model.config.hidden_size)
    return recorded.calls


def model_of(config: dict[str, Any], path: Path) -> CausalLM:
    whole = {"architectures": ["LlamaForCausalLM"], **tiny.SHAPE, **config}
    (path / "config.json").write_text(json.dumps(whole))
    shape: dict[str, Any] = {"dtypes": Dtypes.of(torch.float32), "device": torch.device("cpu"), "max_model_len": 64}
    return load_model(path, load_config(path), load_format="dummy", **shape)


@pytest.mark.parametrize("case", CASES)
def test_one_layer_of_each_kind_is_left(case: str, tmp_path: Path) -> None:
    config, expected = CASES[case]
    model = model_of(config, tmp_path)
    everything = called(model)
    assert [params.layer for params in everything] == list(range(config["num_hidden_layers"]))
    with model.abridged():
        left = called(model)
    assert [params.layer for params in left] == expected
    assert {(one.window, one.rotation) for one in left} == {(one.window, one.rotation) for one in everything}
    sparse = {isinstance(module, SparseMLP) for module in (layer.mlp for layer in model.layers)}
    assert {isinstance(model.layers[index].mlp, SparseMLP) for index in expected} == sparse
    assert left[-1].is_last_layer


def test_it_is_whole_again_after_an_error(tmp_path: Path) -> None:
    model = model_of({"num_hidden_layers": 5}, tmp_path)
    with pytest.raises(ZeroDivisionError), model.abridged():
        raise ZeroDivisionError
    assert len(called(model)) == 5
