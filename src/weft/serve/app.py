"""The HTTP application: its routes, and the state that all requests share."""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from weft import __version__
from weft.engine.collector import Collector
from weft.engine.options import EngineOptions
from weft.errors import RequestError
from weft.observe.engine_metrics import RequestDone
from weft.observe.metrics import CONTENT_TYPE, ServerMetrics
from weft.observe.tracing import RequestSpan, Tracer
from weft.serve.endpoints.background_response import RunRequest
from weft.serve.endpoints.disconnect_watcher import Canceller, ClientDisconnected, DisconnectWatcher
from weft.serve.endpoints.response_generator import respond
from weft.serve.endpoints.stored_responses import CreateResponse, ResponsesEndpoints
from weft.serve.endpoints.token_endpoints import TokenEndpoints
from weft.serve.engines.engine_client import EngineHealth
from weft.serve.engines.engine_pool import EnginePool
from weft.serve.engines.messages import EngineInfo, clock
from weft.serve.errors import ApiError, of_json, of_request
from weft.serve.http.json_body import QUICK, parse_all
from weft.serve.http.middleware import ApiKeys, ApiMiddleware, BodyReader, RateLimits, request_id_headers, send_json
from weft.serve.http.request_pacer import RequestPacer
from weft.serve.log_limits import LogRateLimit, UnknownFieldLog
from weft.serve.options import ServeOptions
from weft.serve.protocols.anthropic_bodies import MessagesBody, parse_message
from weft.serve.protocols.embeddings import EmbeddingsBody, PoolingBody, RerankBody, ScoreBody
from weft.serve.protocols.openai_bodies import ChatBody, CompletionBody, latency_targets
from weft.serve.protocols.openapi import openapi_document
from weft.serve.protocols.responses import ResponsesBody
from weft.serve.protocols.unsupported_fields import HEADER as IGNORED_HEADER
from weft.serve.protocols.unsupported_fields import NAMES, header_value, unknown_fields
from weft.serve.requests.parsed_request import ParsedRequest, finite
from weft.serve.requests.request_parser import RequestContext, RequestParser, new_request_id

