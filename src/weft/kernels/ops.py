"""Layer operations other than attention: weft's kernels if the tensors are on a GPU, otherwise plain torch."""

import functools
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 16  # rows; up to this many, reading the matrix bounds a product, and our kernel reads faster


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and the sum. Either tensor may be overwritten."""
    if _has_kernels(x):
        from weft.kernels import fused

        return fused.add_rms_norm(x, residual, weight, eps)
    residual = x if residual is None else x + residual
    return F.rms_norm(residual, weight.shape, weight, eps), residual


def gated(gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(gate) * up, for gate_up [T, 2 * inner] with the gates first."""
    if activation is F.silu and _has_kernels(gate_up):
        from weft.kernels import fused

        return fused.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(gate) * up, where x times the transposed weight gives the gates, then the ups."""
    if bias is None and activation is F.silu and _is_read_once(x, len(weight) // 2, gated=True):
        from weft.kernels import matvec

        return matvec.matvec_silu(x, weight)
    return gated(linear(x, weight, bias), activation)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if _is_read_once(x, len(weight)):
        from weft.kernels import matvec

        return matvec.matvec(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_into(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """`linear` without a bias, written to `out`."""
    if _is_read_once(x, len(weight)):
        from weft.kernels import matvec

        return matvec.matvec(x, weight, out=out)
    return torch.mm(x, weight.t(), out=out)


def _is_read_once(x: Tensor, outputs: int, *, gated: bool = False) -> bool:
    """Whether to use our kernel: always for few rows, and for more rows where it was measured to be faster."""
    if x.dtype not in (torch.bfloat16, torch.float16) or not _has_kernels(x):
        return False
    if len(x) <= FEW_ROWS:
        return True
    from weft.kernels import matvec_tuning

    return (
        len(x) <= matvec_tuning.MAX_ROWS
        and (matvec_tuning.bucket(len(x)), outputs, x.shape[1], gated) in matvec_tuning.FASTER
    )


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
