"""Numbers in the host's memory, read by kernels."""

import pytest
import torch

from tests.kernels.device import DEVICE
from weft.kernels import fetch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")


def test_fetch() -> None:
    """From the host's memory, as it is at that moment; one buffer after the other."""
    host = torch.zeros((3, 4000), dtype=torch.int32)
    host = host.pin_memory() if DEVICE.type == "cuda" else host
    ring = fetch.Ring(host, torch.zeros(2, dtype=torch.int32, device=DEVICE))
    # Where they begin, and where their lengths are.
    segments = [(4, 0), (24, 1), (44, 1), (64, 2), (3900, 3), (3950, 3)]
    parts = torch.tensor(segments, dtype=torch.int32, device=DEVICE)
    table = torch.zeros(300, dtype=torch.int32, device=DEVICE)
    expected_table = table.cpu()
    for step, lengths in enumerate(((3, 20, 0, 1), (0, 7, 3800, 50), (0, 0, 0, 0), (20, 20, 1, 0), (1, 0, 700, 9))):
        found = torch.full((4000,), -1, dtype=torch.int32, device=DEVICE)
        expected = found.cpu()
        host.copy_(torch.randint(0, 10**9, host.shape, dtype=torch.int32))
        buffer = host[step % 3]
        buffer[:4] = torch.tensor(lengths)
        buffer[3900:3950] = torch.randperm(300)[:50]
        fetch.fetch(ring, parts, found, table, max(lengths))
        for begin, at in segments[:-2]:
            expected[begin : begin + lengths[at]] = buffer[begin : begin + lengths[at]]
        assert torch.equal(found.cpu(), expected)
        news = lengths[3]
        expected_table[buffer[3900 : 3900 + news].long()] = buffer[3950 : 3950 + news]
        assert torch.equal(table.cpu(), expected_table)
        assert ring.state.tolist() == [(step + 1) % 3, 0]


def test_scatter() -> None:
    host = torch.randint(0, 10**9, (2000,), dtype=torch.int32)
    host = host.pin_memory() if DEVICE.type == "cuda" else host
    for count in (0, 1, 900):
        found = torch.zeros(3000, dtype=torch.int32, device=DEVICE)
        indices, numbers = host[:count], host[1000 : 1000 + count]
        indices.copy_(torch.randperm(3000)[:count])
        fetch.scatter(indices, numbers, found)
        expected = torch.zeros(3000, dtype=torch.int32)
        expected[indices.long()] = numbers
        assert torch.equal(found.cpu(), expected)
