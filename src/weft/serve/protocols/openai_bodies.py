"""Request bodies as OpenAI and vLLM define them, and their conversion to SamplingParams.

Null means that a field was left out. unsupported_fields.py handles other fields.
"""

from dataclasses import fields, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from weft.engine.params import MAX_ALLOWED, MAX_COUNT, MAX_LOGPROBS, SamplingParams, StructuredOutputs
from weft.errors import RequestError
from weft.serve.errors import ApiError, from_json_error

Json = dict[str, Any]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Alternatives = Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)]  # -1 (all) is refused later, naming the limit
Stop = Annotated[str, Meta(max_length=1000)]  # limited: each of n choices searches for each, character by character
MAX_PROMPTS = 1024  # in one completion request
MAX_SEQUENCES = 2048  # in one request: prompts times n


class StreamOptions(Struct):
    include_usage: bool | None = None  # a last chunk has the usage
    continuous_usage_stats: bool | None = None  # every chunk has the usage so far


class SamplingBody(Struct, kw_only=True):
    """Fields that text completions and chats share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=64)] | None = None
    seed: Whole | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=1024)] | None = None
    user: str | None = (
        None  # prompts of one user are put back while other users of the same API key wait; policy slo only
    )
    service_tier: str | None = None  # "flex": batch request without targets, uses spare capacity
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Whole], Meta(max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Alternatives | None = None
    priority: Whole | None = None  # lower goes first among prompts of an API key; policy slo only
    cache_salt: str | None = None  # cached prefixes are shared only between prompts of the same salt
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # "token_id:17" in logprobs; None: the server's option
    truncate_prompt_tokens: Whole | None = None  # keep only so many; -1: as many as fit the context
    truncation_side: Literal["left", "right"] | None = None  # the side that is cut off; default left
    use_beam_search: bool | None = None  # this and the next are not supported and change the answer: an error
    bad_words: list[str] | None = None
    allowed_token_ids: Annotated[list[Whole], Meta(max_length=MAX_ALLOWED)] | None = None
    response_format: Json | None = None
    structured_outputs: Json | None = None
    guided_json: Json | str | None = None  # older names for the fields of structured_outputs
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None  # llama.cpp's names for the same
    json_schema: Json | None = None

    @property
    def usage_in_last_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_in_every_chunk(self) -> bool:
        options = self.stream_options
        return bool(options and options.continuous_usage_stats and options.include_usage is not False)


class CompletionBody(SamplingBody, kw_only=True):
    prompt: str | list[Any]  # text, token ids, or a list of either
    echo: bool | None = None
    logprobs: Alternatives | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class ChatBody(SamplingBody, kw_only=True):
    messages: list[Json]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Json] | None = None  # the older name of tools
    function_call: str | Json | None = None  # the older name of tool_choice
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: Json | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[Json] | None = None


class TokenizeBody(Struct, kw_only=True):
    """A prompt, or the messages of a chat, to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Json] | None = None
    chat_template_kwargs: Json | None = None


class DetokenizeBody(Struct, kw_only=True):
    tokens: list[Annotated[int, Meta(ge=0, le=MAX_COUNT)]]
    model: str | None = None


def sampling_params(body: SamplingBody, defaults: SamplingParams, **special: Any) -> SamplingParams:
    """The model's recommended parameters, overridden by the body, and then by `special`.

    `special` has the fields that text completions and chats treat differently.
    """
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true: leave it out")
    for name in ("use_beam_search", "bad_words"):
        if getattr(body, name):
            raise RequestError(f"{name} is not supported here: leave it out")
    for name in ("prompt_logprobs", "logprobs", "top_logprobs"):
        if getattr(body, name, None) == -1:
            raise RequestError(f"{name}=-1 asks for all tokens of the vocabulary: at most {MAX_LOGPROBS} are told")
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.logit_bias:
        given["logit_bias"] = _logit_bias(body.logit_bias)
    return replace(defaults, **{**given, "structured_outputs": _structure(body), **special})


_SAME = (  # fields with the same name and meaning in SamplingParams
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"),
    *("n", "stop", "seed", "min_tokens", "ignore_eos", "stop_token_ids", "prompt_logprobs", "allowed_token_ids"),
    *("include_stop_str_in_output", "skip_special_tokens"),
)


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    for token in biases:
        if not token.isdecimal() or len(token) > 10:
            raise RequestError(f"logit_bias names {token!r:.40}, which is no token id")
    return {int(token): min(max(bias, -100.0), 100.0) for token, bias in biases.items()}


def _structure(body: SamplingBody) -> StructuredOutputs | None:
    """The required structure of the output, from whichever field has it. Raises if several fields do."""
    found = _of_format(body.response_format)
    for name, field in _STRUCTURE_FIELDS:
        if (value := getattr(body, field)) is not None and (value != "" or field != "grammar"):
            found.append({name: value})
    if body.structured_outputs is not None:
        found.append(_supported_keys(body.structured_outputs))
    if len(found) > 1:
        first, second, *_ = _structure_fields(body)
        raise ApiError(400, f"{first} and {second} each ask for a structure: give one", param=second)
    if not found:
        return None
    try:
        return msgspec.convert(found[0], StructuredOutputs)
    except msgspec.ValidationError as error:
        raise ApiError(400, from_json_error(error).message, param=structure_field(body)) from None


_STRUCTURE_FIELDS = (  # fields of structured_outputs, and other body fields with the same meaning
    *(("json", "guided_json"), ("regex", "guided_regex"), ("choice", "guided_choice"), ("grammar", "guided_grammar")),
    *(("grammar", "grammar"), ("json", "json_schema")),
)
# Keys of structured_outputs that are ignored. `behind` and `calls` are internal to weft. The others are vLLM's and have
# no effect here: objects never have additional properties, and there is only one grammar library.
_IGNORED_KEYS = (
    "behind",
    "calls",
    "disable_fallback",
    "disable_additional_properties",
    "_backend",
    "_backend_was_auto",
)


def structure_field(body: SamplingBody) -> str:
    """The field that asks for a structure, or "tools" if no field does."""
    return next(iter(_structure_fields(body)), "tools")


def _structure_fields(body: SamplingBody) -> list[str]:
    every = ("response_format", "structured_outputs", *(field for _, field in _STRUCTURE_FIELDS))
    return [name for name in every if getattr(body, name) is not None]


def _supported_keys(given: Json) -> Json:
    """The supported keys of structured_outputs. An unknown key is an error if its value is not empty."""
    known = [field.name for field in fields(StructuredOutputs)]
    for name in given:
        if given[name] and name not in known and name not in _IGNORED_KEYS:
            raise RequestError(f"structured_outputs: {name!r:.60} is not supported here: leave it out")
    return {
        name: given[name] for name in given if name in known and name not in _IGNORED_KEYS and given[name] is not None
    }


def _of_format(response_format: Json | None) -> list[Json]:
    if response_format is None:
        return []
    kind = response_format.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        schema = response_format.get("schema")  # llama.cpp's extension
        if schema is not None and not isinstance(schema, dict):
            raise RequestError("response_format: the schema of a json_object must be an object")
        return [{"json": schema}] if schema else [{"json_object": True}]
    if kind == "json_schema":
        named = response_format.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if not isinstance(schema, dict | bool):
            raise RequestError("response_format: json_schema needs an object with a schema in it")
        return [{"json": schema if isinstance(schema, dict) else {}}]
    if kind in ("regex", "grammar") and isinstance(response_format.get(kind), str):
        return [{kind: response_format[kind]}]
    raise RequestError(f"response_format: type {kind!r:.40} is unknown: choose text, json_object or json_schema")
