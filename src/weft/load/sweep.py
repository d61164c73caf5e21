"""Sweep: the same load at several rates, kept line by line so that it can go on where it was interrupted."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.errors import EngineError, OptionError

PRECISION = 1.1  # highest rates are found up to this factor


class Lines:
    """A file with one run a line. What is in it is not measured again."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.runs: dict[str, dict[str, Any]] = {}
        try:
            text = file.read_text() if file.exists() else ""
        except OSError as error:
            raise OptionError(f"cannot read {file}: {error.strerror}") from None
        whole, _, half = text.rpartition("\n")
        if half:  # a run that was being written when the machine went down
            file.write_text(whole + "\n" if whole else "")
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                run = json.loads(line)
                self.runs[run["key"]] = run
            except (ValueError, KeyError, TypeError):
                raise OptionError(
                    f"{file}, line {number} is not a run of weft bench sweep: name another file"
                ) from None

    def get(self, about: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The run that `about` describes: from the file, or measured now."""
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        if key not in self.runs:
            run = {"key": key, **about, **measure()}
            if run.get("was_interrupted"):
                return run
            try:
                with self.file.open("a") as file:
                    file.write(json.dumps(run) + "\n")
            except OSError as error:
                raise EngineError(f"cannot write {self.file}: {error.strerror}") from None
            self.runs[key] = run
        return self.runs[key]


def highest(low: float, high: float, holds: Callable[[float], bool]) -> float | None:
    """The highest rate from low to high that holds, up to PRECISION; None where not even the lowest does."""
    if not holds(low):
        return None
    if holds(high):
        return high
    while high > low * PRECISION:
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
