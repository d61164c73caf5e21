"""A step's numbers on their way to the device, against arrays that are simply written."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.device import DEVICE, Moment
from weft.engine import staging

KINDS = [((-1, 0, 7), 40), ((-1,), 1), ((0, 5), 700)]
TABLE = 5000


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> staging.Desk:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(staging, "pinned", lambda *size: torch.zeros(size, dtype=torch.int32))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return staging.Desk(KINDS, torch.zeros((50, TABLE // 50), dtype=torch.int32, device=DEVICE))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_arrives(desk: staging.Desk, seed: int) -> None:
    """Also after steps that were given up, before the device was told to fetch them or behind it."""
    random = np.random.default_rng(seed)
    expected = [np.repeat(np.array(nobody)[:, None], width, 1) for nobody, width in KINDS]
    table = np.zeros(TABLE, np.int64)
    for _ in range(12):
        desk.open()
        given_up = random.random() < 0.2
        if given_up and random.random() < 0.5:
            continue
        most = 0
        for board, numbers, (nobody, width) in zip(desk.boards, expected, KINDS, strict=True):
            if random.random() < 0.7:
                padded = int(random.integers(1, width + 1))
                values = random.integers(0, 1000, (len(nobody), random.integers(0, padded + 1)))
                board.write(list(values), padded)
                numbers[:, :padded] = np.array(nobody)[:, None]
                numbers[:, : values.shape[1]] = values
                most = max(most, padded)
        places = random.permutation(TABLE)[: random.integers(0, 700)]
        values = random.integers(0, 1000, len(places))
        if desk.put_news(places, values):
            table[places] = values
        else:
            assert len(places) > 500
        desk.fetch(None if random.random() < 0.5 else most)  # a graph's knows nothing of the news
        moment: Any = Moment()
        if not given_up:
            desk.close(moment)
        for board, numbers in zip(desk.boards, expected, strict=True):
            assert board.numbers.cpu().numpy().tolist() == numbers.tolist()
        assert desk.table.cpu().flatten().tolist() == table.tolist()
