"""Llama 2 and 3.x. Most other families are variations of it."""

from typing import Any

from torch import nn

from weft.models.base import CausalLM
from weft.models.config import ModelConfig
from weft.models.layers import MLP, Attention, DecoderLayer


class Llama(CausalLM):
    @staticmethod
    def modernise(raw: dict[str, Any]) -> dict[str, Any]:
        return {**raw, "sliding_window": None}

    def build_layer(self, config: ModelConfig, index: int) -> nn.Module:
        return DecoderLayer(config, self.build_attention(config, index), self.build_mlp(config, index))

    def build_attention(self, config: ModelConfig, index: int) -> nn.Module:
        return Attention(config, index, qkv_bias=config.attention_bias, output_bias=config.attention_bias)

    def build_mlp(self, config: ModelConfig, index: int) -> nn.Module:
        return MLP(config)
