"""From a body to a Call: everything about a request is checked here, and its prompt becomes token ids."""

import math
import secrets
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from weft.core import Promise
from weft.engine.engine import Wishes
from weft.engine.executor import TokenLogprobs
from weft.engine.params import MAX_LOGPROBS, SamplingParams, StructuredOutputs, Thoughts
from weft.errors import RequestError
from weft.serve.checker import Checker
from weft.serve.choices import Choice, ForcedCall, ForcedCalls
from weft.serve.client import Prompt
from weft.serve.errors import ApiError
from weft.serve.fields import MOST_PROMPTS, MOST_STREAMS, ChatBody, CompletionBody, Json, Sampling, TokenizeBody, Wanted
from weft.serve.fields import sampling_params as params_of
from weft.serve.formats import ChatFormat, CompletionFormat, Format
from weft.serve.infer import TTFT_HEADER, Call
from weft.serve.messages import Facts
from weft.serve.responses import ResponsesBody, ResponsesFormat, as_chat
from weft.serve.texts import Texts
from weft.text.reasoning import REASONING_PARSERS, make_reasoning_parser, place_of
from weft.text.tools import ToolParser, make_tool_parser

Ids = list[int]
MOST_CALLS = 8  # of tools in one reply, where it must consist of calls
MOST_DESCRIBED = 1_000_000  # log probabilities of prompts in one answer: about 50 MB
DEFAULT_MAX_TOKENS = 16  # of a text completion, as OpenAI has it; a chat may use all the room there is


class Caller(NamedTuple):
    """Who asks, and what it wishes of the time."""

    tenant: str  # of its API key
    salt: str  # of its part of the prefix cache
    wanted: Wanted
    arrival: float
    request_id: str
    size: int  # bytes of its body, which bound everything that is to be done about it


