"""Endpoints that tokenize, detokenize and count tokens. They generate nothing."""

from typing import Any

from starlette.types import Receive, Scope, Send

from weft.errors import RequestError
from weft.serve.endpoints.responses_api.responses_endpoints import ResponsesEndpoints
from weft.serve.engines.messages import clock
from weft.serve.errors import from_request_error
from weft.serve.http.middleware import request_id_headers, send_json
from weft.serve.protocols.anthropic_bodies import CountTokensBody, count_tokens
from weft.serve.protocols.latency_headers import LatencyTargets
from weft.serve.protocols.openai_bodies import ChatBody, DetokenizeBody, TokenizeBody
from weft.serve.protocols.responses_bodies import ResponsesBody
from weft.serve.requests.request_context import RequestContext
from weft.serve.server_state import ServerState
from weft.text.tokenizer import Tokenizer


class TokenEndpoints:
    """Handlers of the token endpoints. All but tokenizer_info count towards the limits of the API key."""

    def __init__(self, state: ServerState, responses: ResponsesEndpoints) -> None:
        self._state, self._parser, self._responses = state, state.parser, responses

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._state.rate_limited(scope["tenant"]):
            await self._tokenize(scope, receive, send)

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, size = await self._state.read_body(scope, receive, TokenizeBody)
        self._state.check_model(body.model)
        try:
            if (body.prompt is None) == (body.messages is None):
                raise RequestError('prompt: give either "prompt" or "messages"')
            if body.prompt is not None:
                ids = await self._parser.texts.encode(body.prompt, body.add_special_tokens is not False)
            else:
                ids = await self._parser.prompt_reader.chat_token_ids(body, size)
            tokenizer = self._parser.texts.require_tokenizer()
        except RequestError as error:
            raise from_request_error(error) from None
        info = self._state.engines.info
        found: dict[str, Any] = {"count": len(ids), "max_model_len": info and info.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = await self._parser.texts.run_offloaded(
                len(ids), lambda: [tokenizer.token_piece(token) for token in ids]
            )
        await send_json(send, 200, found)

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._state.rate_limited(scope["tenant"]):
            body, size = await self._state.read_body(scope, receive, CountTokensBody)
            self._state.check_model(body.model)
            try:
                found = await count_tokens(self._parser, body, size)
            except RequestError as error:
                raise from_request_error(error) from None
            await send_json(send, 200, {"input_tokens": found}, request_id_headers(scope))

    async def render_chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with the prompt of a chat, as text and as token ids."""
        info = self._state.engine_info()
        with self._state.rate_limited(scope["tenant"]):
            body, size = await self._state.read_body(scope, receive, ChatBody)
            self._state.check_model(body.model)
            try:
                text, ids = await self._parser.render_chat(body, size, info)
            except RequestError as error:
                raise from_request_error(error) from None
        shown = {"prompt": text, "prompt_token_ids": ids, "count": len(ids), "max_model_len": info.max_model_len}
        await send_json(send, 200, shown)

    async def tokenizer_info(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with the model's tokenizer_config.json and the chat template in use."""
        await send_json(send, 200, await self._parser.texts.tokenizer_info())

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._state.rate_limited(scope["tenant"]):
            await self._detokenize(scope, receive, send)

    async def _detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, size = await self._state.read_body(scope, receive, DetokenizeBody)
        self._state.check_model(body.model)
        info = self._state.engines.info
        try:
            tokenizer = self._parser.texts.require_tokenizer()
            # The model's vocabulary may be larger than the tokenizer's: such ids have no text, but may be sampled.
            most = max(tokenizer.vocab_size, 0 if info is None else info.vocab_size)
            text = await self._parser.texts.run_offloaded(size, lambda: _decoded(tokenizer, body.tokens, most))
        except RequestError as error:
            raise from_request_error(error) from None
        await send_json(send, 200, {"prompt": text})

    async def input_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with the number of prompt tokens of a /v1/responses body."""
        tenant = scope["tenant"]
        with self._state.rate_limited(tenant):
            info = self._state.engine_info()
            body, size = await self._state.read_body(scope, receive, ResponsesBody)
            self._state.check_model(body.model)
            context = RequestContext(
                tenant=tenant,
                salt="",
                targets=LatencyTargets(None, None),
                arrival=clock(),
                request_id=scope["request_id"].decode(),
                random_id=scope["random_id"],
                size=size,
            )
            try:
                count = await self._responses.input_tokens(body, context, info)
            except RequestError as error:
                raise from_request_error(error) from None
        await send_json(send, 200, {"object": "response.input_tokens", "input_tokens": count})


def _decoded(tokenizer: Tokenizer, ids: list[int], vocab_size: int) -> str:
    if ids and (largest := max(ids)) >= vocab_size:
        raise RequestError(f"tokens names token id {largest}, outside 0..{vocab_size - 1}")
    return tokenizer.decode(ids, skip_special_tokens=False)
