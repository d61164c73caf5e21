"""Numbers in the host's pinned memory, read by the device itself: a kernel is there at once, where a copy between two
steps makes the device wait for its copy engine (10 us on an H200). Only imported where there is a GPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

TILE = 512  # numbers that a program brings


def fetch(source: Tensor, segments: Tensor, target: Tensor, most: int) -> None:
    """Copies parts of `source` [N] int32, pinned, to the same places in `target` [N] int32.

    `segments` [S, 2] int32 says of each part where it begins, and where `source` has its length: `most` or less.
    """
    assert segments.is_contiguous()
    if most:
        _fetch[(len(segments), triton.cdiv(most, TILE))](source, segments, target, TILE=TILE, num_warps=4)


def post(places: Tensor, numbers: Tensor, target: Tensor) -> None:
    """target[places] = numbers, of which both, [N] int32, are in pinned memory, and no place occurs twice."""
    count = len(places)
    if count:
        _post[(triton.cdiv(count, TILE),)](places, numbers, target, count, TILE=TILE, num_warps=4)


@triton.jit
def _fetch(source, segments, target, TILE: tl.constexpr):
    segment = segments + 2 * tl.program_id(0)
    begin = tl.load(segment)
    # Never from a cache: the host writes there again and again.
    length = tl.load(source + tl.load(segment + 1), cache_modifier=".cv")
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < length
    numbers = tl.load(source + begin + columns, mask=inside, cache_modifier=".cv")
    tl.store(target + begin + columns, numbers, mask=inside)


@triton.jit(do_not_specialize=["count"])  # it differs from step to step
def _post(places, numbers, target, count, TILE: tl.constexpr):
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = columns < count
    place = tl.load(places + columns, mask=inside, other=0, cache_modifier=".cv").to(tl.int64)
    tl.store(target + place, tl.load(numbers + columns, mask=inside, cache_modifier=".cv"), mask=inside)