@dataclass(frozen=True)
class Desk:
    """What is needed to check requests for one model."""

    texts: Texts
    defaults: SamplingParams  # the model's recommendation
    model: str  # its name in answers
    tool_parser: str | None
    reasoning_parser: str | None
    checker: Checker
    max_logprobs: int = MAX_LOGPROBS  # alternatives a token that a request may ask for
    names_ids: bool = False  # tokens in logprobs are named by their ids, unless a request says otherwise
    includes_usage: bool = False  # in the last chunk of every stream

    async def completion(self, body: CompletionBody, caller: Caller, facts: Facts) -> Call:
        if body.suffix:
            raise RequestError("suffix: this server cannot fill in between two texts; leave it out")
        shown = body.n or 1
        sampled = max(shown, body.best_of or shown)
        if body.best_of is not None and body.best_of < shown:
            raise RequestError(f"best_of={body.best_of} is below n={shown}")
        if sampled > shown and body.stream:
            raise RequestError(f"best_of={sampled}: choosing the best of several cannot be streamed")
        generates = body.max_tokens != 0
        if not generates and not body.echo:
            raise RequestError("max_tokens=0 leaves nothing to answer: it must be at least 1, or echo must be true")
        keeps = max(0, body.truncate_prompt_tokens or 0)
        prompts = await self._read(body.prompt, body.add_special_tokens is not False, sampled, facts, keeps)
        prompts = [_truncated(ids, body) for ids in prompts]
        describes = body.logprobs if body.echo else None  # also the prompt's tokens
        params = params_of(
            body,
            self.defaults,
            n=sampled,
            max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens),
            logprobs=0 if sampled > shown and body.logprobs is None else body.logprobs,
            prompt_logprobs=body.prompt_logprobs if describes is None else max(describes, body.prompt_logprobs or 0),
        )
        echoed = [(ids, await self._text(ids) if body.echo else "") for ids in prompts]
        format = CompletionFormat(
            f"cmpl-{caller.request_id}",
            self.model,
            self.texts.tokenizer,
            logprobs=body.logprobs,
            token_ids=bool(body.return_token_ids),
            names_ids=self._names_ids(body),
            prompts=echoed,
            per_prompt=sampled,
            echo=bool(body.echo),
            prompt_logprobs=body.prompt_logprobs is not None,
            keeps=shown,
            generates=generates,
        )
        choices = []
        for number, ids in enumerate(prompts):
            shared: dict[int, TokenLogprobs] = {}  # what the first finds out about the prompt is true for all
            choices += [
                Choice(number * sampled + index, self.texts.tokenizer, ids, params, prompt_logprobs=shared)
                for index in range(sampled)
            ]
        return await self._call(body, caller, facts, prompts, params, choices, format)

    async def response(self, body: ResponsesBody, caller: Caller, facts: Facts) -> Call:
        """A chat that is shown in another way."""
        format = ResponsesFormat(f"resp_{caller.request_id}", self.model, self.texts.tokenizer, body, self.names_ids)
        chat = await self.texts.aside(caller.size, lambda: as_chat(body))
        call = await self.chat(chat, caller, facts, format)
        call.includes_usage = True  # its last event has it
        return call

    async def chat(self, body: ChatBody, caller: Caller, facts: Facts, format: Format | None = None) -> Call:
        if not body.messages:
            raise RequestError("messages is empty: a chat needs at least one message")
        if body.top_logprobs and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true")
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if most == 0:
            raise RequestError("max_tokens=0 leaves nothing to answer: it must be at least 1")
        tools = _Tools.of(body)
        options: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            options.setdefault("reasoning_effort", body.reasoning_effort)
            options.setdefault("enable_thinking", body.reasoning_effort != "none")
        continues = bool(body.continue_final_message)
        ids, end = await self.texts.encode_chat(
            body.messages,
            caller.size,
            {
                **options,
                "tools": tools.shown,
                "documents": body.documents,
                "add_generation_prompt": body.add_generation_prompt is not False and not continues,
            },
            continues=continues,
            most=None if body.truncate_prompt_tokens else facts.max_model_len,
        )
        ids = _truncated(ids, body)
        special: dict[str, Any] = {"max_tokens": most, "logprobs": None}
        if body.logprobs:
            special["logprobs"] = body.top_logprobs or 0
        if (structure := tools.structure()) is not None:
            if params_of(body, self.defaults).structured_outputs is not None:
                raise RequestError("tool_choice asks for a structure, and so does another field: give one")
            special["structured_outputs"] = structure
        begun = _text_of(body.messages[-1]) if continues else None
        params = self._behind_thoughts(params_of(body, self.defaults, **special), end, begun)
        format = format or ChatFormat(
            f"chatcmpl-{caller.request_id}",
            self.model,
            self.texts.tokenizer,
            logprobs=bool(body.logprobs),
            token_ids=bool(body.return_token_ids),
            names_ids=self._names_ids(body),
            prompt=ids,
            prompt_logprobs=body.prompt_logprobs is not None,
            reasoning=body.include_reasoning is not False,
        )
        choices = []
        for index in range(params.n):
            reasoning = None
            if self.reasoning_parser is not None:
                reasoning = make_reasoning_parser(self.reasoning_parser, end, begun)
            parser = tools.parser(self.tool_parser)
            single = not tools.parallel
            choice = Choice(index, self.texts.tokenizer, ids, params, reasoning=reasoning, tools=parser, single=single)
            choices.append(choice)
        return await self._call(body, caller, facts, [ids], params, choices, format)

    def _names_ids(self, body: Sampling) -> bool:
        own = body.return_tokens_as_token_ids
        return self.names_ids if own is None else own

    def _behind_thoughts(self, params: SamplingParams, prompt_end: str, begun: str | None) -> SamplingParams:
        """A model that thinks does so before it is held to a structure."""
        if params.structured_outputs is None or self.reasoning_parser is None:
            return params
        place = place_of(self.reasoning_parser, prompt_end, begun)
        if place.over:
            return params
        style = REASONING_PARSERS[self.reasoning_parser]
        thoughts = Thoughts(style.start, style.end, place.open)
        return replace(params, structured_outputs=replace(params.structured_outputs, behind=thoughts))

    async def chat_ids(self, body: TokenizeBody, size: int) -> Ids:
        """What a chat with these messages would send to the model; `size` as in Caller."""
        messages, options = body.messages or [], dict(body.chat_template_kwargs or {})
        continues = bool(body.continue_final_message)
        options.update(
            tools=body.tools, add_generation_prompt=body.add_generation_prompt is not False and not continues
        )
        return (await self.texts.encode_chat(messages, size, options, continues=continues))[0]

    async def _call(
        self,
        body: Sampling,
        caller: Caller,
        facts: Facts,
        prompts: list[Ids],
        params: SamplingParams,
        choices: list[Choice],
        format: Format,
    ) -> Call:
        if params.stop_strings and self.texts.tokenizer is None:
            raise RequestError(
                "stop: the model has no tokenizer.json, so there is no text to look at: use stop_token_ids"
            )
        if params.structured_outputs is not None:
            await self.checker.check(params.structured_outputs)
        params.check_vocabulary(facts.vocab_size)
        _check_logprobs(params, self.max_logprobs)
        for ids in prompts:
            _check_length(len(ids), params.max_tokens if _says_length(body) else None, facts)
        wishes = _wishes(body, caller, facts)
        salt = caller.salt + (body.cache_salt or "")
        engine_params = replace(params, stop=None)  # stop strings are noticed on this side
        promise = Promise()
        if facts.has_targets and not wishes.batch:
            own = (_seconds(wishes.ttft_target_ms), _seconds(wishes.gap_target_ms))
            constrained = params.structured_outputs is not None
            promise = facts.targets.promise(max(map(len, prompts)), *own, constrained)
        _check_described(prompts, params)
        return Call(
            format=format,
            prompts=[Prompt(np.array(ids, np.int32).tobytes(), engine_params, wishes, salt) for ids in prompts],
            prompt_tokens=[len(ids) for ids in prompts],
            choices=choices,
            arrival=caller.arrival,
            max_tokens=params.max_tokens,
            promise=promise,
            stream=bool(body.stream),
            includes_usage=body.includes_usage or self.includes_usage,
            counts_always=body.counts_always,
            is_described=params.logprobs is not None or params.prompt_logprobs is not None,
            headers=_promised(promise),
        )

    async def _read(
        self, prompt: str | list[Any], add_special_tokens: bool, n: int, facts: Facts, keeps: int
    ) -> list[Ids]:
        """The prompts of a completion: text, token ids, or a list of either."""
        every = [prompt] if isinstance(prompt, str) or (prompt and _is_number(prompt[0])) else prompt
        if not every:
            raise RequestError("prompt is empty: at least one token is needed to predict the next one")
        if len(every) > MOST_PROMPTS or len(every) * n > MOST_STREAMS:
            raise RequestError(
                f"prompt: {len(every)} prompts with n={n} are too many at once: at most {MOST_PROMPTS} prompts and "
                f"{MOST_STREAMS} completions fit into one request"
            )
        return [await self._ids(one, add_special_tokens, facts, keeps) for one in every]

    async def _ids(self, prompt: Any, add_special_tokens: bool, facts: Facts, keeps: int) -> Ids:
        if isinstance(prompt, str):
            ids = await self.texts.encode(prompt, add_special_tokens, None if keeps else facts.max_model_len)
            if not ids:
                raise RequestError("prompt is empty: at least one token is needed to predict the next one")
            return ids
        elif isinstance(prompt, list) and keeps and len(prompt) > keeps:
            return await self._ids(prompt[-keeps:], add_special_tokens, facts, keeps)
        elif isinstance(prompt, list) and len(prompt) >= facts.max_model_len:
            raise _too_long(len(prompt), None, facts)  # before a million tokens are looked at
        elif isinstance(prompt, list) and set(map(type, prompt)) <= {int}:  # not bool, which is an int as well
            ids = prompt
        else:
            raise RequestError("prompt must be text, a list of token ids, or a list of either")
        if not ids:
            raise RequestError("prompt is empty: at least one token is needed to predict the next one")
        for token in (min(ids), max(ids)):
            if not 0 <= token < facts.vocab_size:
                raise RequestError(f"prompt names token id {token}, outside 0..{facts.vocab_size - 1}")
        return ids

    async def _text(self, ids: Ids) -> str:
        tokenizer = self.texts.needed()
        return await self.texts.aside(4 * len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=True))


