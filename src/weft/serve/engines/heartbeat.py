"""Heartbeat: a shared mapped file that shows whether the engine process runs and its loop makes progress.

A thread of the engine process counts beats. The count stops if the process is stopped or cannot run. The loop counts
its iterations. The count stops if a step never ends. The API process compares counts, not times, so that a machine that
was suspended does not look like a failed engine.
"""

import mmap
import struct
import threading
from pathlib import Path

BEAT_INTERVAL_S = 0.5  # time between two beats
CHECK_INTERVAL_S = 1.0  # time between two checks by the API process
SILENT_CHECKS = 5  # checks without a beat, after which the engine counts as down and requests are refused
WEDGED_CHECKS = 20  # checks without a beat, after which the engine is replaced
STUCK_CHECKS = 300  # checks within one iteration of the loop, after which the engine is replaced: longer than any step

LAYOUT = struct.Struct("=QQQ")  # beats, iterations, and whether the loop has work


class Heartbeat:
    """The engine process's side: writes the counts."""

    def __init__(self, path: Path) -> None:
        self._map = _mapped(path)
        self._iterations = 0

    def start(self) -> None:
        """Starts the thread that beats until the process ends."""
        threading.Thread(target=self._beat, name="weft-heartbeat", daemon=True).start()

    def count_iteration(self, busy: bool) -> None:
        """Counts one iteration of the loop. `busy`: the loop has work, so the next iteration must follow in time."""
        self._iterations += 1
        struct.pack_into("=QQ", self._map, 8, self._iterations, busy)

    def _beat(self) -> None:
        beats, over = 0, threading.Event()
        while not over.wait(BEAT_INTERVAL_S):
            beats += 1
            struct.pack_into("=Q", self._map, 0, beats)


class HeartbeatMonitor:
    """The API process's side: reads the counts. `check` must be called every CHECK_INTERVAL_S seconds."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(LAYOUT.size))
        self._map = _mapped(path)
        self._last = (0, 0)
        self._silent = self._unchanged = 0  # checks since the last beat, and since the last iteration

    def check(self) -> None:
        beats, iterations, busy = LAYOUT.unpack_from(self._map)
        self._silent = 0 if beats != self._last[0] else self._silent + 1
        self._unchanged = 0 if iterations != self._last[1] or not busy else self._unchanged + 1
        self._last = beats, iterations

    @property
    def is_silent(self) -> bool:
        return self._silent >= SILENT_CHECKS

    @property
    def failure(self) -> str | None:
        """Why the engine must be replaced, or None."""
        if self._silent >= WEDGED_CHECKS:
            return f"the engine process did not respond for {WEDGED_CHECKS * CHECK_INTERVAL_S:.0f} s"
        if self._unchanged >= STUCK_CHECKS:
            return f"a step of the engine did not end within {STUCK_CHECKS * CHECK_INTERVAL_S:.0f} s"
        return None

    def close(self) -> None:
        self._map.close()


def _mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), LAYOUT.size)
