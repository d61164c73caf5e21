"""Stop strings in a text stream: owns the end of the text that may still turn out to be the beginning of one."""

from collections.abc import Sequence
from functools import lru_cache

from weft.errors import RequestError

REMEMBERED = 256  # stop strings whose tables are kept: all completions of a request have the same ones


class StopStrings:
    """Lets text through up to the first stop string; no part of the one that matches gets out before.

    The match that ends first wins, and of those that end together the longest. So the result depends on the text alone,
    not on how it was cut into tokens, and a stream ends with the very character that completes a stop string.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False):
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise RequestError(f"stop must be a list of non-empty strings, got {stop!r} in it")
        self.stopped: str | None = None  # the stop string that matched
        self._include = include_in_output
        self._stops = stops
        self._matchers: list[_Matcher] | None = None  # made with the first text: a request may have 2,000 completions
        self._held = ""

    def push(self, text: str, active: bool = True) -> str:
        """Take new text; returns what is safe to give out, and "" for ever once a stop string has matched.

        Text pushed with `active=False` completes no match, though a later match may begin in it. That is what
        min_tokens asks for: pass False for the text of the first min_tokens tokens.
        """
        if self.stopped is not None:
            return ""
        if not self._stops:
            return text
        if self._matchers is None:
            self._matchers = [_Matcher(stop) for stop in sorted(set(self._stops), key=len, reverse=True)]
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.step(char)]
            if complete and active:
                self.stopped, self._held = complete[0], ""
                return seen[:end] if self._include else seen[: end - len(self.stopped)]
        safe = len(seen) - max(matcher.length for matcher in self._matchers)
        self._held = seen[safe:]
        return seen[:safe]

    def flush(self) -> str:
        """The end of the stream: what was kept back and has not become a stop string."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth-Morris-Pratt, a character at a time: constant time however long the stop string is, and `length` is
    exactly what must be kept back for it."""

    def __init__(self, stop: str):
        self.stop = stop
        self.length = 0  # characters of `stop` that the text ends with at present
        self._shorter = _table(stop)

    def step(self, char: str) -> bool:
        """Take one character; True if it completes the stop string."""
        self.length = _extend(self.stop, self._shorter, self.length, char)
        if self.length < len(self.stop):
            return False
        self.length = self._shorter[self.length]
        return True


@lru_cache(REMEMBERED)
def _table(stop: str) -> Sequence[int]:
    """By length of what the text ends with: the next shorter beginning of `stop` that the text then ends with too."""
    shorter = [0, 0]
    for char in stop[1:]:
        shorter.append(_extend(stop, shorter, shorter[-1], char))
    return shorter


def _extend(stop: str, shorter: Sequence[int], length: int, char: str) -> int:
    """How much of `stop` a text ends with that ended with `length` characters of it, and gets one more."""
    while length and stop[length] != char:
        length = shorter[length]
    return length + 1 if stop[length] == char else 0