class _Tools(NamedTuple):
    """What a chat may call, and whether it must."""

    shown: list[Json] | None  # to the model
    choice: str  # "none", "auto", "required" or "named"
    schemas: list[tuple[str, Json]]  # of those that may be called: name and parameters
    parallel: bool

    @classmethod
    def of(cls, body: ChatBody) -> "_Tools":
        schemas = [_function(tool) for tool in body.tools or []]
        choice: Any = body.tool_choice if body.tool_choice is not None else ("auto" if schemas else "none")
        if isinstance(choice, dict):
            named = choice.get("function")
            name = named.get("name") if isinstance(named, dict) else None
            schemas = [schema for schema in schemas if schema[0] == name]
            if not schemas:
                raise RequestError(f"tool_choice names the function {name!r:.60}, which is not among the tools")
            choice = "named"
        elif choice not in ("none", "auto", "required"):
            raise RequestError(f"tool_choice={choice!r:.60} is unknown: choose none, auto, required or a function")
        if choice == "required" and not schemas:
            raise RequestError("tool_choice=required needs tools to choose from")
        return cls(body.tools or None, choice, schemas, body.parallel_tool_calls is not False)

    def structure(self) -> StructuredOutputs | None:
        """What the reply is held to where it must be a call."""
        if self.choice == "named":
            return StructuredOutputs(json={**self.schemas[0][1], **_GUIDANCE})
        if self.choice == "required":
            # Each tool's schema in a place of its own, so that what it refers to stays within it.
            places = [f"#/$defs/{number}" for number in range(len(self.schemas))]
            calls = [
                {
                    "type": "object",
                    "properties": {"name": {"const": name}, "arguments": {"$ref": place}},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
                for (name, _), place in zip(self.schemas, places, strict=True)
            ]
            defs = {
                str(number): _moved(schema, place)
                for number, ((_, schema), place) in enumerate(zip(self.schemas, places, strict=True))
            }
            items = calls[0] if len(calls) == 1 else {"anyOf": calls}
            most = MOST_CALLS if self.parallel else 1
            form = {"type": "array", "items": items, "minItems": 1, "maxItems": most, "$defs": defs}
            return StructuredOutputs(json={**form, **_GUIDANCE})
        return None

    def parser(self, own: str | None) -> ToolParser | ForcedCall | ForcedCalls | None:
        """`own` is the format that the model writes calls in by itself."""
        if self.choice == "named":
            return ForcedCall(self.schemas[0][0])
        if self.choice == "required":
            return ForcedCalls()
        if self.choice == "auto" and self.schemas and own is not None:
            return make_tool_parser(own, [name for name, _ in self.schemas])
        return None


def _text_of(message: Json) -> str:
    """What a message says, where it says it in parts as well."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _moved(schema: Any, place: str) -> Any:
    """A schema that lies at `place` within another: references to its root are references to there."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    if isinstance(target := moved.get("$ref"), str) and target.startswith("#"):
        moved["$ref"] = place + target[1:]
    return moved


# White space is for people, and nobody sees this. What a schema says that cannot be held to is left to the model: tools
# come with all kinds of schemas, and few clients can change them.
_GUIDANCE = {"x-guidance": {"whitespace_flexible": False, "lenient": True}}


def _function(tool: Json) -> tuple[str, Json]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise RequestError(f'tools must be objects like {{"type": "function", "function": ...}}, not {tool!r:.80}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise RequestError("tools: every function needs a name")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"tools: the parameters of {name!r:.60} must be a JSON schema, an object")
    return name, parameters or {"type": "object", "properties": {}}


def _wishes(body: Sampling, caller: Caller, facts: Facts) -> Wishes:
    batch = body.service_tier == "flex"
    ttft_ms, gap_ms = caller.wanted
    if batch and (ttft_ms or gap_ms):
        raise RequestError('service_tier "flex" is promised nothing: leave the x-slo headers out')
    if not facts.has_targets and (ttft_ms or gap_ms):
        raise RequestError("x-slo headers: this server keeps no promises (see --policy); leave them out")
    # A client's priority and users order its own requests; among keys, fairness decides.
    return Wishes(0, caller.tenant, body.priority or 0, batch, gap_ms, ttft_ms, body.user or "")


def _promised(promise: Promise) -> list[tuple[bytes, bytes]]:
    """What is promised, for the client to read."""
    found = ((b"x-slo-gap-ms", promise.promised_gap), (TTFT_HEADER, promise.promised_ttft))
    return [(name, b"%g" % round(seconds * 1000, 3)) for name, seconds in found if seconds < math.inf]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _truncated(ids: Ids, body: Sampling) -> Ids:
    """The end of a prompt, where that is what the client wants."""
    most = body.truncate_prompt_tokens
    return ids if most is None or most < 1 else ids[-most:]


def _says_length(body: Sampling) -> bool:
    return body.max_tokens is not None or getattr(body, "max_completion_tokens", None) is not None


def _check_length(prompt_tokens: int, max_tokens: int | None, facts: Facts) -> None:
    if prompt_tokens + (max_tokens or 1) > facts.max_model_len:
        raise _too_long(prompt_tokens, max_tokens, facts)


def _check_logprobs(params: SamplingParams, most: int) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > most:
            raise RequestError(f"{name}: {wanted} alternatives a token are wanted, and {most} may be (--max-logprobs)")


def _check_described(prompts: list[Ids], params: SamplingParams) -> None:
    """Each choice shows what is known of its prompt. Alternatives may be shown twice: in OpenAI's way and in vLLM's."""
    if params.prompt_logprobs is None:
        return
    shown = params.n * sum(map(len, prompts)) * (1 + params.prompt_logprobs)
    if shown > MOST_DESCRIBED:
        raise RequestError(
            f"prompt_logprobs: {shown} log probabilities of prompts are too many for one answer, which may have "
            f"{MOST_DESCRIBED}: ask for fewer, or send fewer prompts, or lower n"
        )


def _too_long(prompt_tokens: int, max_tokens: int | None, facts: Facts) -> ApiError:
    alone = max_tokens is None or prompt_tokens >= facts.max_model_len
    wanted = f"{prompt_tokens} tokens" if alone else f"{prompt_tokens} tokens and asks for {max_tokens} more"
    # Clients recognise the first sentence, whoever serves.
    return ApiError(
        400,
        f"This model's maximum context length is {facts.max_model_len} tokens. However, the prompt has {wanted}: "
        "shorten the prompt or lower max_tokens",
        param=None if alone else "max_tokens",
        code="context_length_exceeded",
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def new_request_id() -> str:
    return secrets.token_hex(12)
