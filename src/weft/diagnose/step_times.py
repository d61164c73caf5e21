"""StepTimes: the tokens of one engine process, with their times, from its StepFrames."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from weft.observe.recording import EngineRun

Numbers = NDArray[np.float64]
Keys = NDArray[np.int64]


@dataclass(frozen=True)
class StepTimes:
    """Arrays with one entry per step, per token or per slice. Times are seconds on the clock of the recording."""

    started: Numbers  # by step
    finished: Numbers
    is_prefill: NDArray[np.bool_]  # by step: whether it carries prefill
    token_keys: Keys  # by token, in order of key, then time
    token_times: Numbers
    slice_keys: Keys  # by prefill slice, in order of time
    slice_steps: Keys  # its step, as an index
    slice_first: Keys  # position of its first token
    slice_tokens: Keys

    @classmethod
    def of(cls, run: EngineRun) -> Self:
        steps = run.steps
        finished = np.array([step.finished for step in steps], np.float64)
        slices = [(index, *one) for index, step in enumerate(steps) for one in step.slices]
        columns = np.array(slices, np.int64).reshape(-1, 5)
        ends = columns[columns[:, 4] > 0]
        decodes = [step.decode_keys for step in steps]
        keys = np.concatenate([np.empty(0, np.int64), *decodes, ends[:, 1]]).astype(np.int64)
        decode_times = np.repeat(finished, [len(one) for one in decodes])
        times = np.concatenate([decode_times, finished[ends[:, 0]]])
        order = np.lexsort((times, keys))
        return cls(
            started=np.array([step.started for step in steps], np.float64),
            finished=finished,
            is_prefill=np.array([bool(step.slices) for step in steps], np.bool_),
            token_keys=keys[order],
            token_times=times[order],
            slice_keys=columns[:, 1],
            slice_steps=columns[:, 0],
            slice_first=columns[:, 2],
            slice_tokens=columns[:, 3],
        )

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """By token: whether it is the first recorded token of its sequence."""
        return np.concatenate([np.ones(min(1, len(self.token_keys)), np.bool_), np.diff(self.token_keys) != 0])

    def first_tokens(self) -> dict[int, float]:
        """Time of the first recorded token, by key."""
        first = self.is_first
        return dict(zip(self.token_keys[first].tolist(), self.token_times[first].tolist(), strict=True))

    def gaps(self) -> tuple[Keys, Numbers]:
        """Key and seconds of each gap between two tokens of a sequence."""
        later = ~self.is_first
        seconds = np.diff(self.token_times, prepend=np.nan)
        return self.token_keys[later], seconds[later]

    def output_tokens(self) -> dict[int, int]:
        """Number of recorded tokens, by key."""
        keys, counts = np.unique(self.token_keys, return_counts=True)
        return dict(zip(keys.tolist(), counts.tolist(), strict=True))

    def first_slices(self) -> dict[int, tuple[float, int]]:
        """By key: when its first recorded slice started, and the position where it began (its cached tokens)."""
        keys, where = np.unique(self.slice_keys, return_index=True)
        starts = self.started[self.slice_steps[where]]
        return dict(
            zip(keys.tolist(), zip(starts.tolist(), self.slice_first[where].tolist(), strict=True), strict=True)
        )

    def busy_seconds(self) -> float:
        """Seconds in which the device computed."""
        return float((self.finished - self.started).sum())
