"""Qwen2 and 2.5 (biased projections), Qwen3 (normed heads instead), Qwen3-MoE (experts in some layers)."""

from typing import Any

from torch import nn

from weft.models.config import ModelConfig
from weft.models.layers import MLP, Attention, RMSNorm, SparseMLP
from weft.models.llama import Llama


class Qwen2(Llama):
    @staticmethod
    def modernise(raw: dict[str, Any]) -> dict[str, Any]:
        return {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, **raw}

    def build_attention(self, config: ModelConfig, index: int) -> nn.Module:
        return Attention(config, index, qkv_bias=True)


class Qwen3(Llama):
    @staticmethod
    def modernise(raw: dict[str, Any]) -> dict[str, Any]:
        return {"head_dim": 128, **Qwen2.modernise(raw)}

    def build_attention(self, config: ModelConfig, index: int) -> nn.Module:
        bias = config.attention_bias
        return Attention(config, index, qkv_bias=bias, output_bias=bias, qk_norm=RMSNorm)


class Qwen3Moe(Qwen3):
    @staticmethod
    def modernise(raw: dict[str, Any]) -> dict[str, Any]:
        defaults = {"use_sliding_window": False, "sliding_window": 4096, "num_experts_per_tok": 8}
        return {**defaults, **raw, "max_window_layers": 0}  # a window, if there is one, applies to all layers

    def build_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        sparse = config.moe is not None and index in config.moe.sparse_layers
        return SparseMLP(config) if sparse else MLP(config)
