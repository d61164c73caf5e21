"""Staging: the way of a step's numbers from the host to the device, through pinned buffers, without waiting."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.fetch import TILE, Ring, fetch, post

MOST_SENT = 5  # times that a courier goes in a step: block tables, tokens, and what three ways of attention read
DEPTH = 3  # buffers: one is filled, the others may still be read
CACHE_LINE = 32  # numbers: no two pages have one in common
ALIGNED = 4  # numbers: what begins at a multiple of them begins at one of 16 bytes
NOBODY = -1  # the slot of a row or a token that is only there because a graph has a place for it


class Rows(NamedTuple):
    """Of every row that samples: ten numbers."""

    slots: Tensor
    positions: Tensor  # of its last token
    ends: Tensor  # which of the step's tokens is its last
    places: Tensor  # among what returns to the host
    temperature: Tensor
    low: Tensor  # its seed's lower half
    high: Tensor
    top_k: Tensor  # the last three: see `Cuts`
    top_p: Tensor
    floor: Tensor

    @staticmethod
    def nobody() -> tuple[int, ...]:
        """Of whom only the likeliest token is left, which takes no search."""
        top_p, floor = np.array([2, 0], np.float32).view(np.int32).tolist()
        return (NOBODY, *[0] * 6, np.iinfo(np.int32).max, top_p, floor)

    @classmethod
    def of(cls, numbers: Tensor) -> "Rows":
        """From int32, of which some hold the bits of float32."""
        found = cls(*numbers)
        temperature, top_p, floor = (field.view(torch.float32) for field in (found.temperature, *found[-2:]))
        return found._replace(temperature=temperature, top_p=top_p, floor=floor)


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
    """Numbers at fixed places on the device, where graphs find them, a row for each kind and up to `width` in a row."""

    def __init__(self, desk: "Desk", number: int, begin: int, nobody: tuple[int, ...], width: int) -> None:
        self._desk, self._number, self._begin = desk, number, begin
        self._nobody = np.array(nobody, np.int32)[:, None]
        self._stride = _aligned(width)
        self._end = begin + len(nobody) * self._stride
        self.width = width
        self.numbers = desk.numbers[begin : self._end].view(len(nobody), self._stride)[:, :width]
        self.numbers.copy_(torch.from_numpy(self._nobody))

    def write(self, values: Sequence[NDArray[Any]], padded: int) -> None:
        """Puts these up, and nobody's behind them up to `padded`."""
        array = self._desk.page[self._begin : self._end].reshape(-1, self._stride)
        count = len(values[0])
        for field, numbers in zip(array, values, strict=True):
            field[:count] = numbers
        if count < padded:
            array[:, count:padded] = self._nobody
        self._desk.note(self._number, padded)

    def segments(self) -> list[tuple[int, int]]:
        return [(begin, self._number) for begin in range(self._begin, self._end, self._stride)]


