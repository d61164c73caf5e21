"""StopStrings: ends a text at a stop string. Holds back the end of the text while it may be the start of one."""

from collections.abc import Sequence
from functools import lru_cache

from weft.errors import RequestError

CACHED_TABLES = 256  # stop strings with cached tables: all completions of a request have the same stop strings


class StopStrings:
    """Passes text through up to the first stop string, and emits no part of it.

    The match that ends first wins. If several end at the same character, the longest wins. So the result depends on the
    text alone, not on how it was cut into tokens. The text ends with the very character that completes a stop string.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False):
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop must be a list of non-empty strings, got {stop!r} in it")
        self.stopped: str | None = None  # the stop string that matched
        self._include = include_in_output
        self._stops = stops
        self._matchers: list[_Matcher] | None = (
            None  # created with the first text, because a request may have 2,000 completions
        )
        self._held_back = ""

    def push(self, text: str, active: bool = True) -> str:
        """Takes new text and returns what is safe to emit. Always returns "" after a stop string has matched.

        Text pushed with `active=False` completes no match, but a later match may begin in it. min_tokens needs this:
        pass False for the text of the first min_tokens tokens.
        """
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        if self._matchers is None:
            self._matchers = [_Matcher(stop) for stop in sorted(set(self._stops), key=len, reverse=True)]
        seen = self._held_back + text
        for end, char in enumerate(text, start=len(self._held_back) + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.step(char)]
            if complete and active:
                self.stopped, self._held_back = complete[0], ""
                return seen[:end] if self._include else seen[: end - len(self.stopped)]
        safe = len(seen) - max(matcher.length for matcher in self._matchers)
        self._held_back = seen[safe:]
        return seen[:safe]

    def flush(self) -> str:
        """Ends the text: returns what was held back and has not become a stop string."""
        text, self._held_back = self._held_back, ""
        return text


class _Matcher:
    """Knuth-Morris-Pratt, one character at a time, in constant time for any length of the stop string. `length` is
    exactly the number of characters that must be held back for it.
    """

    def __init__(self, stop: str):
        self.stop = stop
        self.length = 0  # characters of `stop` that the text currently ends with
        self._shorter = _table(stop)

    def step(self, char: str) -> bool:
        """Takes one character. True if it completes the stop string."""
        self.length = _extend(self.stop, self._shorter, self.length, char)
        if self.length < len(self.stop):
            return False
        self.length = self._shorter[self.length]
        return True


@lru_cache(CACHED_TABLES)
def _table(stop: str) -> Sequence[int]:
    """For each length of a prefix of `stop` that the text ends with: the length of the next shorter such prefix."""
    shorter = [0, 0]
    for char in stop[1:]:
        shorter.append(_extend(stop, shorter, shorter[-1], char))
    return shorter


def _extend(stop: str, shorter: Sequence[int], length: int, char: str) -> int:
    """Length of the prefix of `stop` that the text ends with after one more character; `length` is that before it."""
    while length and stop[length] != char:
        length = shorter[length]
    return length + 1 if stop[length] == char else 0
