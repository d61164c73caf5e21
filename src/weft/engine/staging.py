"""Staging: the way of a step's numbers from the host to the device, through pinned buffers, without waiting."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DEPTH = 3  # buffers: one is filled, one is copied, one may still be read
ALIGNED = 4  # numbers
NOBODY = -1  # the slot of a row or a token that is only there because a graph has a place for it


class Rows(NamedTuple):
    """Of every row that samples: five numbers."""

    slots: Tensor
    positions: Tensor  # of its last token
    ends: Tensor  # which of the step's tokens is its last
    temperature: Tensor
    uniform: Tensor

    @staticmethod
    def nobody() -> tuple[int, ...]:
        return (NOBODY, 0, 0, 0, 0)

    @classmethod
    def of(cls, numbers: Tensor) -> "Rows":
        """From int32, of which the last two are the bits of float32."""
        return cls(*numbers[:3], *numbers[3:].view(torch.float32))


class Tokens(NamedTuple):
    """Of every token of a step, decodes first: four numbers."""

    slots: Tensor
    positions: Tensor
    ids: Tensor  # a decode's is on the device
    decodes: Tensor  # its slot if it is a decode, else NOBODY

    @staticmethod
    def nobody() -> tuple[int, ...]:
        return (NOBODY, 0, 0, NOBODY)


class Board:
    """Numbers at fixed places on the device, where graphs find them, for up to `width` things.

    `nobody` has what those places hold that nobody has taken, one for each number.
    """

    def __init__(self, nobody: tuple[int, ...], width: int, device: torch.device) -> None:
        self._nobody = np.array(nobody, np.int32)[:, None]
        self.numbers = torch.tensor(nobody, dtype=torch.int32, device=device)[:, None].repeat(1, width)
        self._hosts = cycle([_Host((len(nobody), width)) for _ in range(DEPTH)])

    def send(self, values: Sequence[NDArray[Any]], padded: int) -> None:
        """Puts these up, and nobody's behind them up to `padded`."""
        host = next(self._hosts).free()
        count = len(values[0])
        for field, numbers in zip(host.array, values, strict=True):
            field[:count] = numbers
        host.array[:, count:padded] = self._nobody
        host.send(self.numbers)


class Courier:
    """Carries whatever else a step needs to new places on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._hosts = cycle([_Host((1 << 14,)) for _ in range(DEPTH)])

    def send(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Each begins at a multiple of 16 bytes: for another alignment a kernel would be compiled anew, in service."""
        ends = np.cumsum([-(-len(array) // ALIGNED) * ALIGNED for array in arrays]).tolist()
        result = torch.empty(ends[-1], dtype=torch.int32, device=self.device)
        places = [slice(start, start + len(array)) for start, array in zip([0, *ends], arrays, strict=False)]
        if len(result):
            host = next(self._hosts).free(len(result))
            for place, array in zip(places, arrays, strict=True):
                host.array[place] = array
            host.send(result)
        return [result[place] for place in places]


class _Host:
    """One of the pinned buffers."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._take(shape)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def free(self, size: int = 0) -> "_Host":
        """Waits until it may be filled again, which was long ago but for a device that is three steps behind."""
        self._copied.synchronize()
        if size > self.array.size:
            self._take((2 * size,))
        return self

    def send(self, target: Tensor) -> None:
        source = self._pinned if target.dim() > 1 else self._pinned[: len(target)]
        target.copy_(source, non_blocking=True)
        self._copied.record()

    def _take(self, shape: tuple[int, ...]) -> None:
        self._pinned = pinned(*shape)
        self.array = self._pinned.numpy()


def bits(numbers: NDArray[np.float64]) -> NDArray[np.int32]:
    """float32 as int32, to travel among others."""
    return numbers.astype(np.float32).view(np.int32)


def pinned(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, pin_memory=True)
