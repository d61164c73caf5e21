"""The OpenAPI description of the server, made from the structs that bodies are read into."""

from typing import Any

import msgspec

from weft import __version__
from weft.serve.fields import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from weft.serve.responses import ResponsesBody

Json = dict[str, Any]

_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {
    "400": "the request is malformed; the message names the value, the limit and the way out",
    "401": "no API key, or one that is not known",
    "403": "a web page of an origin that is not allowed asks",
    "404": "no such model",
    "413": "the body is too large",
    "429": "this API key has asked for too much",
    "503": "overloaded, starting or shutting down; Retry-After says when to come back",
}
_SLO_HEADERS = [
    {
        "name": name,
        "in": "header",
        "required": False,
        "description": about,
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1e9},
    }
    for name, about in (
        ("x-slo-ttft-ms", "milliseconds from arrival to the first token that are wanted"),
        ("x-slo-gap-ms", "milliseconds between tokens that are wanted; raised to what the server can keep"),
    )
]


def description(with_keys: bool, root_path: str = "") -> Json:
    """`root_path` is where a proxy shows the server."""
    bodies = (CompletionBody, ChatBody, ResponsesBody, TokenizeBody, DetokenizeBody)
    refs, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    completion, chat, response, tokenize, detokenize = refs
    components["Error"] = _ERROR
    found: Json = {
        "openapi": "3.1.0",
        "info": {"title": "weft", "version": __version__, "description": "An OpenAI-compatible server."},
        "paths": {
            "/v1/models": {"get": _operation("Lists the names of the model")},
            "/v1/completions": {"post": _operation("Continues prompts", completion, _SLO_HEADERS, stream=True)},
            "/v1/chat/completions": {"post": _operation("Answers a conversation", chat, _SLO_HEADERS, stream=True)},
            "/v1/responses": {"post": _operation("Answers a conversation", response, _SLO_HEADERS, stream=True)},
            "/tokenize": {"post": _operation("Token ids of a prompt or of messages", tokenize)},
            "/detokenize": {"post": _operation("Text of token ids", detokenize)},
            "/health": {"get": _operation("Whether the engine is up")},
            "/ready": {"get": _operation("Whether new work is taken")},
            "/version": {"get": _operation("The version of weft")},
            "/metrics": {"get": _operation("Prometheus metrics", content="text/plain")},
            "/load": {"get": _operation("How busy the server is")},
            "/server_info": {"get": _operation("What runs here, with which options")},
            "/reset_prefix_cache": {"post": _operation("Forgets the cached prefixes of the key that asks")},
            "/openapi.json": {"get": _operation("This description")},
        },
        "components": {"schemas": components},
    }
    if root_path:
        found["servers"] = [{"url": root_path}]
    if with_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _operation(
    summary: str,
    body: Json | None = None,
    parameters: list[Json] | None = None,
    *,
    stream: bool = False,
    content: str = "application/json",
) -> Json:
    good: Json = {content: {"schema": {}}}
    if stream:
        good["text/event-stream"] = {"schema": {"type": "string"}}
    responses: Json = {"200": {"description": "OK", "content": good}}
    for status, about in _ERRORS.items():
        error: Json = {"schema": {"$ref": "#/components/schemas/Error"}}
        responses[status] = {"description": about, "content": {"application/json": error}}
    operation: Json = {"summary": summary, "responses": responses}
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
