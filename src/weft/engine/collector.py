"""Python's garbage collector, kept out of the way: a collection stops all streams, a full one for tens of
milliseconds. And memory that is free, given back to the system."""

import ctypes
import gc
import sys
import time

# Container objects that may be made, and not freed by themselves, between two collections of the youngest; how many of
# those between two of the middle generation; and how many of these between two full ones. A collection looks at all
# that is alive among so many: 20,000 young objects took 9 ms. Objects of a request free themselves when it ends, so
# that older generations have little to find.
THRESHOLDS = (2_000, 500, 100)
EVERY = 5.0  # seconds between two collections of an idle process
EVERY_TRIM = 60.0  # seconds between two moments at which it gives free memory back, which the next request takes again


class Collector:
    """For a process that does nothing but serve."""

    def __init__(self) -> None:
        self._last = self._trimmed = 0.0
        self._before = gc.get_threshold()

    def freeze(self) -> None:
        """What start-up left lives as long as the process does: it is not looked at again."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)

    def thaw(self) -> None:
        """As it was before: for a process that goes on with something else."""
        gc.unfreeze()
        gc.set_threshold(*self._before)

    def idle(self) -> None:
        """Nothing runs: the moment for what would disturb a stream."""
        now = time.monotonic()
        if now - self._last > EVERY:
            self._last = now
            gc.collect()
            if now - self._trimmed > EVERY_TRIM:
                self._trimmed = now
                trim()


def trim() -> None:
    """Gives free memory back. The C library keeps what threads have freed, as hundreds of megabytes of grammars are."""
    if sys.platform == "linux":
        release = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
        if release is not None:
            release(0)
