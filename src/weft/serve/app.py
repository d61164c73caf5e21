"""The ASGI application: the table of routes, and what happens when the server starts and stops."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.serve.endpoints.inference_endpoints import InferenceEndpoints
from weft.serve.endpoints.recording_endpoint import RecordingEndpoint, record_lags
from weft.serve.endpoints.responses_api.responses_endpoints import ResponsesEndpoints
from weft.serve.endpoints.status_endpoints import StatusEndpoints
from weft.serve.endpoints.token_endpoints import TokenEndpoints
from weft.serve.http.middleware import OPEN_PATHS, ApiKeys, ApiMiddleware
from weft.serve.page.page_endpoints import PageEndpoints
from weft.serve.server_state import ServerState

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


def build_app(state: ServerState) -> ASGIApp:
    """The application of a server. Its lifespan starts and ends the engines."""
    most_body = state.body_reader.most
    responses = ResponsesEndpoints(state.parser, state.error_log, most_body, is_on=state.options.response_store)
    table = _routes(state, responses)
    # The same paths without /v1, as in llama.cpp, for clients with such a base URL.
    short = [row for row in table if row[0].startswith("/v1/") and not row[0].startswith("/v1/messages")]
    table += [(path.removeprefix("/v1"), method, handler) for path, method, handler in short]
    page = PageEndpoints(state) if state.options.page else None
    if page is not None:
        table += page.routes()
    routes = [Route(path, _Endpoint(handler, path), methods=[method]) for path, method, handler in table]

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        state.engines.start()
        await _wait_for_engine(state)
        preparing = asyncio.create_task(state.parser.checker.prepare())
        tidying = asyncio.create_task(responses.tidy())
        watching = asyncio.create_task(record_lags(state))
        yield
        preparing.cancel()
        tidying.cancel()
        watching.cancel()
        if page is not None:
            await page.close()
        await state.engines.close()
        state.recording.close()
        state.parser.texts.close()
        state.parser.checker.close()
        if state.tracer is not None:
            await asyncio.get_running_loop().run_in_executor(None, state.tracer.close)

    # Only the router: Starlette's middleware would turn errors into pages before ApiMiddleware sees them.
    router = Router(routes=routes, lifespan=lifespan, redirect_slashes=False)
    return ApiMiddleware(
        router,
        ApiKeys(state.options.api_key),
        state.metrics,
        state.error_log,
        [route.path for route in routes],
        state.options.allowed_origins,
        state.options.root_path,
        OPEN_PATHS if page is None else OPEN_PATHS | page.open_paths,
    )


async def _wait_for_engine(state: ServerState) -> None:
    """Waits for the first engine. No connection is accepted before, so no client waits for the model to load."""
    engines = state.engines
    while engines.info is None and engines.failure is None and not state.draining:
        await engines.changed.wait()
        engines.changed.clear()
    engines.changed.set()


def _routes(state: ServerState, responses: ResponsesEndpoints) -> list[tuple[str, str, Handler]]:
    inference, status = InferenceEndpoints(state, responses), StatusEndpoints(state)
    tokens, recording = TokenEndpoints(state, responses), RecordingEndpoint(state)
    return [
        ("/v1/models", "GET", status.models),
        ("/v1/models/", "GET", status.models),
        ("/v1/models/{name:path}", "GET", status.model),
        ("/v1/completions", "POST", inference.handle_completions),
        ("/v1/chat/completions", "POST", inference.handle_chat),
        ("/v1/chat/completions/render", "POST", tokens.render_chat),
        ("/v1/responses", "POST", inference.handle_responses),
        ("/v1/responses/input_tokens", "POST", tokens.input_tokens),
        ("/v1/responses/{id}", "GET", responses.retrieve),
        ("/v1/responses/{id}", "DELETE", responses.delete),
        ("/v1/responses/{id}/cancel", "POST", responses.cancel),
        ("/v1/responses/{id}/input_items", "GET", _rate_limited(state, responses.input_items)),
        ("/v1/embeddings", "POST", inference.handle_embeddings),
        ("/v1/score", "POST", inference.handle_score),
        ("/v1/rerank", "POST", inference.handle_rerank),
        ("/v2/rerank", "POST", inference.handle_rerank),
        ("/v1/messages", "POST", inference.handle_messages),
        ("/v1/messages/count_tokens", "POST", tokens.count_tokens),
        ("/tokenize", "POST", tokens.tokenize),
        ("/detokenize", "POST", tokens.detokenize),
        ("/tokenizer_info", "GET", tokens.tokenizer_info),
        ("/health", "GET", status.health),
        ("/ready", "GET", status.ready),
        ("/ping", "GET", status.health),
        ("/version", "GET", status.version),
        ("/metrics", "GET", status.metrics),
        ("/load", "GET", status.load),
        ("/server_info", "GET", status.server_info),
        ("/reset_prefix_cache", "POST", status.reset_prefix_cache),
        ("/openapi.json", "GET", status.openapi),
        ("/observe/frames", "GET", recording.frames),
    ]


def _rate_limited(state: ServerState, handler: Handler) -> Handler:
    """The same endpoint, counted towards the limits of the API key."""

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        with state.rate_limited(scope["tenant"]):
            await handler(scope, receive, send)

    return limited


class _Endpoint:
    """An endpoint as an ASGI application. Starlette treats a plain function as a request handler instead."""

    def __init__(self, handler: Handler, path: str) -> None:
        self._handler = handler
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["weft_route"] = self._path  # for the metrics: the pattern, such as "/v1/responses/{id}", not the id
        await self._handler(scope, receive, send)
