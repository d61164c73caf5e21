"""Texts: owns the model's tokenizer and chat template, and keeps long work with them off the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import OptionError, RequestError
from weft.text.chat import ChatTemplate
from weft.text.tokenizer import Tokenizer, read_special_tokens

T = TypeVar("T")
SHORT = 2000  # characters (or bytes) that are dealt with at once: less than a millisecond, and a thread costs time too
THREADS = 2


class Texts:
    """Encoding lets go of the interpreter, and so do other threads' turns: streams go on meanwhile."""

    def __init__(self, path: Path, template: str | None = None) -> None:
        """`template` is used instead of the model's own: the name of a file, or the text itself."""
        self.path = path
        self.tokenizer = Tokenizer.load(path)
        self.template = ChatTemplate.load(path) if template is None else _template(path, template)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="weft-text")

    async def aside(self, size: int, work: Callable[[], T]) -> T:
        """Does work on `size` characters: at once where it is short, else in another thread."""
        if size <= SHORT:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self.needed()
        return await self.aside(len(text), lambda: tokenizer.encode(text, add_special_tokens))

    async def encode_chat(
        self, messages: Sequence[dict[str, Any]], size: int, *, continues: bool = False, **options: Any
    ) -> tuple[list[int], str]:
        """Token ids of a conversation and the end of its text; `size` says about how long it is.

        With `continues`, the last message is left open, for the model to write on.
        """
        tokenizer = self.needed()

        def work() -> tuple[list[int], str]:
            text = self.template.render(messages, **options)
            if continues:
                text = _left_open(text, messages[-1].get("content"))
            return tokenizer.encode(text, add_special_tokens=False), text[-32:]

        return await self.aside(size, work)

    def needed(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"prompt: the model {self.path.name} has no tokenizer.json: send token ids")
        return self.tokenizer

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _template(path: Path, given: str) -> ChatTemplate:
    try:
        is_file = Path(given).is_file()
    except OSError:  # a long text is no name
        is_file = False
    if not is_file and "{" not in given:
        raise OptionError(f"chat_template={given!r:.100} is neither a file nor a template")
    source = Path(given).read_text(encoding="utf-8") if is_file else given
    return ChatTemplate(source, read_special_tokens(path))


def _left_open(text: str, content: Any) -> str:
    """What the template wrote up to the end of the last message's content."""
    words = content.strip() if isinstance(content, str) else ""
    at = text.rfind(words) if words else -1
    if at < 0:
        raise RequestError("continue_final_message: the last message has no text in this chat format to go on from")
    return text[: at + len(words)]
