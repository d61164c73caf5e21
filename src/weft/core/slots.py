"""Slots: counters of the running requests as arrays, so that a decode step takes only a few array operations."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from weft.core.request import Request

NO_SLOTS: NDArray[np.int64] = np.empty(0, np.int64)


def ints(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64) if values else NO_SLOTS


class Slots:
    """Arrays with one row (slot) per request that a plan may contain. vLLM calls the row's number the request index.

    When a request gives up its seat, its slot stays reserved while a step in flight uses it. A new request must not
    wait for that, so there are twice as many slots as seats.

    Invariant of a row: computed <= planned <= num_tokens <= limit.
    """

    def __init__(self, seats: int) -> None:
        size = self.size_for(seats)
        self.size = size
        self.prompt_tokens = np.zeros(size, np.int64)  # tokens of the prompt
        self.num_tokens = np.zeros(size, np.int64)  # prompt and output, including a planned sample
        self.planned = np.zeros(size, np.int64)  # tokens that are computed, cached or in a plan
        self.computed = np.zeros(size, np.int64)  # tokens up to the end of the last committed step
        self.limit = np.zeros(size, np.int64)  # most tokens: prompt plus max_tokens
        self.promised_max_step = np.full(size, np.inf)  # longest step, in seconds, that keeps the promised gap
        self.default_max_step = np.full(size, np.inf)  # longest step, in seconds, that keeps the default gap target
        self.wished_max_step = np.full(size, np.inf)  # longest step, in seconds, that meets the gap wish
        self.is_flex = np.zeros(size, np.bool_)  # flex class
        self.constrained = np.zeros(size, np.bool_)
        self.awaits_mask = np.zeros(size, np.bool_)  # constrained, and the mask of the next token is not ready
        self.capacity = np.zeros(size, np.int64)  # tokens that fit into its blocks
        self.decoding = np.zeros(size, np.bool_)  # has a seat, and its next input is its last sample
        self.num_in_flight = np.zeros(size, np.int64)  # uncommitted steps that use the row
        self.occupant: list[Request | None] = [None] * size
        self._free = deque(range(size))

    @staticmethod
    def size_for(seats: int) -> int:
        return 2 * seats

    def reserve(self, request: Request) -> int:
        """Gives the request a free slot, and copies its numbers to the arrays."""
        slot = self._free.popleft()
        request.slot = slot
        self.occupant[slot] = request
        self.prompt_tokens[slot] = request.prompt_tokens
        self.num_tokens[slot] = request.num_tokens
        self.limit[slot] = request.limit
        self.promised_max_step[slot] = request.promised_max_step
        self.default_max_step[slot] = request.default_max_step
        self.wished_max_step[slot] = request.gap_wish / request.steps_per_token
        self.is_flex[slot] = request.flex
        self.constrained[slot] = request.constrained
        self.awaits_mask[slot] = request.awaits_mask
        self.planned[slot] = self.computed[slot] = self.capacity[slot] = 0
        return slot

    def free(self, request: Request) -> None:
        self.occupant[request.slot] = None
        self._free.append(request.slot)
        request.slot = -1

    @property
    def num_free(self) -> int:
        return len(self._free)
