"""For all tests of kernels: the number types, and the same random numbers each time."""

import pytest
import torch


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "dtype" in metafunc.fixturenames:
        from tests.kernels.device import DTYPES

        metafunc.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
