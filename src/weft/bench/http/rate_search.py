"""Runs of one load at several rates: the file with one line per run, and the search for the highest rate that holds."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.errors import EngineError, OptionError

RATE_PRECISION = 1.1  # the highest rate is found to within this factor
LEAST_PACE = 0.95  # a server keeps up if answers end at this share of the request rate or more
EDGE_SHARE = 0.1  # share of the answers at either end that the pace ignores
LINE_START = b'{"key": "'  # of every line


class RunFile:
    """A file with one run per line. A run that is in the file is not measured again."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.runs: dict[str, dict[str, Any]] = {}
        data = _read(file)
        *whole, half = data.split(b"\n")
        self.needs_break = bool(half) and _is_json(half)  # an editor has removed the last line break
        if self.needs_break:
            whole, half = [*whole, half], b""
        for number, line in enumerate(whole, start=1):
            run = self._run(line, number)
            # A run without any completed request is measured again: the server may work by now.
            if run.get("completed") == 0:
                self.runs.pop(run["key"], None)
            else:
                self.runs[run["key"]] = run
        # The last line is incomplete: the machine stopped while it was written. It is cut off before the next write.
        self.cut_at = len(data) - len(half) if half else None
        if half and half[: len(LINE_START)] != LINE_START[: len(half)]:
            raise self._foreign(len(whole) + 1)

    def _run(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            run = json.loads(line)
        except ValueError:  # also raised for bytes that are not text
            raise self._foreign(number) from None
        if not isinstance(run, dict) or not re.fullmatch("[0-9a-f]{16}", str(run.get("key"))):
            raise self._foreign(number)
        return run

    def _foreign(self, number: int) -> OptionError:
        return OptionError(f"{self.file}, line {number} is not a run of weft bench sweep: name another file")

    def get(self, about: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The run that `about` describes: from the file, or measured now."""
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        if key not in self.runs:
            run = {"key": key, **about, **measure()}
            if run.get("was_interrupted"):
                return run
            try:
                self._append(json.dumps(run) + "\n")
            except OSError as error:
                raise EngineError(f"cannot write {self.file}: {error.strerror}") from None
            self.runs[key] = run
        return self.runs[key]

    def _append(self, line: str) -> None:
        if self.cut_at is not None:
            os.truncate(self.file, self.cut_at)
            self.cut_at = None
        with self.file.open("a") as file:
            file.write("\n" * self.needs_break + line)
        self.needs_break = False


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _read(file: Path) -> bytes:
    """The bytes of the file. Raises before anything is measured if the file cannot be written."""
    if not file.parent.is_dir():
        raise OptionError(f"--out {file}: there is no folder {file.parent}")
    try:
        data = file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise OptionError(f"cannot read {file}: {error.strerror}") from None
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise OptionError(f"--out {file} cannot be written to")
    return data


def pace(requests: Sequence[dict[str, Any]]) -> float | None:
    """The rate at which answers ended divided by the rate at which their requests were sent; None with too few answers.

    Only the middle of the answers counts. The last answers end some time after the last request is sent, so with long
    answers a healthy run would look slow.
    """
    done = [request for request in requests if request["end"] is not None and not request["error"]]
    edge = int(EDGE_SHARE * len(done))
    sent, ends = (sorted(request[name] for request in done)[edge : len(done) - edge] for name in ("sent", "end"))
    span = ends[-1] - ends[0] if ends else 0.0
    return (sent[-1] - sent[0]) / span if span > 0 else None


def keeps_up(found: dict[str, Any]) -> bool:
    """Whether answers end about as fast as requests are sent. Otherwise the queue grows without end."""
    sent = found.get("achieved_request_rate")
    if sent is None:  # all requests were sent at the same time
        return True
    return found["request_throughput"] >= LEAST_PACE * sent or (found.get("pace") or 0.0) >= LEAST_PACE


def highest_rate(low: float, high: float, holds: Callable[[float], bool]) -> float | None:
    """The highest rate from low to high that holds, to within RATE_PRECISION. None: not even `low` holds."""
    if not holds(low):
        return None
    if holds(high):
        return high
    while high > low * RATE_PRECISION:
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def middle_rates(low: float, high: float) -> list[float]:
    """Rates that `highest_rate` tries if only the lowest one holds: the lowest rates, which take longest."""
    found = []
    while high > low * RATE_PRECISION:
        high = (low * high) ** 0.5
        found.append(high)
    return found
