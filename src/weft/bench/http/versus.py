"""Versus: compares runs of several variants, with confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Figures that are compared, and whether a higher value is better.
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
# Two-sided 95% quantiles of Student's distribution, for 1 to 15 degrees of freedom.
STUDENT_QUANTILES = (
    12.71,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)
# The same quantile of the normal distribution. With a correction of 2.4 / freedom it is right to 0.002 from 16 on.
NORMAL_QUANTILE = 1.96


@dataclass(frozen=True)
class RatioInterval:
    """A figure divided by that of the first variant, with a 95% confidence interval."""

    value: float
    low: float | None  # None: a single run has no interval
    high: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 1, that is, whether there is a clear difference."""
        return self.low is not None and self.high is not None and (self.low > 1 or self.high < 1)


def run_order(names: Sequence[str], repeats: int) -> list[str]:
    """The order of runs: all variants in turn, every second round backwards.

    So a machine that slows down over time favours no variant.
    """
    return [name for repeat in range(repeats) for name in (names if repeat % 2 == 0 else names[::-1])]


def ratio(first: Sequence[float], other: Sequence[float]) -> RatioInterval | None:
    """The geometric mean of the ratios of paired runs; None if a figure is missing or 0."""
    pairs = [(a, b) for a, b in zip(first, other, strict=True) if a and b]
    if not pairs or len(pairs) < len(first):
        return None
    logs = np.log([b / a for a, b in pairs])
    middle = float(logs.mean())
    if len(logs) < 2:
        return RatioInterval(math.exp(middle), None, None)
    freedom = len(logs) - 1
    spreads = STUDENT_QUANTILES[freedom - 1] if freedom <= len(STUDENT_QUANTILES) else NORMAL_QUANTILE + 2.4 / freedom
    width = spreads * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return RatioInterval(math.exp(middle), math.exp(middle - width), math.exp(middle + width))


def figure_of(run: dict[str, Any], name: str) -> float | None:
    """A figure of a run; None if it is missing. Other tools name the 50th percentile "median"."""
    value = run.get(name)
    if value is None and name.startswith("p50_"):
        value = run.get(f"median_{name.removeprefix('p50_')}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number and value is not None else None


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """The median of each figure over repeated runs."""
    found: dict[str, float | None] = {}
    for name in COMPARED:
        values = [value for run in runs if (value := figure_of(run, name)) is not None]
        found[name] = float(np.median(values)) if values else None
    return found


def comparison(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, RatioInterval | None]]:
    """Ratios to the first variant, by the name of the other variant and by figure."""
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
