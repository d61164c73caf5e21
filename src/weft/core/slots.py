"""Slots: the running requests' counts as arrays, so that a decode step costs a few array operations."""

from collections import deque

import numpy as np

from weft.core.request import Request


class Slots:
    """Rows of state, one per request that a plan may name.

    There are twice as many slots as seats: one that was given up stays reserved while a step in flight names it, and
    a newcomer must not wait for that. Invariant of a row: computed <= planned <= known <= limit.
    """

    def __init__(self, seats: int) -> None:
        size = self.size_for(seats)
        self.size = size
        self.prompt = np.zeros(size, np.int64)  # tokens of the prompt
        self.known = np.zeros(size, np.int64)  # tokens that exist, a planned sample included
        self.planned = np.zeros(size, np.int64)  # tokens that some plan has computed or will
        self.computed = np.zeros(size, np.int64)  # tokens whose step was committed
        self.limit = np.zeros(size, np.int64)
        self.gap_target = np.full(size, np.inf)  # seconds that a step may take for its promised gap
        self.soft_gap = np.full(size, np.inf)  # the same for a gap that is aimed at and not promised
        self.gap_wish = np.full(size, np.inf)
        self.batch = np.zeros(size, np.bool_)
        self.constrained = np.zeros(size, np.bool_)
        self.held = np.zeros(size, np.bool_)  # constrained, and the mask of its next token is not there yet
        self.capacity = np.zeros(size, np.int64)  # tokens that fit into the blocks it holds
        self.decoding = np.zeros(size, np.bool_)  # seated, and its next input is its own last sample
        self.in_flight = np.zeros(size, np.int64)  # submitted steps that name the row and are not committed
        self.occupant: list[Request | None] = [None] * size
        self._free = deque(range(size))

    @staticmethod
    def size_for(seats: int) -> int:
        return 2 * seats

    def take(self, request: Request) -> int:
        slot = self._free.popleft()
        request.slot = slot
        self.occupant[slot] = request
        self.prompt[slot] = request.prompt_tokens
        self.known[slot] = request.known
        self.limit[slot] = request.limit
        self.gap_target[slot] = request.firm_gap
        self.soft_gap[slot] = request.soft_gap
        self.gap_wish[slot] = request.gap_wish / request.steps_per_token
        self.batch[slot] = request.batch
        self.constrained[slot] = request.constrained
        self.held[slot] = request.held
        self.planned[slot] = self.computed[slot] = self.capacity[slot] = 0
        return slot

    def give_back(self, request: Request) -> None:
        self.occupant[request.slot] = None
        self._free.append(request.slot)
        request.slot = -1

    @property
    def num_free(self) -> int:
        return len(self._free)
