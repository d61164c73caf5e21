"""What layers compute beside attention: plain torch, or a fused kernel where the tensors are on a GPU that has one."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and the sum. Either tensor may be overwritten."""
    residual = x if residual is None else x + residual
    return F.rms_norm(residual, weight.shape, weight, eps), residual


def gated(gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(gate) * up, of [T, 2 * inner] with the gates first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)
