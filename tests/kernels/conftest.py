"""For all tests of kernels: the number types, and the interpreter where there is no GPU."""

import pytest
import torch


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "dtype" in metafunc.fixturenames:
        from tests.kernels.device import DTYPES

        metafunc.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some parts of Triton are imported only when a kernel runs, and look again."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.manual_seed(0)
