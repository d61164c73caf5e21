"""Goodput over rates: every policy, over two traces, four gap targets and two truths, at the same absolute rates.

Results are lines of JSON, written as they come. What is in the file is not run again, so a sweep can be stopped at any
time and go on later. From top to bottom: the grid and its runs, what is known and what that makes wanted, the file, the
workers, the sweep. sweep_report.py makes the tables.
"""

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from weft import __version__
from weft.core import Targets
from weft.errors import EngineError, OptionError
from weft.sim.compare import kept_promises, run_policy
from weft.sim.profiles import Profile, load_profile
from weft.sim.simulator import Truth
from weft.sim.traces import Trace, load_trace

PROFILE = "h200-llama-3-8b"
COARSE, FINE = 1.15, 1.03  # ratios of neighbouring rates, on the grid and near a peak
DISTURBED = {"bias": 0.1, "noise": 0.05, "seed": 0}
TRUTHS: dict[str, dict[str, Any]] = {"exact": {}, "disturbed": DISTURBED}
FALLEN = 0.1  # of the peak: what a policy that refuses nobody keeps once it is drowned
BEATEN = 0.8  # of slo's peak: at rates below this, and so with goodput below it, nobody is a match for slo
OVERLOAD = 1.5  # times the rate of slo's peak
UNUSED = ("name", "mean", "spread", "fidelity")  # of a profile: no run depends on them
STALE = 1.0  # seconds between looks at the clock, and at whether the parent is still there

# --- the grid and its runs ---


@dataclass(frozen=True)
class Course:
    """A trace of the sweep: its promises in seconds, and its rates, which are COARSE**lowest to COARSE**highest."""

    name: str
    file: str
    ttft: float
    ttft_per_1k: float
    lowest: int
    highest: int


# Goodput is never above the rate, so that below the lowest rate no policy has more goodput than that rate; it is far
# below what slo reaches, and slower arrivals make the longest runs of all. The high ends are where the offered prefill
# work alone is about twice what the device can do in the time (the profile's seconds for each token and pair, in steps
# that are bound by arithmetic, over the seconds of arrivals). For Azure that is the case at x17.6, and 1.15**20 is
# x16.4 (1.9 times); for Mooncake at x1.24 if nothing were cached and at x1.74 with an unlimited prefix cache, and
# 1.15**4 is x1.75 (2.8 and 2.0 times).
COURSES = (
    Course("azure", "AzureLLMInferenceTrace_conv.csv", 1.0, 0.0, lowest=3, highest=20),
    Course("mooncake", "mooncake_conversation_trace.jsonl", 1.0, 0.25, lowest=-9, highest=4),
)


@dataclass(frozen=True)
class Grid:
    """What is swept."""

    courses: tuple[Course, ...] = COURSES
    truths: tuple[str, ...] = tuple(TRUTHS)
    gaps_ms: tuple[int, ...] = (15, 25, 50, 100)
    chunks: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    duration: float = 600.0  # seconds of the trace, before it is scaled

    @property
    def ablated(self) -> tuple[str, ...]:
        return tuple(f"slo-order:{chunk}" for chunk in self.chunks)

    @property
    def fixed(self) -> tuple[str, ...]:
        return tuple(f"chunked:{chunk}" for chunk in self.chunks)

    @property
    def policies(self) -> tuple[str, ...]:
        return ("slo", *self.ablated, *self.fixed, "monolithic")

    def course(self, name: str) -> Course:
        return next(course for course in self.courses if course.name == name)

    def scales(self, trace: str) -> list[float]:
        course = self.course(trace)
        return [coarse_scale(step) for step in range(course.lowest, course.highest + 1)]

    def groups(self) -> Iterator[tuple[str, str, int]]:
        """Trace, truth and gap target: what the rows of different policies have in common."""
        for truth in self.truths:
            for course in self.courses:
                for gap in self.gaps_ms:
                    yield course.name, truth, gap

    def coarse_runs(self) -> list["Run"]:
        runs = {
            Run.of(trace, truth, policy, gap, scale): None
            for trace, truth, gap in self.groups()
            for policy in self.policies
            for scale in self.scales(trace)
        }
        return list(runs)


def is_plain(policy: str) -> bool:
    """Whether a policy looks at no targets, so that one run tells about all of them."""
    return not policy.startswith("slo")


