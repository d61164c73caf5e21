"""Draft: the unfinished batch, with all changes that the executor does not know yet."""

import numpy as np
from numpy.typing import NDArray

from weft.core.request import Request

NO_SLOTS: NDArray[np.int64] = np.empty(0, np.int64)


class Draft:
    """Mutable contents of the next StepBatch."""

    def __init__(self) -> None:
        self.prefills: list[tuple[Request, int, int]] = []  # request, first, count
        self.prefilled: set[Request] = set()  # requests in `prefills`
        self.decodes = NO_SLOTS
        self.held = NO_SLOTS  # slots of requests that could decode but wait for a mask
        self.joined: list[Request] = []
        self.block_slots: list[int] = []  # new block table entries: slot, column, block
        self.block_columns: list[int] = []
        self.blocks: list[int] = []
        self.cached_tokens = 0
        self.preemptions = 0
        self.lost_tokens = 0  # computed or cached tokens of the preempted requests

    def forget(self, request: Request) -> None:
        """Drops the request's slot and block table entries, which the executor does not need any more."""
        if request in self.joined:
            self.joined.remove(request)
        if request.slot in self.block_slots:
            stay = [index for index, slot in enumerate(self.block_slots) if slot != request.slot]
            self.block_slots = [self.block_slots[index] for index in stay]
            self.block_columns = [self.block_columns[index] for index in stay]
            self.blocks = [self.blocks[index] for index in stay]


def ints(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64) if values else NO_SLOTS
