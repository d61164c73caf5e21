"""A step's numbers on their way to the device, against arrays that are simply written."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.device import DEVICE, Moment
from weft.engine import staging

LAYOUTS = [((-1, 0, 7), 40), ((-1,), 1), ((0, 5), 700)]
TABLE = 5000


@pytest.fixture
def staging_buffer(monkeypatch: pytest.MonkeyPatch) -> staging.StagingBuffer:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(staging, "pinned", lambda *size: torch.zeros(size, dtype=torch.int32))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return staging.StagingBuffer(LAYOUTS, torch.zeros((50, TABLE // 50), dtype=torch.int32, device=DEVICE))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_arrives(staging_buffer: staging.StagingBuffer, seed: int) -> None:
    """Also after steps that were given up, before the device was told to fetch them or behind it."""
    random = np.random.default_rng(seed)
    expected = [np.repeat(np.array(padding)[:, None], width, 1) for padding, width in LAYOUTS]
    table = np.zeros(TABLE, np.int64)
    for _ in range(12):
        staging_buffer.begin_step()
        given_up = random.random() < 0.2
        if given_up and random.random() < 0.5:
            continue
        most = 0
        for array, numbers, (padding, width) in zip(staging_buffer.arrays, expected, LAYOUTS, strict=True):
            if random.random() < 0.7:
                padded = int(random.integers(1, width + 1))
                values = random.integers(0, 1000, (len(padding), random.integers(0, padded + 1)))
                array.write(list(values), padded)
                numbers[:, :padded] = np.array(padding)[:, None]
                numbers[:, : values.shape[1]] = values
                most = max(most, padded)
        indices = random.permutation(TABLE)[: random.integers(0, 700)]
        values = random.integers(0, 1000, len(indices))
        if staging_buffer.put_block_updates(indices, values):
            table[indices] = values
        else:
            assert len(indices) > 500
        staging_buffer.fetch(None if random.random() < 0.5 else most)  # a graph's knows nothing of the updates
        moment: Any = Moment()
        if not given_up:
            staging_buffer.end_step(moment)
        for array, numbers in zip(staging_buffer.arrays, expected, strict=True):
            assert array.numbers.cpu().numpy().tolist() == numbers.tolist()
        assert staging_buffer.block_tables.cpu().flatten().tolist() == table.tolist()
