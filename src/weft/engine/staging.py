"""Staging buffers: carry a step's inputs from the host to the device through pinned memory, without waiting."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.fetch import TILE, Ring, fetch, post

MOST_SENT = 5  # most transfers of an uploader per step: block tables, tokens, and inputs of three attention kernels
DEPTH = 3  # buffers: the host fills one while the device may still read the others
CACHE_LINE = 32  # int32 numbers: pages do not share a cache line
ALIGNED = 4  # int32 numbers: an offset that is a multiple of this is aligned to 16 bytes
NO_SLOT = -1  # the slot of padding: dummy rows and dummy tokens of a graph


class Rows(NamedTuple):
    """Ten numbers for every row that samples."""

    slots: Tensor
    positions: Tensor  # of the row's last token
    ends: Tensor  # index of that token among the step's tokens
    places: Tensor  # index in the pinned buffer that returns tokens to the host
    temperature: Tensor
    low: Tensor  # lower half of the seed
    high: Tensor  # upper half
    top_k: Tensor  # the last three: see `Cuts`
    top_p: Tensor
    floor: Tensor

    @staticmethod
    def padding() -> tuple[int, ...]:
        """A dummy row. Only its most likely token is kept (floor 0 is min_p 1), which takes no search."""
        top_p, floor = np.array([2, 0], np.float32).view(np.int32).tolist()
        return (NO_SLOT, *[0] * 6, np.iinfo(np.int32).max, top_p, floor)

    @classmethod
    def of(cls, numbers: Tensor) -> "Rows":
        """Views of int32 numbers, of which some hold the bits of a float32."""
        found = cls(*numbers)
        temperature, top_p, floor = (field.view(torch.float32) for field in (found.temperature, *found[-2:]))
        return found._replace(temperature=temperature, top_p=top_p, floor=floor)


class Tokens(NamedTuple):
    """Four numbers for every token of a step, decodes first."""

    slots: Tensor
    positions: Tensor
    ids: Tensor  # 0 for a decode, because its token is on the device
    decodes: Tensor  # the slot of a decode, else NO_SLOT

    @staticmethod
    def padding() -> tuple[int, ...]:
        return (NO_SLOT, 0, 0, NO_SLOT)


class StepTable:
    """A table at a fixed address on the device, for graphs to read: one row per field, up to `width` columns."""

    def __init__(self, staging: "StagingBuffer", number: int, begin: int, padding: tuple[int, ...], width: int) -> None:
        self._staging, self._number, self._begin = staging, number, begin
        self._padding = np.array(padding, np.int32)[:, None]
        self._stride = _aligned(width)
        self._end = begin + len(padding) * self._stride
        self.width = width
        self.numbers = staging.numbers[begin : self._end].view(len(padding), self._stride)[:, :width]
        self.numbers.copy_(torch.from_numpy(self._padding))

    def write(self, values: Sequence[NDArray[Any]], padded: int) -> None:
        """Writes `values` to the current page, followed by padding up to `padded` columns."""
        array = self._staging.page[self._begin : self._end].reshape(-1, self._stride)
        count = len(values[0])
        for field, numbers in zip(array, values, strict=True):
            field[:count] = numbers
        if count < padded:
            array[:, count:padded] = self._padding
        self._staging.note(self._number, padded)

    def segments(self) -> list[tuple[int, int]]:
        return [(begin, self._number) for begin in range(self._begin, self._end, self._stride)]


class StagingBuffer:
    """Staging buffer of a step: all step tables, one after the other. One `fetch` copies every written table to the
    device and applies the block table updates (`put_block_updates`). A header holds the number of written columns of
    each step table.

    The host has DEPTH pinned copies of it, the pages. The host writes them in turn. Each `fetch` that the device runs
    reads the next page, so that a graph can contain a fetch. Host and device each count the pages on their side.
    """

    def __init__(self, kinds: Sequence[tuple[tuple[int, ...], int]], table: Tensor) -> None:
        """`kinds` has, for each step table, the padding value of each field, and the width."""
        # Table updates: as many as the smallest fetch copies. A captured fetch cannot know how many there will be.
        kinds = [*kinds, ((0, 0), TILE)]
        self._head = _aligned(len(kinds))
        begins = np.cumsum([self._head, *(len(padding) * _aligned(width) for padding, width in kinds)]).tolist()
        size = -(-begins[-1] // CACHE_LINE) * CACHE_LINE
        self.table = table
        self.numbers = torch.zeros(size, dtype=torch.int32, device=table.device)
        self._ring = Ring(pinned(DEPTH, size), torch.zeros(2, dtype=torch.int32, device=table.device))
        self._pages = list(self._ring.buffers.numpy())
        self._read: list[torch.cuda.Event | None] = [None] * DEPTH
        self._is_open = False
        self.page_index = 0
        self.page = self._pages[0]
        self._most = 0
        self.step_tables = [StepTable(self, number, begins[number], *kind) for number, kind in enumerate(kinds)]
        segments = [segment for table in self.step_tables for segment in table.segments()]
        self._segments = torch.tensor(segments, dtype=torch.int32, device=table.device)
        self._block_updates = self.step_tables.pop()

    def open(self) -> None:
        """Begins a step on the next page."""
        if self._is_open:
            # The last step failed before `close`. The device may have fetched its page or not: reset both counters.
            torch.cuda.synchronize(self.numbers.device)
            self._ring.state.zero_()
            self.page_index = 0
        self._is_open = True
        read = self._read[self.page_index]
        if read is not None:  # no wait, unless the device is three steps behind
            read.synchronize()
        self.page = self._pages[self.page_index]
        self.page[: self._head] = 0
        self._most = 0

    def note(self, number: int, written: int) -> None:
        """Records that `written` columns of step table `number` are on this page."""
        self.page[number] = written
        self._most = max(self._most, written)

    def put_block_updates(self, places: NDArray[Any], numbers: NDArray[Any]) -> bool:
        """Stages table[places] = numbers. No place may occur twice. Returns False if there are too many."""
        if len(places) > self._block_updates.width:
            return False
        self._block_updates.write((places, numbers), len(places))
        return True

    def fetch(self, most: int | None = None) -> None:
        """Launches the kernel that copies the page to the device. For a graph, give `most`: the largest number of
        columns that any later page will have."""
        fetch(self._ring, self._segments, self.numbers, self.table.view(-1), self._most if most is None else most)

    def close(self, read: torch.cuda.Event) -> None:
        """Ends a step after its launch. The event `read` is recorded after its fetch."""
        self._read[self.page_index] = read
        self.page_index = (self.page_index + 1) % DEPTH
        self._is_open = False


class Uploader:
    """Uploads arrays that have no step table, through a ring of pinned buffers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._hosts = cycle([_Host(1 << 14) for _ in range(MOST_SENT * DEPTH)])

    def send(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Copies arrays to new tensors on the device, as int32."""
        host, places, size = self._pack(arrays)
        result = torch.empty(size, dtype=torch.int32, device=self.device)
        if size:
            result.copy_(host.pinned[:size], non_blocking=True)
            host.sent()
        return [result[place] for place in places]

    def post(self, places: NDArray[Any], numbers: NDArray[Any], target: Tensor) -> None:
        """Runs target[places] = numbers on a flat target. No place may occur twice."""
        host, parts, _ = self._pack((places, numbers))
        post(host.pinned[parts[0]], host.pinned[parts[1]], target)
        host.sent()

    def _pack(self, arrays: Sequence[NDArray[Any]]) -> tuple["_Host", list[slice], int]:
        """Packs arrays into a pinned buffer, aligned to 16 bytes: other alignments compile kernels in service."""
        ends = np.cumsum([_aligned(len(array)) for array in arrays]).tolist()
        host = next(self._hosts).free(ends[-1])
        places = [slice(start, start + len(array)) for start, array in zip([0, *ends], arrays, strict=False)]
        for place, array in zip(places, arrays, strict=True):
            host.array[place] = array
        return host, places, ends[-1]


class _Host:
    """A pinned buffer, and the event after its last read."""

    def __init__(self, size: int) -> None:
        self._take(size)
        self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def free(self, size: int) -> "_Host":
        """Returns the buffer when it can be refilled. Does not wait, unless the device is three steps behind."""
        self._read.synchronize()
        if size > self.array.size:
            self._take(2 * size)
        return self

    def sent(self) -> None:
        """Records the read event: all kernels that read the buffer have been launched."""
        self._read.record()

    def _take(self, size: int) -> None:
        self.pinned = pinned(size)
        self.array = self.pinned.numpy()


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def pinned(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, pin_memory=True)
