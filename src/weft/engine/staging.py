"""Staging: the way of a step's numbers from the host to the device, without waiting for either."""

from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DEPTH = 3  # buffers: one is filled, one is copied, one may still be read


class TokenViews(NamedTuple):
    """Of all tokens of a step, decodes first; and the block tables of its prompts, one behind the other."""

    slots: Tensor
    positions: Tensor
    ids: Tensor
    blocks: Tensor


class Rows(NamedTuple):
    """Five numbers for each row that samples, on the device or on the host."""

    slots: Tensor
    positions: Tensor  # of its input
    ends: Tensor  # which of the step's tokens is its last
    temperature: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, numbers: Tensor) -> "Rows":
        """The first three are int32, the others float32."""
        return cls(*numbers[:3], *numbers[3:].view(torch.float32))

    def first(self, count: int) -> "Rows":
        return Rows(*(field[:count] for field in self))


class Staging:
    """A step's numbers on their way to the device, through pinned buffers in turn.

    Those of the rows have fixed places on the device, where graphs find them; whatever else there is gets new ones.
    """

    def __init__(self, width: int, nobody: int, device: torch.device) -> None:
        self.device, self.width, self.nobody = device, width, nobody
        self._fixed = torch.zeros((len(Rows._fields), width), dtype=torch.int32, device=device)
        self._fixed[0] = nobody
        self.rows = Rows.of(self._fixed)
        self._hosts = cycle([_Host(width) for _ in range(DEPTH)])

    def send(self, rows: list[NDArray[Any]], padded: int, others: list[NDArray[Any]]) -> list[Tensor]:
        """Rows to their places, up to `padded` with nobody's; returns the others as they are on the device."""
        host = next(self._hosts)
        host.copied.synchronize()  # long past, but for a device that is three steps behind
        count = len(rows[0])
        for target, values in zip(host.rows, rows, strict=True):
            target.numpy()[:count] = values
        if padded > count:
            host.numbers[:, count:padded] = 0
            host.rows.slots[count:padded] = self.nobody
        self._fixed.copy_(host.numbers, non_blocking=True)
        lengths = [len(values) for values in others]
        result = torch.empty(sum(lengths), dtype=torch.int32, device=self.device)
        if len(result):
            room = host.room(len(result))
            np.concatenate(others, out=room.numpy(), casting="same_kind")
            result.copy_(room, non_blocking=True)
        host.copied.record()
        return list(torch.split(result, lengths))


class _Host:
    """One of the pinned buffers."""

    def __init__(self, width: int) -> None:
        self.numbers = pinned(len(Rows._fields) * width).view(len(Rows._fields), width)
        self.rows = Rows.of(self.numbers)
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._room = pinned(1 << 14)

    def room(self, size: int) -> Tensor:
        if size > len(self._room):
            self._room = pinned(2 * size)
        return self._room[:size]


def pinned(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, pin_memory=True)
