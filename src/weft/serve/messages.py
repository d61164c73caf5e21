"""What passes between the API process and the engine process: msgspec structs as MessagePack, one a ZeroMQ frame.

A *key* names one stream (one completion of one prompt) for as long as an engine process lives; the API process gives
them out. Times are seconds on the machine's monotonic clock, which both processes share.
"""

import math
from typing import Any, NamedTuple

import msgspec

from weft.core import Source, Targets
from weft.engine.engine import Wishes
from weft.engine.executor import TokenLogprobs
from weft.engine.params import SamplingParams
from weft.observe.metrics import EngineStep

# To the engine


class Orders(msgspec.Struct):
    """What an engine process is to run: JSON, the first line of its standard input."""

    address: str  # of the API process's socket
    path: str  # of the model directory
    eos_ids: tuple[int, ...]  # that end a text beside those that the model's config names
    options: dict[str, Any]  # EngineOptions
    record_steps: str | None = None  # file for StepRecords
    pulse: str = ""  # file that shows that the process is alive


class Submit(msgspec.Struct, tag="submit", array_like=True, eq=False):
    """One prompt; its `params.n` streams get the keys key, key + 1, ..."""

    key: int
    prompt: bytes  # token ids, int32
    params: SamplingParams
    wishes: Wishes
    salt: str
    arrival: float


class Abort(msgspec.Struct, tag="abort", array_like=True):
    """These streams are not wanted any more. Ones that have ended are no error."""

    keys: list[int]


class ResetCache(msgspec.Struct, tag="reset", array_like=True):
    """Forget all cached prefixes, of whatever salt."""


ToEngine = Submit | Abort | ResetCache


# From the engine


class Facts(msgspec.Struct, frozen=True):
    """What the API process must know of an engine to check requests and to answer questions about it."""

    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    policy: str
    enable_prefix_caching: bool
    device: str
    gap_target: float | None  # seconds; None: there is none
    gap_source: Source  # DEFAULT: it is aimed at and not promised
    min_gap_target: float  # a request's own gap target is raised to it
    ttft_target: float | None
    ttft_target_per_1k: float
    ttft_source: Source
    calibration_quality: str  # in words; "" where nothing was measured
    # Of the calibration that the engine started with, as `weft simulate --profile` reads it; None: it has none.
    profile: dict[str, Any] | None = None
    hidden_size: int = 0  # numbers of an embedding

    @property
    def has_targets(self) -> bool:
        return self.gap_target is not None or self.ttft_target is not None

    @property
    def targets(self) -> Targets:
        return Targets(
            gap=math.inf if self.gap_target is None else self.gap_target,
            ttft=math.inf if self.ttft_target is None else self.ttft_target,
            ttft_per_1k=self.ttft_target_per_1k,
            gap_source=self.gap_source,
            ttft_source=self.ttft_source,
            min_gap=self.min_gap_target,
        )


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The model is loaded and the engine takes requests."""

    facts: Facts


class Fatal(msgspec.Struct, tag="fatal", array_like=True):
    """The engine cannot start, and would not the next time either: a wrong option, an unusable model."""

    message: str


class Rejected(msgspec.Struct, tag="rejected", array_like=True):
    """A prompt that was not taken: all streams of the Submit with this key are over."""

    key: int
    kind: str  # "request" (it can never run), "queue_full"
    message: str


class Begin(NamedTuple):
    """A stream got its first token."""

    key: int
    started: float  # start of the first step that carried it
    first_token: float
    cached_tokens: int
    predicted_ttft: float | None
    is_promised: bool = True  # False: not even an idle machine could have kept the server's target


class End(NamedTuple):
    """A stream's last news."""

    key: int
    token: int | None  # its last token; None: it ended without one
    reason: str  # "stop", "length", "refused", "error"
    finished: float | None
    preemptions: int
    predicted_ttft: float | None


class PromptLogprobs(NamedTuple):
    key: int
    first: int  # position of the first token described
    found: list[TokenLogprobs]


class News(msgspec.Struct, tag="news", array_like=True):
    """All that one turn of the loop brought."""

    keys: list[int]  # streams that got a token and go on
    tokens: list[int]  # theirs, in the same order
    begins: list[Begin]
    ends: list[End]
    logprobs: dict[int, TokenLogprobs]  # by key, where asked for, also of last tokens
    prompt_logprobs: list[PromptLogprobs]
    step: EngineStep | None
    embeddings: dict[int, bytes] = {}  # float32, by key, of requests that end with them


FromEngine = Ready | Fatal | Rejected | News

encode = msgspec.msgpack.Encoder().encode
decode_for_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_for_api = msgspec.msgpack.Decoder(FromEngine).decode
