"""StoredResponses: responses that are continued, retrieved, cancelled and deleted by their ids."""

import asyncio
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import parse_qs

import msgspec
from starlette.types import Message, Receive, Scope, Send

from weft.errors import RequestError
from weft.serve.background import MOST_STREAMED, EventLog, Running, Work
from weft.serve.calls import Caller, Desk
from weft.serve.errors import ApiError
from weft.serve.fields import Json
from weft.serve.formats import to_json
from weft.serve.gate import answer, request_ids
from weft.serve.infer import JSON_HEADERS, STREAM_HEADERS, Call, Gone, Presence
from weft.serve.log import Sparing
from weft.serve.messages import Facts
from weft.serve.parsing import LARGE, MOST_VALUES, hold_too_many
from weft.serve.response_store import ResponseStore, Stored
from weft.serve.responses import ResponsesBody, ResponsesFormat

TIDY_EVERY = 60.0  # seconds after which an idle server looks for responses that are too old
PIECE = 1 << 18  # bytes of a stored response that are sent at once, so that slow clients hold little
KNOWN_AT_ONCE = (b"x-request-id", b"x-weft-ignored-fields")  # headers of a background response: no promise yet
MOST_LISTED = 100  # input items in one answer


class Talk(NamedTuple):
    """A body with its whole conversation."""

    body: ResponsesBody
    items: bytes  # its input as JSON, where it is to be stored
    size: int  # bytes of all of it


