"""ApiMiddleware: authentication, rate limits, body limits and error responses for every request.

Pure ASGI, so that a streamed token costs only one extra `send` call.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.observe.metrics import REFUSALS, ServerMetrics
from weft.serve.errors import ApiError, as_anthropic
from weft.serve.http.cors import PREFLIGHT, SAFE_METHODS, AllowedOrigins, check_origin
from weft.serve.log_limits import LogRateLimit
from weft.serve.protocols.formatter import to_json

OPEN_PATHS = frozenset(("/health", "/ready", "/ping", "/version"))  # open: probes have no keys, and nothing is revealed
ANTHROPIC = "/v1/messages"  # this path and all paths under it use Anthropic's API
_ID = re.compile(rb"[\x21-\x7e]{1,128}")
BODY_TIMEOUT = 30.0  # seconds; the most that a client may take to send its body
TOGETHER = 256 << 20  # bytes; limit for all incomplete bodies together, but at least four of the largest
UNCOUNTED = 1 << 16  # bytes of each body that do not count: a connection buffers that many anyway


class ApiKeys:
    """API keys, stored as SHA-256 digests and compared in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.strip().encode()).digest() for key in keys]

    def tenant(self, headers: dict[bytes, bytes]) -> str:
        """The tenant: a name made from the key's digest; "" if the server has no keys. Raises 401 for a bad key."""
        if not self._digests:
            return ""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = [key.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip()]
        if not any(given):
            message = "no API key was given: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
            raise ApiError(401, message, code="missing_api_key")
        for digest in [hashlib.sha256(key).digest() for key in given if key]:
            found = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them: constant time
            if any(found):
                return digest[:12].hex()
        raise ApiError(401, "the API key is not one that this server knows", code="invalid_api_key")


class RateLimits:
    """Limits per API key: concurrent requests, and requests per minute."""

    def __init__(self, per_minute: int | None, concurrent: int | None) -> None:
        self.per_minute, self.concurrent = per_minute, concurrent
        self.running: Counter[str] = Counter()
        self._recent: dict[str, deque[float]] = {}

    def enter(self, tenant: str) -> None:
        if self.concurrent is not None and self.running[tenant] >= self.concurrent:
            raise ApiError(
                429,
                f"{self.running[tenant]} requests of this key run already, which is all that may: wait for one to end",
                code="concurrency",
                retry_after=1,
            )
        if self.per_minute is not None:
            self._count(tenant, self.per_minute)
        self.running[tenant] += 1

    def leave(self, tenant: str) -> None:
        self.running[tenant] -= 1
        if not self.running[tenant]:
            del self.running[tenant]

    def _count(self, tenant: str, most: int) -> None:
        now = time.monotonic()
        recent = self._recent.setdefault(tenant, deque())
        while recent and recent[0] <= now - 60:
            recent.popleft()
        if len(recent) >= most:
            wait = recent[0] + 60 - now
            message = f"{most} requests of this key came within a minute, and no more may: try again in {wait:.0f} s"
            raise ApiError(429, message, code="rate_limit", retry_after=wait)
        recent.append(now)


