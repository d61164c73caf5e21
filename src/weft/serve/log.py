"""What clients can make the log say: requests that are wrong are not logged, and failures only a few at a time."""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable

MOST_NAME = 64  # characters of one that are kept
MOST_NAMES = 100  # of unknown fields; requests could bring any number
MOST = 5  # entries within PERIOD; one is a traceback of some forty lines
PERIOD = 10.0  # seconds


def _print(text: str) -> None:
    print(text.rstrip("\n"), file=sys.stderr, flush=True)


class Sparing(logging.Filter):
    """Lets a few entries through in each period, and then tells how many it has left out. For all threads."""

    def __init__(self, say: Callable[[str], None] = _print) -> None:
        super().__init__()
        self._say = say
        self._lock = threading.Lock()
        self._began = -math.inf  # of this period
        self._entries = 0
        self._timer: threading.Timer | None = None  # runs while entries are left out

    def write(self, text: str) -> None:
        if self._is_let_through():
            self._say(text)

    def filter(self, record: logging.LogRecord) -> bool:
        """For entries of libraries, which write themselves."""
        return self._is_let_through()

    def _is_let_through(self) -> bool:
        with self._lock:
            now = time.monotonic()
            if self._timer is None and now >= self._began + PERIOD:  # nothing was left out in the last one
                self._began, self._entries = now, 0
            self._entries += 1
            if self._entries > MOST and self._timer is None:
                self._timer = threading.Timer(self._began + PERIOD - now, self._tell)
                self._timer.daemon = True
                self._timer.start()
            return self._entries <= MOST

    def _tell(self) -> None:
        """The period is over."""
        with self._lock:
            left_out = self._entries - MOST
            self._began, self._entries, self._timer = -math.inf, 0, None
        self._say(f"weft: {left_out} more errors were left out of the log within {PERIOD:g} s")


class Unknown:
    """Tells of each unknown field of requests once, and of no more than MOST_NAMES."""

    def __init__(self, say: Callable[[str], None] = _print) -> None:
        self._say = say
        self._names: set[str] = set()

    def note(self, names: list[str]) -> None:
        for name in (name[:MOST_NAME] for name in names):
            if name not in self._names and len(self._names) < MOST_NAMES:
                self._names.add(name)
                self._say(f"weft: requests have the field {name!r}, which is not known here and is ignored")
