"""Turnover: how fast KV memory is freed when it is scarce, and how many tokens requests generate."""

import math
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SCARCE_MEMORY_SHARE = 0.25  # memory is scarce if less than this share of it is free
RATE_WINDOW_S = 10.0  # seconds of steps with scarce memory over which the rate is averaged
FEWEST_FINISHED = 8  # requests that must have finished recently, else the rate is unknown
RECENT_REQUESTS = 64  # finished requests whose output lengths are kept
USUAL_OUTPUT_TOKENS = 256  # assumed output tokens of a request until the first one has finished


class EndTimes(NamedTuple):
    """When running decodes end."""

    after: NDArray[np.float64]  # seconds or steps from now (see EndForecast), ascending
    context: NDArray[np.float64]  # tokens of context of each request now, in the same order


class EndForecast(NamedTuple):
    """When running decodes end, in two versions."""

    latest: EndTimes  # seconds, if each generates max_tokens at its promised gap; infinite without a promise
    expected: EndTimes  # steps, if each generates as many tokens as recent requests
    typical_steps: float  # usual number of decode steps of a request


NO_ENDS = EndTimes(np.empty(0), np.empty(0))
NO_DECODES = EndForecast(NO_ENDS, NO_ENDS, USUAL_OUTPUT_TOKENS)


class OutputLengths:
    """Output lengths of recent requests. Many requests end long before max_tokens."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=RECENT_REQUESTS)  # output tokens of the last finished requests
        self._sorted: NDArray[np.int64] | None = None

    def note_finished(self, tokens: int) -> None:
        """Records the output length of a request that finished or was aborted."""
        self._recent.append(tokens)
        self._sorted = None

    def end_forecast(
        self,
        output_tokens: NDArray[np.int64],
        remaining: NDArray[np.int64],
        promised_gap: NDArray[np.float64],
        context: NDArray[np.int64],
    ) -> EndForecast:
        """When running requests are expected to end. All arrays have one entry for each request.

        Args:
            output_tokens: tokens generated so far
            remaining: tokens until max_tokens
            promised_gap: seconds between tokens; infinite if none is promised
            context: tokens of context
        """
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._recent or [USUAL_OUTPUT_TOKENS]))
        middle = self._expected_remaining(output_tokens, remaining, np.full(len(remaining), 0.5))
        # Of many requests that started together, the first ends earlier than the median request, and the last later.
        end_index = np.empty(len(remaining), np.int64)  # in the order in which the requests end
        end_index[np.argsort(middle, kind="stable")] = np.arange(len(remaining))
        expected = self._expected_remaining(output_tokens, remaining, (end_index + 0.5) / max(1, len(remaining)))
        typical = max(1.0, float(self._sorted.mean()))
        return EndForecast(_in_order(remaining * promised_gap, context), _in_order(expected, context), typical)

    def _expected_remaining(
        self, output_tokens: NDArray[np.int64], remaining: NDArray[np.int64], share: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Remaining output tokens of each request.

        Takes the quantile `share` of the recent output lengths above `output_tokens`. At most `remaining`.
        """
        lengths = self._sorted
        assert lengths is not None
        longer = np.searchsorted(lengths, output_tokens, "right")  # index of the first longer one
        found = (
            lengths[np.minimum(longer + (share * (len(lengths) - longer)).astype(np.int64), len(lengths) - 1)]
            - output_tokens
        )
        # A request that is longer than all recent ones is treated as a new one: nothing better is known.
        return np.minimum(np.where(longer < len(lengths), found, max(1, int(lengths.mean()))), remaining)


class Turnover:
    """Output lengths of finished requests, and how fast memory is freed.

    The rate is the net number of tokens of KV memory that are freed per second: the memory of finished requests minus
    the memory that decodes allocate. Only steps with scarce memory count: an idle device or an empty cache says nothing
    about a full cache.
    """

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self._sum_tokens = self._sum_seconds = self._sum_finished = 0.0  # decaying sums
        self._freed_tokens = self._finished = 0  # since the last step

    def note_finished(self, freed_tokens: int, output_tokens: int = 0) -> None:
        """Counts a running request that finished or was aborted.

        It freed memory of `freed_tokens` (shared blocks are not counted). A request that was aborted before its first
        token says nothing about output lengths.
        """
        self._freed_tokens += freed_tokens
        self._finished += 1
        if output_tokens > 0:
            self.lengths.note_finished(output_tokens)

    def note_step(self, seconds: float, decode_tokens: int, free_share: float) -> None:
        """Counts a step with `decode_tokens` decodes. `free_share` is the free share of the KV memory."""
        freed_tokens, finished = self._freed_tokens, self._finished
        self._freed_tokens = self._finished = 0
        if free_share < SCARCE_MEMORY_SHARE:
            factor = math.exp(-seconds / RATE_WINDOW_S)
            self._sum_tokens = self._sum_tokens * factor + freed_tokens - decode_tokens
            self._sum_seconds = self._sum_seconds * factor + seconds
            self._sum_finished = self._sum_finished * factor + finished

    @property
    def freed_per_second(self) -> float | None:
        """Net tokens freed per second; None if unknown."""
        if self._sum_finished < FEWEST_FINISHED or self._sum_tokens <= 0 or self._sum_seconds <= 0:
            return None
        return self._sum_tokens / self._sum_seconds


def _in_order(after: NDArray[np.int64] | NDArray[np.float64], context: NDArray[np.int64]) -> EndTimes:
    order = np.argsort(after, kind="stable")
    return EndTimes(after[order].astype(np.float64), context[order].astype(np.float64))
