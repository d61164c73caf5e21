"""Conversation: the input of a response with the responses before it, and the list of its items."""

from typing import NamedTuple

import msgspec

from weft.errors import RequestError
from weft.serve.endpoints.responses_api.response_store import StoredResponse
from weft.serve.errors import ApiError
from weft.serve.http.json_body import LARGE_BODY, MOST_VALUES, have_too_many_values
from weft.serve.protocols.formatter import to_json
from weft.serve.protocols.openai_bodies import Json
from weft.serve.protocols.responses_bodies import ResponsesBody


class Conversation(NamedTuple):
    """A body with the whole conversation as its input."""

    body: ResponsesBody
    items: bytes  # the input as JSON, needed if the response is stored
    size: int  # bytes of the body and of the earlier conversation


def join_conversation(body: ResponsesBody, previous: StoredResponse | None, size: int) -> Conversation:
    """The body, with the conversation of a previous response put before its input. `size` is in bytes."""
    own = [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    items = to_json(own or [])
    if previous is None:
        return Conversation(body, items, size)
    earlier = (previous.input, previous.output)
    if size > LARGE_BODY and have_too_many_values(earlier):
        raise RequestError(f"previous_response_id: the conversation has more than {MOST_VALUES} values in it")
    found = [item for part in earlier for item in msgspec.json.decode(part)]
    inner = [part[1:-1] for part in (*earlier, items) if part != b"[]"]
    return Conversation(
        msgspec.structs.replace(body, input=[*found, *(own or [])]), b"[" + b",".join(inner) + b"]", size
    )


def list_input_items(id: str, items: bytes, order: str, after: str | None, limit: int) -> Json:
    """One page of a response's input items."""
    found = [
        _list_item(item, f"item_{id.removeprefix('resp_')}_{at}") for at, item in enumerate(msgspec.json.decode(items))
    ]
    if order == "desc":
        found.reverse()
    ids = [item["id"] for item in found]
    if after is not None:
        if after not in ids:
            raise ApiError(404, f"after: the response has no input item {after!r:.60}", param="after", code="not_found")
        found = found[ids.index(after) + 1 :]
    page = found[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {
        "object": "list",
        "data": page,
        "first_id": first,
        "last_id": last,
        "has_more": len(found) > len(page),
    }


def _list_item(item: Json, id: str) -> Json:
    """An input item in OpenAI's list format: with an id, and with message text as parts."""
    shown: Json = {"type": "message", **item}
    if not isinstance(shown.get("id"), str):
        shown["id"] = id
    if shown["type"] == "message" and isinstance(text := shown.get("content"), str):
        kind = "output_text" if shown.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": text}]
    return shown
