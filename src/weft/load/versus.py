"""Versus: runs of several variants beside each other, and what can be said of the difference."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Figures that are compared, and whether more of one is better.
COMPARED = {
    "request_throughput": True,
    "output_throughput": True,
    "request_goodput": True,
    "p50_ttft_ms": False,
    "p99_ttft_ms": False,
    "p50_gap_ms": False,
    "p99_gap_ms": False,
    "p99.9_gap_ms": False,
    "max_gap_ms": False,
    "p50_tpot_ms": False,
    "p99_tpot_ms": False,
    "p99_e2el_ms": False,
}
# Of Student's distribution, two-sided 95%, by degrees of freedom; beyond these, the normal distribution's.
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL = 1.96  # and a correction of 2.4 / freedom, which is right to 0.002 from 16 on


@dataclass(frozen=True)
class Ratio:
    """How many times as large a figure is as that of the first variant, with a 95% confidence interval."""

    value: float
    low: float | None  # None: a single run says nothing of that
    high: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves no doubt that there is a difference."""
        return self.low is not None and self.high is not None and (self.low > 1 or self.high < 1)


def turns(names: Sequence[str], repeats: int) -> list[str]:
    """The order of runs: all in turn, every second time backwards, so that a machine that gets slower favours none."""
    return [name for repeat in range(repeats) for name in (names if repeat % 2 == 0 else names[::-1])]


def ratio(first: Sequence[float], other: Sequence[float]) -> Ratio | None:
    """The geometric mean of the ratios of runs side by side. None where a figure is missing or 0."""
    pairs = [(a, b) for a, b in zip(first, other, strict=True) if a and b]
    if not pairs or len(pairs) < len(first):
        return None
    logs = np.log([b / a for a, b in pairs])
    middle = float(logs.mean())
    if len(logs) < 2:
        return Ratio(math.exp(middle), None, None)
    freedom = len(logs) - 1
    spreads = STUDENT[freedom - 1] if freedom <= len(STUDENT) else NORMAL + 2.4 / freedom
    width = spreads * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Ratio(math.exp(middle), math.exp(middle - width), math.exp(middle + width))


def figure_of(run: dict[str, Any], name: str) -> float | None:
    """A figure of a run; None where it is not told. Other tools call the 50th percentile the median."""
    value = run.get(name)
    if value is None and name.startswith("p50_"):
        value = run.get(f"median_{name.removeprefix('p50_')}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number and value is not None else None


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Of each figure over repeated runs."""
    found: dict[str, float | None] = {}
    for name in COMPARED:
        values = [value for run in runs if (value := figure_of(run, name)) is not None]
        found[name] = float(np.median(values)) if values else None
    return found


def comparison(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Ratio | None]]:
    """By variant but the first, and figure."""
    (_, base), *others = runs.items()
    return {
        name: {
            figure: ratio(
                [figure_of(run, figure) or 0.0 for run in base], [figure_of(run, figure) or 0.0 for run in found]
            )
            for figure in COMPARED
        }
        for name, found in others
    }
