"""Where the kernels are tried: on a GPU where there is one, else in Triton's interpreter, on the CPU.

To be imported before any kernel: Triton decides while it is imported. Where there is no Triton, this skips the module
that imports it.
"""

import importlib.util
import math
import os
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter keeps bfloat16 as integers: it cuts off where it should round, and multiplies the integers in tl.dot.
DTYPES = [torch.float16, torch.float32] if DEVICE.type == "cpu" else [torch.bfloat16, torch.float16, torch.float32]
NAN = float("nan")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5}  # of one result, and some more


def _import_kernels() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed", allow_module_level=True)
    before = os.environ.get("TRITON_INTERPRET")
    if DEVICE.type == "cpu":
        if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
            pytest.skip("Triton's interpreter turns arrays into numbers as numpy 2.4 forbids", allow_module_level=True)
        if "triton" in sys.modules and before != "1":
            pytest.skip("triton was imported before, without its interpreter", allow_module_level=True)
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        for name in ("decode", "draw", "fetch", "fused", "matvec", "penalise"):
            importlib.import_module(f"weft.kernels.{name}")
    finally:
        if DEVICE.type == "cpu" and before is None:
            del os.environ["TRITON_INTERPRET"]


_import_kernels()


def normal(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def permutation(size: int) -> Tensor:
    return torch.randperm(size, device=DEVICE)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Within one rounding of each result, and one of a typical size `scale` for those that nearly cancel."""
    error = (actual.double() - expected).abs()
    allowed = ROUNDING[dtype] * (expected.abs() + scale)
    assert actual.shape == expected.shape
    assert bool((error <= allowed).all()), (
        f"off by {float((error / allowed).nan_to_num(math.inf).max()):.1f} tolerances"
    )
