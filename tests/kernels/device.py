"""Where the kernels are tried: on a GPU where there is one, else in Triton's interpreter, on the CPU.

To be imported before any kernel: where there is no Triton, or none whose interpreter will do, this skips the module
that imports it.
"""

import dataclasses
import importlib.metadata
import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.strength import is_long

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter keeps bfloat16 as integers: it cuts off where it should round, and multiplies the integers in tl.dot.
DTYPES = [torch.float16, torch.float32] if DEVICE.type == "cpu" else [torch.bfloat16, torch.float16, torch.float32]
NAN = float("nan")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5}  # of one result, and some more


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])


def _check_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed", allow_module_level=True)
    if DEVICE.type == "cpu":
        if _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
            pytest.skip("the interpreter before Triton 3.7 does what numpy 2.4 forbids", allow_module_level=True)
        if _version("triton") >= (3, 9):
            pytest.skip("the interpreter of Triton 3.9 makes numbers of truth values", allow_module_level=True)


def _speed_the_interpreter_up() -> None:
    from triton.runtime import interpreter

    from tests.kernels import fast_interpreter

    fast_interpreter.patch_the_language_once()
    if not is_long():  # the long run takes the interpreter as it is
        if _version("triton") == (3, 8):  # of others the insides may differ
            fast_interpreter.remember_types()
        # Half of the rest of its time: every addition of integers is checked for an overflow.
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


_check_triton()
if DEVICE.type == "cpu":
    _speed_the_interpreter_up()


class Moment:
    """An event that has come to pass, or a stream where everything has."""

    def __init__(self, **options: Any) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: object) -> float:
        return 1.0


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
