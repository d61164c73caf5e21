"""Pulse: the engine process shows that it is alive, and that its loop turns, in a file that both processes map.

A thread of the engine process counts beats: they end where the process is stopped or cannot run. Its loop counts turns:
they end where a step never ends. Counts are compared, not times: the engine is not blamed for a machine that slept.
"""

import mmap
import struct
import threading
from pathlib import Path

BEAT = 0.5  # seconds between two beats
LOOK = 1.0  # seconds between two looks
SILENT = 5  # looks without a beat, after which the engine counts as down
WEDGED = 20  # looks without a beat, after which it is replaced
STUCK = 300  # looks within one turn of the loop, after which it is replaced: longer than the longest step

FORM = struct.Struct("=QQQ")  # beats, turns, and whether the loop has something to do


class Pulse:
    """The engine's side."""

    def __init__(self, path: Path) -> None:
        self._map = _mapped(path)
        self._turns = 0

    def start(self) -> None:
        """Beats from now on, until the process ends."""
        threading.Thread(target=self._beat, name="weft-pulse", daemon=True).start()

    def turn(self, busy: bool) -> None:
        """The loop came around. It is `busy` until it comes around again, or waits for something to do."""
        self._turns += 1
        struct.pack_into("=QQ", self._map, 8, self._turns, busy)

    def _beat(self) -> None:
        beats, over = 0, threading.Event()
        while not over.wait(BEAT):
            beats += 1
            struct.pack_into("=Q", self._map, 0, beats)


class Watch:
    """The API's side. `look` is to be called every LOOK seconds."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(FORM.size))
        self._map = _mapped(path)
        self._seen = (0, 0)
        self._silent = self._same = 0  # looks since a beat, and since a turn

    def look(self) -> None:
        beats, turns, busy = FORM.unpack_from(self._map)
        self._silent = 0 if beats != self._seen[0] else self._silent + 1
        self._same = 0 if turns != self._seen[1] or not busy else self._same + 1
        self._seen = beats, turns

    @property
    def is_silent(self) -> bool:
        return self._silent >= SILENT

    @property
    def verdict(self) -> str | None:
        """Why the engine must be replaced; None: it need not be."""
        if self._silent >= WEDGED:
            return f"the engine process did not respond for {WEDGED * LOOK:.0f} s"
        if self._same >= STUCK:
            return f"a step of the engine did not end within {STUCK * LOOK:.0f} s"
        return None

    def close(self) -> None:
        self._map.close()


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), FORM.size)
