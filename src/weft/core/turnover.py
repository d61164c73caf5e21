"""How fast KV memory comes free where it is scarce, and how many tokens requests write until they end."""

import math
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SCARCE = 0.25  # of the memory: with less of it free, what comes free is counted
MEMORY = 10.0  # seconds of steps with scarce memory over which it is averaged
FEWEST = 8  # ends, of late, without which nothing is known
RECENT = 64  # requests that ended last, whose lengths are remembered
USUAL = 256  # tokens that a request is taken to write as long as none has ended


class Turnover:
    """What those who ended gave back, less what those who decode have taken, in a second of steps with scarce memory.

    Only of these: what an idle device or an empty cache gives back says nothing of a full one.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = self._ends = 0.0  # decaying sums
        self._given = self._left = 0  # tokens and ends since the last step

    def ended(self, tokens: int) -> None:
        """One that ran has ended, by itself or not, and gave so much back that nobody else holds."""
        self._given += tokens
        self._left += 1

    def step(self, seconds: float, grown: int, free: float) -> None:
        """A step took so long, and those who decode have `grown` tokens more; `free` is a share of the memory."""
        given, left = self._given, self._left
        self._given = self._left = 0
        if free < SCARCE:
            factor = math.exp(-seconds / MEMORY)
            self._tokens = self._tokens * factor + given - grown
            self._seconds = self._seconds * factor + seconds
            self._ends = self._ends * factor + left

    @property
    def rate(self) -> float | None:
        """Tokens that come free in a second; None where it is not known."""
        if self._ends < FEWEST or self._tokens <= 0 or self._seconds <= 0:
            return None
        return self._tokens / self._seconds


class Leaving(NamedTuple):
    """When requests that decode end."""

    after: NDArray[np.float64]  # seconds or steps from now, ascending
    context: NDArray[np.float64]  # tokens that each of them reads now, in the same order


class Ends(NamedTuple):
    latest: Leaving  # in seconds, if each writes as much as it may at its promised gap; infinite without a promise
    expected: Leaving  # in steps, if each writes as much as requests usually do
    typical: float  # steps that a request decodes, usually


NOTHING = Leaving(np.empty(0), np.empty(0))
NONE_DECODES = Ends(NOTHING, NOTHING, USUAL)


class Lengths:
    """How many tokens requests write: many end long before the most that they may write."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=RECENT)  # tokens of those that ended last
        self._sorted: NDArray[np.int64] | None = None

    def ended(self, tokens: int) -> None:
        """A request has ended, by itself or not, after so many tokens."""
        self._recent.append(tokens)
        self._sorted = None

    def expect(
        self,
        written: NDArray[np.int64],
        left: NDArray[np.int64],
        gap: NDArray[np.float64],
        context: NDArray[np.int64],
    ) -> Ends:
        """Of requests that have written so many tokens, may write so many more with so many seconds between them at
        most, and read so many."""
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._recent or [USUAL]))
        middle = self._rest(written, left, np.full(len(left), 0.5))
        # Of many that began together, the first ends sooner than one usually does, and the last later.
        place = np.argsort(np.argsort(middle, kind="stable"), kind="stable")
        rest = self._rest(written, left, (place + 0.5) / max(1, len(left)))
        typical = max(1.0, float(self._sorted.mean()))
        return Ends(_in_order(left * gap, context), _in_order(rest, context), typical)

    def _rest(
        self, written: NDArray[np.int64], left: NDArray[np.int64], share: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """What each will still write, such that so large a share of the longer ones of late wrote no more."""
        known = self._sorted
        assert known is not None
        longer = np.searchsorted(known, written, "right")
        found = known[np.minimum(longer + (share * (len(known) - longer)).astype(np.int64), len(known) - 1)] - written
        # One that has written more than all of late is taken for one that has just begun: nothing else is known of it.
        return np.minimum(np.where(longer < len(known), found, max(1, int(known.mean()))), left)


def _in_order(after: NDArray[np.int64] | NDArray[np.float64], context: NDArray[np.int64]) -> Leaving:
    order = np.argsort(after, kind="stable")
    return Leaving(after[order].astype(np.float64), context[order].astype(np.float64))
