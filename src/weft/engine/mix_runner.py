"""MixRunner: runs one step mix after the other on an executor, and measures each."""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.core import BlockUpdates, StepBatch
from weft.engine.executor import Executor, PendingStep, SlotSetup, StepInputs, StepResult
from weft.engine.params import SamplingParams
from weft.engine.step_mix import StepLimits, StepMix


class MixRunner:
    """Runs mixes, one after the other. Keeps track of written blocks, so that rows read only these.

    What a block contains does not matter, but unwritten memory may hold NaN. So a row's context is any written blocks.
    Rows read different blocks as long as there are enough, because shared blocks would come from the device's caches.
    """

    def __init__(
        self, executor: Executor, bounds: StepLimits, vocab_size: int, prepares_ahead: bool, is_filled: bool
    ) -> None:
        self.executor = executor
        self.bounds = bounds
        self.prepares_ahead = prepares_ahead
        self.now = 0.0  # end of the last step, in seconds on the executor's clock
        self.submits: tuple[list[float], list[float]] = ([], [])  # seconds per submit, of steps without and with slices
        self.heater = StepMix(slices=((0, 1),))  # runs between two measured steps to keep the device busy
        self.heating = 0.0  # seconds of the heater step
        self._in_flight: deque[PendingStep] = deque()
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)
        self._steps = 0
        self._decode_blocks = np.arange(bounds.rows)  # by slot: the block that its decodes write to
        self._slice_blocks = (
            np.arange(bounds.rows, bounds.blocks) if bounds.blocks > bounds.rows else self._decode_blocks
        )
        self._next_write = self._next_read = 0
        # The known part of the executor's block tables. An entry is block + 1, or 0 if unknown.
        self._block_tables = np.zeros((bounds.rows, -(-bounds.length // bounds.block_size)), np.int64)
        self._written = np.zeros(bounds.blocks + 1, np.int64)  # by entry: tokens written, from the start of the block
        if is_filled:
            self._written[1:] = bounds.block_size
        # In service, a request's blocks are anywhere in the pool. (On an H200 the order makes no difference.)
        self._shuffled = 1 + self._random.permutation(bounds.blocks)
        self._readable = self._full_blocks()

    def warm_up(self) -> None:
        """Writes one block, in several steps if steps are shorter than a block, then decodes once."""
        setups = [_greedy(slot) for slot in range(self.bounds.rows)]
        end = min(self.bounds.block_size, self.bounds.length)
        for first in range(0, end, self.bounds.slice_tokens):
            self.run(StepMix(slices=((first, min(self.bounds.slice_tokens, end - first)),)), setups)
            setups = []
        self.run(StepMix(decodes=(0,)))

    def run(self, mix: StepMix, setups: Sequence[SlotSetup] = ()) -> float:
        """Runs a step and returns its seconds. With `prepares_ahead`, a heater step runs before it and another after
        it, while this mix and the next one are prepared."""
        self._submit(mix, setups)
        if self.prepares_ahead:
            if len(self._in_flight) > 1:
                self._wait_for_oldest()  # the heater step before it
            self._submit(self.heater)
        result = self._wait_for_oldest()
        return result.finished - result.started

    def run_alone(self, mix: StepMix) -> float:
        """Seconds of a step with no other step in flight."""
        self.finish()
        self._submit(mix)
        result = self._wait_for_oldest()
        return result.finished - result.started

    def finish(self) -> None:
        """Waits for all steps in flight."""
        while self._in_flight:
            self._wait_for_oldest()

    def _submit(self, mix: StepMix, setups: Sequence[SlotSetup] = ()) -> None:
        first = np.array([*mix.decodes, *(first for first, _ in mix.slices)], np.int64)
        count = np.array([*(1 for _ in mix.decodes), *(count for _, count in mix.slices)], np.int64)
        decodes = len(mix.decodes)
        updates = [
            self._assign_blocks(slot, int(first[slot]), int(count[slot]), slot < decodes) for slot in range(len(first))
        ]
        self._steps += 1
        batch = StepBatch(
            number=self._steps,
            slots=np.arange(len(first)),
            first=first,
            count=count,
            is_sampled=np.ones(len(first), np.bool_),
            num_decodes=decodes,
            shape=mix.shape(),
            new_blocks=BlockUpdates(*np.concatenate(updates, axis=1)),
        )
        tokens = self._random.integers(self._vocab_size, size=int(count[decodes:].sum()), dtype=np.int32)
        started = time.perf_counter()
        self._in_flight.append(self.executor.submit(batch, StepInputs(tokens, list(setups))))
        self.submits[batch.shape.slices > 0].append(time.perf_counter() - started)
        self._readable = self._full_blocks()

    def _wait_for_oldest(self) -> StepResult:
        result = self._in_flight.popleft().result()
        self.now = result.finished
        return result

    def _assign_blocks(self, slot: int, first: int, count: int, is_decode: bool) -> NDArray[np.int64]:
        """Assigns blocks to a row. Returns the new block table entries, as rows of slots, columns and blocks."""
        size, table = self.bounds.block_size, self._block_tables[slot]
        begin, end = first // size, -(-(first + count) // size)
        before = table[:end].copy()
        unreadable = np.flatnonzero(self._written[before[:begin]] < size)
        table[unreadable] = self._next_readable(len(unreadable))
        keeps = first % size > 0  # continues in a block that it began
        new = end - begin - keeps
        table[begin + keeps : end] = 1 + (self._decode_blocks[slot] if is_decode else self._next_writable(new))
        entries = table[begin:end]
        filled = np.minimum(first + count - np.arange(begin, end) * size, size)
        self._written[entries] = np.maximum(self._written[entries], filled)
        columns = np.flatnonzero(table[:end] != before)
        return np.stack([np.full(len(columns), slot), columns, table[columns] - 1])

    def _full_blocks(self) -> NDArray[np.int64]:
        """Entries of full blocks, in the order in which contexts take them."""
        found: NDArray[np.int64] = self._shuffled[self._written[self._shuffled] == self.bounds.block_size]
        return found

    def _next_readable(self, count: int) -> NDArray[np.int64]:
        indices = (self._next_read + np.arange(count)) % max(1, len(self._readable))
        self._next_read += count
        return self._readable[indices]

    def _next_writable(self, count: int) -> NDArray[np.int64]:
        indices = (self._next_write + np.arange(count)) % len(self._slice_blocks)
        self._next_write += count
        return self._slice_blocks[indices]


def _greedy(slot: int) -> SlotSetup:
    nothing = np.empty(0, np.int32)
    return SlotSetup(slot, SamplingParams(temperature=0.0), 0, nothing, nothing, ())
