"""Texts: owns the model's tokenizer and chat template, and keeps long work with them off the event loop."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import OptionError, RequestError
from weft.files import read_json
from weft.serve.errors import ApiError
from weft.serve.parsing import LARGE, MOST_VALUES, hold_too_many
from weft.text.chat import ChatTemplate
from weft.text.tokenizer import Tokenizer, read_special_tokens

T = TypeVar("T")
SHORT = 2000  # characters (or bytes) that are dealt with at once: less than a millisecond, and a thread costs time too
THREADS = 2
MOST_TEXT = 1_000_000  # characters that are tokenized at once, or MOST_PER_TOKEN for each token of the context: a
MOST_PER_TOKEN = 16  # million of them take up to 200 MB
MARK = "\ue000weft\ue001"  # of private use: nobody writes this


class Texts:
    """Encoding lets go of the interpreter, and so do other threads' turns: streams go on meanwhile."""

    def __init__(self, path: Path, template: str | None = None, content_format: str = "auto") -> None:
        """`template` is used instead of the model's own: the name of a file, or the text itself."""
        self.path = path
        self.tokenizer = Tokenizer.load(path)
        self.template = read_template(path, template, content_format)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="weft-text")
        self._lock = threading.Lock()
        self._info: dict[str, Any] | None = None
        self._running = 0  # threads that do something

    async def aside(self, size: int, work: Callable[[], T]) -> T:
        """Does work on `size` characters: at once where it is short, else in another thread."""
        if size <= SHORT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._counted, work)

    def _counted(self, work: Callable[[], T]) -> T:
        with self._lock:
            self._running += 1
        try:
            return work()
        finally:
            with self._lock:
                self._running -= 1

    async def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids; a text that must have more than `most` of them is an error before it is looked at."""
        tokenizer = self.needed()
        _check_size(text, most, tokenizer, "prompt")
        return await self.aside(len(text), lambda: tokenizer.encode(text, add_special_tokens))

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        size: int,
        options: dict[str, Any],
        *,
        continues: bool = False,
        most: int | None = None,
    ) -> tuple[list[int], str]:
        """Token ids of a conversation and its text; `size` says how many bytes all of this had as a body.

        With `continues`, the last message is left open, for the model to write on.
        """
        tokenizer = self.needed()

        def work() -> tuple[list[int], str]:
            if size > LARGE:
                _check_arguments(messages)
            text = self.template.render(_marked(messages) if continues else messages, **options)
            text = text.partition(MARK)[0]
            _check_size(text, most, tokenizer, "messages")
            return tokenizer.encode(text, add_special_tokens=False), text

        return await self.aside(size, work)

    def needed(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"prompt: the model {self.path.name} has no tokenizer.json: send token ids")
        return self.tokenizer

    async def info(self) -> dict[str, Any]:
        """What tokenizer_config.json says, and the chat template that is in use."""
        if self._info is None:
            read = partial(read_json, self.path / "tokenizer_config.json", optional=True)
            config = await asyncio.get_running_loop().run_in_executor(self._threads, read)
            self._info = {**config, "chat_template": self.template.source or None}
        return self._info

    @property
    def is_busy(self) -> bool:
        """Whether a thread is in the middle of something, also after `close`."""
        return self._running > 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _check_size(text: str, most: int | None, tokenizer: Tokenizer, param: str) -> None:
    """`param` is the field that the text comes from."""
    limit = max(MOST_TEXT, MOST_PER_TOKEN * (most or 0))
    if most is not None and len(text) > most * tokenizer.longest_token:
        raise ApiError(
            400,
            f"This model's maximum context length is {most} tokens. However, the prompt has {len(text)} characters, "
            "which is more in any case: shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )
    if len(text) > limit:
        message = f"the text has {len(text)} characters, and {limit} may be tokenized at once: divide it"
        raise ApiError(400, message, param=param)


def _check_arguments(messages: list[dict[str, Any]]) -> None:
    """JSON within JSON: the template's side decodes it in one call, and nobody counted it when the body was read."""
    if hold_too_many(_arguments(messages)):
        raise RequestError(f"messages: the arguments of tool calls have more than {MOST_VALUES} values in them")


def _arguments(messages: list[dict[str, Any]]) -> Iterator[bytes]:
    for message in messages:
        calls = message.get("tool_calls")
        old = {"function": message.get("function_call")}
        for call in (old, *calls) if isinstance(calls, list) else (old,):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(text := function.get("arguments"), str):
                yield text.encode(errors="replace")


def read_template(path: Path, given: str | None, content_format: str = "auto") -> ChatTemplate:
    """The model's own, or the one that was given: the name of a file, or the text itself."""
    if given is None:
        return ChatTemplate.load(path, content_format)
    try:
        is_file = Path(given).is_file()
    except OSError:  # a long text is no name
        is_file = False
    if not is_file and "{" not in given:
        raise OptionError(f"chat_template={given!r:.100} is neither a file nor a template")
    try:
        source = Path(given).read_text(encoding="utf-8") if is_file else given
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"chat_template={given!r:.100} cannot be read: {error}") from None
    return ChatTemplate(source, read_special_tokens(path), content_format)


def _marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With a mark behind the last message's text, where the prompt is to end."""
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    if not isinstance(last.get("content"), str):
        raise RequestError("continue_final_message: the last message has no text to go on from")
    return [*messages[:-1], {**last, "content": last["content"] + MARK}]
