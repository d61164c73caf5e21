"""Gemma 3 (text): local and global layers with different ropes, norms around each block, scaled embeddings."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.errors import ModelError
from weft.kernels.attention import Attend, HeadNorm
from weft.models.base import CausalLM
from weft.models.config import ModelConfig
from weft.models.layers import MLP, Attention, RMSNorm, wide

_DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


class GemmaNorm(RMSNorm):
    """RMSNorm that stores its weight as the difference from one, and multiplies before it rounds."""

    neutral = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(wide(x), self.weight.shape, 1 + wide(self.weight), self.eps).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x if residual is None else x + residual
        return self.forward(x), x

    def of_heads(self) -> HeadNorm:
        return HeadNorm(self.forward, None, self.eps)


class Gemma3Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        bias = config.attention_bias
        self.self_attn = Attention(config, index, qkv_bias=bias, output_bias=bias, qk_norm=GemmaNorm)
        self.mlp = MLP(config)
        self.input_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = GemmaNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, residual: Tensor | None, attend: Attend) -> tuple[Tensor, Tensor | None]:
        x, residual = self.input_layernorm.add(x, residual)
        x, residual = self.self_attn(x, residual, attend)
        x, residual = self.pre_feedforward_layernorm.add(self.post_attention_layernorm(x), residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Gemma3(CausalLM):
    norm_type = GemmaNorm

    @staticmethod
    def modernise(raw: dict[str, Any]) -> dict[str, Any]:
        raw = {**_DEFAULTS, **raw}
        if raw.get("use_bidirectional_attention"):
            raise ModelError("Gemma 3 with use_bidirectional_attention is an embedding model; weft generates text")
        if raw.get("layer_types") is None:  # older configs: every n-th layer is global
            every = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
            layers = range(1, raw.get("num_hidden_layers", 0) + 1)
            raw["layer_types"] = ["sliding_attention" if i % every else "full_attention" for i in layers]
        ropes = raw.get("rope_parameters") or {}
        raw["rope_parameters"] = {
            "full_attention": {
                "rope_theta": raw.get("rope_theta", 1e6),
                **(ropes.get("full_attention") or {}),
                **(raw.pop("rope_scaling", None) or {}),
            },
            "sliding_attention": {
                "rope_theta": raw.get("rope_local_base_freq", 1e4),
                **(ropes.get("sliding_attention") or {}),
            },
        }
        return raw

    def build_layer(self, config: ModelConfig, index: int) -> nn.Module:
        return Gemma3Layer(config, index)

    def embed(self, token_ids: Tensor) -> Tensor:
        # The model was trained with a scale that is rounded to the weights' dtype. A CPU scalar needs no copy.
        x = super().embed(token_ids)
        return x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype, device="cpu")
