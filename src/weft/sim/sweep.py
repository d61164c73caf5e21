"""Goodput over request rates: every policy on two traces, four gap targets and two truths, at the same absolute rates.

Results are JSON lines, written as they arrive. A run that is in the file is not repeated, so a sweep can be stopped at
any time and resumed later. From top to bottom: the file, the workers, the sweep. sweep_board.py and sweep_capacity.py
choose the runs, sweep_report.py makes the tables.
"""

import ast
import hashlib
import heapq
import json
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from weft import __version__
from weft.core import Targets
from weft.errors import EngineError, OptionError
from weft.sim import sweep_capacity
from weft.sim.compare import kept_promises, run_policy
from weft.sim.profiles import Profile, load_profile
from weft.sim.simulator import Truth
from weft.sim.sweep_board import TRUTHS, Board, Grid, Run, Score, six_digits, usefulness
from weft.sim.traces import Trace, load_trace

PROFILE = "h200-llama-3-8b"
DECISIVE = ("compare.py", "simulator.py", "traces.py")  # files of sim/ in the scheduler hash, with all of core/
PARTS = ("all", "peaks", "capacity")
UNUSED = ("name", "mean", "spread", "residuals", "fidelity")  # fields of a profile that no run depends on
STALE = 1.0  # seconds between checks of the clock, and of whether the parent process is alive

# --- the file ---


def header_of(profile: Profile) -> dict[str, Any]:
    content = {name: value for name, value in asdict(profile).items() if name not in UNUSED}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return {"profile": profile.name, "profile_hash": digest, "weft": __version__, "scheduler": scheduler_hash()}


@cache
def scheduler_hash() -> str:
    """Hash of the code that determines scores: the core, the simulator, the check of targets, the trace reader."""
    package = Path(__file__).parents[1]
    files = [*sorted((package / "core").rglob("*.py")), *(package / "sim" / name for name in DECISIVE)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + code_of(file.read_text(encoding="utf-8")).encode() + b"\0")
    return digest.hexdigest()[:12]


def code_of(source: str) -> str:
    """The code without comments, docstrings and layout; the same text in every version of Python."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return repr(_plain(tree))


def _plain(node: Any) -> Any:
    """A syntax tree as lists, without empty fields: newer versions of Python have more of them."""
    if isinstance(node, list):
        return [_plain(one) for one in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, _plain(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return [type(node).__name__, *fields]


def read_scores(path: Path) -> tuple[dict[str, Any], list[Score], int]:
    """The header, the scores, and the number of bytes that they take. A last line that was cut off is left out."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from None
    whole = data.rfind(b"\n") + 1
    rows = []
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        try:
            rows.append(dict(json.loads(line)) if number == 1 else Score(**json.loads(line)))
        except (ValueError, TypeError):
            raise OptionError(f"{path}, line {number} is not from a sweep; choose another file") from None
    if not rows and not b'{"profile":'.startswith(data[:11]):
        raise OptionError(f"{path} is not from a sweep; choose another file")
    header = rows[0] if rows and isinstance(rows[0], dict) else {}
    return header, [row for row in rows if isinstance(row, Score)], whole


def open_scores(path: Path, header: Mapping[str, Any]) -> list[Score]:
    """The scores of an earlier sweep. Prepares the file for appending; a new file gets the header."""
    found, scores, whole = read_scores(path) if path.exists() else ({}, [], 0)
    if found and found != header:
        there, here = (", ".join(f"{name} {value}" for name, value in one.items()) for one in (found, header))
        raise OptionError(f"{path} is from {there}; this is {here}: choose another file")
    try:
        with path.open("ab") as file:
            file.truncate(whole)
            if not found:
                file.write(_line(header))
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}") from None
    return scores


def append_scores(path: Path, scores: Iterable[Score]) -> None:
    with path.open("ab") as file:
        file.write(b"".join(_line(score._asdict()) for score in scores))


def sort_scores(path: Path, header: Mapping[str, Any], scores: Iterable[Score]) -> None:
    """Rewrites the file in a fixed order, so that it does not depend on the order of the runs."""
    draft = path.with_name(path.name + ".tmp")
    lines = [score._asdict() for score in sorted(scores, key=lambda score: score.order)]
    draft.write_bytes(b"".join(map(_line, [header, *lines])))
    os.replace(draft, path)


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


# --- the workers ---


@dataclass(frozen=True)
class Material:
    """Inputs that all runs share."""

    grid: Grid
    profile: Profile
    traces: dict[str, Trace]  # by the name of the course; unscaled


def load_material(grid: Grid, folder: Path, profile: str = PROFILE) -> Material:
    if not folder.is_dir():
        raise OptionError(f"--traces {folder} is not a folder")
    loaded = load_profile(profile)
    traces = {}
    for course in grid.courses:
        trace, left_out = load_trace(folder / course.file).first(grid.duration).fitting(loaded.max_model_len)
        if left_out is not None:
            print(f"weft: {course.file}: {left_out}", file=sys.stderr)
        if trace.span <= 0:
            raise OptionError(
                f"{course.name} has no two moments of arrival in its first {grid.duration:g} s, so it has no rate"
            )
        traces[course.name] = trace
    return Material(grid, loaded, traces)


