"""ChatTemplate: turns messages into a prompt, with the chat template of a model.

The template comes with the model, so it runs in a sandbox and sees plain JSON data only. The time of one rendering and
the length of its text are bounded. A single expression is not bounded. An expression with a huge value (a text times a
billion) is only caught by the check at server startup (`TemplateCheck`), which runs in a process that can be killed.
The rendered prompt already contains its special tokens: encode it with `add_special_tokens=False`.
"""

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from weft.errors import ModelError, RequestError
from weft.files import read_json
from weft.text.tokenizer import one_line, read_special_tokens

Message = dict[str, Any]
MOST_CPU_S = 5.0  # CPU time for one rendering; a chat of 30,000 messages takes 0.14 s on one core
MOST_TEXT = 1 << 26  # characters of one prompt: many times more than any model can read


class RunawayError(RequestError):
    """A rendering takes too much time or memory."""


class ChatTemplate:
    """The templates of one model by name: "default", and sometimes "tool_use" for requests with tools."""

    def __init__(
        self,
        templates: str | Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        content_format: str = "auto",
    ):
        """`special_tokens` are variables of the template, as in {"bos_token": "<s>"}.

        `content_format` is the form of a message's content for the template: "string", "openai" (a list of parts), or
        "auto": the form for which the template shows the text.
        """
        self._content_format = content_format
        self._sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}

    @classmethod
    def load(cls, path: Path, content_format: str = "auto") -> "ChatTemplate":
        """The templates of a Hugging Face directory. A missing template is no error until a chat is rendered."""
        return cls(_read_templates(path), read_special_tokens(path), content_format)

    def __bool__(self) -> bool:
        """Whether the model has a template at all."""
        return bool(self._sources)

    @property
    def source(self) -> str:
        """The source text of the template for requests with tools; "" if there is none."""
        return self._sources.get("tool_use") or self._sources.get("default", "")

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether a system message may follow other messages. Many templates refuse or ignore it there."""
        late = _PROBE if self._takes_strings else [{"type": "text", "text": _PROBE}]
        return self._shows("", {"role": "system", "content": late})

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for these messages. `variables` are options of the template, such as enable_thinking."""
        if not messages:
            raise RequestError("messages is empty: a chat needs at least one message")
        return self._render(
            [self._normalise(message) for message in _plain(messages)],
            **_plain(variables),
            add_generation_prompt=add_generation_prompt,
            tools=_plain(tools) or None,  # some templates announce tools even if the list is empty
            documents=_plain(documents) or None,
        )

    def _render(self, messages: list[Message], /, **variables: Any) -> str:
        template = self._template("tool_use" if variables["tools"] and "tool_use" in self._sources else "default")
        try:
            return self._environment.bounded(template, {**self._special_tokens, **variables, "messages": messages})
        except (_TooMuch, MemoryError) as error:
            what = str(error) or "more memory than there is"
            raise RunawayError(f"the model's chat template takes {what} for these messages: shorten them") from None
        except SecurityError as error:
            raise ModelError(f"the model's chat template does what the sandbox forbids: {one_line(error)}") from error
        except _TemplateRefusal as error:
            raise RequestError(f"the model's chat template refuses these messages: {one_line(error)}") from error
        except Exception as error:  # anything that the template's expressions can raise
            raise RequestError(f"the model's chat template cannot render these messages: {one_line(error)}") from error

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            if name not in self._sources:
                raise RequestError("the model has no chat template: send a prompt instead, or add chat_template.jinja")
            try:
                self._compiled[name] = self._environment.from_string(self._sources[name])
            except Exception as error:  # a syntax error, or nesting too deep for the compiler
                raise ModelError(f"the model's chat template is broken: {one_line(error)}") from error
        return self._compiled[name]

    def _normalise(self, message: Any) -> Message:
        """The message in the form that templates expect, which is not always the form of the OpenAI API."""
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"a message must be an object with a role, got {message!r:.80}")
        _modernize_calls(message)
        content = message.get("content")
        if isinstance(content, list):
            parts = [_text_part(part) for part in content]
            message["content"] = parts if self._takes_parts else "\n".join(part["text"] for part in parts)
        elif isinstance(content, str):
            message["content"] = content if self._takes_strings else [{"type": "text", "text": content}]
        elif content is not None:
            raise RequestError(f"a message's content must be a string or a list of text parts, got {content!r:.80}")
        elif not message.get("tool_calls"):
            message["content"] = ""  # null is a reply that only calls tools; otherwise templates would write "None"
        for one, other in (("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")):
            if isinstance(message.get(one), str):  # clients send back either name, and templates read one of them
                message.setdefault(other, message[one])
        if not isinstance(calls := message.get("tool_calls") or [], list):
            raise RequestError(f"a message's tool_calls must be a list, got {calls!r:.80}")
        for call in calls:
            _parse_arguments(call)
        return message

    @cached_property
    def _takes_parts(self) -> bool:
        if self._content_format != "auto":
            return self._content_format == "openai"
        return self._shows([{"type": "text", "text": _PROBE}])

    @cached_property
    def _takes_strings(self) -> bool:
        if self._content_format != "auto":
            return self._content_format == "string"
        return self._shows(_PROBE) or not self._takes_parts

    def _shows(self, content: Any, *more: Message) -> bool:
        """Whether the template writes the text of this content, not nothing or a Python literal, and does not fail."""
        messages = [{"role": "user", "content": content}, *more]
        try:
            text = self._render(messages, add_generation_prompt=True, tools=None, documents=None)
        except RequestError:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text


