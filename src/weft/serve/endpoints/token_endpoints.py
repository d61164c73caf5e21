"""Endpoints that tokenize, detokenize and count tokens. They generate nothing."""

from typing import TYPE_CHECKING, Any

from starlette.types import Receive, Scope, Send

from weft.errors import RequestError
from weft.serve.engines.messages import clock
from weft.serve.errors import of_request
from weft.serve.http.middleware import request_id_headers, send_json
from weft.serve.protocols.anthropic_bodies import CountTokensBody, count_tokens
from weft.serve.protocols.openai_bodies import ChatBody, DetokenizeBody, LatencyTargets, TokenizeBody
from weft.serve.protocols.responses import ResponsesBody
from weft.serve.requests.request_parser import RequestContext, new_request_id
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from weft.serve.app import ApiServer


class TokenEndpoints:
    """Handlers of the token endpoints. All but tokenizer_info count towards the limits of the API key."""

    def __init__(self, server: "ApiServer") -> None:
        self.server, self.parser = server, server.parser

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.server.counted(scope["tenant"]):
            await self._tokenize(scope, receive, send)

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, size = await self.server.body(scope, receive, TokenizeBody)
        self.server.check_model(body.model)
        try:
            if (body.prompt is None) == (body.messages is None):
                raise RequestError('prompt: give either "prompt" or "messages"')
            if body.prompt is not None:
                ids = await self.parser.texts.encode(body.prompt, body.add_special_tokens is not False)
            else:
                ids = await self.parser.chat_token_ids(body, size)
            tokenizer = self.parser.texts.require_tokenizer()
        except RequestError as error:
            raise of_request(error) from None
        info = self.server.engines.info
        found: dict[str, Any] = {"count": len(ids), "max_model_len": info and info.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = await self.parser.texts.run_in_thread(
                len(ids), lambda: [tokenizer.token_piece(token) for token in ids]
            )
        await send_json(send, 200, found)

    async def count_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.server.counted(scope["tenant"]):
            body, size = await self.server.body(scope, receive, CountTokensBody)
            self.server.check_model(body.model)
            try:
                found = await count_tokens(self.parser, body, size)
            except RequestError as error:
                raise of_request(error) from None
            await send_json(send, 200, {"input_tokens": found}, request_id_headers(scope))

    async def render_chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with the prompt of a chat, as text and as token ids."""
        info = self.server.engine_info()
        with self.server.counted(scope["tenant"]):
            body, size = await self.server.body(scope, receive, ChatBody)
            self.server.check_model(body.model)
            try:
                text, ids = await self.parser.render_chat(body, size, info)
            except RequestError as error:
                raise of_request(error) from None
        shown = {"prompt": text, "prompt_token_ids": ids, "count": len(ids), "max_model_len": info.max_model_len}
        await send_json(send, 200, shown)

    async def tokenizer_info(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with the model's tokenizer_config.json and the chat template in use."""
        await send_json(send, 200, await self.parser.texts.info())

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.server.counted(scope["tenant"]):
            await self._detokenize(scope, receive, send)

    async def _detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, size = await self.server.body(scope, receive, DetokenizeBody)
        self.server.check_model(body.model)
        info = self.server.engines.info
        try:
            tokenizer = self.parser.texts.require_tokenizer()
            # The model's vocabulary may be larger than the tokenizer's: such ids have no text, but may be sampled.
            most = max(tokenizer.vocab_size, 0 if info is None else info.vocab_size)
            text = await self.parser.texts.run_in_thread(size, lambda: _decoded(tokenizer, body.tokens, most))
        except RequestError as error:
            raise of_request(error) from None
        await send_json(send, 200, {"prompt": text})

    async def input_tokens(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with the number of prompt tokens of a /v1/responses body."""
        tenant = scope["tenant"]
        with self.server.counted(tenant):
            info = self.server.engine_info()
            body, size = await self.server.body(scope, receive, ResponsesBody)
            self.server.check_model(body.model)
            context = RequestContext(tenant, "", LatencyTargets(None, None), clock(), new_request_id(), size)
            try:
                count = await self.server.stored.input_tokens(body, context, info)
            except RequestError as error:
                raise of_request(error) from None
        await send_json(send, 200, {"object": "response.input_tokens", "input_tokens": count})


def _decoded(tokenizer: Tokenizer, ids: list[int], vocab_size: int) -> str:
    if ids and (largest := max(ids)) >= vocab_size:
        raise RequestError(f"tokens names token id {largest}, outside 0..{vocab_size - 1}")
    return tokenizer.decode(ids, skip_special_tokens=False)
