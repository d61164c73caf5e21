"""Formatter: the interface of all answer formats."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from weft.serve.output.choice import Choice, ChoiceDelta
from weft.text.tools import ToolCallDelta

Json = dict[str, Any]
to_json = msgspec.json.Encoder().encode


def continues_call(call: ToolCallDelta) -> bool:
    """Whether a delta continues a tool call, and does not start one."""
    return call.id is None


def sse_frame(data: Json) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"


class Formatter(Protocol):
    """Formats the answer to one request: as chunks of a stream, or as one body. A chunk is one or more SSE events."""

    id: str
    done: bytes  # the end of a stream
    token_ids: bool  # whether every token gets a chunk, even if it adds no text

    def first_chunk(self, choice: Choice, extras: Json) -> bytes:
        """The chunk before a choice's first delta. `extras` is as in `chunk`."""
        ...

    def chunk(self, choice: Choice, delta: ChoiceDelta, extras: Json) -> bytes:
        """The chunk of a delta. `extras` are fields next to `choices`, such as usage."""
        ...

    def last_chunk(self, extras: Json) -> bytes:
        """The last chunk, without choices."""
        ...

    def full_response(self, choices: Sequence[Choice], extras: Json) -> Json:
        """The body of an answer that is not streamed."""
        ...

    def error_chunk(self, body: Json) -> bytes:
        """A chunk with an error."""
        ...
