"""Others: how much of this machine's processors other processes took meanwhile. Linux only."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Ticks(NamedTuple):
    """Of the machine's clock, since it started."""

    own: int  # of the processes that are watched
    busy: int  # of all processors
    total: int


class Others:
    """Watches from when it is made. Figures of a machine that others keep busy say little."""

    def __init__(self, pids: Sequence[int] = ()) -> None:
        """`pids` are processes beside this one that are not others."""
        self._pids = [os.getpid(), *pids]
        self._begin = self._read()

    def share(self) -> float | None:
        """Share of all processor time that other processes or machines took; None where the system does not tell."""
        end = self._read()
        if self._begin is None or end is None or end.total == self._begin.total:
            return None
        own, busy, total = (after - before for before, after in zip(self._begin, end, strict=True))
        return min(max((busy - own) / total, 0.0), 1.0)

    def _read(self) -> Ticks | None:
        try:
            user, nice, system, idle, waiting, *interrupts = _numbers(Path("/proc/stat").read_text().splitlines()[0])
            own = sum(sum(_numbers(_process(pid))[10:12]) for pid in self._pids)
        except (OSError, ValueError, IndexError):
            return None
        busy = user + nice + system + sum(interrupts[:3])  # and what a host took away; guests are in user already
        return Ticks(own, busy, busy + idle + waiting)


def _process(pid: int) -> str:
    """The state of a process and the numbers behind it; its name may have spaces, and ends with the last bracket."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]


def _numbers(line: str) -> list[int]:
    """All but the first word."""
    return [int(word) for word in line.split()[1:]]
