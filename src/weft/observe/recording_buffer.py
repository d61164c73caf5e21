"""RecordingBuffer: the frames of the last minutes, in the memory of the API process."""

from collections import deque
from typing import Literal

from weft.observe.frames import LENGTH_BYTES, PromptFrame, RequestFrame, decode_frame, encode_frame, packed
from weft.observe.recording_file import RecordingFile

MOST_BYTES = 64 << 20  # of all frames: 2 minutes of 500 steps/s with 256 rows, hours of a laptop
MOST_ANSWER_BYTES = 4 << 20  # of one answer; joining more would stop the event loop for milliseconds

Kind = Literal["engine", "prompt", "step", "request", "lag"]


# (frame, its kind, the tenant of a request, time). There are many, and the garbage collector soon stops visiting plain
# tuples, unlike NamedTuples.
_Entry = tuple[bytes, Kind, str, float]


class RecordingBuffer:
    """Keeps the newest frames, and passes all of them to a file, if there is one. For one thread."""

    def __init__(self, file: RecordingFile | None = None) -> None:
        self.file = file
        self._entries: deque[_Entry] = deque()
        self._bytes = 0
        self._next = 0  # sequence number of the next frame
        self._engines: dict[str, bytes] = {}  # the EngineFrame of each engine's newest process

    def add_engine(self, engine: str, frame: bytes, time: float) -> None:
        self._engines[engine] = frame
        if self.file is not None:
            self.file.head = packed(self._engines.values())
        self.add(frame, "engine", time)

    def add(self, frame: bytes, kind: Kind, time: float, tenant: str = "") -> None:
        self._entries.append((frame, kind, tenant, time))
        self._next += 1
        self._bytes += len(frame)
        while self._bytes > MOST_BYTES:
            self._bytes -= len(self._entries.popleft()[0])
        if self.file is not None:
            self.file.write(frame)

    def read(self, since: int | None = None, earliest: float | None = None, tenant: str = "") -> tuple[bytes, int]:
        """Packed frames after number `since`, and what to give as `since` next time. At most MOST_ANSWER_BYTES.

        Without `since`: the EngineFrames of all engines, then the frames from time `earliest` on, or all. With a
        `tenant`, other tenants' requests have no ids, and no prompt says which prefixes it shares.
        """
        oldest = self._next - len(self._entries)
        head: list[bytes] = []
        if since is None:
            head = list(self._engines.values())
            since = self._index_of(earliest) + oldest if earliest is not None else oldest
        number = min(max(since, oldest), self._next)
        frames, size = [*head], 0
        for index in range(number - oldest, len(self._entries)):
            entry = self._entries[index]
            frame = entry[0]
            if frames and size + len(frame) > MOST_ANSWER_BYTES:
                break
            number += 1
            size += len(frame) + LENGTH_BYTES
            if not (head and frame in head):
                frames.append(_visible(entry, tenant) if tenant else frame)
        return packed(frames), number

    def close(self) -> None:
        if self.file is not None:
            self.file.close()

    def _index_of(self, earliest: float) -> int:
        """The index of the first entry from a time on. Entries are nearly in order of time."""
        index = len(self._entries)
        while index and self._entries[index - 1][3] >= earliest:
            index -= 1
        return index


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