class Row(NamedTuple):
    """One policy's goodput over rates."""

    trace: str
    truth: str
    policy: str
    gap_ms: int


class Run(NamedTuple):
    """One simulation."""

    trace: str
    truth: str
    policy: str
    gap_ms: int | None  # None under a plain policy: it is scored for all of them
    scale: float

    @classmethod
    def of(cls, trace: str, truth: str, policy: str, gap_ms: int, scale: float) -> "Run":
        return cls(trace, truth, policy, None if is_plain(policy) else gap_ms, scale)

    @property
    def name(self) -> str:
        """What --only looks into."""
        return f"{self.trace}/{self.truth}/{self.policy}/" + ("" if self.gap_ms is None else f"{self.gap_ms}ms")

    def gaps(self, grid: Grid) -> tuple[int, ...]:
        return grid.gaps_ms if self.gap_ms is None else (self.gap_ms,)


class Score(NamedTuple):
    """One line of the file: what one run says about one gap target."""

    trace: str
    truth: str
    policy: str
    scale: float  # times the trace's own rate
    rate_rps: float  # requests in a second
    gap_ms: int
    kept: int  # promises
    goodput_rps: float  # kept promises in a second of arrivals
    refused: int
    preemptions: int
    requests: int

    @property
    def row(self) -> Row:
        return Row(self.trace, self.truth, self.policy, self.gap_ms)

    @property
    def order(self) -> tuple[Any, ...]:
        """Where it stands in the finished file."""
        kind, _, chunk = self.policy.partition(":")
        return (self.trace, self.truth, kind, int(chunk or 0), self.gap_ms, self.scale)


def six_digits(value: float) -> float:
    return float(f"{value:.6g}")


@cache
def coarse_scale(step: int) -> float:
    """A rate of the grid. What is written is what was run, to the digit, whatever the machine's last bit."""
    return six_digits(COARSE**step)


def fine_scales(low: float, high: float) -> list[float]:
    """The powers of FINE strictly between two scales: one grid for all policies."""
    first, last = (math.floor(math.log(end) / math.log(FINE)) for end in (low, high))
    scales = (six_digits(FINE**step) for step in range(first, last + 2))
    return [scale for scale in scales if low < scale < high]


def fine_scale_from(least: float) -> float:
    """The lowest power of FINE that is not below `least`."""
    return six_digits(FINE ** math.ceil(math.log(least) / math.log(FINE) - 1e-9))


def usefulness(grid: Grid, run: Run) -> tuple[Any, ...]:
    """Sorts runs so that a sweep that is killed has done what matters most.

    One truth with all policies makes a table, two halves make none, so the exact one comes first; in it what is
    compared most closely. Among equals long runs go first, so that no worker is left alone with one at the end: slow
    arrivals and small chunks make many steps.
    """
    chunk = run.policy.partition(":")[2]
    steps = grid.duration / run.scale * (1 + 64 / int(chunk or 8192))
    return (grid.truths.index(run.truth), is_plain(run.policy), -steps, run.name)


# --- what is known, and what that makes wanted ---


