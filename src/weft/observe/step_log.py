"""StepLog: writes StepRecords as JSON lines, for an analysis of every step."""

from dataclasses import fields
from pathlib import Path

import msgspec

from weft.core.step import StepRecord
from weft.errors import OptionError


class StepLog:
    """Appends one line per step."""

    _names = tuple(field.name for field in fields(StepRecord) if field.name not in ("host", "shape"))

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab", buffering=0)  # unbuffered: the process may end at any time
        except OSError as error:
            raise OptionError(f"--record-steps {path}: {error.strerror}; name a file that can be written") from None

    def write(self, record: StepRecord) -> None:
        found = {name: getattr(record, name) for name in self._names}
        found["shape"] = record.shape._asdict()
        found["host"] = record.host._asdict()
        self._file.write(msgspec.json.encode(found) + b"\n")

    def close(self) -> None:
        self._file.close()
