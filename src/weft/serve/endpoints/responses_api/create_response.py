"""CreateResponse: one POST of /v1/responses."""

from contextlib import ExitStack

import msgspec
from starlette.types import Message, Receive, Send

from weft.serve.endpoints.responses_api.background_response import BackgroundResponse, RunRequest
from weft.serve.endpoints.responses_api.event_log import follow
from weft.serve.endpoints.responses_api.response_store import StoredResponse
from weft.serve.endpoints.responses_api.responses_endpoints import ResponsesEndpoints
from weft.serve.engines.messages import EngineInfo
from weft.serve.http.middleware import send_json
from weft.serve.protocols.responses_bodies import ResponsesBody
from weft.serve.protocols.responses_formatter import ResponsesFormatter
from weft.serve.requests.parsed_request import ParsedRequest
from weft.serve.requests.request_context import RequestContext

EARLY_HEADERS = (b"x-request-id", b"x-weft-ignored-fields")  # of a background response; its targets come later


class CreateResponse:
    """One POST of /v1/responses: completes the conversation, and stores the result before the client has all of it."""

    def __init__(self, owner: ResponsesEndpoints, tenant: str, receive: Receive, send: Send) -> None:
        self._owner, self._tenant = owner, tenant
        self._receive, self._send = receive, send
        self._items = b""
        self._formatter: ResponsesFormatter | None = None
        self._streams = False

    async def parse(self, body: ResponsesBody, context: RequestContext, info: EngineInfo) -> ParsedRequest:
        owner = self._owner
        owner.check_background(body)
        keeps = owner.is_on and body.store is not False
        conversation = await owner.with_history(self._tenant, body, context.size, keeps=keeps)
        parsed = await owner.parser.parse_response(conversation.body, context._replace(size=conversation.size), info)
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

    async def run_in_background(self, parsed: ParsedRequest, run: RunRequest, request_scope: ExitStack) -> None:
        """Starts the response in the background. Answers at once with its state, or streams its events."""
        assert self._formatter is not None
        self._owner.check_room(len(self._items), parsed.stream)  # no await until `start`
        running = BackgroundResponse(self._tenant, self._formatter, self._items, parsed.stream)
        self._owner.start(running, run, request_scope.pop_all())
        headers = [header for header in parsed.headers if header[0] in EARLY_HEADERS]
        if running.event_log is not None:
            await follow(running.event_log, 0, headers, self._receive, self._send)
        else:
            await send_json(self._send, 200, running.body, headers)


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)
