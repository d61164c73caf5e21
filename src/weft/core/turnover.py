"""How fast KV memory comes free where it is scarce."""

import math

SCARCE = 0.25  # of the memory: with less of it free, what comes free is counted
MEMORY = 10.0  # seconds of steps with scarce memory over which it is averaged
FEWEST = 8  # ends, of late, without which nothing is known


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
