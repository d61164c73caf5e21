"""Endpoints about the server and its model: names, probes, metrics, options, cache reset."""

import os
from dataclasses import asdict
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from weft import __version__
from weft.observe.metrics import CONTENT_TYPE
from weft.serve.engines.engine_client import EngineHealth
from weft.serve.errors import ApiError
from weft.serve.http.middleware import send_json
from weft.serve.protocols.openapi import openapi_document
from weft.serve.server_state import NO_RESPONSE, ServerState


class StatusEndpoints:
    """Handlers of the endpoints that only report, and of the cache reset."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"object": "list", "data": [self._card(name) for name in self._state.model_names]})

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["name"]
        self._state.check_model(name)
        await send_json(send, 200, self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        state, info = self._state, self._state.engines.info
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "weft",
            "root": state.engine_options.model or str(state.parser.texts.path),
            "parent": None,
            "max_model_len": None if info is None else info.max_model_len,
        }

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Liveness probe: 200 if an engine process is ready and responds."""
        engines = self._state.engines
        match engines.health:
            case EngineHealth.READY:
                await send_json(send, 200, {"status": "ok"})
            case EngineHealth.SILENT:
                raise ApiError(503, NO_RESPONSE, code="engine_silent", retry_after=10)
            case EngineHealth.STARTING | EngineHealth.FAILED:
                reason = engines.failure or "the engine process is starting"
                raise ApiError(503, reason, code="engine_down", retry_after=2)

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Readiness probe: 200 if the server accepts new requests."""
        self._state.check_not_draining()
        await self.health(scope, receive, send)

    async def version(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"version": __version__})

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        data = self._state.metrics.render(self._state.engines.ready)
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", b"%d" % len(data))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"server_load": self._state.active, **asdict(self._state.engines.load)})

    async def server_info(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        info, pids = state.engines.info, state.engines.pids
        processes = {"api": os.getpid(), "engine": next(iter(pids.values()))}
        shown = asdict(state.options)
        shown["api_key"] = len(state.options.api_key)  # the number of keys, never the keys
        await send_json(
            send,
            200,
            {
                "version": __version__,
                "model": state.model_names[0],
                "engine": None if info is None else msgspec.to_builtins(info),
                "engine_options": asdict(state.engine_options),
                "server_options": shown,
                "starved_steps": state.metrics.starved_steps,
                "processes": processes if len(pids) == 1 else {**processes, "engines": pids},
            },
        )

    async def reset_prefix_cache(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Drops the cached prefixes of the calling tenant only. If all tenants share the cache, drops all."""
        self._state.engine_info()  # raises if no engine is ready
        tenant = scope["tenant"]
        if self._state.salt(tenant):
            self._state.cache_resets[tenant] += 1
        else:
            self._state.engines.reset_cache()
        await send_json(send, 200, {"status": "ok"})

    async def openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        options = self._state.options
        await send_json(send, 200, openapi_document(bool(options.api_key), options.root_path))
