"""Penalties, against their formula."""

import torch

from tests.kernels.device import DEVICE, normal, permutation
from weft.kernels.penalise import Histories, note, penalise


def test_penalise() -> None:
    for vocab in (5, 2048, 5000):
        rows, stored = 6, 4
        logits = normal(torch.float32, rows, vocab) * 3
        counts = (normal(torch.float32, stored, vocab).abs() * 2).int()
        seen = (counts > 0) | (normal(torch.float32, stored, vocab) > 1)
        places, histories = permutation(rows)[:3], permutation(stored)[:3]
        penalties = torch.tensor([[1.0, 1.3, 0.8], [0.5, 0.0, -1.0], [0.0, 0.7, 2.0]], device=DEVICE)
        numbers = torch.cat([places[None].int(), histories[None].int(), penalties.view(torch.int32)])
        numbers[0, 1] = -1  # padding
        expected = logits.clone()
        for index in (0, 2):
            row, past = expected[places[index]], int(histories[index])
            repetition, frequency, presence = penalties[:, index]
            row[seen[past]] = torch.where(row > 0, row / repetition, row * repetition)[seen[past]]
            row -= frequency * counts[past] + presence * (counts[past] > 0)
        penalise(logits, numbers, Histories(counts, seen))
        assert torch.allclose(logits, expected, atol=1e-5)


def test_note() -> None:
    vocab = 5000
    counts = torch.zeros((3, vocab), dtype=torch.int32, device=DEVICE)
    seen = torch.zeros((3, vocab), dtype=torch.bool, device=DEVICE)
    tokens = torch.tensor([7, 4999, 7, 0], dtype=torch.int32, device=DEVICE)
    numbers = torch.tensor([[2, 1, -1], [0, 2, 1]], dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        note(tokens, numbers, Histories(counts, seen))
    assert counts.nonzero().tolist() == seen.nonzero().tolist() == [[0, 7], [2, 4999]]
    assert counts[0, 7] == counts[2, 4999] == 2
