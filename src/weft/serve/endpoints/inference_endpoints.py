"""Endpoints that run a request on an engine: completions, chats, responses, messages, embeddings, scores, reranking."""

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from weft.errors import RequestError
from weft.observe.engine_metrics import FinishedRequestStats
from weft.observe.tracing import RequestSpan
from weft.serve.endpoints.disconnect_watcher import Canceller, ClientDisconnected, DisconnectWatcher
from weft.serve.endpoints.response_generator import respond
from weft.serve.endpoints.responses_api.background_response import RunRequest
from weft.serve.endpoints.responses_api.create_response import CreateResponse
from weft.serve.endpoints.responses_api.responses_endpoints import ResponsesEndpoints
from weft.serve.engines.messages import EngineInfo, clock
from weft.serve.errors import from_request_error
from weft.serve.http.middleware import request_id_headers
from weft.serve.http.request_pacer import RequestPacer
from weft.serve.log_limits import UnknownFieldLog
from weft.serve.protocols.anthropic_bodies import MessagesBody, parse_message
from weft.serve.protocols.embeddings import EmbeddingsBody, PoolingBody, RerankBody, ScoreBody
from weft.serve.protocols.latency_headers import latency_targets
from weft.serve.protocols.openai_bodies import ChatBody, CompletionBody
from weft.serve.protocols.responses_bodies import ResponsesBody
from weft.serve.protocols.unsupported_fields import HEADER as IGNORED_HEADER
from weft.serve.protocols.unsupported_fields import header_value, unknown_fields
from weft.serve.requests.parsed_request import ParsedRequest, finite
from weft.serve.requests.request_context import RequestContext
from weft.serve.server_state import ServerState

B = TypeVar("B")


class InferenceEndpoints:
    """Handlers of the inference endpoints. They differ in the body type and in the method that parses it."""

    def __init__(self, state: ServerState, responses: ResponsesEndpoints) -> None:
        self._state, self._responses = state, responses
        self._pacer = RequestPacer()
        self._unknown_fields = UnknownFieldLog()

    async def handle_completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._infer(scope, receive, send, CompletionBody, self._state.parser.parse_completion)

    async def handle_chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._infer(scope, receive, send, ChatBody, self._state.parser.parse_chat)

    async def handle_responses(self, scope: Scope, receive: Receive, send: Send) -> None:
        creation = CreateResponse(self._responses, scope["tenant"], receive, send)
        await self._infer(
            scope, receive, creation.send, ResponsesBody, creation.parse, run_in_background=creation.run_in_background
        )

    async def handle_embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._infer(scope, receive, send, EmbeddingsBody, self._state.parser.parse_pooling)

    async def handle_score(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._infer(scope, receive, send, ScoreBody, self._state.parser.parse_pooling)

    async def handle_rerank(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._infer(scope, receive, send, RerankBody, self._state.parser.parse_pooling)

    async def handle_messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._infer(scope, receive, send, MessagesBody, partial(parse_message, self._state.parser))

    async def _infer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        body_type: type[B],
        parse: Callable[[B, RequestContext, EngineInfo], Coroutine[Any, Any, ParsedRequest]],
        run_in_background: Callable[[ParsedRequest, RunRequest, ExitStack], Awaitable[None]] | None = None,
    ) -> None:
        """Handles one inference request from the body to the last byte.

        `run_in_background` runs a background request. The request stays counted as active until that ends.
        """
        arrival = clock()
        state = self._state
        info = state.engine_info()
        state.check_not_draining()
        tenant, headers = scope["tenant"], scope["headers_by_name"]
        with ExitStack() as request_scope:
            request_scope.enter_context(state.active_request(tenant))
            try:
                state.engines.choose().check_queue()  # before the body is read
                data = await state.body_reader.read(scope, receive)
                watcher = request_scope.enter_context(closing(DisconnectWatcher(receive)))
                context = RequestContext(
                    tenant=tenant,
                    salt=state.salt(tenant),
                    targets=latency_targets(headers),
                    arrival=arrival,
                    request_id=scope["request_id"].decode(),
                    random_id=scope["random_id"],
                    size=len(data),
                )
                body, parsed = await watcher.during(self._parse(data, body_type, parse, context, info))
                parsed.headers += request_id_headers(scope)
                state.metrics.record_accepted()
                run = partial(self._respond, parsed, body, scope)
                if parsed.is_background and run_in_background is not None:
                    watcher.close()
                    await run_in_background(parsed, run, request_scope)
                else:
                    await run(watcher, send)
            except (ClientDisconnected, ConnectionResetError):
                state.metrics.record_disconnect()
            except RequestError as error:
                raise from_request_error(error) from None

    async def _parse(
        self,
        data: bytes,
        body_type: type[B],
        parse: Callable[[B, RequestContext, EngineInfo], Coroutine[Any, Any, ParsedRequest]],
        context: RequestContext,
        info: EngineInfo,
    ) -> tuple[B, ParsedRequest]:
        await self._pacer.wait()
        body, others = await self._state.parse_body(data, body_type)
        self._state.check_model(body.model)  # type: ignore[attr-defined]
        names = unknown_fields(others) if others else []
        parsed = await parse(body, context, info)
        if names:
            self._unknown_fields.note(names)
            parsed.headers.append((IGNORED_HEADER, header_value(names)))
        return body, parsed

    async def _respond(self, parsed: ParsedRequest, body: Any, scope: Scope, watcher: Canceller, send: Send) -> None:
        generator = await respond(
            parsed, self._state.engines, self._state.metrics, self._state.recording, watcher, send
        )
        self._trace(generator.stats, parsed, body, scope)

    def _trace(self, stats: FinishedRequestStats | None, parsed: ParsedRequest, body: Any, scope: Scope) -> None:
        if self._state.tracer is None or stats is None:
            return
        headers, model = scope["headers_by_name"], self._state.model_names[0]
        self._state.tracer.request(
            RequestSpan(
                stats=stats,
                arrival=parsed.arrival,
                operation=_operation(body),
                model=body.model or model,
                response_model=model,
                response_id=parsed.formatter.id,
                request_id=scope["request_id"].decode(),
                temperature=getattr(body, "temperature", None),  # embeddings have none
                top_p=getattr(body, "top_p", None),
                gap_target=finite(parsed.promise.promised_gap),
                ttft_target=finite(parsed.promise.promised_ttft),
                error="engine_error" if stats.reason == "error" else None,
                traceparent=headers.get(b"traceparent", b"").decode("latin-1") or None,
                tracestate=headers.get(b"tracestate", b"").decode("latin-1") or None,
            )
        )


def _operation(body: Any) -> str:
    """The operation name of OpenTelemetry's conventions."""
    if isinstance(body, PoolingBody):
        return "embeddings"
    return "text_completion" if isinstance(body, CompletionBody) else "chat"
