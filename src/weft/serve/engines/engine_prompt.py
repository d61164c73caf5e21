"""EnginePrompt: one prompt of a request, as the engine needs it."""

from typing import NamedTuple

from weft.engine.engine import RequestOptions
from weft.engine.params import SamplingParams


class EnginePrompt(NamedTuple):
    """One prompt of a request, as the engine needs it."""

    tokens: bytes  # int32
    params: SamplingParams
    options: RequestOptions
    salt: str
    request_id: str = ""  # of the HTTP request, for the log
