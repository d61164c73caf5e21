"""ToolParser: splits a reply into content for the reader and pieces of tool calls, while the model writes it.

A call is emitted while it is written: its name once that is complete, then its arguments as they arrive. Text that
cannot be a call is content, including its marker. Whitespace next to a call belongs to the format and is dropped. A
call cannot be taken back once its name is emitted. If its JSON turns out to be invalid after that, the remaining text
up to the next marker is sent as (invalid) arguments. If the reply ends early, the arguments are incomplete.
"""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from weft.text.tools.json_reader import CLOSERS, SPACE, JsonReader, Mismatch, Steps


class ToolCallDelta(NamedTuple):
    """A piece of a call. The arguments of a finished call, concatenated, are valid JSON."""

    index: int  # type: ignore[assignment]  # which call of the reply, from 0 (tuples have a method of this name)
    id: str | None  # with the first piece of a call only
    name: str | None  # with the first piece of a call only
    arguments: str  # the next piece of the arguments' JSON text, as the model writes it


class Parsed(NamedTuple):
    """What a piece of text adds to the two parts of a reply."""

    content: str  # text for the reader
    calls: list[ToolCallDelta]


class ToolParser(JsonReader, ABC):
    """Splits the text of one reply into content and tool calls. The result does not depend on how the text is cut."""

    # Whether the format's markers are special tokens in some tokenizers, so that the detokenizer must not skip them.
    needs_special_tokens: ClassVar[bool]

    def __init__(self, tools: Sequence[str] = (), make_id: Callable[[], str] | None = None):
        super().__init__()
        self._tools = frozenset(tools)
        self._make_id = make_id or self._random_id
        self._steps = self._reply()
        self._plain = False  # whether a run of characters that cannot begin a marker may be fed as one character
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._index = -1  # index of the latest call
        self._head: tuple[str | None, str | None] = (None, None)  # its id and name, until a delta carries them
        self._arguments: list[str] = []  # its arguments, until a delta carries them
        self._unfinished = False  # whether more arguments should come
        self._shown = self._content  # where text goes: to the content, or to the arguments of a broken call

    def push(self, text: str) -> Parsed:
        """Takes the next piece of text and returns what is decided by now."""
        at = 0
        while at < len(text):
            run = _PLAIN.match(text, at) if self._plain else None
            end = run.end() if run else at + 1
            self._feed(text[at:end])
            at = end
        return self._take_decided()

    def flush(self) -> Parsed:
        """Ends the reply: returns what was not decided yet."""
        self._feed("")
        return self._take_decided()

    @abstractmethod
    def _reply(self) -> Steps[None]:
        """The grammar of a whole reply."""

    @staticmethod
    def _random_id() -> str:
        return "call_" + secrets.token_hex(12)

    def _text(self, *markers: str) -> Steps[str]:
        """Emits text up to a marker, which it returns; "" at the end. The marker stays undecided: it may be text."""
        seen = ""
        while self._char and seen not in markers:
            if any(marker.startswith(seen + self._char) for marker in markers):
                seen += self._char
                yield
            elif seen:  # not a marker after all; another one can only begin with the current character
                self._show(but=1)
                seen = ""
            else:
                if self._char not in SPACE:
                    self._show()
                self._plain = True
                yield
                self._plain = False
        if seen not in markers:
            if seen or self._index < 0:
                self._show()
            seen = ""
        self._shown = self._content
        return seen

    def _attempt(self, call: Steps[None]) -> Steps[bool]:
        """Reads a possible call. Returns whether the call was complete. If not, text goes on where it broke."""
        try:
            yield from call
        except Mismatch:
            if self._unfinished:
                self._shown = self._arguments
                self._finish()
            elif "".join(self._undecided[:-1]).strip():
                self._show(but=1)
            return False
        self._drop()
        return True

    def _object(self, marked: bool = True) -> Steps[None]:
        """A call as an object with a name and arguments, in any order; other keys are skipped. Without a marker before
        it, the object must look like a call before anything is emitted: the user may have asked for JSON.
        """
        name, begun, complete = "", False, False
        early: list[str] = []  # arguments that come before the name
        yield from self._expect("{")
        while True:
            yield from self._space()
            literal: list[str] = []
            yield from self._key(literal)
            key, _ = json.JSONDecoder().raw_decode("".join(literal))
            if key == "name" and not name:
                literal = []
                yield from self._string(literal)
                name = json.loads("".join(literal) + '"')
                self._check(name != "" and name.isprintable())
                self._check(marked or not self._tools or name in self._tools)
                if marked or self._tools or complete:
                    begun = self._begin(name)
                    self._arguments.extend(early)
                    self._unfinished = not complete
                yield from self._expect('"')
                if begun:
                    self._drop()
            elif key in _ARGUMENTS and not complete:
                begun = begun or (name != "" and self._begin(name))
                yield from self._any_arguments(self._arguments if begun else early)
                complete = True
                if begun:
                    self._finish()
            else:
                self._check(marked or begun or key in _HARMLESS)
                yield from self._value([])
            yield from self._space()
            if self._char == "}":
                break
            yield from self._expect(",")
        self._check(begun)
        if not complete:
            self._arguments.append("{}")
            self._finish()
        yield
        self._drop()

    def _any_arguments(self, into: list[str]) -> Steps[None]:
        if self._char in CLOSERS:
            yield from self._value(into)
            return
        value: list[str] = []
        try:
            yield from self._value(value)
        finally:  # also if it breaks, so that nothing is lost
            into.append(_unwrap("".join(value)))

    def _begin(self, name: str, call_id: str | None = None) -> bool:
        self._close_delta()
        self._index += 1
        self._head = (call_id or self._make_id(), name)
        self._unfinished = True
        self._drop()
        return True

    def _finish(self) -> None:
        self._unfinished = False
        self._drop()

    def _show(self, but: int = 0) -> None:
        """Emits undecided text, except for its last `but` characters."""
        end = len(self._undecided) - but
        self._shown.extend(self._undecided[:end])
        del self._undecided[:end]

    def _drop(self) -> None:
        """Drops undecided text that was part of a call. Keeps the current character."""
        del self._undecided[:-1]

    def _feed(self, char: str) -> None:
        self._char = char
        self._undecided.append(char)
        next(self._steps, None)

    def _close_delta(self) -> None:
        """Makes a delta of what is new in the latest call."""
        if self._head[0] or self._arguments:
            self._calls.append(ToolCallDelta(self._index, *self._head, "".join(self._arguments)))
        self._head = (None, None)
        self._arguments.clear()

    def _take_decided(self) -> Parsed:
        self._close_delta()
        parsed = Parsed("".join(self._content), self._calls)
        self._content.clear()
        self._calls = []
        return parsed


_PLAIN = re.compile(r"[^\s<\[]+(?: +[^\s<\[]+)*")  # no first character of a marker, and no whitespace at its ends
_ARGUMENTS = frozenset(["arguments", "parameters"])
_HARMLESS = frozenset(["type", "id"])  # other keys that models write into a call


def _unwrap(value: str) -> str:
    """Arguments that are neither object nor list: null and "" become {}, and JSON in a string is unwrapped."""
    try:
        text = json.loads(value)
        if text is None or text == "":
            return "{}"
        if isinstance(text, str):
            text.encode()  # half a surrogate pair could not be sent
            json.dumps(json.loads(text), allow_nan=False)
            return text
    except (ValueError, RecursionError):
        pass
    return value
