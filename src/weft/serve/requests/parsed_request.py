"""ParsedRequest: a checked request, ready to be submitted to an engine."""

import math
from dataclasses import dataclass, field

from weft.core import Promise
from weft.serve.engines.engine_prompt import EnginePrompt
from weft.serve.output.choice import Choice
from weft.serve.protocols.formatter import Formatter

TTFT_HEADER = b"x-slo-ttft-ms"


@dataclass
class ParsedRequest:
    """A checked request: what to send to the engine, and the objects that collect and format the output."""

    formatter: Formatter
    prompts: list[EnginePrompt]
    prompt_tokens: list[int]  # of each prompt
    choices: list[Choice]
    arrival: float
    max_tokens: int | None
    promise: Promise
    stream: bool = False
    usage_in_last_chunk: bool = False  # the last chunk, without choices, has the usage
    usage_in_every_chunk: bool = False  # the usage so far
    usage_in_first_chunk: bool = False  # the usage so far
    is_background: bool = False  # goes on after the client has disconnected
    may_be_large: bool = False  # the answer has log probabilities or embeddings
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


def finite(seconds: float) -> float | None:
    return None if seconds == math.inf else seconds


def promise_headers(promise: Promise) -> list[tuple[bytes, bytes]]:
    """Response headers with the promised targets, in milliseconds."""
    found = ((b"x-slo-gap-ms", promise.promised_gap), (TTFT_HEADER, promise.promised_ttft))
    return [(name, b"%g" % round(seconds * 1000, 3)) for name, seconds in found if seconds < math.inf]