class ApiMiddleware:
    """The outermost ASGI layer: authentication, error objects for every failure, and the count of responses."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        metrics: ServerMetrics,
        log: LogRateLimit,
        paths: Iterable[str],
        origins: Iterable[str] | None = None,
        root_path: str = "",
    ) -> None:
        self.app, self.keys, self.metrics, self.log = app, keys, metrics, log
        self.paths = frozenset(paths)
        self.origins = AllowedOrigins(origins)
        self.root_path = root_path  # a proxy may keep this prefix of the path, or remove it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            else:
                await self.app(scope, receive, send)
            return
        if self.root_path and scope["path"].startswith(self.root_path + "/"):
            scope["path"] = scope["path"].removeprefix(self.root_path)
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *self.origins.headers(open_to)]
            await send(message)

        scope["headers_by_name"] = headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        scope["random_id"] = random_id = secrets.token_hex(12)
        scope["request_id"] = given if _ID.fullmatch(given) else random_id.encode()
        open_to = self.origins.open_to(headers.get(b"origin"))
        scope["app"] = self  # makes the router raise HTTPException for an unknown path
        try:
            if open_to and scope["method"] == "OPTIONS":  # a CORS preflight of a browser, which has no key
                await send_json(counted, 200, {}, PREFLIGHT)
                return
            if scope["method"] not in SAFE_METHODS and open_to is None:
                check_origin(headers)
            if scope["path"] not in OPEN_PATHS:
                scope["tenant"] = self.keys.tenant(headers)
            await self.app(scope, receive, counted)
        except ApiError as error:
            if not status:
                self._note(error)
                await _fail(counted, error, scope)
        except HTTPException as error:
            if not status:
                await _refuse(counted, error, scope)
        except asyncio.CancelledError:  # the server shuts down
            if not status:
                ending = ApiError(503, "the server is shutting down", code="draining", retry_after=5)
                await _fail(counted, ending, scope)
        except Exception:
            self.log.write(f"weft: an error in request {scope['request_id'].decode()}:\n{traceback.format_exc()}")
            if not status:
                wrong = ApiError(500, "something went wrong inside the server; its log says more", code="internal")
                await _fail(counted, wrong, scope)
        finally:
            path = scope.get("weft_route", "other")
            self.metrics.responded(path if path in self.paths else "other", status or 499)

    def _note(self, error: ApiError) -> None:
        if error.code in REFUSALS:
            self.metrics.refused(error.code)


async def _refuse(send: Send, error: HTTPException, scope: Scope) -> None:
    """Sends the router's 404 or 405 as an error object."""
    method, path = scope["method"], scope["path"]
    message = f"{path} does not exist" if error.status_code == 404 else f"{path} does not take {method}"
    wrong = ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else "method_not_allowed")
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    await _fail(send, wrong, scope, headers)


async def _fail(send: Send, error: ApiError, scope: Scope, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Sends an error in the format of the path: OpenAI's, or Anthropic's."""
    body = error.body
    if _is_anthropic(scope):
        body = as_anthropic(body, scope["request_id"].decode())
    await send_json(send, error.status, body, [*error.headers, *headers, *request_id_headers(scope)])


def request_id_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The response headers with the request id. Anthropic's API uses another name as well."""
    id = scope["request_id"]
    return [(b"x-request-id", id), (b"request-id", id)] if _is_anthropic(scope) else [(b"x-request-id", id)]


def _is_anthropic(scope: Scope) -> bool:
    path: str = scope["path"]
    return path == ANTHROPIC or path.startswith(ANTHROPIC + "/")


async def send_json(send: Send, status: int, body: Any, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Sends a JSON response."""
    data = body if isinstance(body, bytes) else to_json(body)
    every = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": every})
    await send({"type": "http.response.body", "body": data})


class BodyReader:
    """Reads request bodies. Limits the size of each, and the sum of all incomplete ones."""

    def __init__(self, most: int) -> None:
        self.most = most  # bytes of one body
        self.most_together = max(TOGETHER, 4 * most)
        self.held = 0  # bytes of incomplete bodies, without the first UNCOUNTED bytes of each

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Returns the whole body of a request. Raises if it takes longer than BODY_TIMEOUT."""
        length = scope["headers_by_name"].get(b"content-length", b"")
        if length.isdigit() and int(length) > self.most:
            raise _too_large(int(length), self.most)
        body = bytearray()  # not a list of pieces: they may be tiny, and each would be an object
        counted = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionResetError
                    body += message.get("body", b"")
                    if len(body) > self.most:
                        raise _too_large(len(body), self.most)
                    if not message.get("more_body", False):
                        return bytes(body)
                    more = max(0, len(body) - UNCOUNTED) - counted
                    self._check(more)
                    self.held, counted = self.held + more, counted + more
        except TimeoutError:
            raise ApiError(400, f"the body did not come within {BODY_TIMEOUT:g} s", code="body_timeout") from None
        finally:
            self.held -= counted

    def _check(self, more: int) -> None:
        """Raises if incomplete bodies would hold too much. Small bodies do not count, so stalled ones block none."""
        if more and self.held + more > self.most_together:
            message = f"unfinished bodies have {self.held} bytes, and {self.most_together} may be: try again later"
            raise ApiError(503, message, code="bodies_full", retry_after=1)


def _too_large(size: int, limit: int) -> ApiError:
    message = f"the body has {size} bytes or more, and {limit} are allowed (--max-body-mb)"
    return ApiError(413, message, code="body_too_large")
