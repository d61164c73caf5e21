"""GarbageCollection: controls when Python's garbage collector runs, because a full collection stops all streams for
tens of milliseconds. Also returns free memory to the system."""

import ctypes
import gc
import sys
import time

# Container objects created and not yet freed between two collections of the young generation; young collections between
# two of the middle generation; middle collections between two full ones. A collection visits all live objects of its
# generation: 20,000 young objects took 9 ms. Reference counting frees the objects of a request when it ends, so older
# generations contain little garbage.
THRESHOLDS = (2_000, 500, 100)
COLLECT_EVERY = 5.0  # seconds between two collections of an idle process
TRIM_EVERY = 60.0  # seconds between two returns of free memory, which the next request must allocate again


class GarbageCollection:
    """Controls Python's garbage collector in a process that only serves requests."""

    def __init__(self) -> None:
        self._collected_at = self._trimmed_at = 0.0
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

    def collect_when_idle(self) -> None:
        """To be called often while no request runs: collects garbage and trims memory from time to time."""
        now = time.monotonic()
        if now - self._collected_at > COLLECT_EVERY:
            self._collected_at = now
            gc.collect()
            if now - self._trimmed_at > TRIM_EVERY:
                self._trimmed_at = now
                trim()


def trim() -> None:
    """Returns free memory to the system. The C library keeps memory that threads freed: hundreds of MB of grammars."""
    if sys.platform == "linux":
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)  # in glibc, not in musl
        if release is not None:
            release(0)
