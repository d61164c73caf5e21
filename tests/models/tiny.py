"""Small random Transformers models of every family and rope, and a dense `attend` to run weft's models with.

Weights are drawn so that logits have a spread of a few units: near-ties between the two best tokens are rare, and norm
weights, biases and routers matter. No model has an end-of-sequence token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from weft.kernels.attention import AttentionParams, PlainNormRope

VOCAB = 256
GAIN = 2.0  # of the weights that make logits differ; larger ones amplify rounding beyond 1e-4
CONTEXT = 512  # max_position_embeddings
WINDOW = 8  # of the families that have one: shorter than any prompt in these tests

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def build(family: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model of transformers' `{family}Config` and `{family}ForCausalLM` with weights drawn from `seed`."""
    kind = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, parameter, noise))
        if family == "Gemma3":  # its embeddings are scaled up and tied: without this it would only repeat its input
            model.model.embed_tokens.weight *= 0.1
            model.model.norm.weight += 9.0
    return model


def _scaled(name: str, parameter: Tensor, noise: Tensor) -> Tensor:
    """Sharp attention and loud layers: otherwise random models soon repeat one token, which would prove little."""
    if "norm" in name:
        return parameter + 0.2 * noise + (0.8 if "q_norm" in name or "k_norm" in name else 0.0)
    if name.endswith("bias"):
        return 0.5 * noise
    loud = ("embed", "lm_head", "mlp.gate.weight", "o_proj", "down_proj", "q_proj", "k_proj", "qkv_proj")
    return noise * parameter.shape[-1] ** -0.5 * (GAIN if any(part in name for part in loud) else 1)


def llama(**options: Any) -> PreTrainedModel:
    return build("Llama", **options)


def rope(kind: str, **settings: Any) -> PreTrainedModel:
    return build("Llama", rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **settings})


def longrope(**settings: Any) -> PreTrainedModel:
    """Phi-3 whose original context is a quarter of CONTEXT; the two lists of factors differ visibly."""
    pairs = SHAPE["hidden_size"] // SHAPE["num_attention_heads"] // 2
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(pairs)], "long_factor": [2.0 + i for i in range(pairs)]}
    rope_parameters = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors, **settings}
    return build("Phi3", original_max_position_embeddings=CONTEXT // 4, rope_parameters=rope_parameters)


GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama-deep": lambda: llama(num_hidden_layers=6),  # some layers only repeat others
    "llama-tied": lambda: llama(tie_word_embeddings=True),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True, head_dim=24),
    "llama-one-kv-head": lambda: llama(num_key_value_heads=1),
    "mistral": lambda: build("Mistral", sliding_window=WINDOW),
    "mistral-no-window": lambda: build("Mistral", sliding_window=None),
    "mixtral": lambda: build("Mixtral", num_local_experts=4),
    "mixtral-window": lambda: build("Mixtral", num_local_experts=4, sliding_window=WINDOW),
    "qwen2": lambda: build("Qwen2"),
    "qwen2-window": lambda: build("Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": lambda: build("Qwen3", head_dim=32, tie_word_embeddings=True),
    "qwen3-window": lambda: build("Qwen3", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2),
    "qwen3-moe": lambda: build("Qwen3Moe", head_dim=32, norm_topk_prob=True, **MOE),
    "qwen3-moe-mixed": lambda: build("Qwen3Moe", mlp_only_layers=[0], decoder_sparse_step=1, **MOE),
    "qwen3-moe-step": lambda: build(
        "Qwen3Moe", decoder_sparse_step=2, use_sliding_window=True, sliding_window=9, **MOE
    ),
    "gemma3": lambda: build(
        "Gemma3", head_dim=32, query_pre_attn_scalar=24, sliding_window=WINDOW, layer_types=GEMMA_LAYERS
    ),
    "gemma3-linear": lambda: build(
        "Gemma3",
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=GEMMA_LAYERS,
        final_logit_softcapping=5.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3": lambda: build("Phi3"),
    "phi3-partial": lambda: build(
        "Phi3",
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
}

# Dynamic and longrope depend on max_model_len: see weft.models.rope.
ROPES: dict[str, Callable[[], PreTrainedModel]] = {
    "default": lambda: rope("default"),
    "linear": lambda: rope("linear", factor=4.0),
    "dynamic": lambda: rope("dynamic", factor=2.0),
    "llama3": lambda: rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "yarn": lambda: rope("yarn", factor=4.0, original_max_position_embeddings=CONTEXT // 4),
    "yarn-tuned": lambda: rope(
        "yarn",
        factor=8.0,
        original_max_position_embeddings=64,
        beta_fast=8.0,
        beta_slow=2.0,
        mscale=1.0,
        mscale_all_dim=0.5,
        truncate=False,
    ),
    "yarn-attention-factor": lambda: rope(
        "yarn", factor=4.0, original_max_position_embeddings=CONTEXT // 4, attention_factor=1.5
    ),
    "longrope": longrope,
    "longrope-attention-factor": lambda: longrope(attention_factor=1.3),
}


def save(model: PreTrainedModel, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    return path


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Transformers' logits [T, vocab] over one sequence."""
    logits: Tensor = model(token_ids[None]).logits[0]
    return logits


@dataclass
class DenseAttend:
    """Attention without a cache: each token sees those of its own sequence up to itself, within the layer's window."""

    positions: Tensor
    sequences: Tensor  # to which sequence each token belongs

    def __call__(self, params: AttentionParams, qkv: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = PlainNormRope(self.positions).split(params, qkv)
        scale, window = params.scale, params.window
        distance = self.positions[:, None] - self.positions[None, :]
        seen = (self.sequences[:, None] == self.sequences[None, :]) & (distance >= 0)
        if window is not None:
            seen &= distance < window
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, dim=1)) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, dim=1)).flatten(1), residual


@torch.no_grad()
def weft_logits(model: Any, *prompts: Tensor) -> list[Tensor]:
    """weft's logits for each prompt, computed as one flat batch."""
    positions = torch.cat([torch.arange(len(tokens)) for tokens in prompts])
    sequences = torch.cat([torch.full((len(tokens),), index) for index, tokens in enumerate(prompts)])
    hidden = model(torch.cat(prompts), DenseAttend(positions, sequences))
    return list(torch.split(model.logits(hidden), [len(tokens) for tokens in prompts]))
