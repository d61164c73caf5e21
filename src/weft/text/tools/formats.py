"""The tool-call formats of model families."""

import re
import secrets

from weft.text.tools.json_reader import SPACE, Steps
from weft.text.tools.parser import ToolParser


class HermesParser(ToolParser):
    """Hermes 2 and 3, Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": ...}</tool_call>, with text around it."""

    needs_special_tokens = True

    def _reply(self) -> Steps[None]:
        start, end = "<tool_call>", "</tool_call>"
        markers = [start]
        while marker := (yield from self._text(*markers)):
            before = self._index
            if marker == start:
                yield from self._space()
                yield from self._attempt(self._object())
            else:
                self._drop()
            markers = [start, end] if self._index > before else [start]


class Llama3JsonParser(ToolParser):
    """Llama 3.1 and 3.2: the reply is {"name": ..., "parameters": ...}, perhaps after <|python_tag|>. Several such
    objects are separated by `;`.
    """

    needs_special_tokens = False  # the tag adds nothing to what the objects say

    def _reply(self) -> Steps[None]:
        yield from self._space()
        bare = self._char == "{"
        while bare or (yield from self._text("<|python_tag|>")):
            if not bare:
                yield from self._space()
            whole = yield from self._attempt(self._object(marked=not bare))
            while whole and (self._char in SPACE or self._char == ";"):
                yield
            bare = whole and self._char == "{"


class MistralParser(ToolParser):
    """Mistral: [TOOL_CALLS] and then [{"name": ..., "arguments": ...}, ...], or in newer models name{...},
    name[ARGS]{...} or name[CALL_ID]id[ARGS]{...}, each with its own marker."""

    needs_special_tokens = True

    def _reply(self) -> Steps[None]:
        while (yield from self._text("[TOOL_CALLS]")):
            yield from self._space()
            form = {"[": self._array, "{": self._object}.get(self._char, self._named)
            yield from self._attempt(form())

    def _array(self) -> Steps[None]:
        yield from self._expect("[")
        while True:
            yield from self._space()
            yield from self._object()
            yield from self._space()
            if self._char == "]":
                break
            yield from self._expect(",")
        yield

    def _named(self) -> Steps[None]:
        name = yield from self._identifier()
        call_id = ""
        yield from self._space()
        if self._char == "[":
            yield
            if self._char == "C":
                yield from self._expect("CALL_ID]")
                call_id = yield from self._identifier()
                yield from self._expect("[")
            yield from self._expect("ARGS]")
            yield from self._space()
        self._check(name != "" and self._char == "{")
        self._begin(name, call_id if _MISTRAL_ID.fullmatch(call_id) else None)
        yield from self._value(self._arguments)
        self._finish()

    def _identifier(self) -> Steps[str]:
        read: list[str] = []
        while self._char.isalnum() or self._char in _NAME_SIGNS:
            yield from self._expect(self._char, read)
        return "".join(read)

    @staticmethod
    def _random_id() -> str:
        return secrets.token_hex(5)[:9]


_MISTRAL_ID = re.compile("[0-9a-zA-Z]{9}")  # Mistral's templates refuse other ids
_NAME_SIGNS = frozenset("_-.:/")
