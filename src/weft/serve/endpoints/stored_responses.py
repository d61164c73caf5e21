"""StoredResponses: continues, retrieves, cancels and deletes responses by id."""

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
from weft.serve.endpoints.background_response import MOST_STREAMED, BackgroundResponse, EventLog, RunRequest
from weft.serve.endpoints.disconnect_watcher import ClientDisconnected, DisconnectWatcher
from weft.serve.endpoints.response_generator import JSON_HEADERS, STREAM_HEADERS
from weft.serve.endpoints.response_store import ResponseStore, StoredResponse
from weft.serve.engines.messages import EngineInfo
from weft.serve.errors import ApiError
from weft.serve.http.json_body import LARGE, MOST_VALUES, hold_too_many
from weft.serve.http.middleware import request_id_headers, send_json
from weft.serve.log_limits import LogRateLimit
from weft.serve.protocols.formatter import to_json
from weft.serve.protocols.openai_bodies import Json
from weft.serve.protocols.responses import ResponsesBody, ResponsesFormatter
from weft.serve.requests.parsed_request import ParsedRequest
from weft.serve.requests.request_parser import RequestContext, RequestParser

TIDY_EVERY = 60.0  # seconds between two removals of expired responses
PIECE = 1 << 18  # bytes of a stored response per send, so that slow clients buffer little
KNOWN_AT_ONCE = (b"x-request-id", b"x-weft-ignored-fields")  # headers of a background response; no targets yet
MOST_LISTED = 100  # most input items in one answer


class Conversation(NamedTuple):
    """A body with the whole conversation as its input."""

    body: ResponsesBody
    items: bytes  # the input as JSON, needed if the response is stored
    size: int  # bytes of the body and of the earlier conversation


