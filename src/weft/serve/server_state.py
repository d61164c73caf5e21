"""ServerState: what all requests of one server share."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from starlette.types import Receive, Scope

from weft.engine.garbage_collection import GarbageCollection
from weft.engine.options import EngineOptions
from weft.observe.metrics import ServerMetrics
from weft.observe.recording_buffer import RecordingBuffer
from weft.observe.tracing import Tracer
from weft.serve.engines.engine_client import EngineHealth
from weft.serve.engines.engine_pool import EnginePool
from weft.serve.engines.messages import EngineInfo
from weft.serve.errors import ApiError, from_json_error
from weft.serve.http.body_reader import BodyReader
from weft.serve.http.json_body import INLINE_BODY, parse_all
from weft.serve.http.rate_limits import RateLimits
from weft.serve.log_limits import LogRateLimit
from weft.serve.options import ServeOptions
from weft.serve.protocols.unsupported_fields import KNOWN_FIELDS
from weft.serve.requests.request_parser import RequestParser

B = TypeVar("B")
NO_RESPONSE = "the engine process does not respond; it is replaced if it stays so"


@dataclass
class ServerState:
    """The engines, the parser, the limits and the counters of a server. Endpoints hold a reference to it."""

    options: ServeOptions
    engine_options: EngineOptions
    model_names: tuple[str, ...]  # answers carry the first one
    parser: RequestParser
    engines: EnginePool
    metrics: ServerMetrics
    tracer: Tracer | None
    recording: RecordingBuffer
    rate_limits: RateLimits
    body_reader: BodyReader
    created: int  # seconds since the epoch
    draining: bool = False
    active: int = 0  # running inference requests
    garbage_collection: GarbageCollection = field(default_factory=GarbageCollection)
    error_log: LogRateLimit = field(default_factory=LogRateLimit)
    cache_resets: Counter[str] = field(default_factory=Counter)  # number of prefix cache resets, by tenant
    drained: asyncio.Event = field(default_factory=asyncio.Event)  # set when draining and no request is active

    def drain(self) -> None:
        """Refuses new inference requests from now on. `drained` is set when the active ones have ended."""
        self.draining = True
        self.engines.changed.set()
        if not self.active:
            self.drained.set()

    def check_not_draining(self) -> None:
        if self.draining:
            raise ApiError(
                503, "the server is shutting down", code="draining", retry_after=self.options.shutdown_timeout
            )

    @contextmanager
    def rate_limited(self, tenant: str) -> Iterator[None]:
        """Counts a request towards the limits of its API key while it runs."""
        self.rate_limits.enter(tenant)
        try:
            yield
        finally:
            self.rate_limits.leave(tenant)

    @contextmanager
    def active_request(self, tenant: str) -> Iterator[None]:
        """Counts an inference request while it runs: for the limits of its API key, and for shutdown."""
        with self.rate_limited(tenant):
            self.active += 1
            try:
                yield
            finally:
                self.active -= 1
                if not self.active:
                    self.garbage_collection.collect_when_idle()
                    if self.draining:
                        self.drained.set()

    def engine_info(self) -> EngineInfo:
        """The EngineInfo that requests are checked against. Raises if no engine is ready."""
        health, info = self.engines.health, self.engines.info
        if health is EngineHealth.SILENT:
            raise ApiError(503, NO_RESPONSE, code="engine_silent", retry_after=10)
        if health is not EngineHealth.READY or info is None:
            message = "the engine is not ready yet: the model is being loaded"
            raise ApiError(503, message, code="engine_starting", retry_after=2)
        return info

    def check_model(self, name: str | None) -> None:
        if name and name not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(
                404,
                f"the model {name!r:.100} does not exist here; known: {known}",
                param="model",
                code="model_not_found",
            )

    def salt(self, tenant: str) -> str:
        """The salt of a tenant's block hashes, or "" if all tenants share the cache.

        A reset changes the salt, so that the old blocks never match again. They are evicted like all unused blocks.
        """
        if not tenant or self.options.share_prefix_cache:
            return ""
        return f"{tenant}/{self.cache_resets[tenant]}/"

    async def read_body(self, scope: Scope, receive: Receive, body_type: type[B]) -> tuple[B, int]:
        """The parsed body and its size in bytes."""
        try:
            data = await self.body_reader.read(scope, receive)
        except ConnectionResetError:
            raise ApiError(400, "the client has disconnected") from None
        body, _ = await self.parse_body(data, body_type)
        return body, len(data)

    async def parse_body(self, data: bytes, body_type: type[B]) -> tuple[B, dict[str, bytes]]:
        """The body, and the fields that `body_type` does not define, as JSON by name."""
        try:
            if len(data) <= INLINE_BODY:
                return parse_all(data, body_type, KNOWN_FIELDS)
            return await self.parser.texts.run_offloaded(len(data), lambda: parse_all(data, body_type, KNOWN_FIELDS))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise from_json_error(error) from None
