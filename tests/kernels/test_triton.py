"""The Triton kernels against plain torch: on a GPU where there is one, else in Triton's interpreter, on the CPU."""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter keeps bfloat16 as integers: it cuts off where it should round, and multiplies the integers in tl.dot.
DTYPES = [torch.float16, torch.float32] if DEVICE.type == "cpu" else [torch.bfloat16, torch.float16, torch.float32]


def load_checks() -> ModuleType:
    """scripts/check_kernels.py, with kernels that run on DEVICE. Triton decides that while it is imported."""
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
        spec = importlib.util.spec_from_file_location("check_kernels", ROOT / "scripts" / "check_kernels.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        if DEVICE.type == "cpu" and before is None:
            del os.environ["TRITON_INTERPRET"]


checks = load_checks()


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parts of Triton are imported only when a kernel runs, and look again."""
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_kernel_agrees_with_plain_torch(check: Callable[[torch.device, torch.dtype], None], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check(DEVICE, dtype)


def test_rows_are_tuned_for_in_buckets() -> None:
    buckets = [checks.matvec.bucket(rows) for rows in range(1, checks.matvec.MAX_ROWS + 1)]
    assert sorted(set(buckets)) == [1, 4, 16, 32, 64]
    assert all(bucket >= rows for rows, bucket in enumerate(buckets, start=1))


def test_tuned_configurations_have_enough_counters() -> None:
    for (rows, m, _, _), config in checks.matvec.TUNED.items():
        assert config.splits == 1 or -(-m // config.block_m) <= checks.matvec.PROGRAMS
        assert config.dot or rows == 1


def test_only_what_was_tuned_can_be_faster_than_torch() -> None:
    assert all(key in checks.matvec.TUNED and key[0] > checks.ops.FEW for key in checks.matvec.FASTER)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU may have it")
def test_kernels_do_not_overlap_without_a_gpu() -> None:
    assert checks.fused.dependent(DEVICE) == {"PDL": False}
