"""Shares: how the contexts of a step's decodes are divided among the programs of the attention kernel.

Lengths differ from row to row, and a step waits for the program that has the most to read. So long contexts are
divided, short ones are not, and the longest shares start first. The host knows all lengths, so it divides. The kernel
reads the shares from a fixed address, so it can be captured in a CUDA graph.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SHARE_TILE = 64  # tokens; all shares of a row but the last are multiples of it
MOST_SPLITS = 64  # shares of a row: merging more costs more than it gains


class Shares(NamedTuple):
    """One entry per share in each field, the longest share first."""

    row: NDArray[np.int64]
    slot: NDArray[np.int64]
    begin: NDArray[np.int64]  # first position that it reads
    end: NDArray[np.int64]  # one past the last
    result: NDArray[np.int64]  # index of its partial result
    first: NDArray[np.int64]  # index of the first partial result of its row
    splits: NDArray[np.int64]  # number of shares of its row

    @staticmethod
    def padding() -> tuple[int, ...]:
        """Values of an unused entry: its row is -1."""
        return (-1, 0, 0, 0, 0, 0, 0)


def most_shares(rows: int, wanted: int) -> int:
    """Upper bound of the number of shares."""
    return rows + wanted


def divide(slots: NDArray[np.int64], positions: NDArray[np.int64], window: int | None, wanted: int) -> Shares:
    """Divides the keys that each row sees: positions 0 to its own, or the last `window` of them.

    Returns about `wanted` shares, or one per row if there are more rows than that.
    """
    end = positions + 1
    begin = np.zeros_like(end) if window is None else np.maximum(end - window, 0)
    tiles = -(-(end - begin) // SHARE_TILE)
    each = max(1, -(-int(tiles.sum()) // max(1, wanted)))  # tiles per share, if all contexts were divided evenly
    splits = np.minimum(-(-tiles // each), MOST_SPLITS)
    per_share = -(-tiles // splits)  # tiles; only the last share of a row may have fewer
    splits = -(-tiles // per_share)
    first = np.cumsum(splits) - splits
    row = np.repeat(np.arange(len(end)), splits)
    result = np.arange(len(row))
    length = per_share[row] * SHARE_TILE
    starts = begin[row] + (result - first[row]) * length
    ends = np.minimum(starts + length, end[row])
    longest_first = np.argsort(starts - ends, kind="stable")
    row = row[longest_first]
    share = (slots[row], starts[longest_first], ends[longest_first], result[longest_first])
    return Shares(row, *share, first[row], splits[row])