def score_run(run: Run, material: Material) -> list[Score]:
    grid, profile = material.grid, material.profile
    course, base = grid.course(run.trace), material.traces[run.trace]
    gaps = run.gaps(grid)
    promises = {gap: Targets(gap / 1000, course.ttft, course.ttft_per_1k) for gap in gaps}
    truth = Truth(profile.coefficients, **TRUTHS[run.truth])
    played = run_policy(run.policy, base.scaled(run.scale), profile, promises[gaps[0]], truth)
    tokens = played.prompt_tokens + played.output_tokens
    scores = []
    for gap, targets in promises.items():
        kept = kept_promises(played, targets)
        scores.append(
            Score(
                trace=run.trace,
                truth=run.truth,
                policy=run.policy,
                scale=run.scale,
                rate_rps=six_digits(run.scale * len(base.arrivals) / base.span),
                gap_ms=gap,
                kept=int(kept.sum()),
                goodput_rps=six_digits(kept.sum() / played.span),
                refused=int(played.refused.sum()),
                preemptions=played.preemptions,
                requests=len(base.arrivals),
                kept_tokens=six_digits(tokens[kept].sum() / tokens.sum()),
                longest_gap_ms=six_digits(1000 * played.gaps.max(initial=0.0)),
            )
        )
    return scores


def _work(pipe: "Connection[Any, Any]", material: Material) -> None:
    """A worker process: receives a run, sends its scores or the traceback of a failure, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and then ends the workers
    parent = os.getppid()
    try:
        while True:
            while not pipe.poll(STALE):
                if os.getppid() != parent:  # the parent was killed; siblings hold the pipe open, so it does not break
                    return
            run = pipe.recv()
            try:
                pipe.send(score_run(run, material))
            except Exception:
                pipe.send(traceback.format_exc())
    except (EOFError, OSError):
        return


class Crew:
    """Worker processes, each with at most one run at a time."""

    def __init__(self, count: int, material: Material) -> None:
        # A fork needs no second import. It is safe, because this process has no other threads.
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self.workers: list[BaseProcess] = []
        self.idle: list[Connection[Any, Any]] = []
        self.busy: dict[Connection[Any, Any], Run] = {}
        for _ in range(count):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, material), daemon=True)
            worker.start()
            theirs.close()  # so that a worker's death breaks the pipe
            self.workers.append(worker)
            self.idle.append(ours)

    def give(self, run: Run) -> None:
        pipe = self.idle.pop()
        pipe.send(run)
        self.busy[pipe] = run

    def results(self) -> Iterator[tuple[Run, list[Score]]]:
        """Results that have arrived; waits at most STALE seconds."""
        for pipe in wait(list(self.busy), timeout=STALE):
            assert isinstance(pipe, Connection)
            run = self.busy.pop(pipe)
            try:
                answer = pipe.recv()
            except (EOFError, OSError):
                raise EngineError(
                    f"a worker was killed while it ran {run.name} at x{run.scale:g}; was it memory? try fewer --jobs. "
                    "What is done is in the file"
                ) from None
            if isinstance(answer, str):
                raise EngineError(f"{run.name} at x{run.scale:g} failed:\n{answer}")
            self.idle.append(pipe)
            yield run, answer

    def close(self) -> None:
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.join()


# --- the sweep ---


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
    board = Board(grid, open_scores(path, header))
    queue = Queue(grid, only)
    queue.add(missing_runs(board, part))
    crew = Crew(jobs if queue.heap else 0, material)
    try:
        while (queue.heap or crew.busy) and time.monotonic() < end:
            while queue.heap and crew.idle:
                crew.give(queue.pop())
            for run, scores in crew.results():
                append_scores(path, scores)
                for score in scores:
                    board.add(score)
                queue.done += 1
                for gap in run.gaps(grid):
                    queue.add(wanted_runs(board, run.trace, run.truth, gap, part))
            tell(queue.done, len(queue.seen))
    finally:
        crew.close()
        sort_scores(path, header, board.scores())
    return len(queue.seen) - queue.done


def wanted_runs(board: Board, trace: str, truth: str, gap: int, part: str = "all") -> list[Run]:
    """Runs of a part of the sweep (see PARTS) that the scores so far require and that are not done."""
    peaks = [] if part == "capacity" else board.wanted(trace, truth, gap)
    capacity = [] if part == "peaks" else sweep_capacity.wanted(board, trace, truth, gap)
    return list(dict.fromkeys(peaks + capacity))


def missing_runs(board: Board, part: str = "all") -> list[Run]:
    """As `wanted_runs`, for all traces, truths and gap targets."""
    return list(dict.fromkeys(run for group in board.grid.groups() for run in wanted_runs(board, *group, part)))


class Queue:
    """Runs to do, the most useful first. A run is queued only once, even if it is added again."""

    def __init__(self, grid: Grid, only: str) -> None:
        self.grid, self.only = grid, only
        self.heap: list[tuple[tuple[Any, ...], Run]] = []
        self.seen: set[Run] = set()
        self.done = 0

    def add(self, runs: Iterable[Run]) -> None:
        for run in runs:
            if self.only in run.name and run not in self.seen:
                self.seen.add(run)
                heapq.heappush(self.heap, (usefulness(self.grid, run), run))

    def pop(self) -> Run:
        return heapq.heappop(self.heap)[1]


def check_jobs(jobs: int) -> None:
    if jobs < 1:
        raise OptionError(f"--jobs {jobs} must be at least 1")
