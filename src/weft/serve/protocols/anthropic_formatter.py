"""Anthropic's answer format: a message of blocks (thinking, text, tool use), as one body or as events."""

from collections.abc import Sequence
from itertools import dropwhile, takewhile
from typing import Any

import msgspec

from weft.files import is_too_deep
from weft.serve.errors import as_anthropic
from weft.serve.output.choice import Choice, ChoiceDelta
from weft.serve.protocols.formatter import Json, continues_call, to_json
from weft.text.tools import ToolCallDelta


class MessagesFormatter:
    """Formats one answer. For a stream, tracks the open block."""

    done = b""  # the last event (message_stop) ends the stream
    token_ids = False

    def __init__(self, id: str, model: str, max_tokens: int, service_tier: str | None, omits_thoughts: bool) -> None:
        self.id, self.model, self.max_tokens = id, model, max_tokens
        self.tier = "batch" if service_tier == "flex" else "standard"  # the values that the SDKs know
        self.omits_thoughts = omits_thoughts
        self._index = -1  # index of the latest block
        self._open: str | None = None  # type of the open block; None: no block is open
        self._choice: Choice | None = None

    def first_chunk(self, choice: Choice, extras: Json) -> bytes:
        self._choice = choice
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, extras["usage"])
        return _event("message_start", message=message)

    def chunk(self, choice: Choice, delta: ChoiceDelta, extras: Json) -> bytes:
        text, calls = delta.text, delta.calls
        if (
            self._open == "text" and text and not (calls or delta.reasoning or delta.finish_reason)
        ):  # most are plain text
            return _TEXT % (self._index, to_json(text))
        data = b""
        if delta.reasoning:
            data += self._begin("thinking", thinking="", signature="")
            if not self.omits_thoughts:
                data += self._delta("thinking_delta", thinking=delta.reasoning)
        if self._open == "tool_use":  # the rest of the open call goes before text of the same delta
            data += b"".join(map(self._arguments, takewhile(continues_call, calls)))
            calls = list(dropwhile(continues_call, calls))
        if text:
            data += self._begin("text", text="") + _TEXT % (self._index, to_json(text))
        for call in calls:
            if call.id is not None:
                data += self._end() + self._begin("tool_use", id=call.id, name=call.name, input={})
            data += self._arguments(call)
        return data + self._end() if delta.finish_reason is not None else data

    def last_chunk(self, extras: Json) -> bytes:
        assert self._choice is not None  # set by first_chunk
        usage = self._usage(extras["usage"])
        del usage["service_tier"]  # it belongs to the first event only
        delta = self._stop(self._choice, usage["output_tokens"])
        last = _event("message_delta", delta=delta, usage=usage, metrics=extras["metrics"])
        return last + _event("message_stop")

    def full_response(self, choices: Sequence[Choice], extras: Json) -> Json:
        choice = choices[0]
        content: list[Json] = []
        if choice.reasoning:
            thoughts = "" if self.omits_thoughts else choice.reasoning
            content.append({"type": "thinking", "thinking": thoughts, "signature": ""})
        if choice.text:
            content.append({"type": "text", "text": choice.text})
        for call in choice.calls:
            function = call["function"]
            input = _object(function["arguments"])
            content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": input})
        stop = self._stop(choice, extras["usage"]["completion_tokens"])
        return {**self._message(content, stop, extras["usage"]), "metrics": extras["metrics"]}

    def error_chunk(self, body: Json) -> bytes:
        return _event("error", error=as_anthropic(body)["error"])

    def _message(self, content: list[Json], stop: Json, usage: Json) -> Json:
        about = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**about, "content": content, **stop, "usage": self._usage(usage)}

    def _stop(self, choice: Choice, output_tokens: int) -> Json:
        """The stop reason. A stop sequence takes precedence over a tool call that it cut off."""
        sequence = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if sequence is not None:
            reason = "stop_sequence"
        elif choice.finish_reason == "length":
            reason = "max_tokens" if output_tokens >= self.max_tokens else "model_context_window_exceeded"
        else:
            reason = "tool_use" if choice.calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, usage: Json) -> Json:
        """Usage in Anthropic's format: input_tokens excludes cached prompt tokens."""
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "service_tier": self.tier,
        }

    def _begin(self, kind: str, **fields: Any) -> bytes:
        """Opens a block, and ends the previous one, unless a block of this type is open."""
        if self._open == kind:
            return b""
        data = self._end()
        self._open, self._index = kind, self._index + 1
        return data + _event("content_block_start", index=self._index, content_block={"type": kind, **fields})

    def _end(self) -> bytes:
        if self._open is None:
            return b""
        # Anthropic verifies its thinking blocks by a signature. Clients expect one; here it is empty.
        data = self._delta("signature_delta", signature="") if self._open == "thinking" else b""
        self._open = None
        return data + _event("content_block_stop", index=self._index)

    def _arguments(self, call: ToolCallDelta) -> bytes:
        return self._delta("input_json_delta", partial_json=call.arguments) if call.arguments else b""

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _object(arguments: str) -> Json:
    """The input of a tool call; {} if the JSON was cut off or is not an object."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) and not is_too_deep(found) else {}


def _event(type: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type.encode(), to_json({"type": type, **fields}))


_TEXT = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%b}}\n\n'
)
