"""How fast KV memory is freed when it is scarce, and how many tokens requests generate."""

import math
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SCARCE = 0.25  # share of free memory below which freed memory is counted
MEMORY = 10.0  # seconds of steps with scarce memory over which the rate is averaged
FEWEST = 8  # recently finished requests needed for a rate
RECENT = 64  # last finished requests with a recorded output length
USUAL = 256  # assumed output tokens of a request until the first one has finished


class Leaving(NamedTuple):
    """When running decodes end."""

    after: NDArray[np.float64]  # seconds or steps from now, ascending
    context: NDArray[np.float64]  # tokens of context of each request now, in the same order


class EndForecast(NamedTuple):
    latest: Leaving  # seconds, if each generates max_tokens at its promised gap; infinite without a promise
    expected: Leaving  # steps, if each generates as many tokens as recent requests
    typical: float  # usual number of decode steps of a request


NOTHING = Leaving(np.empty(0), np.empty(0))
NONE_DECODES = EndForecast(NOTHING, NOTHING, USUAL)


class OutputLengths:
    """Output lengths of recent requests. Many requests end long before max_tokens."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=RECENT)  # output tokens of the last finished requests
        self._sorted: NDArray[np.int64] | None = None

    def ended(self, tokens: int) -> None:
        """Records the output length of a request that finished or was aborted."""
        self._recent.append(tokens)
        self._sorted = None

    def expect(
        self,
        written: NDArray[np.int64],
        left: NDArray[np.int64],
        gap: NDArray[np.float64],
        context: NDArray[np.int64],
    ) -> EndForecast:
        """When running requests end.

        Of each request: tokens generated (`written`), tokens left to max_tokens (`left`), promised seconds between
        tokens (`gap`) and tokens of `context`.
        """
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._recent or [USUAL]))
        middle = self._rest(written, left, np.full(len(left), 0.5))
        # Of many requests that started together, the first ends earlier than the median request, and the last later.
        place = np.empty(len(left), np.int64)
        place[np.argsort(middle, kind="stable")] = np.arange(len(left))
        rest = self._rest(written, left, (place + 0.5) / max(1, len(left)))
        typical = max(1.0, float(self._sorted.mean()))
        return EndForecast(_in_order(left * gap, context), _in_order(rest, context), typical)

    def _rest(
        self, written: NDArray[np.int64], left: NDArray[np.int64], share: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Remaining output tokens of each request.

        Takes the quantile `share` of recent output lengths above `written`. At most `left`.
        """
        known = self._sorted
        assert known is not None
        longer = np.searchsorted(known, written, "right")
        found = known[np.minimum(longer + (share * (len(known) - longer)).astype(np.int64), len(known) - 1)] - written
        # A request that is longer than all recent ones is treated as a new one: nothing better is known.
        return np.minimum(np.where(longer < len(known), found, max(1, int(known.mean()))), left)


class Turnover:
    """Output lengths of finished requests, and how fast memory is freed.

    The rate is the net tokens of KV memory freed per second: memory of finished requests minus memory taken by decodes.
    Only steps with scarce memory count: an idle device or an empty cache says nothing about a full one.
    """

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self._tokens = self._seconds = self._ends = 0.0  # decaying sums
        self._given = self._left = 0  # freed tokens and finished requests since the last step

    def ended(self, tokens: int, written: int = 0) -> None:
        """Counts a running request that finished or was aborted.

        It freed `tokens` of memory (shared blocks are not counted) and had generated `written` tokens. A request that
        was aborted before its first token is no sample of an output length.
        """
        self._given += tokens
        self._left += 1
        if written > 0:
            self.lengths.ended(written)

    def step(self, seconds: float, grown: int, free: float) -> None:
        """Counts a step. Its decodes added `grown` tokens. `free` is the free share of the KV memory."""
        given, left = self._given, self._left
        self._given = self._left = 0
        if free < SCARCE:
            factor = math.exp(-seconds / MEMORY)
            self._tokens = self._tokens * factor + given - grown
            self._seconds = self._seconds * factor + seconds
            self._ends = self._ends * factor + left

    @property
    def rate(self) -> float | None:
        """Net tokens freed per second; None if unknown."""
        if self._ends < FEWEST or self._tokens <= 0 or self._seconds <= 0:
            return None
        return self._tokens / self._seconds


def _in_order(after: NDArray[np.int64] | NDArray[np.float64], context: NDArray[np.int64]) -> Leaving:
    order = np.argsort(after, kind="stable")
    return Leaving(after[order].astype(np.float64), context[order].astype(np.float64))
