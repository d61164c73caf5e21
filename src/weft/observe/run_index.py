"""RunIndex: the steps of an engine process as arrays, to find what happened to a sequence at a time."""

from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from weft.core.step import WaitsFor
from weft.observe.recording import EngineRun
from weft.observe.step_shares import StepShares, coefficients_of

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WAITS: tuple[WaitsFor, ...] = get_args(WaitsFor)  # `RunIndex.waits_for` are indices of it


class OwnSlice(NamedTuple):
    """A prefill slice of a sequence."""

    step: int  # index of the step in the run
    end: int  # position after its last token


class RunIndex:
    """Indices of steps count from 0 in the run. Times are seconds, on the clock of the recording.

    The device runs one step after the other: `started` and `finished` never overlap, and what is between them is idle
    time of the device. So host time that the device does not wait for is counted nowhere.
    """

    def __init__(self, run: EngineRun) -> None:
        self.run, steps = run, run.steps
        self.finished: Floats = np.maximum.accumulate(np.array([step.finished for step in steps], np.float64))
        # End of the step before. Before the first step, the device was idle for as long as the recording can say.
        self.previous: Floats = np.concatenate([[-np.inf], self.finished[:-1]])[: len(steps)]
        measured: Floats = np.array([step.started for step in steps], np.float64)
        self.started: Floats = np.minimum(np.maximum(measured, self.previous), self.finished)
        self.waits_for = np.array([WAITS.index(step.waits_for) for step in steps], np.int64)
        self._divide()
        self._find_tokens()
        self.preempted: dict[int, list[int]] = {}  # by key: indices of the steps whose plans preempted it
        for index, step in enumerate(steps):
            for key in step.preempted:
                self.preempted.setdefault(key, []).append(index)
        # The same as lists: reading single elements of arrays is slow.
        self.started_list: list[float] = self.started.tolist()
        self.finished_list: list[float] = self.finished.tolist()
        self.previous_list: list[float] = self.previous.tolist()
        self.decode_list, self.excess_list = self.decodes.tolist(), self.excess.tolist()
        self.bounds_list = self.slice_bounds.tolist()
        self.slice_key_list, self.slice_seconds_list = self.slice_keys.tolist(), self.slice_seconds.tolist()

    def own_slices(self, key: int) -> list[OwnSlice]:
        """The prefill slices of a sequence, in order."""
        return self._own_slices.get(key, [])

    def token_steps(self, key: int) -> Ints:
        """For each token of a sequence: the index of the step that sampled it."""
        low, high = self._token_bounds.get(key, (0, 0))
        return self._token_steps[low:high]

    @property
    def keys(self) -> list[int]:
        """Keys of the sequences with tokens."""
        return list(self._token_bounds)

    def _divide(self) -> None:
        """Divides the time of each step."""
        steps = self.run.steps
        shares = StepShares(coefficients_of(self.run.info))
        for step in steps:
            shares.note(step)
        seconds = (self.finished - self.started).tolist()
        divided = [shares.divide(step, time) for step, time in zip(steps, seconds, strict=True)]
        self.decodes: Floats = np.array([one.decodes for one in divided], np.float64)
        self.excess: Floats = np.array([one.excess for one in divided], np.float64)
        # Slices of all steps, one after the other. slice_bounds[i]: index of the first slice of step i.
        self.slice_bounds: Ints = np.concatenate([[0], np.cumsum([len(step.slices) for step in steps])]).astype(
            np.int64
        )
        self.slice_keys: Ints = np.array([one[0] for step in steps for one in step.slices], np.int64)
        self.slice_seconds: Floats = np.array([part for one in divided for part in one.slices], np.float64)
        self._own_slices: dict[int, list[OwnSlice]] = {}
        for index, step in enumerate(steps):
            for key, first, count, _ in step.slices:
                self._own_slices.setdefault(key, []).append(OwnSlice(index, first + count))

    def _find_tokens(self) -> None:
        steps = self.run.steps
        decodes = np.frombuffer(b"".join(step.decodes for step in steps), np.int32).astype(np.int64)
        counts = [len(step.decodes) // 4 for step in steps]
        ends = [(key, index) for index, step in enumerate(steps) for key, _, _, is_end in step.slices if is_end]
        end_keys, end_steps = np.array(ends, np.int64).reshape(-1, 2).T
        keys = np.concatenate([decodes, end_keys])
        indices = np.concatenate([np.repeat(np.arange(len(steps)), counts), end_steps])
        order = np.lexsort((indices, keys))
        keys, indices = keys[order], indices[order]
        self._token_steps: Ints = indices.astype(np.int64)
        found, lows = np.unique(keys, return_index=True)
        highs = [*lows.tolist()[1:], len(keys)][: len(found)]
        bounds: dict[int, tuple[int, int]] = {}
        for key, low, high in zip(found.tolist(), lows.tolist(), highs, strict=True):
            if key < 0:
                continue  # a sequence that had ended when the step was recorded
            request = self.run.requests.get(key)
            if request is not None:  # tokens after a stop are not part of the output
                high = min(high, low + request.output_tokens)
            if high > low:
                bounds[key] = low, high
        self._token_bounds = bounds
