"""Error responses: always the same JSON object. The HTTP status tells a client error from a server error.

/v1/messages returns the object in Anthropic's format.
"""

import math
import re
from typing import Any

import msgspec

from weft.errors import QueueFullError, RequestError
from weft.files import MOST_DEPTH

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "overloaded_error",
}
# Error messages of weft start with the field: "temperature=7 is out of range: ...", "max_tokens: ...".
_FIELD = re.compile(r"([a-z_]+)(?:\.[a-z_]+)?(?:\[[^\]]*\])?(?:=|:| (?:must|is|are|has|names|needs|cannot|asks)\b)")
# Starts of error messages that name no field, and the field to report for them.
_FIELD_OF_START = (
    ("a message", "messages"),
    ("messages, ", "messages"),
    ("the model's chat template", "messages"),
    ("the model has no chat template", "messages"),
    ("the prompt ", "prompt"),
    ("the text to encode", "prompt"),
    ("the request may grow", "max_tokens"),
)
_MISSING = re.compile(r"Object missing required field `([a-z_]+)`$")
_TOP = re.compile(r"[^.\[]*")  # the first part of a path such as messages[0].role
_AT = re.compile(r" - at `\$\.?([^`]*)`$")


class ApiError(Exception):
    """Ends a request with an HTTP status and an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after  # seconds
        self.details = details or {}  # extra fields of the error object: numbers that explain it

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.details}
        return {"error": error}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        if self.status == 401:
            return [(b"www-authenticate", b"Bearer")]
        found = []
        if self.status == 413 or self.code in ("body_timeout", "bodies_full"):
            found.append((b"connection", b"close"))  # the rest of the body is not read
        if self.retry_after is not None:
            found.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        return found


def as_anthropic(body: dict[str, Any], request_id: str | None = None) -> dict[str, Any]:
    """The error object in Anthropic's format. Keeps `param` and `code`."""
    error = dict(body["error"])
    if error["type"] == "internal_error":
        error["type"] = "api_error"
    elif error["code"] == "body_too_large":
        error["type"] = "request_too_large"
    elif error["code"] == "context_length_exceeded":  # agents look for this text, and then shorten the conversation
        error["message"] = f"prompt is too long: {error['message']}"
    found = {"type": "error", "error": error}
    return found if request_id is None else {**found, "request_id": request_id}


def from_request_error(error: RequestError) -> ApiError:
    """The response for a RequestError: 503 if the queue is full, else 400."""
    if isinstance(error, QueueFullError):
        return ApiError(503, str(error), code="queue_full", retry_after=1)
    found = _FIELD.match(str(error))
    blamed = [field for start, field in _FIELD_OF_START if str(error).startswith(start)]
    return ApiError(400, str(error), param=blamed[0] if blamed else found[1] if found else None)


def from_json_error(error: msgspec.MsgspecError | UnicodeDecodeError | RecursionError) -> ApiError:
    """The 400 response for a body that is not valid JSON, or does not match its schema."""
    if isinstance(error, RecursionError):
        return ApiError(400, f"the body is nested too deep: {MOST_DEPTH} levels are allowed")
    text = str(error)
    if isinstance(error, msgspec.ValidationError):
        at = _AT.search(text)
        if at is None:
            missing = _MISSING.search(text)
            return ApiError(400, f"the body is not what is needed: {text}", param=missing[1] if missing else None)
        field = at[1] or None
        wrong = text[: at.start()].replace("`", "")
        top = _TOP.match(field or "")
        message = f"{field or 'the body'}: {wrong[:1].lower()}{wrong[1:]}"
        return ApiError(400, message, param=top[0] or None if top else None)
    return ApiError(400, f"the body is not valid JSON: {text}")
