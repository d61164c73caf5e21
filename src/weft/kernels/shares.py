"""Shares: how the contexts of a step's decodes are divided among the programs that attend to them.

Lengths differ from row to row, and a program that has much more to read than the others is what a step waits for. So
long contexts are divided, short ones are not, and the longest shares begin first. The host knows all lengths, so it
divides; the kernel finds the shares where they always lie, which lets it be captured in a CUDA graph.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TILE = 64  # tokens; shares of a row begin at multiples of it
MOST_SPLITS = 64  # of a row: merging more costs more than it gains


class Shares(NamedTuple):
    """One number of each kind for every share, the longest share first."""

    row: NDArray[np.int64]
    slot: NDArray[np.int64]
    begin: NDArray[np.int64]  # the first position that it reads
    end: NDArray[np.int64]  # one past the last
    place: NDArray[np.int64]  # where its partial result goes
    first: NDArray[np.int64]  # where the partial results of its row begin
    splits: NDArray[np.int64]  # how many shares its row has

    @staticmethod
    def nobody() -> tuple[int, ...]:
        """In a place that no share has taken: the row says so."""
        return (-1, 0, 0, 0, 0, 0, 0)


def most_shares(rows: int, wanted: int) -> int:
    """How many there can be."""
    return rows + wanted


def divide(slots: NDArray[np.int64], positions: NDArray[np.int64], window: int | None, wanted: int) -> Shares:
    """Each row sees the keys at positions 0 to its own, and only those after its own - window.

    There are about as many shares as `wanted`, or one for each row if that is more.
    """
    end = positions + 1
    begin = np.zeros_like(end) if window is None else np.maximum(end - window, 0)
    tiles = -(-(end - begin) // TILE)
    each = max(1, -(-int(tiles.sum()) // max(1, wanted)))
    splits = np.minimum(-(-tiles // each), MOST_SPLITS)
    per_share = -(-tiles // splits)  # the same for all shares of a row, but for its last
    splits = -(-tiles // per_share)
    first = np.cumsum(splits) - splits
    row = np.repeat(np.arange(len(end)), splits)
    place = np.arange(len(row))
    length = per_share[row] * TILE
    starts = begin[row] + (place - first[row]) * length
    ends = np.minimum(starts + length, end[row])
    turn = np.argsort(starts - ends, kind="stable")
    row = row[turn]
    return Shares(row, slots[row], starts[turn], ends[turn], place[turn], first[row], splits[row])
