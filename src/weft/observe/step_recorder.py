"""StepRecorder: turns the StepRecords of a loop into encoded frames. It runs in the engine's process."""

import math
from collections.abc import Callable

import numpy as np

from weft.core.promises import Source
from weft.core.request import Request
from weft.core.step import StepRecord
from weft.observe.frames import PromptFrame, StepFrame, encode_frame

MOST_PREFIX_BLOCKS = 2048  # of a prompt, whose hashes are recorded


class StepRecorder:
    """Frames of one engine process. `key_of` says which number stands for a request in the recording."""

    def __init__(self, engine: str, num_slots: int, key_of: Callable[[Request], int]) -> None:
        self.engine, self._key_of = engine, key_of
        self._key_by_slot = np.full(num_slots, -1, np.int32)
        self._prefix = b""  # of the last prompt

    def prompt(self, request: Request, now: float) -> bytes:
        """The frame of a request that was given to the scheduler at `now`."""
        if not request.sibling:  # else the prompt is the same as before
            numbers = [hash(one) & 0x7FFFFFFF for one in request.hashes[:MOST_PREFIX_BLOCKS]]
            self._prefix = np.array(numbers, np.int32).tobytes()
        return encode_frame(
            PromptFrame(
                self.engine,
                self._key_of(request),
                now,
                request.arrival,
                request.prompt_tokens,
                request.max_tokens,
                _finite(request.gap_target),
                request.gap_source is not Source.DEFAULT and request.gap_target < math.inf,
                _finite(request.ttft_target),
                request.ttft_source is not Source.DEFAULT and request.ttft_target < math.inf,
                request.flex,
                request.priority,
                request.constrained,
                self._prefix,
            )
        )

    def step(self, record: StepRecord, queued_tokens: int) -> bytes:
        """The frame of a committed step. To be called for every step, in order: it follows which request has a slot."""
        batch, keys = record.batch, self._key_by_slot
        assert batch is not None, "only the scheduler makes records"
        for slot, request in record.new_slots:
            keys[slot] = self._key_of(request)
        rows = keys[batch.slots]
        split = batch.num_decodes
        slices = []
        if split < len(rows):
            fields = (rows, batch.first, batch.count, batch.is_sampled)
            slices = list(zip(*(field[split:].tolist() for field in fields), strict=True))
        return encode_frame(
            StepFrame(
                self.engine,
                record.number,
                record.started,
                record.finished,
                record.predicted,
                rows[:split].tobytes(),
                slices,
                record.shape,
                record.host,
                record.reason,
                record.waits_for,
                [self._key_of(request) for request in record.preempted],
                record.running,
                record.waiting,
                queued_tokens,
                record.free_blocks,
                record.cached_tokens,
                record.lost_tokens,
                record.starved,
            )
        )


def _finite(seconds: float) -> float | None:
    return seconds if seconds < math.inf else None
