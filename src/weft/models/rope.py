"""Rotary position embeddings: the frequencies of every kind, and their angles.

A request's tokens must not depend on other requests, on chunking or on the contents of the KV cache. So frequencies are
a function of the model and of max_model_len, never of the current length of a sequence:

- dynamic: unscaled if max_model_len fits the model's own maximum, else the base is fixed for max_model_len;
- longrope: the short factors if max_model_len fits the original context, else the long ones.

Transformers changes both while a sequence grows. Its cache then holds keys that were rotated by other frequencies.
"""

import functools
import math

import torch
from torch import Tensor

from weft.kernels.attention import Angles
from weft.models.config import RopeConfig


class Rope:
    """One rotary embedding on a device (a `Rotation`). Layers with equal settings share it."""

    def __init__(self, config: RopeConfig, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.inv_freq = frequencies(config, max_model_len, wide).to(device)
        self.factor = attention_factor(config)
        self.dtype = dtype
        self.max_model_len = max_model_len

    @functools.cached_property
    def table(self) -> Tensor:
        """cos and sin in float32, for kernels, which round only once, at the end."""
        angles = torch.arange(self.max_model_len, device=self.inv_freq.device)[:, None] * self.inv_freq
        return (torch.stack((angles.cos(), angles.sin()), dim=1) * self.factor).float()

    def __call__(self, positions: Tensor) -> Angles:
        angles = positions[:, None, None] * self.inv_freq
        return Angles((angles.cos() * self.factor).to(self.dtype), (angles.sin() * self.factor).to(self.dtype))


def frequencies(rope: RopeConfig, max_model_len: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Radians per token for each of the rotary_dim / 2 pairs. Computed on the CPU: the same values on all devices."""
    exponents = torch.arange(0, rope.rotary_dim, 2, device="cpu").to(dtype) / rope.rotary_dim
    stretches = _theta(rope, max_model_len) ** exponents  # tokens per radian
    base = 1.0 / stretches
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "longrope":
        factors = rope.short_factor if max_model_len <= rope.original_positions else rope.long_factor
        return 1.0 / (torch.tensor(factors, dtype=dtype, device="cpu") * stretches)
    if rope.kind in ("llama3", "yarn"):
        keep = _llama3_keep(rope, base) if rope.kind == "llama3" else _yarn_keep(rope, base)
        return base * keep + base / rope.factor * (1 - keep)
    return base


def attention_factor(rope: RopeConfig) -> float:
    """Factor on cos and sin that keeps the temperature of attention over a stretched context."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_positions))

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _theta(rope: RopeConfig, max_model_len: int) -> float:
    """The base wavelength. Dynamic (NTK) scaling raises it if max_model_len exceeds the model's own maximum."""
    if rope.kind != "dynamic" or max_model_len <= rope.max_positions:
        return rope.theta
    stretch = rope.factor * max_model_len / rope.max_positions - (rope.factor - 1)
    return float(rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _llama3_keep(rope: RopeConfig, base: Tensor) -> Tensor:
    """1 for frequencies that turn often in the original context and are kept, 0 if divided by the factor."""
    turns = rope.original_positions * base / (2 * math.pi)
    return ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)


def _yarn_keep(rope: RopeConfig, base: Tensor) -> Tensor:
    """The same as a ramp over dimensions, from beta_fast turns (kept) to beta_slow turns (divided)."""

    def dimension(turns: float) -> float:
        return rope.rotary_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (torch.arange(len(base), device="cpu").to(base.dtype) - low) / (high - low or 0.001)
    return 1 - ramp.clamp(0, 1)
