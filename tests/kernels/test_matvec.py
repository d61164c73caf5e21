"""Products of few rows against plain torch in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.device import DEVICE, assert_close, normal
from weft.kernels import matvec, matvec_tuning, ops

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")


def test_matvec(dtype: torch.dtype) -> None:
    shapes = [(1, 37, 99), (1, 21, 2048), (1, 9, 3072), (2, 70, 96), (4, 129, 512), (7, 50, 33), (16, 200, 640)]
    shapes += [(17, 70, 96), (33, 129, 256), (64, 50, 130)]
    if DEVICE.type == "cuda":
        shapes += [(1, 6144, 4096), (3, 1024, 3072), (16, 4096, 4096), (5, 151936, 1024), (64, 4096, 1024)]
    for rows, m, k in shapes:
        x, weight, bias = normal(dtype, rows, k), normal(dtype, m, k), normal(dtype, m)
        expected = x.double() @ weight.double().T
        for config in _some_configs(rows, m, k, dtype, False):
            assert_close(matvec.matvec(x, weight, config=config), expected, dtype, scale=math.sqrt(k))
        assert_close(matvec.matvec(x, weight, bias), expected + bias.double(), dtype, scale=math.sqrt(k))
        shared = _some_configs(rows, m, k, dtype, False)[-1]
        twice = [matvec.matvec(x, weight, bias, config=shared) for _ in range(2)]
        assert torch.equal(*twice), "not reproducible"


def test_matvec_silu(dtype: torch.dtype) -> None:
    for rows, inner, k in ((1, 37, 99), (1, 70, 1024), (3, 40, 256), (16, 130, 640), (9, 33, 50), (40, 33, 96)):
        x, weight = normal(dtype, rows, k), normal(dtype, 2 * inner, k) / math.sqrt(k)
        gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
        for config in _some_configs(rows, inner, k, dtype, True):
            assert_close(matvec.matvec_silu(x, weight, config=config), F.silu(gate) * up, dtype)


def _some_configs(rows: int, m: int, k: int, dtype: torch.dtype, gated: bool) -> list[matvec_tuning.Config]:
    """The default, the last candidate, and both with shared columns; splits may be without any."""
    found = matvec_tuning.candidates(rows, m, k, dtype, gated=gated)
    chosen = [found[0], found[-1]]
    if -(-m // found[-1].block_m) <= matvec_tuning.DEVICE_PROGRAMS >= -(-m // found[0].block_m):
        chosen += [found[0]._replace(splits=2), found[-1]._replace(splits=5)]
    return chosen


def test_rows_are_tuned_for_in_buckets() -> None:
    buckets = [matvec_tuning.bucket(rows) for rows in range(1, matvec_tuning.MAX_ROWS + 1)]
    assert sorted(set(buckets)) == [1, 4, 16, 32, 64]
    assert all(bucket >= rows for rows, bucket in enumerate(buckets, start=1))


def test_tuned_configurations_have_enough_counters() -> None:
    for (rows, m, _, _), config in matvec_tuning.TUNED.items():
        assert config.splits == 1 or -(-m // config.block_m) <= matvec_tuning.DEVICE_PROGRAMS
        assert config.dot or rows == 1


def test_only_what_was_tuned_can_be_faster_than_torch() -> None:
    assert all(key in matvec_tuning.TUNED and key[0] > ops.FEW_ROWS for key in matvec_tuning.FASTER)