_PROBE = "weft-probe"
_DEEPEST = 100  # levels: far more than the JSON schema of any tool has, and below Python's recursion limit


def _read_templates(path: Path) -> dict[str, str]:
    """Template files win over tokenizer_config.json, as in Transformers. Some models use chat_template.json instead."""
    files = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        files["default"] = path / "chat_template.jinja"
    try:
        found: Any = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        for name in ("tokenizer_config.json", "chat_template.json"):
            found = found or read_json(path / name, optional=True).get("chat_template") or {}
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}
        return {"default": found} if isinstance(found, str) else dict(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the chat template in {path} cannot be read: {one_line(error)}") from error


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy in plain JSON types. A template can call methods, and methods of other objects could do anything."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth == _DEEPEST:
        raise RequestError(f"messages, tools and template options may be nested {_DEEPEST} levels deep, not more")
    if isinstance(value, dict):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    raise RequestError(f"messages, tools and template options must be plain JSON data, got a {type(value).__name__}")


def _text_part(part: Any) -> dict[str, str]:
    text = part
    if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
        text = part.get("text")
    elif isinstance(part, dict) and part.get("type") == "refusal":
        text = part.get("refusal")
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RequestError(f"a message has a content part of type {kind!r}: only text parts are supported")
    return {"type": "text", "text": text}


def _modernize_calls(message: Message) -> None:
    """Rewrites OpenAI's older form of a call and of its result as tool calls, which templates know."""
    call = message.pop("function_call", None)
    if isinstance(call, dict) and not message.get("tool_calls"):
        message["tool_calls"] = [{"id": _OLD_ID, "type": "function", "function": call}]
    if message["role"] == "function":
        message["role"] = "tool"
        message.setdefault("tool_call_id", _OLD_ID)


_OLD_ID = "function0"  # the older form has no id; Mistral's templates require nine letters or digits


def _parse_arguments(call: Any) -> None:
    """Parses a call's arguments: clients send a JSON string, templates expect the object. A model may have written
    broken JSON. It then stays a string, so that the conversation can go on.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError):
            return


class _TooMuch(Exception):
    """Rendering takes too much time or text; the message says which."""


class _TemplateRefusal(jinja2.TemplateError):
    """Raised by the template itself, with a message for the user."""


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's text for training. Here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (the base class has it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _PlainNamespace(Namespace):
    """A namespace without attributes that start with an underscore: Python could take them for special ones."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as in jinja, so that any name can be a key, even "self"
        Namespace.__init__(*args, **kwargs)
        for name in dict(*args[1:], **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace may not have the attribute {name!r}")


class _Ticking(CodeGenerator):
    """Starts every body of a loop, a macro or a condition with a tick, so that endless code ticks without end."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.tick()")
        super().blockvisit(nodes, frame)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Ticking

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._rendering = threading.local()  # `ticks` and `end` of this thread's rendering

    def bounded(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Renders a template. Raises _TooMuch if this takes too long, or if the text is too long."""
        self._rendering.ticks, self._rendering.end = 0, time.thread_time() + MOST_CPU_S
        text, length = StringIO(), 0
        for piece in template.generate(variables):
            length += len(piece)
            if length > MOST_TEXT:
                raise _TooMuch(f"more than {MOST_TEXT} characters")
            text.write(piece)
        return text.getvalue()

    def tick(self) -> None:
        """Called by the template. The clock is slow to read, so it is read only at every 256th tick."""
        self._rendering.ticks += 1
        if self._rendering.ticks % 256 == 0 and time.thread_time() > self._rendering.end:
            raise _TooMuch(f"more than {MOST_CPU_S:g} s of processor time")


def _environment() -> _Environment:
    """The environment that published templates rely on: Transformers' settings, tags, filters and functions."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_PlainNamespace)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