class ResponsesEndpoints:
    """The store, the running background responses, and the endpoints for both."""

    def __init__(self, parser: RequestParser, log: LogRateLimit, most_body: int, *, is_on: bool) -> None:
        self.parser, self.log, self.is_on = parser, log, is_on
        self.most_body = most_body  # bytes; limit for a conversation, as if it were sent in one body
        self.store = ResponseStore(time.monotonic)
        self.running: dict[str, BackgroundResponse] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # keeps references: an unreferenced task may be collected

    async def tidy(self) -> None:
        """Removes expired responses regularly, as long as the server runs."""
        while True:
            await asyncio.sleep(TIDY_EVERY)
            self.store.expire()

    # Conversations

    async def with_history(self, tenant: str, body: ResponsesBody, size: int, *, keeps: bool) -> Conversation:
        """The body, with the conversation of its previous response put before its input."""
        previous = None
        if body.previous_response_id is not None:
            previous = self._previous(tenant, body.previous_response_id)
            size += len(previous.input) + len(previous.output)
        if previous is None and not keeps:
            return Conversation(body, b"", size)
        return await self.parser.texts.run_in_thread(size, lambda: _joined(body, previous, size))

    def _previous(self, tenant: str, id: str) -> StoredResponse:
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

    async def input_tokens(self, body: ResponsesBody, context: RequestContext, info: EngineInfo) -> int:
        """Number of prompt tokens. The answer's structure is no part of the prompt, and is not checked."""
        choice = "none" if body.tool_choice == "none" else None
        plain = msgspec.structs.replace(body, text=None, tool_choice=choice, max_output_tokens=None)
        conversation = await self.with_history(context.tenant, plain, context.size, keeps=False)
        return sum(
            (
                await self.parser.response(conversation.body, context._replace(size=conversation.size), info)
            ).prompt_tokens
        )

    def check_background(self, body: ResponsesBody) -> None:
        if not body.background:
            return
        self._check_on("background")
        if body.store is False:
            raise RequestError("background: the response is retrieved from the store, so store must not be false")

    def check_room(self, size: int, streams: bool) -> None:
        """Raises if background responses hold too much memory. They hold no connection, so need separate limits."""
        streamed = sum(running.log is not None for running in self.running.values())
        held, most = sum(len(running.input) for running in self.running.values()), self.store.most_bytes
        if streams and streamed >= MOST_STREAMED:
            message = f"{streamed} streams run in the background, and {MOST_STREAMED} may: try again later, or poll"
        elif held + size > most:
            message = f"responses in the background hold {held} bytes of input, and {most} may be: try again later"
        else:
            return
        raise ApiError(503, message, code="queue_full", retry_after=1)

    def start(self, running: BackgroundResponse, work: RunRequest, admission: ExitStack) -> None:
        """Starts a background response as a task."""
        self.running[running.formatter.id] = running
        task = asyncio.create_task(self._run(running, work, admission))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, running: BackgroundResponse, work: RunRequest, admission: ExitStack) -> None:
        try:
            result = await running.run(work, admission, lambda: self.log.write(traceback.format_exc()))
            if not running.is_deleted and not self.store.put(running.tenant, result):
                most = self.store.most_each
                error = ApiError(500, f"the response has {result.size} bytes, and {most} may be stored: ask for less")
                running.fail(error)
                self.store.put(running.tenant, replace(running.result, input=b"[]", events=()))
        finally:
            del self.running[running.formatter.id]
            running.close()

    # Endpoints

    async def retrieve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/responses/{id}. With stream=true: sends events after starting_after, and new ones as they come."""
        found = self._find(scope)
        query = _query(scope)
        if query.get("stream") in ("true", "1"):
            after = _number(query, "starting_after", -1)
            await follow(_log(found), after + 1, [(b"x-request-id", scope["request_id"])], receive, send)
            return
        await _send_body(send, found.body, request_id_headers(scope))

    async def delete(self, scope: Scope, receive: Receive, send: Send) -> None:
        """DELETE /v1/responses/{id}. A running response is ended first."""
        found, id = self._find(scope), scope["path_params"]["id"]
        if isinstance(found, BackgroundResponse):
            found.is_deleted = True
            found.cancel()
            await found.ended.wait()
        self.store.remove(scope["tenant"], id)
        await send_json(send, 200, {"id": id, "object": "response", "deleted": True}, request_id_headers(scope))

    async def cancel(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/responses/{id}/cancel. A background response that has ended is returned unchanged."""
        found = self._find(scope)
        if isinstance(found, BackgroundResponse):
            found.cancel()
            await found.ended.wait()
            found = self._find(scope)
        elif not found.is_background:
            raise ApiError(400, "only a response that was created with background=true can be cancelled")
        await _send_body(send, found.body, request_id_headers(scope))

    async def input_items(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET /v1/responses/{id}/input_items. Last item first, unless order=asc."""
        found, query = self._find(scope), _query(scope)
        limit = _number(query, "limit", 20)
        if not 1 <= limit <= MOST_LISTED:
            raise ApiError(400, f"limit={limit} must be 1 to {MOST_LISTED}", param="limit")
        order, after = query.get("order", "desc"), query.get("after")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order={order!r:.40} is unknown: choose asc or desc", param="order")
        id, items = scope["path_params"]["id"], found.input
        listed = await self.parser.texts.run_in_thread(len(items), lambda: _listed(id, items, order, after, limit))
        await send_json(send, 200, listed, request_id_headers(scope))

    def _find(self, scope: Scope) -> StoredResponse | BackgroundResponse:
        """The response with the id in the path. Raises 404 if this API key has not created it."""
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


class CreateResponse:
    """One POST of /v1/responses: completes the conversation, and stores the result before the client has all of it."""

    def __init__(self, owner: ResponsesEndpoints, tenant: str, receive: Receive, send: Send) -> None:
        self._owner, self._tenant = owner, tenant
        self._receive, self._send = receive, send
        self._items = b""
        self._formatter: ResponsesFormatter | None = None
        self._streams = False

    async def check(self, body: ResponsesBody, context: RequestContext, info: EngineInfo) -> ParsedRequest:
        owner = self._owner
        owner.check_background(body)
        keeps = owner.is_on and body.store is not False
        conversation = await owner.with_history(self._tenant, body, context.size, keeps=keeps)
        parsed = await owner.parser.response(conversation.body, context._replace(size=conversation.size), info)
        assert isinstance(parsed.formatter, ResponsesFormatter)
        self._formatter, self._items, self._streams = parsed.formatter, conversation.items, parsed.stream
        # From here on only the JSON text of the conversation is kept.
        parsed.formatter.body, body.input = msgspec.structs.replace(conversation.body, input=None), None
        parsed.formatter.is_stored = keeps
        parsed.formatter.is_background = parsed.is_background = bool(body.background)
        return parsed

    async def send(self, message: Message) -> None:
        """Sends to the client. Stores the response before the last bytes: the next request may follow at once."""
        formatter = self._formatter
        if formatter is not None and formatter.is_stored and _is_last(message):
            body = formatter.final if self._streams else message["body"]
            if body is not None:  # None: the stream ends with an error
                self._owner.store.put(self._tenant, StoredResponse(formatter.id, body, self._items, formatter.output))
        await self._send(message)

    async def detach(self, parsed: ParsedRequest, work: RunRequest, admission: ExitStack) -> None:
        """Starts the response in the background. Answers at once with its state, or streams its events."""
        assert self._formatter is not None
        self._owner.check_room(len(self._items), parsed.stream)  # no await until `start`
        running = BackgroundResponse(self._tenant, self._formatter, self._items, parsed.stream)
        self._owner.start(running, work, admission.pop_all())
        headers = [header for header in parsed.headers if header[0] in KNOWN_AT_ONCE]
        if running.log is not None:
            await follow(running.log, 0, headers, self._receive, self._send)
        else:
            await send_json(self._send, 200, running.body, headers)


async def follow(log: EventLog, number: int, headers: list[tuple[bytes, bytes]], receive: Receive, send: Send) -> None:
    """Sends the events from `number` on, until the stream ends or the client disconnects."""
    if number < log.first:
        raise ApiError(
            400, f"the events before number {log.first} are not kept any more: retrieve the response without stream"
        )

    async def work(number: int) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *headers]})
        while True:
            events = log.since(number) if number >= log.first else None
            if events is None:  # the client is so slow that its next event was dropped
                break
            if events:
                data = b""
                for event in events:  # limited, so that slow clients buffer little
                    data += event
                    number += 1
                    if len(data) > PIECE:
                        break
                await send({"type": "http.response.body", "body": data, "more_body": True})
            elif log.ended:
                break
            else:
                await log.wait()
        await send({"type": "http.response.body", "body": b""})

    watcher = DisconnectWatcher(receive)
    try:
        await watcher.during(work(number))
    except ClientDisconnected:
        pass
    finally:
        watcher.close()


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


def _joined(body: ResponsesBody, previous: StoredResponse | None, size: int) -> Conversation:
    own = [{"type": "message", "role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    items = to_json(own or [])
    if previous is None:
        return Conversation(body, items, size)
    earlier = (previous.input, previous.output)
    if size > LARGE and hold_too_many(earlier):
        raise RequestError(f"previous_response_id: the conversation has more than {MOST_VALUES} values in it")
    found = [item for part in earlier for item in msgspec.json.decode(part)]
    inner = [part[1:-1] for part in (*earlier, items) if part != b"[]"]
    return Conversation(
        msgspec.structs.replace(body, input=[*found, *(own or [])]), b"[" + b",".join(inner) + b"]", size
    )


def _log(found: StoredResponse | BackgroundResponse) -> EventLog:
    """The event log of a background response that was created with stream=true. Raises 400 for others."""
    if isinstance(found, BackgroundResponse):
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
    """One page of a response's input items."""
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
    """An input item in OpenAI's list format: with an id, and with message text as parts."""
    shown: Json = {"type": "message", **item}
    if not isinstance(shown.get("id"), str):
        shown["id"] = id
    if shown["type"] == "message" and isinstance(text := shown.get("content"), str):
        kind = "output_text" if shown.get("role") == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": text}]
    return shown


def _query(scope: Scope) -> dict[str, str]:
    """The query parameters; the last value of each."""
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
    """Sends JSON text in pieces. Each is sent when the client has read most of the one before."""
    headers = [*JSON_HEADERS, *ids, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for start in range(0, len(body), PIECE):
        more = start + PIECE < len(body)
        await send({"type": "http.response.body", "body": body[start : start + PIECE], "more_body": more})
