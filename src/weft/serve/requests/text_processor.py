"""TextProcessor: owns the tokenizer and the chat template, and runs long work with them outside the event loop."""

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
from weft.serve.http.json_body import LARGE_BODY, MOST_VALUES, have_too_many_values
from weft.text.chat import ChatTemplate
from weft.text.tokenizer import Tokenizer, read_special_tokens

T = TypeVar("T")
INLINE_SIZE = 2000  # characters (or bytes) processed on the event loop: under 1 ms, and a thread costs time too
THREADS = 2
# Characters that may be tokenized in one call: a million take up to 200 MB. If the model's context has room for more,
# it may be MOST_TEXT_PER_TOKEN for each token of the context.
MOST_TEXT = 1_000_000
MOST_TEXT_PER_TOKEN = 16
END_MARK = "\ue000weft\ue001"  # private-use characters, which do not occur in messages


class TextProcessor:
    """The tokenizer, the chat template, and threads for long work.

    Encoding releases the GIL, and Python code in the threads gives it up regularly, so that streams go on.
    """

    def __init__(self, path: Path, template: str | None = None, content_format: str = "auto") -> None:
        """`template` replaces the model's chat template: a file name, or the template text."""
        self.path = path
        self.tokenizer = Tokenizer.load(path)
        self.template = read_template(path, template, content_format)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="weft-text")
        self._lock = threading.Lock()
        self._tokenizer_info: dict[str, Any] | None = None
        self._running = 0  # busy threads

    async def run_offloaded(self, size: int, work: Callable[[], T]) -> T:
        """Runs `work` on `size` characters: in another thread, or here if they are at most INLINE_SIZE."""
        if size <= INLINE_SIZE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run_counted, work)

    def _run_counted(self, work: Callable[[], T]) -> T:
        with self._lock:
            self._running += 1
        try:
            return work()
        finally:
            with self._lock:
                self._running -= 1

    async def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids of a text. A text that is sure to exceed `most` tokens is refused before encoding."""
        tokenizer = self.require_tokenizer()
        _check_size(text, most, tokenizer, "prompt")
        return await self.run_offloaded(len(text), lambda: tokenizer.encode(text, add_special_tokens))

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        size: int,
        options: dict[str, Any],
        *,
        continues: bool = False,
        most: int | None = None,
    ) -> tuple[list[int], str]:
        """Token ids and text of a rendered conversation. `size` is the size of the request body in bytes.

        With `continues`, the prompt ends inside the last message, and the model continues it.
        """
        tokenizer = self.require_tokenizer()

        def work() -> tuple[list[int], str]:
            if size > LARGE_BODY:
                _check_arguments(messages)
            text = self.template.render(_with_end_marker(messages) if continues else messages, **options)
            text = text.partition(END_MARK)[0]
            _check_size(text, most, tokenizer, "messages")
            return tokenizer.encode(text, add_special_tokens=False), text

        return await self.run_offloaded(size, work)

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"prompt: the model {self.path.name} has no tokenizer.json: send token ids")
        return self.tokenizer

    async def tokenizer_info(self) -> dict[str, Any]:
        """The contents of tokenizer_config.json, with the chat template in use."""
        if self._tokenizer_info is None:
            read = partial(read_json, self.path / "tokenizer_config.json", optional=True)
            config = await asyncio.get_running_loop().run_in_executor(self._threads, read)
            self._tokenizer_info = {**config, "chat_template": self.template.source or None}
        return self._tokenizer_info

    @property
    def is_busy(self) -> bool:
        """Whether a thread is still working, even after `close`."""
        return self._running > 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _check_size(text: str, most: int | None, tokenizer: Tokenizer, param: str) -> None:
    """Raises if a text is too long to encode. `param` is the field that it comes from."""
    limit = max(MOST_TEXT, MOST_TEXT_PER_TOKEN * (most or 0))
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
    """Raises if the arguments of tool calls have too many values.

    They are JSON in a string: rendering decodes it in one call, and parsing the body did not count its values.
    """
    if have_too_many_values(_arguments(messages)):
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
    """The chat template: the model's, or `given`, which is a file name or the template text."""
    if given is None:
        return ChatTemplate.load(path, content_format)
    try:
        is_file = Path(given).is_file()
    except OSError:  # too long for a file name
        is_file = False
    if not is_file and "{" not in given:
        raise OptionError(f"chat_template={given!r:.100} is neither a file nor a template")
    try:
        source = Path(given).read_text(encoding="utf-8") if is_file else given
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"chat_template={given!r:.100} cannot be read: {error}") from None
    return ChatTemplate(source, read_special_tokens(path), content_format)


def _with_end_marker(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with END_MARK after the text of the last one. The prompt will end there."""
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    if not isinstance(last.get("content"), str):
        raise RequestError("continue_final_message: the last message has no text to go on from")
    return [*messages[:-1], {**last, "content": last["content"] + END_MARK}]
