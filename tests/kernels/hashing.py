"""A kernel that writes down the noise that tokens are drawn with."""

import triton
import triton.language as tl

from weft.kernels.draw import _uniform


@triton.jit
def hash_rows(low, high, positions, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(out + at, _uniform(tl.load(low + at), tl.load(high + at), tl.load(positions + at)))
