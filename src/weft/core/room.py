"""Room: seats and KV memory that newcomers find, and how fast they come free."""

import math
from typing import NamedTuple

MEMORY = 10.0  # seconds over which it is averaged what comes free


class Room(NamedTuple):
    seats: float
    tokens: float  # of KV cache

    def without(self, tokens: float) -> "Room":
        """After one more has sat down, with so many tokens."""
        return Room(self.seats - 1, self.tokens - tokens)

    def lacking(self, freed: "Room") -> float:
        """Seconds until nothing is lacking any more, where so much comes free in a second; 0 where nothing is."""
        seconds = 0.0
        for left, rate in zip(self, freed, strict=True):
            if left < 0:
                seconds = max(seconds, -left / rate if rate > 0 else math.inf)
        return seconds


PLENTY = Room(math.inf, math.inf)
NOTHING = Room(0.0, 0.0)


class Turnover:
    """What came free in a second, of late: by requests that ended, less what those who decode have taken."""

    def __init__(self) -> None:
        self._seats = self._tokens = 0.0  # decaying sums
        self._since = self._at = -math.inf  # seconds on the scheduler's clock

    def add(self, now: float, seats: int, tokens: int) -> None:
        if self._since == -math.inf:
            self._since = self._at = now
        factor = math.exp(min(0.0, self._at - now) / MEMORY)
        self._at = max(now, self._at)
        self._seats = self._seats * factor + seats
        self._tokens = self._tokens * factor + tokens

    def rate(self, now: float) -> Room:
        """None of it is negative."""
        if now <= self._since:
            return NOTHING
        # A sum that decays holds what came in so many seconds; fewer where it has not been at it for that long.
        seconds = MEMORY * -math.expm1((self._since - now) / MEMORY)
        factor = math.exp(min(0.0, self._at - now) / MEMORY)
        return Room(self._seats * factor / seconds, max(0.0, self._tokens * factor / seconds))