class StoredResponses:
    """The store, the background responses that run, and the endpoints for both."""

    def __init__(self, desk: Desk, log: Sparing, most_body: int, *, is_on: bool) -> None:
        self.desk, self.log, self.is_on = desk, log, is_on
        self.most_body = most_body  # bytes that a conversation may have, as if it were sent as a whole
        self.store = ResponseStore(time.monotonic)
        self.running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # a task that nothing refers to may vanish

    async def tidy(self) -> None:
        """For as long as the server runs."""
        while True:
            await asyncio.sleep(TIDY_EVERY)
            self.store.expire()

    # Conversations

    async def continued(self, tenant: str, body: ResponsesBody, size: int, *, keeps: bool) -> Talk:
        """The body with the conversation of its previous response before its input."""
        previous = None
        if body.previous_response_id is not None:
            previous = self._previous(tenant, body.previous_response_id)
            size += len(previous.input) + len(previous.output)
        if previous is None and not keeps:
            return Talk(body, b"", size)
        return await self.desk.texts.aside(size, lambda: _joined(body, previous, size))

    def _previous(self, tenant: str, id: str) -> Stored:
        self._check_on("previous_response_id")
        if (running := self.running.get(id)) is not None and running.tenant == tenant:
            raise RequestError(f"previous_response_id: the response {id!r:.60} has not ended yet: wait until it has")
        found = self.store.get(tenant, id)
        if found is None:
            raise self._unknown(id, "previous_response_id", "previous_response_not_found")
        size = len(found.input) + len(found.output)
        if size > self.most_body:
            raise RequestError(
                f"previous_response_id: the conversation has {size} bytes, and {self.most_body} are allowed "
                "(--max-body-mb): begin a new one"
            )
        return found

    def _check_on(self, field: str) -> None:
        if not self.is_on:
            raise RequestError(
                f"{field}: responses are not stored here (--no-response-store); send the whole conversation as input, "
                "and stream the response"
            )

    async def input_tokens(self, body: ResponsesBody, caller: Caller, facts: Facts) -> int:
        """Tokens of the prompt. What the answer must look like is no part of it, and is not checked."""
        choice = "none" if body.tool_choice == "none" else None
        plain = msgspec.structs.replace(body, text=None, tool_choice=choice, max_output_tokens=None)
        talk = await self.continued(caller.tenant, plain, caller.size, keeps=False)
        return sum((await self.desk.response(talk.body, caller._replace(size=talk.size), facts)).prompt_tokens)

    def check_background(self, body: ResponsesBody) -> None:
        if not body.background:
            return
        self._check_on("background")
        if body.store is False:
            raise RequestError("background: the response is retrieved from the store, so store must not be false")

    def check_room(self, size: int, streams: bool) -> None:
        """What runs in the background holds no connection, so what it holds of memory has bounds of its own."""
        streamed = sum(running.log is not None for running in self.running.values())
        held, most = sum(len(running.input) for running in self.running.values()), self.store.most_bytes
        if streams and streamed >= MOST_STREAMED:
            message = f"{streamed} streams run in the background, and {MOST_STREAMED} may: try again later, or poll"
        elif held + size > most:
            message = f"responses in the background hold {held} bytes of input, and {most} may be: try again later"
        else:
            return
        raise ApiError(503, message, code="queue_full", retry_after=1)

    def start(self, running: Running, work: Work, admission: ExitStack) -> None:
        """Lets a background response run."""
        self.running[running.format.id] = running
        task = asyncio.create_task(self._run(running, work, admission))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, running: Running, work: Work, admission: ExitStack) -> None:
        try:
            result = await running.run(work, admission, lambda: self.log.write(traceback.format_exc()))
            if not running.is_deleted and not self.store.put(running.tenant, result):
                most = self.store.most_each
                error = ApiError(500, f"the response has {result.size} bytes, and {most} may be stored: ask for less")
                running.fail(error)
                self.store.put(running.tenant, replace(running.result, input=b"[]", events=()))
        finally:
            del self.running[running.format.id]
            running.close()

    # Endpoints

    async def retrieve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/responses/{id}; with stream=true, the events behind number starting_after, and those to come."""
        found = self._find(scope)
        query = _query(scope)
        if query.get("stream") in ("true", "1"):
            after = _number(query, "starting_after", -1)
            await follow(_log(found), after + 1, [(b"x-request-id", scope["request_id"])], receive, send)
            return
        await _send_body(send, found.body, request_ids(scope))

    async def delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE /v1/responses/{id}; one that runs is ended."""
        found, id = self._find(scope), scope["path_params"]["id"]
        if isinstance(found, Running):
            found.is_deleted = True
            found.cancel()
            await found.ended.wait()
        self.store.remove(scope["tenant"], id)
        await answer(send, 200, {"id": id, "object": "response", "deleted": True}, request_ids(scope))

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/responses/{id}/cancel; one that has ended stays as it is."""
        found = self._find(scope)
        if isinstance(found, Running):
            found.cancel()
            await found.ended.wait()
            found = self._find(scope)
        elif not found.is_background:
            raise ApiError(400, "only a response that was created with background=true can be cancelled")
        await _send_body(send, found.body, request_ids(scope))

    async def input_items(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/responses/{id}/input_items, the last one first unless order=asc."""
        found, query = self._find(scope), _query(scope)
        limit = _number(query, "limit", 20)
        if not 1 <= limit <= MOST_LISTED:
            raise ApiError(400, f"limit={limit} must be 1 to {MOST_LISTED}", param="limit")
        order, after = query.get("order", "desc"), query.get("after")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order={order!r:.40} is unknown: choose asc or desc", param="order")
        id, items = scope["path_params"]["id"], found.input
        listed = await self.desk.texts.aside(len(items), lambda: _listed(id, items, order, after, limit))
        await answer(send, 200, listed, request_ids(scope))

    def _find(self, scope: Scope) -> Stored | Running:
        """The response that a path names, where the key that asks has created it."""
        id, tenant = scope["path_params"]["id"], scope["tenant"]
        running = self.running.get(id)
        if running is not None and running.tenant == tenant and not running.is_deleted:
            return running
        found = self.store.get(tenant, id)
        if found is None:
            raise self._unknown(id, None, "response_not_found")
        return found

    def _unknown(self, id: str, param: str | None, code: str) -> ApiError:
        why = f"responses are kept for {self.store.time_to_live / 3600:g} h at most, and the oldest go first"
        if not self.is_on:
            why = "responses are not stored here (--no-response-store)"
        return ApiError(404, f"the response {id!r:.60} is not stored for this key: {why}", param=param, code=code)


