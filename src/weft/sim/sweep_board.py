"""The grid of a sweep, its runs and scores, and the runs that the search for goodput peaks needs.

From top to bottom: the grid and its runs; the board of all scores so far, which chooses the next runs.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

COARSE, FINE = 1.15, 1.03  # ratio of neighbouring rates: on the grid, and near a peak
DISTURBED = {"bias": 0.1, "noise": 0.05, "seed": 0}
TRUTHS: dict[str, dict[str, Any]] = {"exact": {}, "disturbed": DISTURBED}
FALLEN = 0.1  # share of its peak goodput: below it, a policy without refusals has collapsed under overload
BEATEN = 0.8  # share of slo's peak: goodput is at most the rate, so at rates below this no policy comes near slo
OVERLOAD = 1.5  # overload test: this multiple of the rate of slo's peak

# --- the grid and its runs ---


@dataclass(frozen=True)
class Course:
    """A trace of the sweep: its TTFT targets in seconds, and its rates COARSE**lowest to COARSE**highest."""

    name: str
    file: str
    ttft: float
    ttft_per_1k: float
    lowest: int
    highest: int


# Lowest rate: goodput is never above the rate, so below the lowest rate no policy has more goodput than that rate,
# which is far below slo's goodput. Slower arrivals would also make the longest runs.
# Highest rate: the offered prefill work alone is about twice what the device can do (the profile's seconds for each
# token and pair, in compute-bound steps, divided by the seconds of arrivals). Azure reaches 2 times at x17.6;
# 1.15**20 is x16.4 (1.9 times). Mooncake reaches 2 times at x1.24 without any caching and at x1.74 with an unlimited
# prefix cache; 1.15**4 is x1.75 (2.8 and 2.0 times).
COURSES = (
    Course("azure", "AzureLLMInferenceTrace_conv.csv", 1.0, 0.0, lowest=3, highest=20),
    Course("mooncake", "mooncake_conversation_trace.jsonl", 1.0, 0.25, lowest=-9, highest=4),
)


@dataclass(frozen=True)
class Grid:
    """All dimensions of the sweep: traces, truths, gap targets, chunk sizes."""

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
        """Yields (trace, truth, gap target): policies are compared within one such group."""
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
    """Whether a policy ignores targets, so that one run can be scored for all gap targets."""
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
    gap_ms: int | None  # None for a plain policy: the run is scored for all gap targets
    scale: float

    @classmethod
    def of(cls, trace: str, truth: str, policy: str, gap_ms: int, scale: float) -> "Run":
        return cls(trace, truth, policy, None if is_plain(policy) else gap_ms, scale)

    @property
    def name(self) -> str:
        """The name that --only is matched against."""
        return f"{self.trace}/{self.truth}/{self.policy}/" + ("" if self.gap_ms is None else f"{self.gap_ms}ms")

    def gaps(self, grid: Grid) -> tuple[int, ...]:
        return grid.gaps_ms if self.gap_ms is None else (self.gap_ms,)


class Score(NamedTuple):
    """One line of the file: the result of one run for one gap target."""

    trace: str
    truth: str
    policy: str
    scale: float  # multiple of the trace's original rate
    rate_rps: float  # requests per second
    gap_ms: int
    kept: int  # requests that met their targets
    goodput_rps: float  # requests that met their targets, per second of arrivals
    refused: int
    preemptions: int
    requests: int
    kept_tokens: float | None = None  # share of all prompt and output tokens that belong to kept requests
    longest_gap_ms: float | None = None  # over all requests

    @property
    def row(self) -> Row:
        return Row(self.trace, self.truth, self.policy, self.gap_ms)

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key in the finished file."""
        kind, _, chunk = self.policy.partition(":")
        return (self.trace, self.truth, kind, int(chunk or 0), self.gap_ms, self.scale)


def six_digits(value: float) -> float:
    return float(f"{value:.6g}")


@cache
def coarse_scale(step: int) -> float:
    """A rate of the grid, rounded to six digits: the file then holds exactly the rate that was run, on any machine."""
    return six_digits(COARSE**step)


def fine_scales(low: float, high: float) -> list[float]:
    """The powers of FINE strictly between two scales. All policies share this grid."""
    first, last = (math.floor(math.log(end) / math.log(FINE)) for end in (low, high))
    scales = (six_digits(FINE**step) for step in range(first, last + 2))
    return [scale for scale in scales if low < scale < high]


def fine_scale_from(least: float) -> float:
    """The lowest power of FINE that is not below `least`."""
    return six_digits(FINE ** math.ceil(math.log(least) / math.log(FINE) - 1e-9))


def usefulness(grid: Grid, run: Run) -> tuple[Any, ...]:
    """Sort key of runs: the most useful first, so that a sweep that is killed early has done the most important ones.

    All policies under one truth make a table, two halves do not, so the exact truth comes first. Within a truth, the
    policies that are compared most closely (slo and the ablated chunks) come first. Then long runs come first, so that
    no worker is still busy alone at the end: slow arrivals and small chunks make many steps.
    """
    chunk = run.policy.partition(":")[2]
    steps = grid.duration / run.scale * (1 + 64 / int(chunk or 8192))
    return (grid.truths.index(run.truth), is_plain(run.policy), -steps, run.name)