class Board:
    """All scores so far."""

    def __init__(self, grid: Grid, scores: Iterable[Score] = ()) -> None:
        self.grid = grid
        self.rows: dict[Row, dict[float, Score]] = {}
        self._units: dict[str, float] = {}
        for score in scores:
            self.add(score)

    def add(self, score: Score) -> None:
        self.rows.setdefault(score.row, {})[score.scale] = score
        self._units[score.trace] = score.rate_rps / score.scale

    def scores(self) -> list[Score]:
        return [score for row in self.rows.values() for score in row.values()]

    def row(self, row: Row) -> Mapping[float, Score]:
        return self.rows.get(row, {})

    def has(self, run: Run) -> bool:
        rows = (Row(run.trace, run.truth, run.policy, gap) for gap in run.gaps(self.grid))
        return all(run.scale in self.row(row) for row in rows)

    def next_coarse(self, row: Row) -> float | None:
        """The rate of the grid that is to be run next; None where the others do not matter.

        Goodput is never above the rate. So who refuses is run from the highest rate down, as far as the rate exceeds
        its best goodput so far, and an ablated chunk also only as far as the rate exceeds BEATEN times slo's peak. Who
        refuses nobody is run from the lowest rate up.
        """
        scales = self.grid.scales(row.trace)
        if is_plain(row.policy):
            return next((scale for scale in scales if not self.has(Run.of(*row, scale))), None)
        best = 0.0
        if row.policy != "slo":
            peak = self.coarse_peak(row._replace(policy="slo"))
            best = BEATEN * peak.goodput_rps / self.unit(row.trace) if peak is not None else math.inf
        for scale in reversed(scales):
            score = self.row(row).get(scale)
            if score is None:
                return scale if scale > best else None
            best = max(best, score.goodput_rps / self.unit(row.trace))
        return None

    def has_fallen(self, trace: str, truth: str, policy: str) -> bool:
        """Whether a plain policy, at two rates in a row, kept next to nothing of its peak under any gap target."""
        for gap in self.grid.gaps_ms:
            scores = self.row(Row(trace, truth, policy, gap))
            scales = [s for s in self.grid.scales(trace) if self.has(Run.of(trace, truth, policy, gap, s))]
            on_grid = [scores[scale] for scale in scales]
            if len(on_grid) < 3:
                return False
            best = highest(on_grid).goodput_rps
            if any(score.goodput_rps >= FALLEN * best and score.goodput_rps > 0 for score in on_grid[-2:]):
                return False
        return True

    def wanted_coarse(self, row: Row) -> float | None:
        """As `next_coarse`; a plain policy is done when it has fallen."""
        if is_plain(row.policy) and self.has_fallen(row.trace, row.truth, row.policy):
            return None
        return self.next_coarse(row)

    def is_complete(self, row: Row) -> bool:
        """Whether all rates of the grid that matter were run; an ablated chunk's are known when slo's are."""
        waits = not is_plain(row.policy) and row.policy != "slo" and not self.is_complete(row._replace(policy="slo"))
        return bool(self.row(row)) and not waits and self.wanted_coarse(row) is None

    def unit(self, trace: str) -> float:
        """Requests in a second at the trace's own rate."""
        return self._units[trace]

    def coarse_peak(self, row: Row) -> Score | None:
        """The highest goodput on the grid; None while rates that might be higher are missing."""
        if not self.is_complete(row):
            return None
        return highest(score for scale, score in self.row(row).items() if scale in self.grid.scales(row.trace))

    def best_of(self, policies: Sequence[str], trace: str, truth: str, gap: int) -> str | None:
        """The policy with the highest peak on the grid; None while rates of any of them are missing."""
        peaks = [self.coarse_peak(Row(trace, truth, policy, gap)) for policy in policies]
        found = [peak for peak in peaks if peak is not None]
        return highest(found).policy if found and len(found) == len(peaks) else None

    def near_peaks(self, trace: str, truth: str, gap: int) -> dict[str, set[float]]:
        """For slo, the best ablated and the best plain chunk: finer rates between the neighbours of the peak.

        Those of slo and of the best ablated chunk are run under both, so that their peaks are compared at equal rates.
        """
        near: dict[str, set[float]] = {}
        ablated = self.best_of(self.grid.ablated, trace, truth, gap)
        for policy in ("slo", ablated, self.best_of(self.grid.fixed, trace, truth, gap)):
            peak = None if policy is None else self.coarse_peak(Row(trace, truth, policy, gap))
            if peak is not None:
                near[peak.policy] = set(fine_scales(*_neighbours(self.grid.scales(trace), peak.scale)))
        if ablated is not None and "slo" in near:
            near["slo"] = near[ablated] = near["slo"] | near[ablated]
        return near

    def peak(self, row: Row) -> Score | None:
        """The highest goodput that was found; None where there is no score at all.

        slo's is looked for where the others' is: the point that was run to see what becomes of it in overload is not
        one of them.
        """
        scores = self.row(row)
        if row.policy == "slo":
            near = self.near_peaks(row.trace, row.truth, row.gap_ms).get("slo", set())
            allowed = near.union(self.grid.scales(row.trace))
            scores = {scale: score for scale, score in scores.items() if scale in allowed}
        return highest(scores.values()) if scores else None

    def overload_scale(self, trace: str, truth: str, gap: int) -> float | None:
        """Where slo is run at OVERLOAD times the rate of its peak; None before the peak is known."""
        row = Row(trace, truth, "slo", gap)
        near = self.near_peaks(trace, truth, gap).get("slo")
        if (
            near is None
            or self.best_of(self.grid.ablated, trace, truth, gap) is None
            or not near <= self.row(row).keys()
        ):
            return None
        peak = self.peak(row)
        return None if peak is None else fine_scale_from(OVERLOAD * peak.scale)

    def wanted(self, trace: str, truth: str, gap: int) -> list[Run]:
        """The runs that the scores so far ask for and that are not done."""
        points = []
        for policy in self.grid.policies:
            scale = self.wanted_coarse(Row(trace, truth, policy, gap))
            points += [(policy, scale)] if scale is not None else []
        for policy, scales in self.near_peaks(trace, truth, gap).items():
            points += [(policy, scale) for scale in sorted(scales)]
        overload = self.overload_scale(trace, truth, gap)
        points += [("slo", overload)] if overload is not None else []
        runs = [Run.of(trace, truth, policy, gap, scale) for policy, scale in points]
        return [run for run in runs if not self.has(run)]

    def missing(self) -> list[Run]:
        """Everything that is wanted by now and not done."""
        return list(dict.fromkeys(run for group in self.grid.groups() for run in self.wanted(*group)))


