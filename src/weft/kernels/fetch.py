"""Kernels that copy numbers from the host's pinned memory to the device. A kernel starts at once, while a copy command
between two steps makes the device wait for its copy engine (10 us on an H200). Imported only where there is a GPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

FETCH_TILE = 512  # numbers read per program


class Ring(NamedTuple):
    """Pinned buffers that are used in turn. The host and the device each keep their own index of the next buffer."""

    buffers: Tensor  # [B, N] int32, pinned
    state: Tensor  # [2] int32, on the device: index of the next buffer, and how many programs have read that buffer


def fetch(ring: Ring, segments: Tensor, target: Tensor, table: Tensor, max_length: int) -> None:
    """Copies segments of the ring's next pinned buffer to the same offsets in `target` [N] int32, on the device.

    `segments` [S, 2] int32 has for each segment its offset, and the offset at which the buffer holds its length (up to
    `max_length`). The last two segments are not copied to `target`: they are flat indices of `table`, and the numbers
    to store there. No index occurs twice.
    """
    assert segments.is_contiguous()
    assert ring.buffers.is_contiguous()
    grid = (len(segments) - 1, max(1, triton.cdiv(max_length, FETCH_TILE)))
    buffers, width = len(ring.buffers), ring.buffers.shape[1]
    _fetch[grid](ring.buffers, ring.state, segments, target, table, buffers, width, TILE=FETCH_TILE, num_warps=4)


def scatter(indices: Tensor, numbers: Tensor, target: Tensor) -> None:
    """target[indices] = numbers. Both are [N] int32 in pinned memory, and no index occurs twice."""
    count = len(indices)
    if count:
        _post[(triton.cdiv(count, FETCH_TILE),)](indices, numbers, target, count, TILE=FETCH_TILE, num_warps=4)


@triton.jit
def _fetch(ring, state, segments, target, table, buffers, width, TILE: tl.constexpr):
    turn = tl.load(state)
    source = ring + turn * width
    segment = segments + 2 * tl.program_id(0)
    begin = tl.load(segment)
    # Ordinary loads: the host wrote before it launched this. Volatile loads take 105 us instead of 6 us on an H200.
    length = tl.load(source + tl.load(segment + 1))
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < length
    numbers = tl.load(source + begin + columns, mask=inside)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        tl.store(target + begin + columns, numbers, mask=inside)
    else:  # the numbers are indices of the table
        values = source + tl.load(segment + 2) + columns
        tl.store(table + numbers, tl.load(values, mask=inside), mask=inside)
    # The last program to read moves on to the next buffer, for the next step.
    tl.debug_barrier()
    if tl.atomic_add(state + 1, 1) == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(state + 1, 0)
        tl.store(state, (turn + 1) % buffers)


@triton.jit(do_not_specialize=["count"])  # it differs from step to step
def _post(places, numbers, target, count, TILE: tl.constexpr):
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = columns < count
    place = tl.load(places + columns, mask=inside, other=0).to(tl.int64)
    tl.store(target + place, tl.load(numbers + columns, mask=inside), mask=inside)
