"""Messages between the API process and the engine process: msgspec structs as MessagePack, one per ZeroMQ frame.

A *sequence* is one completion of one prompt; a `Sequence` in the engine process. A *key* identifies a sequence for
the lifetime of an engine process. The API process assigns the keys. Times are seconds on the machine's monotonic clock,
which both processes share.
"""

import math
import time
from typing import Any, NamedTuple

import msgspec

from weft.core import Source, Targets
from weft.engine.engine import RequestOptions
from weft.engine.executor import TokenLogprobs
from weft.engine.params import SamplingParams
from weft.observe.engine_metrics import EngineStep

clock = time.perf_counter  # the clock of the engine loop; all processes of a machine share it

# To the engine


class EngineProcessConfig(msgspec.Struct):
    """Start parameters of an engine process: JSON, on the first line of its standard input."""

    address: str  # ZeroMQ address of the API process's socket
    path: str  # of the model directory
    eos_ids: tuple[int, ...]  # end-of-text tokens in addition to the ones in the model's config
    options: dict[str, Any]  # EngineOptions
    record_steps: str | None = None  # file for StepRecords
    heartbeat_file: str = ""  # path; see heartbeat.py
    engine: str = "0"  # name of the engine


class AddPrompt(msgspec.Struct, tag="add", array_like=True, eq=False):
    """Adds one prompt with `params.n` sequences, which have the keys key, key + 1, ..."""

    key: int
    prompt: bytes  # token ids, int32
    params: SamplingParams
    options: RequestOptions
    salt: str
    arrival: float
    request_id: str = ""  # of the HTTP request, for the log


class AbortSequences(msgspec.Struct, tag="abort", array_like=True):
    """Ends these sequences. Keys of sequences that have already ended are ignored."""

    keys: list[int]


class ResetPrefixCache(msgspec.Struct, tag="reset", array_like=True):
    """Drops all cached prefixes, of every salt."""


ToEngine = AddPrompt | AbortSequences | ResetPrefixCache


# From the engine


class EngineInfo(msgspec.Struct, frozen=True):
    """Properties of an engine that the API process needs to check requests and to answer /server_info."""

    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    policy: str
    enable_prefix_caching: bool
    device: str  # display name
    device_type: str  # "cpu" or "cuda"
    gap_target: float | None  # seconds; None: no target
    gap_source: Source  # DEFAULT: the scheduler aims at it, but it is not promised
    min_gap_target: float  # seconds; a smaller gap target of a request is raised to this
    ttft_target: float | None
    ttft_target_per_1k: float
    ttft_source: Source
    calibration_quality: str  # in words; "" if nothing was measured
    # The calibration that the engine started with, in the format of `weft simulate --profile`; None: not calibrated.
    profile: dict[str, Any] | None = None
    hidden_size: int = 0  # dimensions of an embedding
    max_num_batched_tokens: int = 0  # most tokens of a step
    block_space: str = ""  # equal for engines with equal weights and layouts; see engine/fingerprint.py

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


class EngineReady(msgspec.Struct, tag="ready", array_like=True):
    """The model is loaded and the engine takes requests."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, tag="failed", array_like=True):
    """The engine cannot start, and a retry would fail too: a wrong option, an unusable model."""

    message: str


class RequestRejected(msgspec.Struct, tag="rejected", array_like=True):
    """The engine rejected a prompt. All sequences of the AddPrompt with this key have ended.

    A prompt is *rejected* before the scheduler takes it: it is invalid, the queue is full, or adding it failed. A
    sequence is *refused* later, by the scheduler's policy: it gets a SequenceEnd with the reason "refused".
    """

    key: int
    kind: str  # "request" (it can never run), "queue_full", "error" (an internal error)
    message: str


class PrefillDone(NamedTuple):
    """The prefill of a sequence is done. The message that carries this also has the sequence's first token."""

    key: int
    started: float  # start of the first step that contained it
    first_token: float  # end of the step that sampled its first token
    cached_tokens: int
    predicted_ttft: float | None
    # False: there is no TTFT target, it is only a goal (source DEFAULT), or even an idle machine could not meet it.
    has_ttft_promise: bool = True


class SequenceEnd(NamedTuple):
    """A sequence has ended."""

    key: int
    token: int | None  # the last token; None: the end came without a token
    reason: str  # "stop", "length", "refused", "error"
    finished: float | None
    preemptions: int
    predicted_ttft: float | None


class PromptLogprobs(NamedTuple):
    """Log probabilities of consecutive prompt tokens."""

    key: int
    first: int  # position in the prompt of the first entry
    found: list[TokenLogprobs]


class StepOutputs(msgspec.Struct, tag="outputs", array_like=True):
    """The results of one iteration of the engine loop."""

    keys: list[int]  # sequences that got a token and continue
    tokens: list[int]  # one token per key, in the same order
    prefills_done: list[PrefillDone]  # of sequences that got their first token
    sequence_ends: list[SequenceEnd]
    logprobs: dict[int, TokenLogprobs]  # by key, if asked for; includes last tokens
    prompt_logprobs: list[PromptLogprobs]
    step: EngineStep | None
    embeddings: dict[int, bytes] = {}  # float32, by key; for pooling requests, with their end
    prompt_frames: list[bytes] = []  # for the recording: of sequences that the scheduler took since the last message
    step_frame: bytes = b""  # for the recording; empty if no step was committed


FromEngine = EngineReady | EngineFailed | RequestRejected | StepOutputs

encode = msgspec.msgpack.Encoder().encode
decode_for_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_for_api = msgspec.msgpack.Decoder(FromEngine).decode
