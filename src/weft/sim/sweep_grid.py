"""The grid of a sweep: its traces, policies, gap targets and rates, and the runs and scores on it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

COARSE, FINE = 1.15, 1.03  # ratio of neighbouring rates: on the grid, and near a peak
DISTURBED = {"bias": 0.1, "noise": 0.05, "seed": 0}
TRUTHS: dict[str, dict[str, Any]] = {"exact": {}, "disturbed": DISTURBED}
FALLEN = 0.1  # share of its peak goodput: below it, a policy without refusals has collapsed under overload
BEATEN = 0.8  # share of slo's peak: goodput is at most the rate, so at rates below this no policy comes near slo
OVERLOAD = 1.5  # overload test: this multiple of the rate of slo's peak


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

    def coarse_runs(self) -> list["SweepRun"]:
        runs = {
            SweepRun.of(trace, truth, policy, gap, scale): None
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


class SweepRun(NamedTuple):
    """One simulation."""

    trace: str
    truth: str
    policy: str
    gap_ms: int | None  # None for a plain policy: the run is scored for all gap targets
    scale: float

    @classmethod
    def of(cls, trace: str, truth: str, policy: str, gap_ms: int, scale: float) -> "SweepRun":
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


def usefulness(grid: Grid, run: SweepRun) -> tuple[Any, ...]:
    """Sort key of runs: the most useful first, so that a sweep that is killed early has done the most important ones.

    All policies under one truth make a table, two halves do not, so the exact truth comes first. Within a truth, the
    policies that are compared most closely (slo and the ablated chunks) come first. Then long runs come first, so that
    no worker is still busy alone at the end: slow arrivals and small chunks make many steps.
    """
    chunk = run.policy.partition(":")[2]
    steps = grid.duration / run.scale * (1 + 64 / int(chunk or 8192))
    return (grid.truths.index(run.truth), is_plain(run.policy), -steps, run.name)
