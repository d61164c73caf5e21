"""RequestParser: turns a request body into a ParsedRequest. Checks all of it, and encodes the prompt to token ids."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weft.core import Promise
from weft.engine.engine import Wishes
from weft.engine.executor import TokenLogprobs
from weft.engine.params import MAX_LOGPROBS, SamplingParams, StructuredOutputs, Thoughts
from weft.engine.pooling import check_dimensions, pooling_params
from weft.errors import RequestError
from weft.serve.engines.engine_prompt import EnginePrompt
from weft.serve.engines.messages import EngineInfo
from weft.serve.errors import ApiError
from weft.serve.output.choice import Choice
from weft.serve.protocols.chat_formatter import ChatFormatter
from weft.serve.protocols.completion_formatter import CompletionFormatter
from weft.serve.protocols.embeddings import EmbeddingChoice, EmbeddingsBody, PoolingBody
from weft.serve.protocols.formatter import Formatter
from weft.serve.protocols.openai_bodies import (
    ChatBody,
    CompletionBody,
    Json,
    SamplingBody,
    sampling_params,
    structure_field,
)
from weft.serve.protocols.responses_bodies import ResponsesBody, as_chat
from weft.serve.protocols.responses_formatter import ResponsesFormatter
from weft.serve.requests.parsed_request import ParsedRequest, promise_headers
from weft.serve.requests.prompt_length import (
    TokenIds,
    check_length,
    check_prompt_logprobs,
    kept_tokens,
    prompt_field,
    says_length,
)
from weft.serve.requests.prompt_reader import PromptReader
from weft.serve.requests.request_context import RequestContext
from weft.serve.requests.structure_checker import StructureChecker
from weft.serve.requests.text_processor import TextProcessor
from weft.serve.requests.tool_choice import ToolChoice
from weft.text.reasoning import REASONING_PARSERS, initial_state, make_reasoning_parser

NOT_PROMISED = (b"x-slo-promise", b"not promised")  # the answer to x-slo headers if the server has no targets
DEFAULT_MAX_TOKENS = 16  # of a text completion, as at OpenAI; a chat may fill the whole context


@dataclass(frozen=True)
class RequestParser:
    """Parses the requests for one model. Owns the text processor, the prompt reader and the structure checker."""

    texts: TextProcessor
    defaults: SamplingParams  # the sampling parameters that the model recommends
    model: str  # the model name in answers
    tool_parser: str | None
    reasoning_parser: str | None
    checker: StructureChecker
    pooling: str = "last"  # how the model's hidden states become an embedding
    fingerprint: str | None = None  # hash of the model path, the engine options and weft's version
    max_logprobs: int = MAX_LOGPROBS  # most alternatives per token that a request may ask for
    tokens_as_ids: bool = False  # logprobs name tokens by id, unless the request says otherwise
    usage_in_last_chunk: bool = False  # every stream ends with a usage chunk
    prompt_reader: PromptReader = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_reader", PromptReader(self.texts))

    # Completions

    async def parse_completion(self, body: CompletionBody, context: RequestContext, info: EngineInfo) -> ParsedRequest:
        shown, sampled = _completion_counts(body)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        keeps = kept_tokens(body, max_tokens, info)
        prompts = await self.prompt_reader.encode_completion(body, sampled, info, keeps)
        echo_logprobs = body.logprobs if body.echo else None  # logprobs for the prompt's tokens too
        params = sampling_params(
            body,
            self.defaults,
            n=sampled,
            max_tokens=max(1, max_tokens),
            logprobs=0 if sampled > shown and body.logprobs is None else body.logprobs,
            prompt_logprobs=body.prompt_logprobs
            if echo_logprobs is None
            else max(echo_logprobs, body.prompt_logprobs or 0),
        )
        formatter = CompletionFormatter(
            f"cmpl-{context.response_id}",
            self.model,
            self.texts.tokenizer,
            logprobs=body.logprobs,
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=self._tokens_as_ids(body),
            fingerprint=self.fingerprint,
            prompts=[(ids, await self.prompt_reader.decode(ids) if body.echo else "") for ids in prompts],
            per_prompt=sampled,
            echo=bool(body.echo),
            prompt_logprobs=body.prompt_logprobs is not None,
            keeps=shown,
            generates=body.max_tokens != 0,
        )
        choices = []
        for number, ids in enumerate(prompts):
            shared: dict[int, TokenLogprobs] = {}  # prompt logprobs of the first choice, used by all
            choices += [
                Choice(number * sampled + index, self.texts.tokenizer, ids, params, prompt_logprobs=shared)
                for index in range(sampled)
            ]
        return await self._parsed_request(body, context, info, prompts, params, choices, formatter)

    async def parse_pooling(self, body: PoolingBody, context: RequestContext, info: EngineInfo) -> ParsedRequest:
        """A request that pools its prompts: for embeddings, scores or reranking."""
        if not self.pooling:
            raise RequestError(f"{self.model} pools in a way that is not supported: its 1_Pooling/config.json says how")
        if isinstance(body, EmbeddingsBody):
            check_dimensions(body.dimensions or None, info.hidden_size)
        completion = body.completion()
        keeps = kept_tokens(completion, 1, info)
        try:
            prompts = await self.prompt_reader.encode_completion(completion, 1, info, keeps)
        except RequestError as error:
            raise ApiError(400, str(error), param=body.field) from None
        params = pooling_params(self.pooling)
        formatter = body.formatter(f"embd-{context.response_id}", self.model)
        choices: list[Choice] = [EmbeddingChoice(index, None, ids, params) for index, ids in enumerate(prompts)]
        return await self._parsed_request(completion, context, info, prompts, params, choices, formatter)

    # Chats

    async def parse_response(self, body: ResponsesBody, context: RequestContext, info: EngineInfo) -> ParsedRequest:
        """A chat request with the answer format of /v1/responses."""
        # Random only: a stored response is found by its id, and the id is part of a path.
        formatter = ResponsesFormatter(
            f"resp_{context.random_id}", self.model, self.texts.tokenizer, body, self.tokens_as_ids
        )
        chat = await self.texts.run_offloaded(context.size, lambda: as_chat(body))
        parsed = await self.parse_chat(chat, context, info, formatter)
        parsed.usage_in_last_chunk = True  # the last event carries the usage
        return parsed

    async def parse_chat(
        self,
        body: ChatBody,
        context: RequestContext,
        info: EngineInfo,
        formatter: Formatter | None = None,
        *,
        fits: bool = False,
    ) -> ParsedRequest:
        """A chat request. `fits` lowers max_tokens to the room that the context has left."""
        if not body.messages:
            raise RequestError("messages is empty: a chat needs at least one message")
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true")
        most = _chat_max_tokens(body)
        if most == 0:
            raise RequestError("max_tokens=0 leaves nothing to answer: it must be at least 1")
        tools = ToolChoice.of(body)
        ids, text = await self.prompt_reader.encode_chat(body, context.size, tools, most, info)
        if fits and most is not None:
            most = max(1, min(most, info.max_model_len - len(ids)))
        prompt_end = text[-32:]
        begun = _text_of(body.messages[-1]) if body.continue_final_message else None
        params = self._chat_params(body, tools, most, prompt_end, begun)
        formatter = formatter or self._chat_formatter(body, context, ids, legacy=tools.legacy)
        choices = []
        for index in range(params.n):
            reasoning = None
            if self.reasoning_parser is not None:
                reasoning = make_reasoning_parser(self.reasoning_parser, prompt_end, begun)
            parser = tools.parser(self.tool_parser)
            single = not tools.parallel
            choice = Choice(index, self.texts.tokenizer, ids, params, reasoning=reasoning, tools=parser, single=single)
            choices.append(choice)
        return await self._parsed_request(body, context, info, [ids], params, choices, formatter)

    async def render_chat(self, body: ChatBody, size: int, info: EngineInfo) -> tuple[str, TokenIds]:
        """The prompt of a chat, as text and as token ids. `size` is RequestContext.size."""
        ids, text = await self.prompt_reader.encode_chat(body, size, ToolChoice.of(body), _chat_max_tokens(body), info)
        return (
            text if body.truncate_prompt_tokens is None else await self.prompt_reader.decode(ids, special=True)
        ), ids

    def _chat_formatter(
        self, body: ChatBody, context: RequestContext, prompt: TokenIds, *, legacy: bool
    ) -> ChatFormatter:
        return ChatFormatter(
            f"chatcmpl-{context.response_id}",
            self.model,
            self.texts.tokenizer,
            logprobs=bool(body.logprobs),
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=self._tokens_as_ids(body),
            fingerprint=self.fingerprint,
            prompt=prompt,
            prompt_logprobs=body.prompt_logprobs is not None,
            reasoning=body.include_reasoning is not False,
            legacy=legacy,
        )

    def _chat_params(
        self, body: ChatBody, tools: ToolChoice, max_tokens: int | None, prompt_end: str, begun: str | None
    ) -> SamplingParams:
        special: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": None}
        if body.logprobs:
            special["logprobs"] = body.top_logprobs or 0
        if (structure := tools.structure()) is not None:
            special["structured_outputs"] = structure  # overrides response_format: the client requires a tool call
        params = sampling_params(body, self.defaults, **special)
        return self._allow_reasoning(self._allow_calls(params, tools), prompt_end, begun)

    def _allow_calls(self, params: SamplingParams, tools: ToolChoice) -> SamplingParams:
        """Adds tool calls as an alternative to the required structure, if the chat may call tools."""
        if params.structured_outputs is None:
            return params
        calls = tools.calls(self.tool_parser, self.texts.template.source)
        if calls is None:
            return params
        return replace(params, structured_outputs=replace(params.structured_outputs, calls=calls))

    def _allow_reasoning(self, params: SamplingParams, prompt_end: str, begun: str | None) -> SamplingParams:
        """Lets a reasoning model think freely first. The structure applies after its reasoning."""
        if params.structured_outputs is None or self.reasoning_parser is None:
            return params
        state = initial_state(self.reasoning_parser, prompt_end, begun)
        if state.is_over:
            return params
        tags = REASONING_PARSERS[self.reasoning_parser]
        thoughts = Thoughts(tags.start, tags.end, state.is_inside)
        return replace(params, structured_outputs=replace(params.structured_outputs, behind=thoughts))

    def _tokens_as_ids(self, body: SamplingBody) -> bool:
        own = body.return_tokens_as_token_ids
        return self.tokens_as_ids if own is None else own

    # All requests

    async def _parsed_request(
        self,
        body: SamplingBody,
        context: RequestContext,
        info: EngineInfo,
        prompts: list[TokenIds],
        params: SamplingParams,
        choices: list[Choice],
        formatter: Formatter,
    ) -> ParsedRequest:
        await self._check(body, params, prompts, info)
        wishes = _wishes(body, context, info)
        salt = context.salt + (body.cache_salt or "")
        engine_params = replace(params, stop=None)  # the API process looks for stop strings
        promise = Promise()
        if info.has_targets and not wishes.batch:
            own = (_seconds(wishes.ttft_target_ms), _seconds(wishes.gap_target_ms))
            constrained = params.structured_outputs is not None
            promise = info.targets.promise(max(map(len, prompts)), *own, constrained)
        check_prompt_logprobs(prompts, params)
        return ParsedRequest(
            formatter=formatter,
            prompts=[
                EnginePrompt(np.array(ids, np.int32).tobytes(), engine_params, wishes, salt, context.request_id)
                for ids in prompts
            ],
            prompt_tokens=[len(ids) for ids in prompts],
            choices=choices,
            arrival=context.arrival,
            max_tokens=params.max_tokens,
            promise=promise,
            stream=bool(body.stream),
            usage_in_last_chunk=body.usage_in_last_chunk or self.usage_in_last_chunk,
            usage_in_every_chunk=body.usage_in_every_chunk,
            may_be_large=any(one is not None for one in (params.logprobs, params.prompt_logprobs, params.pooling)),
            headers=promise_headers(promise) if info.has_targets or not any(context.targets) else [NOT_PROMISED],
        )

    async def _check(
        self, body: SamplingBody, params: SamplingParams, prompts: list[TokenIds], info: EngineInfo
    ) -> None:
        if params.stop_strings and self.texts.tokenizer is None:
            raise RequestError(
                "stop: the model has no tokenizer.json, so there is no text to look at: use stop_token_ids"
            )
        if params.structured_outputs is not None:
            await self._check_structure(body, params.structured_outputs)
        params.check_vocabulary(info.vocab_size)
        _check_logprobs(params, self.max_logprobs, "top_logprobs" if isinstance(body, ChatBody) else "logprobs")
        for ids in prompts:
            check_length(len(ids), params.max_tokens if says_length(body) else None, info, prompt_field(body))

    async def _check_structure(self, body: SamplingBody, structure: StructuredOutputs) -> None:
        try:
            await self.checker.check(structure)
        except RequestError as error:
            raise ApiError(400, str(error), param=structure_field(body)) from None


def _completion_counts(body: CompletionBody) -> tuple[int, int]:
    """The number of choices per prompt in the answer, and the number that is sampled (best_of)."""
    if body.suffix:
        raise RequestError("suffix: this server cannot fill in between two texts; leave it out")
    shown = body.n or 1
    sampled = max(shown, body.best_of or shown)
    if body.best_of is not None and body.best_of < shown:
        raise RequestError(f"best_of={body.best_of} is below n={shown}")
    if sampled > shown and body.stream:
        raise RequestError(f"best_of={sampled}: choosing the best of several cannot be streamed")
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens=0 leaves nothing to answer: it must be at least 1, or echo must be true")
    return shown, sampled


def _chat_max_tokens(body: ChatBody) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _text_of(message: Json) -> str:
    """The text of a message; a list of parts is joined."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _wishes(body: SamplingBody, context: RequestContext, info: EngineInfo) -> Wishes:
    batch = body.service_tier == "flex"
    ttft_ms, gap_ms = context.targets
    if batch and (ttft_ms or gap_ms):
        raise RequestError("service_tier=flex is promised nothing: leave the x-slo headers out")
    if not info.has_targets:
        ttft_ms = gap_ms = None  # response headers tell the client so (NOT_PROMISED)
    # The HTTP field `priority` only orders prompts of the same API key, as `user` does: `Wishes.precedence`.
    # `Wishes.priority` is the engine-wide class, which `weft.LLM.generate(priority=...)` sets. It stays 0
    # here: fairness decides between API keys, and no client can put itself before others.
    return Wishes(
        priority=0,
        tenant=context.tenant,
        precedence=body.priority or 0,
        batch=batch,
        gap_target_ms=gap_ms,
        ttft_target_ms=ttft_ms,
        user=body.user or "",
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _check_logprobs(params: SamplingParams, most: int, field: str) -> None:
    """Raises if too many alternatives per token are asked for. `field` is the body's field for output logprobs."""
    for name, wanted in ((field, params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if wanted is not None and wanted > most:
            raise RequestError(f"{name}: {wanted} alternatives a token are wanted, and {most} may be (--max-logprobs)")