class Session:
    """One POST of a response: completes its conversation, and stores what comes of it before the client can ask."""

    def __init__(self, owner: StoredResponses, tenant: str, receive: Receive, send: Send) -> None:
        self._owner, self._tenant = owner, tenant
        self._receive, self._send = receive, send
        self._items = b""
        self._format: ResponsesFormat | None = None
        self._streams = False

    async def check(self, body: ResponsesBody, caller: Caller, facts: Facts) -> Call:
        owner = self._owner
        owner.check_background(body)
        keeps = owner.is_on and body.store is not False
        talk = await owner.continued(self._tenant, body, caller.size, keeps=keeps)
        call = await owner.desk.response(talk.body, caller._replace(size=talk.size), facts)
        assert isinstance(call.format, ResponsesFormat)
        self._format, self._items, self._streams = call.format, talk.items, call.stream
        # From here on the conversation is kept as text alone.
        call.format.body, body.input = msgspec.structs.replace(talk.body, input=None), None
        call.format.is_stored = keeps
        call.format.is_background = call.is_background = bool(body.background)
        return call

    async def send(self, message: Message) -> None:
        """To the client. The store comes before the last bytes: the next request may follow at once."""
        format = self._format
        if format is not None and format.is_stored and _is_last(message):
            body = format.final if self._streams else message["body"]
            if body is not None:  # else the stream ends with an error
                self._owner.store.put(self._tenant, Stored(format.id, body, self._items, format.output))
        await self._send(message)

    async def detach(self, call: Call, work: Work, admission: ExitStack) -> None:
        """Lets the response run on its own, and answers at once: with its state, or with events as they come."""
        assert self._format is not None
        self._owner.check_room(len(self._items), call.stream)  # nothing is waited for between this and the start
        running = Running(self._tenant, self._format, self._items, call.stream)
        self._owner.start(running, work, admission.pop_all())
        headers = [header for header in call.headers if header[0] in KNOWN_AT_ONCE]
        if running.log is not None:
            await follow(running.log, 0, headers, self._receive, self._send)
        else:
            await answer(self._send, 200, running.body, headers)


async def follow(log: EventLog, number: int, headers: list[tuple[bytes, bytes]], receive: Receive, send: Send) -> None:
    """Sends the events from `number` on until the stream has ended or the client has left."""
    if number < log.first:
        raise ApiError(
            400, f"the events before number {log.first} are not kept any more: retrieve the response without stream"
        )

    async def work(number: int) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *headers]})
        while True:
            events = log.since(number) if number >= log.first else None
            if events is None:  # the client is slower than the stream, by all that is kept
                break
            if events:
                data = b""
                for event in events:  # slow clients hold little
                    data += event
                    number += 1
                    if len(data) > PIECE:
                        break
                await send({"type": "http.response.body", "body": data, "more_body": True})
            elif log.ended:
                break
            else:
                await log.news()
        await send({"type": "http.response.body", "body": b""})

    there = Presence(receive)
    try:
        await there.during(work(number))
    except Gone:
        pass
    finally:
        there.close()


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def _joined(body: ResponsesBody, previous: Stored | None, size: int) -> Talk:
    own = [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    items = to_json(own or [])
    if previous is None:
        return Talk(body, items, size)
    earlier = (previous.input, previous.output)
    if size > LARGE and hold_too_many(earlier):
        raise RequestError(f"previous_response_id: the conversation has more than {MOST_VALUES} values in it")
    found = [item for part in earlier for item in msgspec.json.decode(part)]
    inner = [part[1:-1] for part in (*earlier, items) if part != b"[]"]
    return Talk(msgspec.structs.replace(body, input=[*found, *(own or [])]), b"[" + b",".join(inner) + b"]", size)


def _log(found: Stored | Running) -> EventLog:
    """The events of a response that was created as a stream in the background."""
    if isinstance(found, Running):
        log = found.log
    elif found.events:
        log = EventLog.of(found.events, found.first_event)
    else:
        log = None
    if log is None:
        raise ApiError(
            400, "stream: only a response that was created with background=true and stream=true can be streamed again"
        )
    return log


def _listed(id: str, items: bytes, order: str, after: str | None, limit: int) -> Json:
    """A page of the input items of a response."""
    found = [
        _shown(item, f"item_{id.removeprefix('resp_')}_{at}") for at, item in enumerate(msgspec.json.decode(items))
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


def _shown(item: Json, id: str) -> Json:
    """An input item as OpenAI lists it: with an id, and a message's text in parts."""
    shown: Json = {"type": "message", **item}
    if not isinstance(shown.get("id"), str):
        shown["id"] = id
    if shown["type"] == "message" and isinstance(text := shown.get("content"), str):
        kind = "output_text" if shown.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": text}]
    return shown


def _query(scope: Scope) -> dict[str, str]:
    """The last value of each parameter."""
    try:
        found = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=32)
    except ValueError:
        raise ApiError(400, "the query has more than 32 parameters") from None
    return {name: values[-1] for name, values in found.items()}


def _number(query: dict[str, str], name: str, default: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ApiError(400, f"{name}={text!r:.40} must be a whole number, 0 or more", param=name)
    return int(text)


async def _send_body(send: Send, body: bytes, ids: list[tuple[bytes, bytes]]) -> None:
    """A JSON text, in pieces: the next one is sent when the client has taken most of the last."""
    headers = [*JSON_HEADERS, *ids, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for start in range(0, len(body), PIECE):
        more = start + PIECE < len(body)
        await send({"type": "http.response.body", "body": body[start : start + PIECE], "more_body": more})
