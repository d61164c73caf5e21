"""Numbers in the host's pinned memory, read by the device itself: a kernel is there at once, where a copy between two
steps makes the device wait for its copy engine (10 us on an H200). Only imported where there is a GPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

TILE = 512  # numbers that a program brings


class Ring(NamedTuple):
    """Buffers that the host writes in turn, and the device reads in turn: each counts for itself."""

    buffers: Tensor  # [B, N] int32, pinned
    state: Tensor  # [2] int32, on the device: which buffer it reads next, and how many programs have read this one


def fetch(ring: Ring, segments: Tensor, target: Tensor, table: Tensor, most: int) -> None:
    """Copies parts of the ring's next buffer to the same places in `target` [N] int32.

    `segments` [S, 2] int32 says of each part where it begins, and where the buffer has its length: `most` or less.
    The last two parts are not copied: they are places in `table`, flat, and the numbers that go there. No place occurs
    twice.
    """
    assert segments.is_contiguous()
    assert ring.buffers.is_contiguous()
    grid = (len(segments) - 1, max(1, triton.cdiv(most, TILE)))
    buffers, width = len(ring.buffers), ring.buffers.shape[1]
    _fetch[grid](ring.buffers, ring.state, segments, target, table, buffers, width, TILE=TILE, num_warps=4)


def post(places: Tensor, numbers: Tensor, target: Tensor) -> None:
    """target[places] = numbers, of which both, [N] int32, are in pinned memory, and no place occurs twice."""
    count = len(places)
    if count:
        _post[(triton.cdiv(count, TILE),)](places, numbers, target, count, TILE=TILE, num_warps=4)


@triton.jit
def _fetch(ring, state, segments, target, table, buffers, width, TILE: tl.constexpr):
    turn = tl.load(state)
    source = ring + turn * width
    segment = segments + 2 * tl.program_id(0)
    begin = tl.load(segment)
    # Ordinary loads: the host wrote before it launched this. Volatile ones take 105 us instead of 6 on an H200.
    length = tl.load(source + tl.load(segment + 1))
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < length
    numbers = tl.load(source + begin + columns, mask=inside)
    if tl.program_id(0) < tl.num_programs(0) - 1:
        tl.store(target + begin + columns, numbers, mask=inside)
    else:  # these are places in the table
        values = source + tl.load(segment + 2) + columns
        tl.store(table + numbers, tl.load(values, mask=inside), mask=inside)
    # The last that has read goes on to the next buffer, for the next step.
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
