"""OtherProcesses: the share of this machine's CPU time that other processes used during a measurement. Linux only."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Ticks(NamedTuple):
    """Clock ticks of CPU time. `busy` and `total` count from the start of the machine."""

    own: int  # of this process and the given ones
    busy: int  # of all processors
    total: int


class OtherProcesses:
    """Measures from its creation. Figures from a machine that is busy with other processes mean little."""

    def __init__(self, pids: Sequence[int] = ()) -> None:
        """`pids` are processes that, like this one, do not count as others."""
        self._pids = [os.getpid(), *pids]
        self._begin = self._read()

    def share(self) -> float | None:
        """Share of all CPU time that other processes or virtual machines used; None if the system does not tell."""
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
        busy = user + nice + system + sum(interrupts[:3])  # includes time stolen by a host; user includes guest time
        return Ticks(own, busy, busy + idle + waiting)


def _process(pid: int) -> str:
    """The state of a process and the numbers after it. The name before may have spaces and ends at the last bracket."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]


def _numbers(line: str) -> list[int]:
    """All words except the first, as numbers."""
    return [int(word) for word in line.split()[1:]]