B = TypeVar("B")
NO_RESPONSE = "the engine process does not respond; it is replaced if it stays so"
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass
class ApiServer:
    """The state that all requests share, and the endpoint handlers."""

    options: ServeOptions
    engine_options: EngineOptions
    names: tuple[str, ...]  # of the model; answers carry the first one
    parser: RequestParser
    engines: EnginePool
    metrics: ServerMetrics
    tracer: Tracer | None
    limits: RateLimits
    bodies: BodyReader
    created: int  # seconds since the epoch
    draining: bool = False
    active: int = 0  # running inference requests
    collector: Collector = field(default_factory=Collector)
    pacer: RequestPacer = field(default_factory=RequestPacer)
    log: LogRateLimit = field(default_factory=LogRateLimit)
    unknown: UnknownFieldLog = field(default_factory=UnknownFieldLog)
    resets: Counter[str] = field(default_factory=Counter)  # number of prefix cache resets, by tenant
    quiet: asyncio.Event = field(default_factory=asyncio.Event)  # set when draining and no request is active
    stored: ResponsesEndpoints = field(init=False)
    tokens: TokenEndpoints = field(init=False)

    def __post_init__(self) -> None:
        self.stored = ResponsesEndpoints(self.parser, self.log, self.bodies.most, is_on=self.options.response_store)
        self.tokens = TokenEndpoints(self)

    def drain(self) -> None:
        """Refuses new inference requests from now on. `quiet` is set when the active ones have ended."""
        self.draining = True
        self.engines.changed.set()
        if not self.active:
            self.quiet.set()

    def app(self) -> ASGIApp:
        table = self._table()
        # The same paths without /v1, as in llama.cpp, for clients with such a base URL.
        short = [row for row in table if row[0].startswith("/v1/") and not row[0].startswith("/v1/messages")]
        table += [(path.removeprefix("/v1"), method, handler) for path, method, handler in short]
        routes = [Route(path, _Endpoint(handler, path), methods=[method]) for path, method, handler in table]

        @asynccontextmanager
        async def lifespan(app: Any) -> Any:
            self.engines.start()
            await self._first_engine()
            preparing = asyncio.create_task(self.parser.checker.prepare())
            tidying = asyncio.create_task(self.stored.tidy())
            yield
            preparing.cancel()
            tidying.cancel()
            await self.engines.close()
            self.parser.texts.close()
            self.parser.checker.close()
            if self.tracer is not None:
                await asyncio.get_running_loop().run_in_executor(None, self.tracer.close)

        # Only the router: Starlette's middleware would turn errors into pages before ApiMiddleware sees them.
        inner = Router(routes=routes, lifespan=lifespan, redirect_slashes=False)
        return ApiMiddleware(
            inner,
            ApiKeys(self.options.api_key),
            self.metrics,
            self.log,
            [route.path for route in routes],
            self.options.allowed_origins,
            self.options.root_path,
        )

    async def _first_engine(self) -> None:
        """Waits for the first engine. No connection is accepted before, so no client waits for the model to load."""
        while self.engines.info is None and self.engines.fatal is None and not self.draining:
            await self.engines.changed.wait()
            self.engines.changed.clear()
        self.engines.changed.set()

    def _table(self) -> list[tuple[str, str, Handler]]:
        return [
            ("/v1/models", "GET", self.models),
            ("/v1/models/", "GET", self.models),
            ("/v1/models/{name:path}", "GET", self.model),
            ("/v1/completions", "POST", self.completions),
            ("/v1/chat/completions", "POST", self.chat),
            ("/v1/chat/completions/render", "POST", self.tokens.render_chat),
            ("/v1/responses", "POST", self.responses),
            ("/v1/responses/input_tokens", "POST", self.tokens.input_tokens),
            ("/v1/responses/{id}", "GET", self.stored.retrieve),
            ("/v1/responses/{id}", "DELETE", self.stored.delete),
            ("/v1/responses/{id}/cancel", "POST", self.stored.cancel),
            ("/v1/responses/{id}/input_items", "GET", self._limited(self.stored.input_items)),
            ("/v1/embeddings", "POST", self.embeddings),
            ("/v1/score", "POST", self.score),
            ("/v1/rerank", "POST", self.rerank),
            ("/v2/rerank", "POST", self.rerank),
            ("/v1/messages", "POST", self.messages),
            ("/v1/messages/count_tokens", "POST", self.tokens.count_tokens),
            ("/tokenize", "POST", self.tokens.tokenize),
            ("/detokenize", "POST", self.tokens.detokenize),
            ("/tokenizer_info", "GET", self.tokens.tokenizer_info),
            ("/health", "GET", self.health),
            ("/ready", "GET", self.ready),
            ("/ping", "GET", self.health),
            ("/version", "GET", self.version),
            ("/metrics", "GET", self.render_metrics),
            ("/load", "GET", self.load),
            ("/server_info", "GET", self.server_info),
            ("/reset_prefix_cache", "POST", self.reset_prefix_cache),
            ("/openapi.json", "GET", self.openapi),
        ]

    # Inference

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._infer(scope, receive, send, CompletionBody, self.parser.completion)

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._infer(scope, receive, send, ChatBody, self.parser.chat)

    async def responses(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = CreateResponse(self.stored, scope["tenant"], receive, send)
        await self._infer(scope, receive, session.send, ResponsesBody, session.check, session.detach)

    async def embeddings(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._infer(scope, receive, send, EmbeddingsBody, self.parser.embedding)

    async def score(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._infer(scope, receive, send, ScoreBody, self.parser.embedding)

    async def rerank(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._infer(scope, receive, send, RerankBody, self.parser.embedding)

    async def messages(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._infer(scope, receive, send, MessagesBody, partial(parse_message, self.parser))

    async def _infer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        kind: type[B],
        check: Callable[[B, RequestContext, EngineInfo], Coroutine[Any, Any, ParsedRequest]],
        detach: Callable[[ParsedRequest, RunRequest, ExitStack], Awaitable[None]] | None = None,
    ) -> None:
        """Handles one inference request from the body to the last byte.

        `detach` takes over a background parsed, together with its place in the count of active requests.
        """
        arrival = clock()
        info = self.engine_info()
        if self.draining:
            raise ApiError(
                503, "the server is shutting down", code="draining", retry_after=self.options.shutdown_timeout
            )
        tenant, headers = scope["tenant"], scope["headers_by_name"]
        with ExitStack() as admission:
            admission.enter_context(self._admitted(tenant))
            try:
                self.engines.choose().check_queue()  # before the body is read
                data = await self.bodies.read(scope, receive)
                watcher = admission.enter_context(closing(DisconnectWatcher(receive)))
                context = RequestContext(
                    tenant, self._salt(tenant), latency_targets(headers), arrival, new_request_id(), len(data)
                )
                body, parsed = await watcher.during(self._read(data, kind, check, context, info))
                parsed.headers += request_id_headers(scope)
                self.metrics.started()
                work = partial(self._respond, parsed, body, scope)
                if parsed.is_background and detach is not None:
                    watcher.close()
                    await detach(parsed, work, admission)
                else:
                    await work(watcher, send)
            except ClientDisconnected:
                self.metrics.disconnected()
            except ConnectionResetError:
                self.metrics.disconnected()
            except RequestError as error:
                raise of_request(error) from None

    @contextmanager
    def _admitted(self, tenant: str) -> Iterator[None]:
        """Counts an inference request while it runs: for the limits of its API key, and for shutdown."""
        with self.counted(tenant):
            self.active += 1
            try:
                yield
            finally:
                self.active -= 1
                if not self.active:
                    self.collector.idle()
                    if self.draining:
                        self.quiet.set()

    async def _respond(self, parsed: ParsedRequest, body: Any, scope: Scope, watcher: Canceller, send: Send) -> None:
        generator = await respond(parsed, self.engines, self.metrics, watcher, send)
        self._trace(generator.done, parsed, body, scope)

    async def _read(
        self,
        data: bytes,
        kind: type[B],
        check: Callable[[B, RequestContext, EngineInfo], Coroutine[Any, Any, ParsedRequest]],
        context: RequestContext,
        info: EngineInfo,
    ) -> tuple[B, ParsedRequest]:
        await self.pacer.wait()
        body, others = await self._parse_all(data, kind)
        self.check_model(body.model)  # type: ignore[attr-defined]
        names = unknown_fields(others) if others else []
        parsed = await check(body, context, info)
        if names:
            self.unknown.note(names)
            parsed.headers.append((IGNORED_HEADER, header_value(names)))
        return body, parsed

    def _trace(self, done: RequestDone | None, parsed: ParsedRequest, body: Any, scope: Scope) -> None:
        if self.tracer is None or done is None:
            return
        headers = scope["headers_by_name"]
        self.tracer.request(
            RequestSpan(
                done=done,
                arrival=parsed.arrival,
                operation=_operation(body),
                model=body.model or self.names[0],
                response_model=self.names[0],
                response_id=parsed.formatter.id,
                temperature=getattr(body, "temperature", None),  # embeddings have none
                top_p=getattr(body, "top_p", None),
                gap_target=finite(parsed.promise.promised_gap),
                ttft_target=finite(parsed.promise.promised_ttft),
                error="engine_error" if done.reason == "error" else None,
                traceparent=headers.get(b"traceparent", b"").decode("latin-1") or None,
                tracestate=headers.get(b"tracestate", b"").decode("latin-1") or None,
            )
        )

    def engine_info(self) -> EngineInfo:
        """The info that requests are checked against. Raises if no engine is ready."""
        health, info = self.engines.health, self.engines.info
        if health is EngineHealth.SILENT:
            raise ApiError(503, NO_RESPONSE, code="engine_silent", retry_after=10)
        if health is not EngineHealth.READY or info is None:
            message = "the engine is not ready yet: the model is being loaded"
            raise ApiError(503, message, code="engine_starting", retry_after=2)
        return info

    async def _parse(self, data: bytes, kind: type[B]) -> B:
        return (await self._parse_all(data, kind))[0]

    async def _parse_all(self, data: bytes, kind: type[B]) -> tuple[B, dict[str, bytes]]:
        """The body, and the fields that `kind` does not define, as JSON by name."""
        try:
            if len(data) <= QUICK:
                return parse_all(data, kind, NAMES)
            return await self.parser.texts.run_in_thread(len(data), lambda: parse_all(data, kind, NAMES))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise of_json(error) from None

    def check_model(self, name: str | None) -> None:
        if name and name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(
                404,
                f"the model {name!r:.100} does not exist here; known: {known}",
                param="model",
                code="model_not_found",
            )

    # About the model

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"object": "list", "data": [self._card(name) for name in self.names]})

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["name"]
        self.check_model(name)
        await send_json(send, 200, self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        info = self.engines.info
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "weft",
            "root": self.engine_options.model or str(self.parser.texts.path),
            "parent": None,
            "max_model_len": None if info is None else info.max_model_len,
        }

    def _limited(self, handler: Handler) -> Handler:
        """The same endpoint, counted towards the limits of the API key."""

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            with self.counted(scope["tenant"]):
                await handler(scope, receive, send)

        return limited

    @contextmanager
    def counted(self, tenant: str) -> Iterator[None]:
        """Counts a request towards the limits of its API key while it runs."""
        self.limits.enter(tenant)
        try:
            yield
        finally:
            self.limits.leave(tenant)

    async def body(self, scope: Scope, receive: Receive, kind: type[B]) -> tuple[B, int]:
        """The parsed body and its size in bytes."""
        try:
            data = await self.bodies.read(scope, receive)
            return await self._parse(data, kind), len(data)
        except ConnectionResetError:
            raise ApiError(400, "the client has disconnected") from None

    # About the server

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Liveness probe: 200 if an engine process is ready and responds."""
        match self.engines.health:
            case EngineHealth.READY:
                await send_json(send, 200, {"status": "ok"})
            case EngineHealth.SILENT:
                raise ApiError(503, NO_RESPONSE, code="engine_silent", retry_after=10)
            case EngineHealth.STARTING | EngineHealth.FATAL:
                reason = self.engines.fatal or "the engine process is starting"
                raise ApiError(503, reason, code="engine_down", retry_after=2)

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Readiness probe: 200 if the server accepts new requests."""
        if self.draining:
            raise ApiError(
                503, "the server is shutting down", code="draining", retry_after=self.options.shutdown_timeout
            )
        await self.health(scope, receive, send)

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"version": __version__})

    async def render_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        data = self.metrics.render(self.engines.ready)
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", b"%d" % len(data))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"server_load": self.active, **asdict(self.engines.load)})

    async def server_info(self, scope: Scope, receive: Receive, send: Send) -> None:
        info, pids = self.engines.info, self.engines.pids
        processes = {"api": os.getpid(), "engine": next(iter(pids.values()))}
        shown = asdict(self.options)
        shown["api_key"] = len(self.options.api_key)  # the number of keys, never the keys
        await send_json(
            send,
            200,
            {
                "version": __version__,
                "model": self.names[0],
                "engine": None if info is None else msgspec.to_builtins(info),
                "engine_options": asdict(self.engine_options),
                "server_options": shown,
                "starved_steps": self.metrics.starved_steps,
                "processes": processes if len(pids) == 1 else {**processes, "engines": pids},
            },
        )

    async def reset_prefix_cache(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Drops the cached prefixes of the calling tenant only. If all tenants share the cache, drops all."""
        self.engine_info()
        tenant = scope["tenant"]
        if self._salt(tenant):
            self.resets[tenant] += 1
        else:
            self.engines.reset_cache()
        await send_json(send, 200, {"status": "ok"})

    def _salt(self, tenant: str) -> str:
        """The salt of a tenant's block hashes, or "" if all tenants share the cache.

        A reset changes the salt, so that the old blocks never match again. They are evicted like all unused blocks.
        """
        if not tenant or self.options.share_prefix_cache:
            return ""
        return f"{tenant}/{self.resets[tenant]}/"

    async def openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, openapi_document(bool(self.options.api_key), self.options.root_path))


def _operation(body: Any) -> str:
    """The operation name of OpenTelemetry's conventions."""
    if isinstance(body, PoolingBody):
        return "embeddings"
    return "text_completion" if isinstance(body, CompletionBody) else "chat"


class _Endpoint:
    """An endpoint as an ASGI application. Starlette calls an object that is not a function directly as one."""

    def __init__(self, handler: Handler, path: str) -> None:
        self._handler = handler
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["weft_route"] = self._path  # for the metrics: the pattern, such as "/v1/responses/{id}", not the id
        await self._handler(scope, receive, send)
