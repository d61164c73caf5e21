"""RecordingFile: writes a recording to disk, in a thread of its own, so that a slow disk delays no stream."""

import errno
import os
import queue
import sys
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from weft.errors import OptionError
from weft.observe.frames import HEADER, LENGTH_BYTES, packed

MOST_PENDING = 50_000  # frames that wait for the disk; further frames are dropped
OLD = ".old"  # suffix of the file before


class _Head(NamedTuple):
    frames: bytes


class RecordingFile:
    """Two files with at most `most_bytes` together: FILE, and FILE.old with what came before."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path = path
        self.dropped = 0  # frames, because the disk was too slow
        self._has_failed = False  # the disk is full, say: nothing more is written
        self._head = b""  # packed frames that each file begins with
        self._most = most_bytes // 2
        self._put_back: list[_Head | None] = []  # at most one item, which ended a batch of frames
        self._queue: queue.Queue[bytes | _Head | None] = queue.Queue(MOST_PENDING)
        if path.exists() and not path.is_file():
            raise OptionError(f"--record {path}: this is no ordinary file; name one that can be written")
        try:
            # A server that did not come up leaves a header alone, which must not displace a recording.
            if path.exists() and path.stat().st_size > len(HEADER):
                os.replace(path, _old(path))
            self._file = _create(path)
        except OSError as error:
            raise OptionError(f"--record {path}: {error.strerror}; name a file that can be written") from None
        self._size = self._least = self._file.write(HEADER)  # bytes, and what a file without other frames has
        self._thread = threading.Thread(target=self._run, name="weft-record", daemon=True)
        self._thread.start()

    def write(self, frame: bytes) -> None:
        if self._has_failed:
            return
        try:
            self._queue.put_nowait(frame)
        except queue.Full:
            self.dropped += 1

    def start_engine(self, head: bytes) -> None:
        """Sets the packed frames that later files begin with."""
        with suppress(queue.Full):
            self._queue.put_nowait(_Head(head))

    def close(self) -> None:
        """Writes what is pending, for at most a second."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=1)
                self._thread.join(1)
            except queue.Full:
                pass

    def _run(self) -> None:
        try:
            while (item := self._take()) is not None:
                if isinstance(item, _Head):
                    self._head = item.frames
                else:
                    self._write([item, *self._pending()])
        except OSError as error:
            print(f"weft: --record {self.path}: {error.strerror}; the recording ends here", file=sys.stderr, flush=True)
            self._has_failed = True
        finally:
            if self.dropped:
                print(
                    f"weft: --record {self.path}: {self.dropped} frames are missing: the disk was too slow",
                    file=sys.stderr,
                )
            self._file.close()

    def _take(self) -> "bytes | _Head | None":
        return self._put_back.pop() if self._put_back else self._queue.get()

    def _pending(self) -> list[bytes]:
        """Frames that wait already: one system call writes them all."""
        found: list[bytes] = []
        while len(found) < 1000:
            try:
                frame = self._queue.get_nowait()
            except queue.Empty:
                break
            if not isinstance(frame, bytes):
                self._put_back = [frame]
                break
            found.append(frame)
        return found

    def _write(self, frames: list[bytes]) -> None:
        """Appends frames with one system call, or with two if the file becomes full in between."""
        pending: list[bytes] = []
        for frame in frames:
            size = len(frame) + LENGTH_BYTES
            if self._size + size > self._most and self._size > self._least:
                self._append(packed(pending))
                pending = []
                self._rotate()
            pending.append(frame)
            self._size += size
        self._append(packed(pending))

    def _append(self, data: bytes) -> None:
        if self._file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _rotate(self) -> None:
        self._file.close()
        os.replace(self.path, _old(self.path))
        self._file = _create(self.path)
        self._size = self._least = len(HEADER) + len(self._head)
        self._append(HEADER + self._head)


def _create(path: Path) -> FileIO:
    """Readable for the owner alone: it has request ids. Unbuffered: the process may end at any time."""
    return FileIO(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))


def _old(path: Path) -> Path:
    return path.with_name(path.name + OLD)
