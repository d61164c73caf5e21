"""ApiMiddleware: authentication, CORS headers and error responses for every request.

Pure ASGI, so that a streamed token costs only one extra `send` call.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
import traceback
from collections.abc import Iterable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.observe.metrics import REFUSALS, ServerMetrics
from weft.serve.errors import ApiError, as_anthropic
from weft.serve.http.cors import PREFLIGHT, SAFE_METHODS, AllowedOrigins, check_origin
from weft.serve.log_limits import LogRateLimit
from weft.serve.protocols.formatter import to_json

# Paths that need no key: probes have none, and nothing is revealed.
OPEN_PATHS = frozenset(("/health", "/ready", "/ping", "/version"))
ANTHROPIC = "/v1/messages"  # this path and all paths under it use Anthropic's API
_ID = re.compile(rb"[\x21-\x7e]{1,128}")


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


class ApiMiddleware:
    """The outermost ASGI layer: authentication, error objects for every failure, and the count of responses."""

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        metrics: ServerMetrics,
        error_log: LogRateLimit,
        paths: Iterable[str],
        origins: Iterable[str] | None = None,
        root_path: str = "",
        open_paths: frozenset[str] = OPEN_PATHS,
    ) -> None:
        self.app, self.keys, self.metrics, self.error_log = app, keys, metrics, error_log
        self.paths = frozenset(paths)
        self.origins = AllowedOrigins(origins)
        self.root_path = root_path  # a proxy may keep this prefix of the path, or remove it
        self.open_paths = open_paths

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

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *self.origins.headers(allowed_origin)]
            await send(message)

        scope["headers_by_name"] = headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        scope["random_id"] = random_id = secrets.token_hex(12)
        scope["request_id"] = given if _ID.fullmatch(given) else random_id.encode()
        allowed_origin = self.origins.allowed(headers.get(b"origin"))
        scope["app"] = self  # makes the router raise HTTPException for an unknown path
        try:
            if allowed_origin and scope["method"] == "OPTIONS":  # a CORS preflight of a browser, which has no key
                await send_json(send_and_note_status, 200, {}, PREFLIGHT)
                return
            if scope["method"] not in SAFE_METHODS and allowed_origin is None:
                check_origin(headers)
            if scope["path"] not in self.open_paths:
                scope["tenant"] = self.keys.tenant(headers)
            await self.app(scope, receive, send_and_note_status)
        except ApiError as error:
            if not status:
                self._note(error)
                await _fail(send_and_note_status, error, scope)
        except HTTPException as error:
            if not status:
                await _refuse(send_and_note_status, error, scope)
        except asyncio.CancelledError:  # the server shuts down
            if not status:
                ending = ApiError(503, "the server is shutting down", code="draining", retry_after=5)
                await _fail(send_and_note_status, ending, scope)
        except Exception:
            self.error_log.write(f"weft: an error in request {scope['request_id'].decode()}:\n{traceback.format_exc()}")
            if not status:
                wrong = ApiError(500, "something went wrong inside the server; its log says more", code="internal")
                await _fail(send_and_note_status, wrong, scope)
        finally:
            path = scope.get("weft_route", "other")
            self.metrics.record_response(path if path in self.paths else "other", status or 499)

    def _note(self, error: ApiError) -> None:
        if error.code in REFUSALS:
            self.metrics.record_refused(error.code)


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
