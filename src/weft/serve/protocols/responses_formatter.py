"""ResponsesFormatter: the answer format of /v1/responses, as one body or as events."""

import time
from collections.abc import Sequence
from itertools import dropwhile, takewhile
from typing import Any

from msgspec import Raw

from weft.serve.output.choice import Choice, ChoiceDelta
from weft.serve.protocols.formatter import Json, continues_call, to_json
from weft.serve.protocols.logprobs import spelled_logprob
from weft.serve.protocols.responses_bodies import ResponsesBody
from weft.text.tokenizer import Tokenizer
from weft.text.tools import ToolCallDelta


class ResponsesFormatter:
    """Formats one answer as a list of items (reasoning, message, function calls), or as stream events."""

    done = b""  # the last event ends the stream
    token_ids = False

    def __init__(
        self, id: str, model: str, tokenizer: Tokenizer | None, body: ResponsesBody, tokens_as_ids: bool = False
    ) -> None:
        self.tokens_as_ids = tokens_as_ids  # log probabilities name tokens by id
        self.id = id
        self.model = model
        self.tokenizer = tokenizer
        self.body = body
        self.created = int(time.time())
        self._number = 0
        self._items: list[Json] = []  # started so far; the last one may be open
        self._open: str | None = None  # type of the open item; None: no item is open
        self._text = ""
        self._logprobs: list[Json] = []
        self.is_stored = False
        self.is_background = False  # continues without its client, which retrieves it later
        self.final: bytes | None = None  # the response as JSON, once its stream has ended
        self.output = b"[]"  # the items as JSON, without log probabilities, once the response has ended

    def queued(self) -> bytes:
        """The first events of a background stream, before the first token."""
        response = self._response("queued", [], {})
        return self._event("response.created", response=response) + self._event("response.queued", response=response)

    def first_chunk(self, choice: Choice, extras: Json) -> bytes:
        response = self._response("in_progress", [], {})
        created = b"" if self.is_background else self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def snapshot(self, status: str) -> Json:
        """The response before its end, without output items."""
        return self._response(status, [], {})

    def chunk(self, choice: Choice, delta: ChoiceDelta, extras: Json) -> bytes:
        # Deltas of the open function call come before all else.
        data = b"".join(self._call(call) for call in takewhile(continues_call, delta.calls))
        if delta.reasoning:
            data += self._begin("reasoning")
            self._text += delta.reasoning
            data += self._delta("response.reasoning_text.delta", content_index=0, delta=delta.reasoning)
        if delta.text:
            data += self._begin("message")
            self._text += delta.text
            found = [spelled_logprob(self.tokenizer, one, self.tokens_as_ids) for one in delta.text_logprobs]
            self._logprobs += found
            data += self._delta("response.output_text.delta", content_index=0, delta=delta.text, logprobs=found)
        data += b"".join(self._call(call) for call in dropwhile(continues_call, delta.calls))
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            data += self._end_item("incomplete" if delta.finish_reason == "length" else "completed")
        return data

    def last_chunk(self, extras: Json) -> bytes:
        status = "incomplete" if self._reason == "length" else "completed"
        return self._end(status, f"response.{status}", extras)

    def cancelled(self) -> bytes:
        """The last event of a cancelled response. OpenAI has no event for it: the status of response.failed says so."""
        return self._end("cancelled", "response.failed", {})

    def full_response(self, choices: Sequence[Choice], extras: Json) -> Json:
        """The whole response, with the same items as a stream."""
        choice = choices[0]
        if choice.reasoning:
            self._items.append(self._item("reasoning", choice.reasoning))
        if choice.text or not choice.calls:
            shown = choice.text_logprobs
            self._logprobs = [spelled_logprob(self.tokenizer, found, self.tokens_as_ids) for found in shown]
            self._items.append(self._item("message", choice.text))
        for call in choice.calls:
            function = call["function"]
            self._items.append(
                self._item("function_call", function["arguments"], name=function["name"], call_id=call["id"])
            )
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        self._items[-1]["status"] = status
        self.output = _continued(self._items)
        return self._response(status, self._items, extras)

    def error_chunk(self, body: Json) -> bytes:
        error = body["error"]
        if self.is_background:
            code = "rate_limit_exceeded" if error["code"] in _REFUSALS else "server_error"
            return self._end("failed", "response.failed", {}, error={"code": code, "message": error["message"]})
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    _reason = "stop"

    def _end(self, status: str, kind: str, extras: Json, **more: Any) -> bytes:
        """The last event, with all complete items."""
        items = self._items if self._open is None else self._items[:-1]
        self.final = to_json({**self._response(status, items, extras), **more})
        self.output = _continued(items)
        return self._event(kind, response=Raw(self.final))

    def _call(self, call: ToolCallDelta) -> bytes:
        data = b""
        if not continues_call(call):
            data = self._end_item() + self._begin("function_call", name=call.name, call_id=call.id)
        if call.arguments:
            self._text += call.arguments
            data += self._delta("response.function_call_arguments.delta", delta=call.arguments)
        return data

    def _begin(self, kind: str, **more: Any) -> bytes:
        """Opens an item, unless the open item is of this kind. A function call is always a new item."""
        if self._open == kind and kind != "function_call":
            return b""
        data = self._end_item()
        self._open = kind
        item = {**self._item(kind, "", **more), "status": "in_progress"}
        self._items.append(item)
        bare = {**item, "content": []} if "content" in item else item
        data += self._event("response.output_item.added", output_index=len(self._items) - 1, item=bare)
        if kind != "function_call":
            data += self._delta("response.content_part.added", content_index=0, part=item["content"][0])
        return data

    def _end_item(self, status: str = "completed") -> bytes:
        if self._open is None:
            return b""
        kind, text, item = self._open, self._text, self._items[-1]
        more = {name: item[name] for name in ("name", "call_id") if name in item}
        full_response = {**self._item(kind, text, **more), "id": item["id"], "status": status}
        if kind == "function_call":
            data = self._delta("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            name, logprobs = (
                ("output_text", {"logprobs": self._logprobs}) if kind == "message" else ("reasoning_text", {})
            )
            data = self._delta(f"response.{name}.done", content_index=0, text=text, **logprobs)
            data += self._delta("response.content_part.done", content_index=0, part=full_response["content"][0])
        data += self._event("response.output_item.done", output_index=len(self._items) - 1, item=full_response)
        self._items[-1] = full_response
        self._open, self._text, self._logprobs = None, "", []
        return data

    def _item(self, kind: str, text: str, **more: Any) -> Json:
        number, key = len(self._items), self.id.removeprefix("resp_")
        if kind == "function_call":
            return {"type": kind, "id": f"fc_{key}_{number}", "status": "completed", "arguments": text, **more}
        if kind == "reasoning":
            content = [{"type": "reasoning_text", "text": text}]
            return {"type": kind, "id": f"rs_{key}_{number}", "summary": [], "content": content, "status": "completed"}
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}
        return {
            "type": kind,
            "id": f"msg_{key}_{number}",
            "status": "completed",
            "role": "assistant",
            "content": [part],
        }

    def _delta(self, kind: str, **more: Any) -> bytes:
        at = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **at, **more)

    def _event(self, kind: str, **more: Any) -> bytes:
        self._number += 1
        body = {"type": kind, "sequence_number": self._number - 1, **more}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), to_json(body))

    def _response(self, status: str, output: list[Json], extras: Json) -> Json:
        body, usage = self.body, extras.get("usage")
        response: Json = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": self.is_stored,
            "background": self.is_background,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "user": body.user,
            "metadata": body.metadata or {},
            "usage": None if usage is None else _usage(usage),
        }
        return {**response, "metrics": extras["metrics"]} if "metrics" in extras else response


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }


_REFUSALS = ("deadline", "queue_full")  # error codes of the engine: it had no room, and nothing had started


def _continued(items: list[Json]) -> bytes:
    """Items for a following response: without log probabilities, which may be a hundred times larger than the text."""
    bare = [
        {**item, "content": [_bare(part) for part in item["content"]]} if "content" in item else item for item in items
    ]
    return to_json(bare)


def _bare(part: Json) -> Json:
    return {**part, "logprobs": []} if "logprobs" in part else part
