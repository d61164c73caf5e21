"""BatchBuilder: the prefill slices of the step that is being planned, and what else its plan has done so far."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.request import Request
from weft.core.running import RunningRequests
from weft.core.shape import step_shape
from weft.core.slots import ints
from weft.core.step import BlockUpdates, StepBatch


class PromptSlice(NamedTuple):
    request: Request
    first: int  # position of its first token
    tokens: int


class BatchBuilder:
    """The next batch while it is planned. `clear` begins another one.

    A request that took a slot stays in `joined` until a batch tells the executor of it.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.prefills: list[PromptSlice] = []
        self.prefilled: set[Request] = set()  # requests in `prefills`
        self.joined: list[Request] = []  # requests that took a slot
        self.cached_tokens = 0
        self.preemptions = 0
        self.lost_tokens = 0  # computed or cached tokens of the preempted requests

    def add(self, request: Request, first: int, count: int) -> None:
        self.prefills.append(PromptSlice(request, first, count))
        self.prefilled.add(request)

    def forget(self, request: Request) -> None:
        """The request gave up its slot."""
        if request in self.joined:
            self.joined.remove(request)

    def batch(
        self, number: int, decodes: NDArray[np.int64], running: RunningRequests, updates: BlockUpdates, wave: int
    ) -> StepBatch:
        """Makes the batch. Updates `planned` and `known` with what the step computes and samples."""
        prefills, slots = self.prefills, running.slots
        num_decodes = len(decodes)
        rows, first = decodes, slots.planned[decodes]
        count = np.ones(num_decodes + len(prefills), np.int64)
        samples = np.ones(num_decodes + len(prefills), np.bool_)
        slots.planned[decodes] += 1
        shape = step_shape(first, [(one.first, one.tokens) for one in prefills], wave)
        if prefills:  # most steps have none and skip this cost
            rows = np.concatenate([rows, ints([one.request.slot for one in prefills])])
            first = np.concatenate([first, ints([one.first for one in prefills])])
            count[num_decodes:] = [one.tokens for one in prefills]
            samples = first + count == slots.known[rows]
        slots.known[rows] += samples
        if slots.constrained.any():  # held until the loop has the token and the next mask
            slots.held[rows] |= samples & slots.constrained[rows]
        slots.in_flight[rows] += 1
        for row, one in enumerate(prefills, start=num_decodes):
            if samples[row]:
                slots.decoding[one.request.slot] = True
                running.prefilling.remove(one.request)
        return StepBatch(number, rows, first, count, samples, num_decodes, shape, updates)
