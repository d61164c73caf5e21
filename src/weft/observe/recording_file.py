"""RecordingFile: writes a recording to disk, in a thread of its own, so that a slow disk delays no stream."""

import os
import queue
import sys
import threading
from pathlib import Path

from weft.errors import OptionError
from weft.observe.frames import HEADER, LENGTH_BYTES, packed

MOST_PENDING = 50_000  # frames that wait for the disk; further frames are dropped
OLD = ".old"  # suffix of the file before


class RecordingFile:
    """Two files with at most `most_bytes` together: FILE, and FILE.old with what came before."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path, self.head = path, b""  # head: frames that each file begins with
        self.dropped = 0
        self._most = most_bytes // 2
        self._queue: queue.Queue[bytes | None] = queue.Queue(MOST_PENDING)
        try:
            if path.exists() and path.stat().st_size:
                os.replace(path, _old(path))
            self._file = path.open("wb", buffering=0)  # unbuffered: the process may end at any time
        except OSError as error:
            raise OptionError(f"--record {path}: {error.strerror}; name a file that can be written") from None
        self._size = self._least = self._file.write(HEADER)  # bytes, and what a file without other frames has
        self._thread = threading.Thread(target=self._run, name="weft-record", daemon=True)
        self._thread.start()

    def write(self, frame: bytes) -> None:
        try:
            self._queue.put_nowait(frame)
        except queue.Full:
            self.dropped += 1

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
            while (frame := self._queue.get()) is not None:
                self._write([frame, *self._pending()])
        except OSError as error:
            print(f"weft: --record {self.path}: {error.strerror}; the recording ends here", file=sys.stderr, flush=True)
            self.write = lambda frame: None  # type: ignore[method-assign]
        finally:
            self._file.close()

    def _pending(self) -> list[bytes]:
        """Frames that wait already: one system call writes them all."""
        found: list[bytes] = []
        while len(found) < 1000:
            try:
                frame = self._queue.get_nowait()
            except queue.Empty:
                break
            if frame is None:
                self._queue.put(None)
                break
            found.append(frame)
        return found

    def _write(self, frames: list[bytes]) -> None:
        """Appends frames with one system call, or with two if the file becomes full in between."""
        pending: list[bytes] = []
        for frame in frames:
            size = len(frame) + LENGTH_BYTES
            if self._size + size > self._most and self._size > self._least:
                self._file.write(packed(pending))
                pending = []
                self._rotate()
            pending.append(frame)
            self._size += size
        self._file.write(packed(pending))

    def _rotate(self) -> None:
        self._file.close()
        os.replace(self.path, _old(self.path))
        self._file = self.path.open("wb", buffering=0)
        self._size = self._least = self._file.write(HEADER + self.head)


def _old(path: Path) -> Path:
    return path.with_name(path.name + OLD)
