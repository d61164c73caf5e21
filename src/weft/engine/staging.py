"""StagingBuffer: carries a step's inputs from the host to the device through pinned memory, without waiting."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.fetch import FETCH_TILE, Ring, fetch, scatter

MOST_UPLOADS = 5  # of an Uploader per step: block tables, tokens, and inputs of three attention kernels
NUM_BUFFERS = 3  # pinned buffers: the host fills one while the device may still read the others
CACHE_LINE = 32  # int32 numbers: pinned buffers do not share a cache line
ALIGNED = 4  # int32 numbers: an offset that is a multiple of this is aligned to 16 bytes
NO_SLOT = -1  # the slot of padding: dummy rows and dummy tokens of a graph


class SampledRowInputs(NamedTuple):
    """Inputs of a step that exist once per sampled row: one array per field, one entry per row."""

    slots: Tensor
    positions: Tensor  # of the row's last token
    token_indices: Tensor  # index of that token among the step's tokens
    output_indices: Tensor  # index in the pinned buffer that returns the sampled tokens to the host
    temperature: Tensor
    seed_low: Tensor  # lower half of the seed
    seed_high: Tensor
    top_k: Tensor  # the last three: see `TruncationParams`
    top_p: Tensor
    log_min_p: Tensor

    @staticmethod
    def padding() -> tuple[int, ...]:
        """A dummy row. Only its most likely token is kept (log_min_p 0 is min_p 1), which takes no search."""
        top_p, log_min_p = np.array([2, 0], np.float32).view(np.int32).tolist()
        return (NO_SLOT, *[0] * 6, np.iinfo(np.int32).max, top_p, log_min_p)

    @classmethod
    def of(cls, numbers: Tensor) -> "SampledRowInputs":
        """Views of int32 numbers, of which some hold the bits of a float32."""
        found = cls(*numbers)
        temperature, top_p, log_min_p = (field.view(torch.float32) for field in (found.temperature, *found[-2:]))
        return found._replace(temperature=temperature, top_p=top_p, log_min_p=log_min_p)


class TokenInputs(NamedTuple):
    """Inputs of a step that exist once per token: one array per field, one entry per token, decodes first."""

    slots: Tensor
    positions: Tensor
    ids: Tensor  # 0 for a decode, because its token is on the device
    decode_slots: Tensor  # the slot of a decode, else NO_SLOT

    @staticmethod
    def padding() -> tuple[int, ...]:
        return (NO_SLOT, 0, 0, NO_SLOT)


class StagedArray:
    """Part of a StagingBuffer: an array at a fixed address on the device, for graphs to read.

    It has one row per field, and up to `width` columns.
    """

    def __init__(self, staging: "StagingBuffer", index: int, begin: int, padding: tuple[int, ...], width: int) -> None:
        self._staging, self._index, self._begin = staging, index, begin
        self._padding = np.array(padding, np.int32)[:, None]
        self._stride = _aligned(width)
        self._end = begin + len(padding) * self._stride
        self.width = width
        self.numbers = staging.numbers[begin : self._end].view(len(padding), self._stride)[:, :width]  # on the device
        self.numbers.copy_(torch.from_numpy(self._padding))

    def write(self, values: Sequence[NDArray[Any]], padded: int) -> None:
        """Writes `values` to the current pinned buffer, followed by padding up to `padded` columns."""
        array = self._staging.buffer[self._begin : self._end].reshape(-1, self._stride)
        count = len(values[0])
        for field, numbers in zip(array, values, strict=True):
            field[:count] = numbers
        if count < padded:
            array[:, count:padded] = self._padding
        self._staging.note_written(self._index, padded)

    def segments(self) -> list[tuple[int, int]]:
        return [(begin, self._index) for begin in range(self._begin, self._end, self._stride)]


class StagingBuffer:
    """All inputs of a step in one buffer: its StagedArrays, one after the other.

    The host writes one of NUM_BUFFERS pinned buffers in turn. Each `fetch` that the device runs copies the next one to
    the device, and applies its updates of block tables. So a graph can contain a fetch. Host and device each keep their
    own index of the next buffer. A header says how many columns of each array are written.
    """

    def __init__(self, layouts: Sequence[tuple[tuple[int, ...], int]], block_tables: Tensor) -> None:
        """`layouts` has, for each staged array, the padding value of each field, and the width."""
        # Block table updates: as many as the smallest fetch copies, because a captured fetch cannot know their number.
        layouts = [*layouts, ((0, 0), FETCH_TILE)]
        self._head = _aligned(len(layouts))
        begins = np.cumsum([self._head, *(len(padding) * _aligned(width) for padding, width in layouts)]).tolist()
        size = -(-begins[-1] // CACHE_LINE) * CACHE_LINE
        self.block_tables = block_tables
        self.numbers = torch.zeros(size, dtype=torch.int32, device=block_tables.device)
        self._ring = Ring(pinned(NUM_BUFFERS, size), torch.zeros(2, dtype=torch.int32, device=block_tables.device))
        self._buffers = list(self._ring.buffers.numpy())
        self._was_read: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._is_open = False
        self.buffer_index = 0
        self.buffer = self._buffers[0]  # the pinned buffer of the current step
        self._most_columns = 0  # written to any array of this buffer
        self.arrays = [StagedArray(self, index, begins[index], *layout) for index, layout in enumerate(layouts)]
        segments = [segment for array in self.arrays for segment in array.segments()]
        self._segments = torch.tensor(segments, dtype=torch.int32, device=block_tables.device)
        self._block_updates = self.arrays.pop()

    def begin_step(self) -> None:
        """Switches to the next pinned buffer."""
        if self._is_open:
            # The last step failed before `end_step`. The device may have fetched its buffer or not: reset both indices.
            torch.cuda.synchronize(self.numbers.device)
            self._ring.state.zero_()
            self.buffer_index = 0
        self._is_open = True
        was_read = self._was_read[self.buffer_index]
        if was_read is not None:  # no wait, unless the device is three steps behind
            was_read.synchronize()
        self.buffer = self._buffers[self.buffer_index]
        self.buffer[: self._head] = 0
        self._most_columns = 0

    def note_written(self, index: int, columns: int) -> None:
        """Records that so many columns of the staged array `index` are written."""
        self.buffer[index] = columns
        self._most_columns = max(self._most_columns, columns)

    def put_block_updates(self, indices: NDArray[Any], blocks: NDArray[Any]) -> bool:
        """Stages block_tables[indices] = blocks, with flat indices, all different. False if there are too many."""
        if len(indices) > self._block_updates.width:
            return False
        self._block_updates.write((indices, blocks), len(indices))
        return True

    def fetch(self, most_columns: int | None = None) -> None:
        """Launches the kernel that copies the pinned buffer to the device. For a graph, give `most_columns`: the
        largest number of columns that an array of any later buffer will have."""
        columns = self._most_columns if most_columns is None else most_columns
        fetch(self._ring, self._segments, self.numbers, self.block_tables.view(-1), columns)

    def end_step(self, was_read: torch.cuda.Event) -> None:
        """To be called when the step is launched. The event is recorded after its fetch."""
        self._was_read[self.buffer_index] = was_read
        self.buffer_index = (self.buffer_index + 1) % NUM_BUFFERS
        self._is_open = False


class Uploader:
    """Uploads arrays that no StagedArray holds, through a ring of pinned buffers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = cycle([_PinnedBuffer(1 << 14) for _ in range(MOST_UPLOADS * NUM_BUFFERS)])

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Copies arrays to new tensors on the device, as int32."""
        buffer, parts, size = self._pack(arrays)
        result = torch.empty(size, dtype=torch.int32, device=self.device)
        if size:
            result.copy_(buffer.pinned[:size], non_blocking=True)
            buffer.record_read()
        return [result[part] for part in parts]

    def scatter(self, indices: NDArray[Any], numbers: NDArray[Any], target: Tensor) -> None:
        """Runs target[indices] = numbers on a flat target. No index may occur twice."""
        buffer, parts, _ = self._pack((indices, numbers))
        scatter(buffer.pinned[parts[0]], buffer.pinned[parts[1]], target)
        buffer.record_read()

    def _pack(self, arrays: Sequence[NDArray[Any]]) -> tuple["_PinnedBuffer", list[slice], int]:
        """Packs arrays into a pinned buffer, aligned to 16 bytes: other alignments compile kernels in service."""
        ends = np.cumsum([_aligned(len(array)) for array in arrays]).tolist()
        buffer = next(self._buffers).wait_until_free(ends[-1])
        parts = [slice(start, start + len(array)) for start, array in zip([0, *ends], arrays, strict=False)]
        for part, array in zip(parts, arrays, strict=True):
            buffer.array[part] = array
        return buffer, parts, ends[-1]


class _PinnedBuffer:
    """A pinned buffer, and the event after its last read."""

    def __init__(self, size: int) -> None:
        self._allocate(size)
        self._was_read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait_until_free(self, size: int) -> "_PinnedBuffer":
        """Returns the buffer when it can be refilled. Does not wait, unless the device is three steps behind."""
        self._was_read.synchronize()
        if size > self.array.size:
            self._allocate(2 * size)
        return self

    def record_read(self) -> None:
        """To be called when all kernels that read the buffer are launched."""
        self._was_read.record()

    def _allocate(self, size: int) -> None:
        self.pinned = pinned(size)
        self.array = self.pinned.numpy()


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def pinned(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, pin_memory=True)
