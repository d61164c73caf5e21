"""Frames: what a recording consists of. A frame is a msgspec struct as MessagePack, and has no prompt and no text.

A recording is a file or a ring in memory. A file begins with `MAGIC` and the version. Each frame follows its length
(four bytes, little-endian). Times are seconds on the monotonic clock of the machine that served; `EngineFrame.epoch`
says what time of day that was.
"""

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from weft.core.shape import StepShape
from weft.core.step import HostTimes, WaitsFor
from weft.errors import WeftError

MAGIC = b"weft-recording"
VERSION = 1
LENGTH_BYTES = 4
MOST_LATE_CHUNKS = 256  # of a sequence; further ones are not recorded
MOST_FRAME_BYTES = 16 << 20  # a longer frame is damaged
HEADER = MAGIC + b" %d\n" % VERSION


class RecordingError(WeftError):
    """A recording cannot be read."""


class EngineFrame(msgspec.Struct, tag=1, array_like=True):
    """An engine process started. Frames of this engine that follow belong to this process."""

    engine: str  # name of the engine, such as "0"
    time: float
    epoch: float  # seconds since 1970 at `time`
    weft: str  # version
    model: str
    device: str
    policy: str
    gap_target: float | None  # seconds; of requests that name none; None: no target
    gap_promised: bool
    ttft_target: float | None
    ttft_target_per_1k: float
    ttft_promised: bool
    max_num_seqs: int
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    max_num_batched_tokens: int
    profile: dict[str, Any] | None = None  # the calibration, in the format of `weft simulate --profile`


class PromptFrame(msgspec.Struct, tag=2, array_like=True):
    """The engine took a sequence."""

    engine: str
    key: int  # of the sequence, unique for the engine process
    time: float  # when the engine had hashed the prompt and given it to the scheduler
    arrival: float
    prompt_tokens: int
    max_tokens: int
    gap_target: float | None  # seconds
    gap_promised: bool
    ttft_target: float | None  # seconds from `arrival`
    ttft_promised: bool
    flex: bool
    priority: int
    constrained: bool  # has a grammar
    prefix: bytes = b""  # int32 per full block of the prompt: equal numbers at equal indices are equal prefixes


class StepFrame(msgspec.Struct, tag=3, array_like=True):
    """A step was committed."""

    engine: str
    number: int
    started: float  # on the device
    finished: float
    predicted: float | None
    decodes: bytes  # int32: keys of the sequences that got a token from a decode row
    slices: list[tuple[int, int, int, bool]]  # (key, first position, tokens, whether it ends its prompt)
    shape: tuple[int, float, int, int, float, float]  # StepShape
    host: tuple[float, float, float, float]  # HostTimes
    prefill_limit: str  # what limited the prefill tokens of the step
    waits_for: WaitsFor  # what the first waiting request waits for
    preempted: list[int]  # keys, preempted while this step was planned
    running: int
    waiting: int
    queued_tokens: int
    free_blocks: int
    cached_tokens: int  # taken from the prefix cache
    lost_tokens: int  # computed or cached tokens of the preempted sequences
    starved: bool

    @property
    def step_shape(self) -> StepShape:
        return StepShape(*self.shape)

    @property
    def host_times(self) -> HostTimes:
        return HostTimes(*self.host)

    @property
    def decode_keys(self) -> NDArray[np.int32]:
        return np.frombuffer(self.decodes, np.int32)


class LateChunk(msgspec.Struct, array_like=True, gc=False):  # numbers only, and there may be many
    """A chunk that a client got later after the chunk before than its gap target allows."""

    token_index: int  # of the last token in the chunk, from 0
    received: float  # when the API process had the token
    sent: float  # when the chunk was written to the socket
    waited: float  # seconds that the socket took: the client reads slowly
    previous_sent: float | None = None  # when the chunk before was written to the socket; None: not known


class RequestFrame(msgspec.Struct, tag=4, array_like=True):
    """A sequence ended, seen by the API process."""

    engine: str
    key: int
    request_id: str
    tenant: str  # "" without API keys
    choice_index: int
    arrival: float  # when its HTTP request had arrived
    parsed: float  # when the API process sent it to the engine
    started: float | None  # start of its first step; None: it never started
    first_token: float | None  # end of the step that sampled its first token
    first_sent: float | None  # when the first chunk was written to the socket, or the answer if it is not streamed
    finished: float  # when the API process was done with it
    reason: str  # "stop", "length", "refused", "abort", "error", ...
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    predicted_ttft: float | None
    stream: bool
    late_chunks: list[LateChunk] = []  # the first MOST_LATE_CHUNKS


class LagFrame(msgspec.Struct, tag=5, array_like=True):
    """The event loop of the API process stood still."""

    time: float  # when it went on
    seconds: float


Frame = EngineFrame | PromptFrame | StepFrame | RequestFrame | LagFrame
encode_frame = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode


def decode_frame(data: bytes | memoryview) -> Frame:
    try:
        found: Frame = _decode(data)
    except msgspec.MsgspecError as error:
        raise RecordingError(f"the recording is damaged: {error}") from None
    return found


def packed(frames: Iterable[bytes]) -> bytes:
    """Encoded frames as the body of a recording."""
    return b"".join(part for frame in frames for part in (len(frame).to_bytes(LENGTH_BYTES, "little"), frame))


def read_frames(file: BinaryIO, name: str = "the recording") -> Iterator[Frame]:
    """Yields the frames of a recording. A last frame that is cut off is left out: its writer was killed.

    Raises RecordingError if this is no recording, if another version made it, or if a frame is damaged.
    """
    line = file.readline(len(HEADER) + 16)
    magic, _, version = line.rstrip(b"\n").partition(b" ")
    if magic != MAGIC:
        raise RecordingError(f"{name} is no recording of weft: weft serve --record FILE makes one")
    if version != b"%d" % VERSION:
        raise RecordingError(
            f"{name} has format {version.decode(errors='replace')[:20]}, and this version of weft reads format "
            f"{VERSION}: read it with the version that made it"
        )
    while len(head := file.read(LENGTH_BYTES)) == LENGTH_BYTES:
        size = int.from_bytes(head, "little")
        if size > MOST_FRAME_BYTES:
            raise RecordingError(f"{name} is damaged: a frame of {size} bytes, where {MOST_FRAME_BYTES} are possible")
        data = file.read(size)
        if len(data) < size:
            return
        try:
            yield decode_frame(data)
        except RecordingError as error:
            raise RecordingError(f"{name}: {error}") from None
