"""Background responses: they continue when the client disconnects, and the client may reconnect."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from starlette.types import Message, Send

from weft.errors import RequestError
from weft.serve.endpoints.disconnect_watcher import CLIENT_DISCONNECTED, Canceller, ClientDisconnected
from weft.serve.endpoints.responses_api.event_log import EventLog
from weft.serve.endpoints.responses_api.response_store import StoredResponse
from weft.serve.engines.request_output_collector import RequestOutputCollector
from weft.serve.errors import ApiError, from_request_error
from weft.serve.protocols.formatter import to_json
from weft.serve.protocols.responses_formatter import ResponsesFormatter

RunRequest = Callable[[Canceller, Send], Awaitable[object]]  # runs a parsed request to its end


class BackgroundResponse:
    """A background response that has not ended. It is the Canceller of its request: `cancel` acts like a disconnect."""

    def __init__(self, tenant: str, formatter: ResponsesFormatter, input: bytes, streams: bool) -> None:
        self.tenant, self.formatter = tenant, formatter
        self.event_log = EventLog() if streams else None
        self.is_deleted = False
        self.ended = asyncio.Event()
        self.input = input
        self._body = b""
        self._collector: RequestOutputCollector | None = None
        self._is_cancelled = False
        if self.event_log is not None:
            self.event_log.append(formatter.queued())

    def attach(self, collector: RequestOutputCollector) -> None:
        self._collector = collector
        if self._is_cancelled:
            collector.fail(CLIENT_DISCONNECTED)

    def cancel(self) -> None:
        """Ends the response. `ended` is set once the ResponseGenerator has read the cancellation."""
        self._is_cancelled = True
        if self._collector is not None:
            self._collector.fail(CLIENT_DISCONNECTED)

    @property
    def body(self) -> bytes:
        """The current state of the response, as JSON."""
        has_tokens = self._collector is not None and bool(self._collector.prefills_done)
        return to_json(self.formatter.snapshot("in_progress" if has_tokens else "queued"))

    async def run(self, work: RunRequest, request_scope: ExitStack, failed: Callable[[], None]) -> StoredResponse:
        """Runs the response to its end, which may be an error, and returns the result.

        `request_scope` counts it as an active request until then. `failed` is called for internal errors of the server.
        """
        with request_scope:
            try:
                await work(self, self._keep_message)
            except ClientDisconnected:
                self._keep_event(self.formatter.cancelled())
            except RequestError as error:
                self.fail(from_request_error(error))
            except ApiError as error:
                self.fail(error)
            except Exception:
                failed()
                self.fail(ApiError(500, "something went wrong inside the server; its log says more", code="internal"))
            return self.result

    def fail(self, error: ApiError) -> None:
        self._body = b""
        self._keep_event(self.formatter.error_chunk(error.body))

    @property
    def result(self) -> StoredResponse:
        log = self.event_log
        return StoredResponse(
            self.formatter.id,
            self.formatter.final or self._body,
            self.input,
            self.formatter.output,
            is_background=True,
            events=() if log is None else log.events,
            first_event=0 if log is None else log.first,
        )

    def close(self) -> None:
        """Wakes waiting clients. To be called after the result is stored."""
        self.ended.set()
        if self.event_log is not None:
            self.event_log.end()

    async def _keep_message(self, message: Message) -> None:
        """The ASGI `send` of the request: keeps the events of a stream, or the whole response."""
        data = message.get("body", b"")
        if not data:
            return
        if self.event_log is None:
            self._body = data
        else:
            self.event_log.append(data)

    def _keep_event(self, data: bytes) -> None:
        if self.event_log is not None:
            self.event_log.append(data)
