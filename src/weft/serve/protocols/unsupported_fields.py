"""Fields of OpenAI, vLLM and llama.cpp that weft does not have: accepted if they change nothing, else refused by name.

A field that none of these servers knows is ignored, and a response header tells the client.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from weft.serve.errors import ApiError
from weft.serve.protocols.openai_bodies import ChatBody, CompletionBody

HEADER = b"x-weft-ignored-fields"
MOST_HEADER = 256  # bytes; longest value of the header
SMALL_VALUE = 200  # bytes; longer JSON values always count as asking for something

# Accepted: they have no effect on the answer, whatever the value.
HARMLESS_FIELDS = frozenset(
    (
        # OpenAI
        *("store", "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
        *("stream_options", "max_tool_calls", "moderation"),
        # vLLM: options of beam search and of slow tokenizers, names for logs
        *("length_penalty", "early_stopping", "spaces_between_special_tokens", "request_id"),
        *("guided_decoding_backend", "data_parallel_rank"),
        # llama.cpp: caches and slots, and parameters of samplers that are off
        *("cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "mirostat_tau", "mirostat_eta", "dry_base"),
        *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold", "dynatemp_exponent"),
        *("repeat_last_n", "min_keep", "penalize_nl", "backend_sampling", "n_threads"),
    )
)

# Refused, unless the value is neutral. Each entry has the neutral values (in addition to null, false, 0 and empty ones)
# and the alternative that the error message names.
REFUSED_FIELDS: dict[str, tuple[tuple[Any, ...], str]] = {
    # OpenAI
    "modalities": ((["text"],), "answers are text only"),
    "audio": ((), "answers are text only"),
    "web_search_options": ((), "the server searches nothing"),
    "verbosity": (("medium",), "say it in the prompt"),
    "conversation": ((), "send the whole conversation as input"),
    "context_management": ((), "send a shorter conversation"),
    # vLLM
    "logprob_token_ids": ((), "ask for logprobs"),
    "detokenize": ((True,), "use return_token_ids"),
    "logits_processors": ((), "leave it out"),
    "mm_processor_kwargs": ((), "models here read text only"),
    "media_io_kwargs": ((), "models here read text only"),
    "kv_transfer_params": ((), "leave it out"),
    "ec_transfer_params": ((), "leave it out"),
    "vllm_xargs": ((), "leave it out"),
    "chat_template": ((), "the operator sets it with --chat-template"),
    "prompt_embeds": ((), "send text or token ids"),
    "guided_whitespace_pattern": ((), "leave it out"),
    "repetition_detection": ((), "leave it out"),
    "thinking_token_budget": ((), "use max_tokens"),
    # llama.cpp
    "n_predict": ((-1,), "use max_tokens"),
    "n_probs": ((), "use logprobs"),
    "n_indent": ((), "leave it out"),
    "t_max_predict_ms": ((-1,), "use max_tokens"),
    "t_max_prompt_ms": ((-1,), "leave it out"),
    "mirostat": ((), "leave it out"),
    "dry_multiplier": ((), "use frequency_penalty"),
    "xtc_probability": ((), "use min_p"),
    "typical_p": ((1,), "use top_p or min_p"),
    "tfs_z": ((1,), "use top_p or min_p"),
    "top_n_sigma": ((-1,), "use top_p or min_p"),
    "dynatemp_range": ((), "use temperature"),
    "adaptive_target": ((-1,), "use temperature"),
    "repeat_penalty": ((1,), "use repetition_penalty"),
    "samplers": ((), "the order of samplers is fixed here"),
    "grammar_lazy": ((), "use tools"),
    "grammar_triggers": ((), "use tools"),
    "preserved_tokens": ((), "use skip_special_tokens"),
    "post_sampling_probs": ((), "use logprobs"),
    "return_tokens": ((), "use return_token_ids"),
    "return_progress": ((), "leave it out"),
    "timings_per_token": ((), "the last chunk has metrics"),
    "response_fields": ((), "leave it out"),
    "lora": ((), "no adapters are loaded here"),
    "reasoning_format": (("auto", "deepseek"), "thoughts come as reasoning_content"),
    "thinking_forced_open": ((), "use chat_template_kwargs"),
    "parse_tool_calls": ((True,), "leave tools out"),
    "system_prompt": ((), "send it as a message"),
    "input_prefix": ((), "send one prompt"),
    "input_suffix": ((), "send one prompt"),
    "input_extra": ((), "send one prompt"),
    "image_data": ((), "models here read text only"),
}

# Fields of one endpoint are refused on others, where they have no effect, unless the value is neutral.
_ELSEWHERE = frozenset((*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__))
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "top_k": (-1,),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "parallel_tool_calls": (True,),
    "include_reasoning": (True,),
    "add_generation_prompt": (True,),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "truncation_side": ("left",),
}
KNOWN_FIELDS = HARMLESS_FIELDS | REFUSED_FIELDS.keys() | _ELSEWHERE


def unknown_fields(others: Mapping[str, bytes]) -> list[str]:
    """The names in `others` that no server knows. Raises if a known field has a value that is not neutral.

    `others` has the fields that the body's struct does not define, as JSON by name.
    """
    found = []
    for name, value in others.items():
        if name in REFUSED_FIELDS:
            neutral, way_out = REFUSED_FIELDS[name]
            _check(name, value, neutral, f"is not supported here: {way_out}")
        elif name in HARMLESS_FIELDS:
            continue
        elif name in _ELSEWHERE:
            _check(name, value, _NEUTRAL.get(name, ()), "has no effect on this path: leave it out")
        else:
            found.append(name)
    return found


def _check(name: str, value: bytes, neutral: tuple[Any, ...], wrong: str) -> None:
    decoded = msgspec.json.decode(value) if len(value) <= SMALL_VALUE else value
    if decoded and decoded not in neutral:
        raise ApiError(400, f"{name} {wrong}", param=name)


def header_value(names: Iterable[str]) -> bytes:
    """The value of the header with the ignored fields. A list that is too long ends with `...`."""
    text = ""
    for name in names:
        shown = _UNPRINTABLE.sub("?", name[:64])
        if len(text) + len(shown) + 7 > MOST_HEADER:
            return f"{text}, ...".encode()
        text = f"{text}, {shown}" if text else shown
    return text.encode()


_UNPRINTABLE = re.compile(r"[^\x21-\x2b\x2d-\x7e]")  # not printable ASCII, or the comma, which separates names
