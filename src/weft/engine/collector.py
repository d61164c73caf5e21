"""Limits Python's garbage collection, which stops all streams (a full collection for tens of milliseconds), and returns
free memory to the system."""

import ctypes
import gc
import sys
import time

# Container objects created and not yet freed between two collections of the young generation; young collections between
# two of the middle generation; middle collections between two full ones. A collection visits all live objects of its
# generation: 20,000 young objects took 9 ms. Reference counting frees the objects of a request when it ends, so older
# generations contain little garbage.
THRESHOLDS = (2_000, 500, 100)
EVERY = 5.0  # seconds between two collections of an idle process
EVERY_TRIM = 60.0  # seconds between two returns of free memory, which the next request must allocate again


class Collector:
    """Controls garbage collection in a process that only serves requests."""

    def __init__(self) -> None:
        self._last = self._trimmed = 0.0
        self._before = gc.get_threshold()

    def freeze(self) -> None:
        """Excludes all objects of the start-up from later collections: they live as long as the process."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)

    def thaw(self) -> None:
        """Restores the settings from before, for a process that continues with other work."""
        gc.unfreeze()
        gc.set_threshold(*self._before)

    def idle(self) -> None:
        """Collects garbage and trims memory from time to time. Call it when no request runs: it would delay streams."""
        now = time.monotonic()
        if now - self._last > EVERY:
            self._last = now
            gc.collect()
            if now - self._trimmed > EVERY_TRIM:
                self._trimmed = now
                trim()


def trim() -> None:
    """Returns free memory to the system. The C library keeps memory that threads freed: hundreds of MB of grammars."""
    if sys.platform == "linux":
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)  # in glibc, not in musl
        if release is not None:
            release(0)
