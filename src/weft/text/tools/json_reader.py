"""JsonReader: reads JSON one character at a time. Owns the current character, and the text that is not decided yet.

A grammar is written as generators. `yield` means: the current character is consumed, wait for the next one. So a
character costs the same however long the text is, and the result does not depend on how the text was cut into pieces.
"""

import json
import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

# Sets, not strings: "" (the end of the text) is in every string.
SPACE = frozenset(" \t\r\n")
CLOSERS = {"{": "}", "[": "]"}


class Mismatch(Exception):
    """The current character does not fit the grammar. It is not consumed."""


class JsonReader:
    """The rules for JSON values. Text is appended to `into` as it is read."""

    def __init__(self) -> None:
        self._char = ""  # the current character; "" at the end of the text
        self._undecided: list[str] = []  # text that is not decided yet, up to the current character

    def _value(self, into: list[str]) -> Steps[None]:
        """Any value. A stack instead of recursion: a model in a loop may open brackets without end."""
        closers: list[str] = []
        while True:
            yield from self._space(into)
            if self._char in CLOSERS:
                closers.append(CLOSERS[self._char])
                yield from self._expect(self._char, into)
                yield from self._space(into)
                if self._char != closers[-1]:
                    if closers[-1] == "}":
                        yield from self._key(into)
                    continue
            elif self._char == '"':
                yield from self._string(into)
                yield from self._expect('"', into)
            else:
                yield from self._word(into)
            while closers:  # what follows a value
                yield from self._space(into)
                if self._char == ",":
                    yield from self._expect(",", into)
                    yield from self._space(into)
                    if closers[-1] == "}":
                        yield from self._key(into)
                    break
                yield from self._expect(closers.pop(), into)
            else:
                return

    def _key(self, into: list[str]) -> Steps[None]:
        """An object's key, and everything up to its value."""
        yield from self._string(into)
        yield from self._expect('"', into)
        yield from self._space(into)
        yield from self._expect(":", into)
        yield from self._space(into)

    def _string(self, into: list[str]) -> Steps[None]:
        """A string without its closing quote, which is then the current character. So the string is known as soon as it
        is complete, not one character later.
        """
        yield from self._expect('"', into)
        while self._char != '"':
            if self._char == "\\":
                yield from self._expect("\\", into)
                if self._char == "u":
                    for _ in range(4):
                        yield from self._expect(self._char, into)
                        self._check(self._char in _HEX)
                else:
                    self._check(self._char in _ESCAPES)
            self._check(self._char != "")
            # Models write line breaks into strings unescaped; their meaning is clear.
            into.append(_CONTROLS.get(self._char, self._char))
            yield

    def _word(self, into: list[str]) -> Steps[None]:
        """A number, true, false or null."""
        word = ""
        while self._char.isalnum() or self._char in _SIGNS:
            word += self._char
            yield from self._expect(self._char, into)
        self._check(_WORD.fullmatch(word) is not None)

    def _space(self, into: list[str] | None = None) -> Steps[None]:
        while self._char in SPACE:
            yield from self._expect(self._char, into)

    def _expect(self, text: str, into: list[str] | None = None) -> Steps[None]:
        for char in text:
            self._check(self._char == char)
            if into is not None:
                into.append(char)
            yield

    @staticmethod
    def _check(fits: bool) -> None:
        if not fits:
            raise Mismatch


_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
_SIGNS = frozenset("+-.")
_WORD = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_CONTROLS = {chr(code): json.dumps(chr(code))[1:-1] for code in range(32)}