# --- scores so far, and the runs that they require ---


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

    def peak_search(self, row: Row) -> tuple[list[float], float | None]:
        """The grid rates that the peak search has run, in its order, and the next rate; None when the search is done.

        Goodput is never above the rate. So a policy with refusals is run from the highest rate down, while the rate
        exceeds its best goodput so far. An ablated chunk also stops when the rate is no longer above BEATEN times slo's
        peak. A policy without refusals is run from the lowest rate up, until it has fallen. Rates that were run only
        for the capacity search are ignored here.
        """
        if is_plain(row.policy):
            done, fallen = self._until_fallen(row.trace, row.truth, row.policy)
            left = self.grid.scales(row.trace)[len(done) :]
            return done, left[0] if left and not fallen else None
        done, best = [], 0.0
        if row.policy != "slo":
            peak = self.coarse_peak(row._replace(policy="slo"))
            best = BEATEN * peak.goodput_rps / self.unit(row.trace) if peak is not None else math.inf
        for scale in reversed(self.grid.scales(row.trace)):
            score = self.row(row).get(scale)
            if scale <= best or score is None:
                return done, scale if scale > best else None
            done.append(scale)
            best = max(best, score.goodput_rps / self.unit(row.trace))
        return done, None

    def _until_fallen(self, trace: str, truth: str, policy: str) -> tuple[list[float], bool]:
        """Grid rates of a plain policy from the lowest up to where it has fallen or was not run; whether it has fallen.

        It has fallen when, at two rates in a row, its goodput is below FALLEN of its peak (or 0) for every gap target.
        """
        rows = [self.row(Row(trace, truth, policy, gap)) for gap in self.grid.gaps_ms]
        best = [0.0] * len(rows)
        done: list[float] = []
        for scale in self.grid.scales(trace):
            if not all(scale in row for row in rows):
                break
            done.append(scale)
            best = [max(most, row[scale].goodput_rps) for row, most in zip(rows, best, strict=True)]
            last = ((row[one].goodput_rps, most) for row, most in zip(rows, best, strict=True) for one in done[-2:])
            if len(done) > 2 and all(goodput < FALLEN * most or goodput == 0 for goodput, most in last):
                return done, True
        return done, False

    def has_fallen(self, trace: str, truth: str, policy: str) -> bool:
        """Whether a plain policy's goodput has fallen (see `_until_fallen`)."""
        return self._until_fallen(trace, truth, policy)[1]

    def is_complete(self, row: Row) -> bool:
        """Whether the peak search is complete. For an ablated chunk, slo's search must be complete too."""
        waits = not is_plain(row.policy) and row.policy != "slo" and not self.is_complete(row._replace(policy="slo"))
        done, following = self.peak_search(row)
        return bool(done) and not waits and following is None

    def unit(self, trace: str) -> float:
        """Requests per second at the trace's original rate."""
        return self._units[trace]

    def coarse_peak(self, row: Row) -> Score | None:
        """The highest goodput on the grid; None while the peak search is not complete."""
        if not self.is_complete(row):
            return None
        return highest(self.row(row)[scale] for scale in self.peak_search(row)[0])

    def best_of(self, policies: Sequence[str], trace: str, truth: str, gap: int) -> str | None:
        """The policy with the highest peak on the grid; None while the search of any policy is not complete."""
        peaks = [self.coarse_peak(Row(trace, truth, policy, gap)) for policy in policies]
        found = [peak for peak in peaks if peak is not None]
        return highest(found).policy if found and len(found) == len(peaks) else None

    def near_peaks(self, trace: str, truth: str, gap: int) -> dict[str, set[float]]:
        """For slo, the best ablated and the best plain chunk: finer rates between the neighbours of the peak.

        slo and the best ablated chunk both run the fine rates of either, so that their peaks are compared at equal
        rates.
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
        """The highest goodput found; None before the peak search has begun.

        For slo, only the rates of the peak search and the finer rates near the peak count: the overload test does not.
        """
        scores = self.row(row) if self.peak_search(row)[0] else {}
        if row.policy == "slo":
            near = self.near_peaks(row.trace, row.truth, row.gap_ms).get("slo", set())
            allowed = near.union(self.peak_search(row)[0])
            scores = {scale: score for scale, score in scores.items() if scale in allowed}
        return highest(scores.values()) if scores else None

    def overload_scale(self, trace: str, truth: str, gap: int) -> float | None:
        """The scale of slo's overload test, OVERLOAD times the scale of its peak; None before the peak is known."""
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
        """Runs that the scores so far require and that are not done."""
        points = []
        for policy in self.grid.policies:
            scale = self.peak_search(Row(trace, truth, policy, gap))[1]
            points += [(policy, scale)] if scale is not None else []
        for policy, scales in self.near_peaks(trace, truth, gap).items():
            points += [(policy, scale) for scale in sorted(scales)]
        overload = self.overload_scale(trace, truth, gap)
        points += [("slo", overload)] if overload is not None else []
        runs = [Run.of(trace, truth, policy, gap, scale) for policy, scale in points]
        return [run for run in runs if not self.has(run)]

    def missing(self) -> list[Run]:
        """Wanted runs of all groups that are not done."""
        return list(dict.fromkeys(run for group in self.grid.groups() for run in self.wanted(*group)))


def _neighbours(scales: Sequence[float], scale: float) -> tuple[float, float]:
    """The scales on both sides; at an end of the grid, the end itself, because no policy is run beyond it."""
    index = scales.index(scale)
    return scales[max(index - 1, 0)], scales[min(index + 1, len(scales) - 1)]


def highest(scores: Iterable[Score]) -> Score:
    """The score with the highest goodput; among equals, the one at the lowest rate."""
    return max(scores, key=lambda score: (score.goodput_rps, -score.scale))
