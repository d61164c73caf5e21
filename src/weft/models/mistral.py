"""Mistral (Llama with a sliding window, where the config has one) and Mixtral (the same with experts)."""

from typing import Any

from torch import nn

from weft.models.config import ModelConfig
from weft.models.layers import SparseMLP
from weft.models.llama import Llama


class Mistral(Llama):
    @staticmethod
    def modernise(raw: dict[str, Any]) -> dict[str, Any]:
        return {"sliding_window": 4096, **raw}  # null, as from Mistral 7B v0.2 on, means no window


class Mixtral(Llama):
    @staticmethod
    def modernise(raw: dict[str, Any]) -> dict[str, Any]:
        defaults = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2}
        return {**defaults, **raw, "moe_intermediate_size": raw.get("intermediate_size"), "norm_topk_prob": True}

    def build_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        return SparseMLP(config, names=("w1", "w3", "w2"))

    def published_name(self, name: str) -> str:
        return name.replace(".mlp.", ".block_sparse_moe.")
