"""BatchBuilder: collects the prefill slices of a plan, and builds its StepBatch."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.request import Request
from weft.core.running import RunningRequests
from weft.core.shape import step_shape
from weft.core.slots import ints
from weft.core.step import BlockUpdates, StepBatch, WaitsFor


class PromptSlice(NamedTuple):
    """The part of a prompt that one step computes (vLLM: a chunk)."""

    request: Request
    first: int  # position of its first token
    tokens: int


class BatchBuilder:
    """Collects what the current plan does. `clear` begins the next plan.

    If a plan results in no batch, it is not cleared: the executor must still be told of `new_requests`.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.prefills: list[PromptSlice] = []
        self.scheduled_prefills: set[Request] = set()  # requests in `prefills`
        self.new_requests: list[Request] = []  # got a slot; the executor does not know them yet
        self.cached_tokens = 0
        self.preempted: list[Request] = []
        self.waits_for: WaitsFor = ""
        self.lost_tokens = 0  # computed or cached tokens of the preempted requests

    def add(self, request: Request, first: int, count: int) -> None:
        self.prefills.append(PromptSlice(request, first, count))
        self.scheduled_prefills.add(request)

    def forget(self, request: Request) -> None:
        """The request lost its seat before a batch told the executor of it."""
        if request in self.new_requests:
            self.new_requests.remove(request)

    def build(
        self, number: int, decodes: NDArray[np.int64], running: RunningRequests, updates: BlockUpdates, wave: int
    ) -> StepBatch:
        """Builds the batch. Advances `planned` and `num_tokens` by what the step computes and samples."""
        prefills, slots = self.prefills, running.slots
        num_decodes = len(decodes)
        rows, first = decodes, slots.planned[decodes]
        count = np.ones(num_decodes + len(prefills), np.int64)
        is_sampled = np.ones(num_decodes + len(prefills), np.bool_)
        slots.planned[decodes] += 1
        shape = step_shape(first, [(one.first, one.tokens) for one in prefills], wave)
        if prefills:  # most steps have none and skip this cost
            rows = np.concatenate([rows, ints([one.request.slot for one in prefills])])
            first = np.concatenate([first, ints([one.first for one in prefills])])
            count[num_decodes:] = [one.tokens for one in prefills]
            is_sampled = first + count == slots.num_tokens[rows]
        slots.num_tokens[rows] += is_sampled
        if slots.constrained.any():  # they wait until the loop has the token and the next mask
            slots.awaits_mask[rows] |= is_sampled & slots.constrained[rows]
        slots.num_in_flight[rows] += 1
        for row, one in enumerate(prefills, start=num_decodes):
            if is_sampled[row]:
                slots.decoding[one.request.slot] = True
                running.prefilling.remove(one.request)
        return StepBatch(number, rows, first, count, is_sampled, num_decodes, shape, updates)
