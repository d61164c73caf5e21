"""Rate limits for the log: invalid requests are not logged, and failures only a few at a time."""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable

MOST_NAME_CHARACTERS = 64  # characters of a field name that are kept
MOST_NAMES = 100  # unknown field names to remember; clients could send any number
MOST_ENTRIES = 5  # entries within PERIOD_S; one may be a traceback of about forty lines
PERIOD_S = 10.0  # seconds


def _print(text: str) -> None:
    print(text.rstrip("\n"), file=sys.stderr, flush=True)


class LogRateLimit(logging.Filter):
    """Passes MOST_ENTRIES entries in each period, and then logs how many were dropped. Thread-safe."""

    def __init__(self, say: Callable[[str], None] = _print) -> None:
        super().__init__()
        self._say = say
        self._lock = threading.Lock()
        self._began = -math.inf  # start of the current period
        self._entries = 0
        self._timer: threading.Timer | None = None  # runs while entries are being dropped

    def write(self, text: str) -> None:
        if self._passes():
            self._say(text)

    def filter(self, record: logging.LogRecord) -> bool:
        """For log records of libraries, which write them themselves."""
        return self._passes()

    def _passes(self) -> bool:
        with self._lock:
            now = time.monotonic()
            if self._timer is None and now >= self._began + PERIOD_S:  # the last period dropped nothing
                self._began, self._entries = now, 0
            self._entries += 1
            if self._entries > MOST_ENTRIES and self._timer is None:
                self._timer = threading.Timer(self._began + PERIOD_S - now, self._report_dropped)
                self._timer.daemon = True
                self._timer.start()
            return self._entries <= MOST_ENTRIES

    def _report_dropped(self) -> None:
        """Logs the number of dropped entries at the end of the period."""
        with self._lock:
            left_out = self._entries - MOST_ENTRIES
            self._began, self._entries, self._timer = -math.inf, 0, None
        self._say(f"weft: {left_out} more errors were left out of the log within {PERIOD_S:g} s")


class UnknownFieldLog:
    """Logs each unknown request field once, and at most MOST_NAMES fields."""

    def __init__(self, say: Callable[[str], None] = _print) -> None:
        self._say = say
        self._names: set[str] = set()

    def note(self, names: list[str]) -> None:
        for name in (name[:MOST_NAME_CHARACTERS] for name in names):
            if name not in self._names and len(self._names) < MOST_NAMES:
                self._names.add(name)
                self._say(f"weft: requests have the field {name!r}, which is not known here and is ignored")
