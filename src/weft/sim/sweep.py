"""Goodput over request rates: every policy on two traces, four gap targets and two truths, at the same absolute rates.

Scores are written to the file as they arrive (sweep_file.py). A run that is in the file is not repeated, so a sweep can
be stopped at any time and resumed later. score_table.py and sweep_capacity.py choose the runs.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from weft.errors import OptionError
from weft.sim import sweep_capacity
from weft.sim.score_table import ScoreTable
from weft.sim.sweep_file import append_scores, header_of, open_scores, sort_scores
from weft.sim.sweep_grid import Grid, SweepRun, usefulness
from weft.sim.sweep_run import Material
from weft.sim.sweep_workers import SweepWorkers

PARTS = ("all", "peaks", "capacity")


def sweep(
    material: Material,
    path: Path,
    jobs: int,
    only: str = "",
    seconds: float = math.inf,
    part: str = "all",
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Runs the wanted runs that are not in the file, for at most `seconds`. Returns the number of runs that remain."""
    end = time.monotonic() + seconds
    grid = material.grid
    if part not in PARTS:
        raise OptionError(f"--part {part!r} is not known; there are {', '.join(PARTS)}")
    if not any(only in run.name for run in grid.coarse_runs()):
        example = grid.coarse_runs()[0].name
        raise OptionError(f"--only {only!r} is in no run's name; such a name is {example}")
    header = header_of(material.profile)
    table = ScoreTable(grid, open_scores(path, header))
    queue = RunQueue(grid, only)
    queue.add(missing_runs(table, part))
    try:
        with SweepWorkers(jobs, material) as workers:
            while (queue.heap or workers.is_busy) and time.monotonic() < end:
                while queue.heap and workers.has_idle:
                    workers.submit(queue.pop())
                for run, scores in workers.results():
                    append_scores(path, scores)
                    for score in scores:
                        table.add(score)
                    queue.done += 1
                    for gap in run.gaps(grid):
                        queue.add(wanted_runs(table, run.trace, run.truth, gap, part))
                tell(queue.done, len(queue.seen))
    finally:
        sort_scores(path, header, table.scores())
    return len(queue.seen) - queue.done


def wanted_runs(table: ScoreTable, trace: str, truth: str, gap: int, part: str = "all") -> list[SweepRun]:
    """Runs of a part of the sweep (see PARTS) that the scores so far require and that are not done."""
    peaks = [] if part == "capacity" else table.wanted(trace, truth, gap)
    capacity = [] if part == "peaks" else sweep_capacity.wanted(table, trace, truth, gap)
    return list(dict.fromkeys(peaks + capacity))


def missing_runs(table: ScoreTable, part: str = "all") -> list[SweepRun]:
    """As `wanted_runs`, for all traces, truths and gap targets."""
    return list(dict.fromkeys(run for group in table.grid.groups() for run in wanted_runs(table, *group, part)))


class RunQueue:
    """Runs to do, the most useful first. A run is queued only once, even if it is added again."""

    def __init__(self, grid: Grid, only: str) -> None:
        self.grid, self.only = grid, only
        self.heap: list[tuple[tuple[Any, ...], SweepRun]] = []
        self.seen: set[SweepRun] = set()
        self.done = 0

    def add(self, runs: Iterable[SweepRun]) -> None:
        for run in runs:
            if self.only in run.name and run not in self.seen:
                self.seen.add(run)
                heapq.heappush(self.heap, (usefulness(self.grid, run), run))

    def pop(self) -> SweepRun:
        return heapq.heappop(self.heap)[1]


def check_jobs(jobs: int) -> None:
    if jobs < 1:
        raise OptionError(f"--jobs {jobs} must be at least 1")
