"""ResponsesEndpoints: the stored and the background responses, and the endpoints that use them by id."""

import asyncio
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from weft.errors import RequestError
from weft.serve.endpoints.response_generator import JSON_HEADERS
from weft.serve.endpoints.responses_api.background_response import BackgroundResponse, RunRequest
from weft.serve.endpoints.responses_api.conversation import Conversation, join_conversation, list_input_items
from weft.serve.endpoints.responses_api.event_log import EventLog, follow
from weft.serve.endpoints.responses_api.response_store import ResponseStore, StoredResponse
from weft.serve.engines.messages import EngineInfo
from weft.serve.errors import ApiError
from weft.serve.http.middleware import request_id_headers, send_json
from weft.serve.log_limits import LogRateLimit
from weft.serve.protocols.responses_bodies import ResponsesBody
from weft.serve.requests.request_context import RequestContext
from weft.serve.requests.request_parser import RequestParser

TIDY_INTERVAL_S = 60.0  # seconds between two removals of expired responses
SEND_BYTES = 1 << 18  # bytes of a stored response per send, so that slow clients buffer little
MAX_STREAMED = 64  # concurrent background streams: 128 MiB of events
MAX_LISTED = 100  # most input items in one answer


class ResponsesEndpoints:
    """The store, the running background responses, and the endpoints for both."""

    def __init__(self, parser: RequestParser, error_log: LogRateLimit, most_body: int, *, is_on: bool) -> None:
        self.parser, self.error_log, self.is_on = parser, error_log, is_on
        self.most_body = most_body  # bytes; limit for a conversation, as if it were sent in one body
        self.store = ResponseStore(time.monotonic)
        self.running: dict[str, BackgroundResponse] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # keeps references: an unreferenced task may be collected

    async def tidy(self) -> None:
        """Removes expired responses regularly, as long as the server runs."""
        while True:
            await asyncio.sleep(TIDY_INTERVAL_S)
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
        return await self.parser.texts.run_offloaded(size, lambda: join_conversation(body, previous, size))

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
                await self.parser.parse_response(conversation.body, context._replace(size=conversation.size), info)
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
        streamed = sum(running.event_log is not None for running in self.running.values())
        held, most = sum(len(running.input) for running in self.running.values()), self.store.most_bytes
        if streams and streamed >= MAX_STREAMED:
            message = f"{streamed} streams run in the background, and {MAX_STREAMED} may: try again later, or poll"
        elif held + size > most:
            message = f"responses in the background hold {held} bytes of input, and {most} may be: try again later"
        else:
            return
        raise ApiError(503, message, code="queue_full", retry_after=1)

    def start(self, running: BackgroundResponse, work: RunRequest, request_scope: ExitStack) -> None:
        """Starts a background response as a task."""
        self.running[running.formatter.id] = running
        task = asyncio.create_task(self._run(running, work, request_scope))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, running: BackgroundResponse, work: RunRequest, request_scope: ExitStack) -> None:
        def failed() -> None:
            self.error_log.write(f"weft: an error in response {running.formatter.id}:\n{traceback.format_exc()}")

        try:
            result = await running.run(work, request_scope, failed)
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
            await follow(_event_log(found), after + 1, [(b"x-request-id", scope["request_id"])], receive, send)
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
        if not 1 <= limit <= MAX_LISTED:
            raise ApiError(400, f"limit={limit} must be 1 to {MAX_LISTED}", param="limit")
        order, after = query.get("order", "desc"), query.get("after")
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order={order!r:.40} is unknown: choose asc or desc", param="order")
        id, items = scope["path_params"]["id"], found.input
        listed = await self.parser.texts.run_offloaded(
            len(items), lambda: list_input_items(id, items, order, after, limit)
        )
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


def _event_log(found: StoredResponse | BackgroundResponse) -> EventLog:
    """The event log of a background response that was created with stream=true. Raises 400 for others."""
    if isinstance(found, BackgroundResponse):
        log = found.event_log
    elif found.events:
        log = EventLog.of(found.events, found.first_event)
    else:
        log = None
    if log is None:
        raise ApiError(
            400, "stream: only a response that was created with background=true and stream=true can be streamed again"
        )
    return log


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
    for start in range(0, len(body), SEND_BYTES):
        more = start + SEND_BYTES < len(body)
        await send({"type": "http.response.body", "body": body[start : start + SEND_BYTES], "more_body": more})