def _neighbours(scales: Sequence[float], scale: float) -> tuple[float, float]:
    """Those on both sides; at an end of the grid, the end itself: nobody looks for a peak where others were not run."""
    index = scales.index(scale)
    return scales[max(index - 1, 0)], scales[min(index + 1, len(scales) - 1)]


def highest(scores: Iterable[Score]) -> Score:
    """The highest goodput; of equal ones that at the lowest rate."""
    return max(scores, key=lambda score: (score.goodput_rps, -score.scale))


# --- the file ---


def header_of(profile: Profile) -> dict[str, Any]:
    content = {name: value for name, value in asdict(profile).items() if name not in UNUSED}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return {"profile": profile.name, "profile_hash": digest, "weft": __version__}


def read_scores(path: Path) -> tuple[dict[str, Any], list[Score], int]:
    """The header, the scores, and how many bytes of the file they are: a last line that was cut off is left out."""
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
    """The scores of an earlier sweep, with the file made ready to be appended to; a new file gets the header."""
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
    """Rewrites the file in order, so that it is the same whichever run was done first."""
    draft = path.with_name(path.name + ".tmp")
    lines = [score._asdict() for score in sorted(scores, key=lambda score: score.order)]
    draft.write_bytes(b"".join(map(_line, [header, *lines])))
    os.replace(draft, path)


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


# --- the workers ---


@dataclass(frozen=True)
class Material:
    """What every run needs."""

    grid: Grid
    profile: Profile
    traces: dict[str, Trace]  # by the names of the courses; unscaled


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
    scores = []
    for gap, targets in promises.items():
        kept = int(kept_promises(played, targets).sum())
        scores.append(
            Score(
                trace=run.trace,
                truth=run.truth,
                policy=run.policy,
                scale=run.scale,
                rate_rps=six_digits(run.scale * len(base.arrivals) / base.span),
                gap_ms=gap,
                kept=kept,
                goodput_rps=six_digits(kept / played.span),
                refused=int(played.refused.sum()),
                preemptions=played.preemptions,
                requests=len(base.arrivals),
            )
        )
    return scores


def _work(pipe: "Connection[Any, Any]", material: Material) -> None:
    """A worker: a run in, scores (or the story of a failure) out, until nothing more comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, which then ends us
    parent = os.getppid()
    try:
        while True:
            while not pipe.poll(STALE):
                if os.getppid() != parent:  # killed; siblings hold the pipe open, so that it does not break
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
        # A fork needs no second import, and there are no threads here that it could catch in the middle of something.
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
        """What has come in; waits a moment for it."""
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
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Runs what is wanted and not in the file yet, for at most so many seconds. Returns how many runs are left."""
    end = time.monotonic() + seconds
    grid = material.grid
    if not any(only in run.name for run in grid.coarse_runs()):
        example = grid.coarse_runs()[0].name
        raise OptionError(f"--only {only!r} is in no run's name; such a name is {example}")
    header = header_of(material.profile)
    board = Board(grid, open_scores(path, header))
    queue = Queue(grid, only)
    queue.add(board.missing())
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
                    queue.add(board.wanted(run.trace, run.truth, gap))
            tell(queue.done, len(queue.seen))
    finally:
        crew.close()
        sort_scores(path, header, board.scores())
    return len(queue.seen) - queue.done


class Queue:
    """Runs that are not done, the most useful first; each comes once, however often it is wanted."""

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
