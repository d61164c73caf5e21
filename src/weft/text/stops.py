"""Stop strings in a text stream: owns the end of the text that may still turn out to be the beginning of one."""

from collections.abc import Sequence

from weft.errors import RequestError


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
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def push(self, text: str, active: bool = True) -> str:
        """Take new text; returns what is safe to give out, and "" for ever once a stop string has matched.

        Text pushed with `active=False` completes no match, though a later match may begin in it. That is what
        min_tokens asks for: pass False for the text of the first min_tokens tokens.
        """
        if self.stopped is not None:
            return ""
        if not self._matchers:
            return text
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
        self._shorter = [0, 0]  # by length: the next shorter one that the text then ends with too
        for char in stop[1:]:
            self._shorter.append(self._extend(self._shorter[-1], char))

    def step(self, char: str) -> bool:
        """Take one character; True if it completes the stop string."""
        self.length = self._extend(self.length, char)
        if self.length < len(self.stop):
            return False
        self.length = self._shorter[self.length]
        return True

    def _extend(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._shorter[length]
        return length + 1 if self.stop[length] == char else 0
