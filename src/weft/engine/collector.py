"""Python's garbage collector, kept out of the way: a collection stops all streams, a full one for tens of
milliseconds."""

import gc
import time

# Container objects that may be made, and not freed by themselves, between two collections of the youngest; how many of
# those between two of the middle generation; and how many of these between two full ones. A collection looks at all
# that is alive among so many: 20,000 young objects took 9 ms. Objects of a request free themselves when it ends, so
# that older generations have little to find.
THRESHOLDS = (2_000, 500, 100)
EVERY = 5.0  # seconds between two collections of an idle process


class Collector:
    """For a process that does nothing but serve."""

    def __init__(self) -> None:
        self._last = 0.0
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
