"""RecordingBuffer: the frames of the last minutes, in the memory of the API process."""

from collections import deque
from itertools import islice
from typing import Literal, NamedTuple

from weft.observe.frames import LENGTH_BYTES, PromptFrame, RequestFrame, decode_frame, encode_frame, packed
from weft.observe.recording_file import RecordingFile

MOST_BYTES = 64 << 20  # of all frames: 2 minutes of 500 steps/s with 256 rows, hours of a laptop
ENTRY_BYTES = 150  # that a frame takes beside its own
MOST_ANSWER_BYTES = 1 << 20  # of one answer; joining more would stop the event loop for several milliseconds
MOST_STARTS = 64  # of engine processes; more are forgotten when their frames are

Kind = Literal["engine", "prompt", "step", "request", "lag"]


# (frame, its kind, the tenant of a request, time). There are many, and the garbage collector soon stops visiting plain
# tuples, unlike NamedTuples.
_Entry = tuple[bytes, Kind, str, float]


class RecordingPart(NamedTuple):
    """A part of the recording, packed."""

    data: bytes
    next: int  # what to give as `since` next time
    has_more: bool  # whether frames were left out, because the part would be too long


class RecordingBuffer:
    """Keeps the newest frames, and passes all of them to a file, if there is one. For one thread."""

    def __init__(self, file: RecordingFile | None = None) -> None:
        self.file = file
        self._entries: deque[_Entry] = deque()
        self._bytes = 0
        self._next = 0  # sequence number of the next frame
        self._starts: list[tuple[int, str, bytes]] = []  # (number, engine, EngineFrame), also of frames that are gone

    def add_engine(self, engine: str, frame: bytes, time: float) -> None:
        """Adds the frame of an engine process that has started."""
        self._starts.append((self._next, engine, frame))
        if len(self._starts) > MOST_STARTS:
            oldest = self._next - len(self._entries)
            kept = self._starts_before(oldest)
            gone = [(0, engine, frame) for engine, frame in kept.items()]
            self._starts = gone + [start for start in self._starts if start[0] >= oldest]
        if self.file is not None:
            self.file.start_engine(packed(self._starts_before(self._next + 1).values()))
        self.add(frame, "engine", time)

    def add(self, frame: bytes, kind: Kind, time: float, tenant: str = "") -> None:
        self._entries.append((frame, kind, tenant, time))
        self._next += 1
        self._bytes += len(frame) + ENTRY_BYTES
        while self._bytes > MOST_BYTES:
            self._bytes -= len(self._entries.popleft()[0]) + ENTRY_BYTES
        if self.file is not None:
            self.file.write(frame)

    def read(self, since: int | None = None, earliest: float | None = None, tenant: str = "") -> RecordingPart:
        """Packed frames after number `since`, about MOST_ANSWER_BYTES at most.

        Without `since`: the frames from time `earliest` on, or all, and before them the EngineFrames of the processes
        that ran then. With a `tenant`, other tenants' requests have no ids, and prompts do not say which prefixes they
        share.
        """
        oldest = self._next - len(self._entries)
        frames: list[bytes] = []
        if since is None:
            since = oldest if earliest is None else oldest + self._index_of(earliest)
            frames += self._starts_before(since).values()
        number = min(max(since, oldest), self._next)
        size, has_more = 0, False
        for entry in islice(self._entries, number - oldest, None):
            size += len(entry[0]) + LENGTH_BYTES
            if size > MOST_ANSWER_BYTES and frames:
                has_more = True
                break
            number += 1
            frames.append(_visible(entry, tenant) if tenant else entry[0])
        return RecordingPart(packed(frames), number, has_more)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def _starts_before(self, number: int) -> dict[str, bytes]:
        """The EngineFrame of each engine's process before the frame with this number."""
        return {engine: frame for start, engine, frame in self._starts if start < number}

    def _index_of(self, earliest: float) -> int:
        """The index of the first entry from a time on. Entries are nearly in order of time."""
        newer = 0
        for entry in reversed(self._entries):  # indexing a deque takes time in its middle
            if entry[3] < earliest:
                break
            newer += 1
        return len(self._entries) - newer


def _visible(entry: _Entry, tenant: str) -> bytes:
    """What a tenant may see of a frame."""
    frame, kind, owner, _ = entry
    if kind == "prompt":
        prompt = decode_frame(frame)
        assert isinstance(prompt, PromptFrame)
        prompt.prefix = b""
        return encode_frame(prompt)
    if kind == "request" and owner != tenant:
        request = decode_frame(frame)
        assert isinstance(request, RequestFrame)
        request.request_id = request.tenant = ""
        return encode_frame(request)
    return frame