class Desk:
    """All boards of a step, one behind the other: what was written on any of them travels at once, and what is news to
    a table goes there. In front lies, for each board, how much of it was written.

    There are a few copies of it on the host, its pages. The host writes them in turn, and each `fetch` that the device
    runs reads the next, so that a graph may contain it; both count for themselves.
    """

    def __init__(self, kinds: Sequence[tuple[tuple[int, ...], int]], table: Tensor) -> None:
        """`kinds` has, for each board, what a place holds that nobody has taken, and its width."""
        # Of news, what the smallest fetch brings: that of a graph does not know how many there will be.
        kinds = [*kinds, ((0, 0), TILE)]
        self._head = _aligned(len(kinds))
        begins = np.cumsum([self._head, *(len(nobody) * _aligned(width) for nobody, width in kinds)]).tolist()
        size = -(-begins[-1] // CACHE_LINE) * CACHE_LINE
        self.table = table
        self.numbers = torch.zeros(size, dtype=torch.int32, device=table.device)
        self._ring = Ring(pinned(DEPTH, size), torch.zeros(2, dtype=torch.int32, device=table.device))
        self._pages = list(self._ring.buffers.numpy())
        self._read: list[torch.cuda.Event | None] = [None] * DEPTH
        self._is_open = False
        self.turn = 0
        self.page = self._pages[0]
        self._most = 0
        self.boards = [Board(self, number, begins[number], *kind) for number, kind in enumerate(kinds)]
        segments = [segment for board in self.boards for segment in board.segments()]
        self._segments = torch.tensor(segments, dtype=torch.int32, device=table.device)
        self._news = self.boards.pop()

    def open(self) -> None:
        """Begins another step, on a new page."""
        if self._is_open:
            # The last was given up, and who knows whether the device got to fetch it: both begin to count anew.
            torch.cuda.synchronize(self.numbers.device)
            self._ring.state.zero_()
            self.turn = 0
        self._is_open = True
        read = self._read[self.turn]
        if read is not None:  # long ago, but for a device that is three steps behind
            read.synchronize()
        self.page = self._pages[self.turn]
        self.page[: self._head] = 0
        self._most = 0

    def note(self, board: int, written: int) -> None:
        self.page[board] = written
        self._most = max(self._most, written)

    def put_news(self, places: NDArray[Any], numbers: NDArray[Any]) -> bool:
        """What goes to these places in the table; none occurs twice. False: they are too many."""
        if len(places) > self._news.width:
            return False
        self._news.write((places, numbers), len(places))
        return True

    def fetch(self, most: int | None = None) -> None:
        """Launches what brings the page to the device. For a graph, of pages yet to be written: on no board will there
        be more than `most`."""
        fetch(self._ring, self._segments, self.numbers, self.table.view(-1), self._most if most is None else most)

    def close(self, read: torch.cuda.Event) -> None:
        """The step is launched. What was recorded in `read` comes after its fetch."""
        self._read[self.turn] = read
        self.turn = (self.turn + 1) % DEPTH
        self._is_open = False


class Courier:
    """Carries whatever else a step needs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._hosts = cycle([_Host(1 << 14) for _ in range(MOST_SENT * DEPTH)])

    def send(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """To new places on the device."""
        host, places, size = self._pack(arrays)
        result = torch.empty(size, dtype=torch.int32, device=self.device)
        if size:
            result.copy_(host.pinned[:size], non_blocking=True)
            host.sent()
        return [result[place] for place in places]

    def post(self, places: NDArray[Any], numbers: NDArray[Any], target: Tensor) -> None:
        """To these places of a flat target; none occurs twice."""
        host, parts, _ = self._pack((places, numbers))
        post(host.pinned[parts[0]], host.pinned[parts[1]], target)
        host.sent()

    def _pack(self, arrays: Sequence[NDArray[Any]]) -> tuple["_Host", list[slice], int]:
        """Each begins at a multiple of 16 bytes: for another alignment a kernel would be compiled anew, in service."""
        ends = np.cumsum([_aligned(len(array)) for array in arrays]).tolist()
        host = next(self._hosts).free(ends[-1])
        places = [slice(start, start + len(array)) for start, array in zip([0, *ends], arrays, strict=False)]
        for place, array in zip(places, arrays, strict=True):
            host.array[place] = array
        return host, places, ends[-1]


class _Host:
    """One of the pinned buffers."""

    def __init__(self, size: int) -> None:
        self._take(size)
        self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def free(self, size: int) -> "_Host":
        """Waits until it may be filled again, which was long ago but for a device that is three steps behind."""
        self._read.synchronize()
        if size > self.array.size:
            self._take(2 * size)
        return self

    def sent(self) -> None:
        """What was launched up to here reads it."""
        self._read.record()

    def _take(self, size: int) -> None:
        self.pinned = pinned(size)
        self.array = self.pinned.numpy()


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def pinned(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, pin_memory=True)
