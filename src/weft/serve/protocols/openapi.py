"""The OpenAPI description of the server, generated from the body structs."""

from typing import Any

import msgspec

from weft import __version__
from weft.serve.protocols.anthropic_bodies import CountTokensBody, MessagesBody
from weft.serve.protocols.embeddings import EmbeddingsBody, RerankBody, ScoreBody
from weft.serve.protocols.openai_bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from weft.serve.protocols.responses_bodies import ResponsesBody

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
_ANTHROPIC_ERROR: Json = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": _ERROR["properties"]["error"],
        "request_id": {"type": "string"},
    },
}
_ERRORS = {
    "400": "the request is malformed; the message names the value, the limit and the way out",
    "401": "no API key, or one that is not known",
    "403": "a web page of an origin that is not allowed asks",
    "404": "no such model, or no such response of this API key",
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
        ("x-slo-tpot-ms", "another name of x-slo-gap-ms"),
        ("x-llm-d-slo-ttft-ms", "another name of x-slo-ttft-ms"),
        ("x-llm-d-slo-tpot-ms", "another name of x-slo-gap-ms"),
    )
]
_ID: Json = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


def _query(name: str, about: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "required": False, "description": about, "schema": schema}


_STREAM = [
    _query("stream", "the events of a background response that was created as a stream", {"type": "boolean"}),
    _query(
        "starting_after", "only the events behind this number", {"type": "integer", "minimum": 0, "maximum": 10**9 - 1}
    ),
]
_PAGE = [
    _query("limit", "items of a page", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}),
    _query("order", "desc: the last item first", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
    _query("after", "the id of the item before the page", {"type": "string"}),
]
_FRAMES = [
    _query(
        "since", "only frames after this number: x-weft-next of the answer before", {"type": "integer", "minimum": 0}
    ),
    _query("seconds", "only frames of the last seconds", {"type": "number", "minimum": 0}),
]


def openapi_document(with_keys: bool, root_path: str = "") -> Json:
    """The OpenAPI document. `root_path` is the path prefix under which a proxy serves the API."""
    asked = (
        CompletionBody,
        ChatBody,
        ResponsesBody,
        MessagesBody,
        CountTokensBody,
        EmbeddingsBody,
        ScoreBody,
        RerankBody,
    )
    bodies = (*asked, TokenizeBody, DetokenizeBody)
    refs, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    completion, chat, response, message, count, embeddings, score, rerank, tokenize, detokenize = refs
    components["Error"] = _ERROR
    components["AnthropicError"] = _ANTHROPIC_ERROR
    found: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "weft",
            "version": __version__,
            "description": "A server for clients of OpenAI's and of Anthropic's API.",
        },
        "paths": {
            "/v1/models": {"get": _operation("Lists the names of the model")},
            "/v1/completions": {"post": _operation("Continues prompts", completion, _SLO_HEADERS, stream=True)},
            "/v1/chat/completions": {"post": _operation("Answers a conversation", chat, _SLO_HEADERS, stream=True)},
            "/v1/chat/completions/render": {
                "post": _operation("The prompt of a conversation, as text and token ids", chat)
            },
            "/v1/responses": {"post": _operation("Answers a conversation", response, _SLO_HEADERS, stream=True)},
            "/v1/responses/input_tokens": {"post": _operation("Counts the tokens of a conversation", response)},
            "/v1/responses/{id}": {
                "get": _operation("A stored response", parameters=[_ID, *_STREAM], stream=True),
                "delete": _operation("Forgets a response; one that runs is ended", parameters=[_ID]),
            },
            "/v1/responses/{id}/cancel": {"post": _operation("Ends a background response", parameters=[_ID])},
            "/v1/responses/{id}/input_items": {
                "get": _operation("The conversation before a response", parameters=[_ID, *_PAGE])
            },
            "/v1/embeddings": {"post": _operation("Embeddings of prompts", embeddings, _SLO_HEADERS)},
            "/v1/score": {"post": _operation("Cosines of the embeddings of two texts", score, _SLO_HEADERS)},
            "/v1/rerank": {"post": _operation("Documents by the cosine with a query", rerank, _SLO_HEADERS)},
            "/v1/messages": {
                "post": _operation("Answers a conversation", message, _SLO_HEADERS, stream=True, error="AnthropicError")
            },
            "/v1/messages/count_tokens": {
                "post": _operation("Number of tokens of a conversation", count, error="AnthropicError")
            },
            "/tokenize": {"post": _operation("Token ids of a prompt or of messages", tokenize)},
            "/detokenize": {"post": _operation("Text of token ids", detokenize)},
            "/tokenizer_info": {"get": _operation("The tokenizer's configuration, with the chat template")},
            "/health": {"get": _operation("Whether the engine is up")},
            "/ready": {"get": _operation("Whether new work is taken")},
            "/version": {"get": _operation("The version of weft")},
            "/metrics": {"get": _operation("Prometheus metrics", content="text/plain")},
            "/observe/frames": {
                "get": _operation(
                    "What ran in the last minutes, as MessagePack frames",
                    parameters=_FRAMES,
                    content="application/octet-stream",
                )
            },
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
        found["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        found["security"] = [{"key": []}, {"x-api-key": []}]
    return found


def _operation(
    summary: str,
    body: Json | None = None,
    parameters: list[Json] | None = None,
    *,
    stream: bool = False,
    content: str = "application/json",
    error: str = "Error",
) -> Json:
    """One operation of a path. `error` names the schema of its error responses."""
    good: Json = {content: {"schema": {}}}
    if stream:
        good["text/event-stream"] = {"schema": {"type": "string"}}
    responses: Json = {"200": {"description": "OK", "content": good}}
    for status, about in _ERRORS.items():
        shown: Json = {"schema": {"$ref": f"#/components/schemas/{error}"}}
        responses[status] = {"description": about, "content": {"application/json": shown}}
    operation: Json = {"summary": summary, "responses": responses}
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation
