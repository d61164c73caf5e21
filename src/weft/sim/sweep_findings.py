"""What a sweep found: peaks, capacities and their ratios, for one trace, truth and gap target."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from weft.sim import sweep_capacity
from weft.sim.score_table import ScoreTable, highest
from weft.sim.sweep_capacity import Capacity
from weft.sim.sweep_grid import Row, Score


class Findings:
    """Results for one trace, truth and gap target."""

    def __init__(self, table: ScoreTable, trace: str, truth: str, gap: int) -> None:
        self.trace, self.truth, self.gap = trace, truth, gap
        self.table, self.grid = table, table.grid
        rows = {policy: Row(trace, truth, policy, gap) for policy in self.grid.policies}
        self.scores = {policy: table.row(row) for policy, row in rows.items()}
        self.searched = {policy: table.peak_search(row)[0] for policy, row in rows.items()}
        found = {policy: table.peak(row) for policy, row in rows.items()}
        self.peaks = {policy: peak for policy, peak in found.items() if peak is not None}

    @property
    def name(self) -> str:
        return f"{self.trace}, {self.gap} ms"

    def best(self, policies: Sequence[str]) -> Score | None:
        peaks = [self.peaks[policy] for policy in policies if policy in self.peaks]
        return highest(peaks) if peaks else None

    def over_best(self, policy: str) -> float | None:
        """Upper bound of a policy's peak (see `most`), divided by the best peak of any policy."""
        best, most = self.best(self.grid.policies), self.most(policy)
        return None if best is None or most is None else most / max(best.goodput_rps, 1e-12)

    def most(self, policy: str) -> float | None:
        """Upper bound of a policy's goodput: its peak, or the highest grid rate below the rates of its search."""
        peak = self.peaks.get(policy)
        if peak is None or not self.searched[policy]:
            return None
        unit, lowest = peak.rate_rps / peak.scale, min(self.searched[policy])
        below = [scale for scale in self.grid.scales(self.trace) if scale < lowest]
        return max(peak.goodput_rps, unit * (below[-1] if below else lowest))

    def over_ablated(self) -> float | None:
        return self._over_most(self.grid.ablated)

    def over_plain(self) -> float | None:
        return self._over_most(self.grid.fixed)

    def _over_most(self, policies: Sequence[str]) -> float | None:
        """slo's peak divided by the highest upper bound among these policies."""
        most = [found for policy in policies if (found := self.most(policy)) is not None]
        peak = self.peaks.get("slo")
        return None if peak is None or not most else peak.goodput_rps / max(max(most), 1e-12)

    def least_over_ablated(self) -> float | None:
        """The smallest ratio, over common rates, of slo's goodput to that of the best ablated chunk at that rate."""
        ratios = []
        for scale, score in self.scores["slo"].items():
            there = [self.scores[policy][scale] for policy in self.grid.ablated if scale in self.scores[policy]]
            ratios.append(ratio(score, highest(there) if there else None))
        return min((one for one in ratios if one is not None), default=None)

    def in_overload(self) -> float | None:
        scale = self.table.overload_scale(self.trace, self.truth, self.gap)
        return None if scale is None else ratio(self.scores["slo"].get(scale), self.peaks.get("slo"))

    def capacity(self, policies: Sequence[str], share: float) -> Capacity | None:
        """The highest capacity among these policies."""
        return sweep_capacity.best_capacity(self.table, policies, self.trace, self.truth, self.gap, share)

    def is_at_an_end(self, peak: Score) -> bool:
        scales = self.grid.scales(self.trace)
        return not scales[0] < peak.scale < scales[-1]


def ratio(one: Score | None, other: Score | None) -> float | None:
    """Ratio of two goodputs; None if one is not known, 1 if both are 0."""
    if one is None or other is None:
        return None
    if not other.goodput_rps:
        return math.inf if one.goodput_rps else 1.0
    return one.goodput_rps / other.goodput_rps


class CapacityRatio(NamedTuple):
    """Ratio of two capacities. The sign says that one of them is only known to be below or above a rate."""

    value: float
    sign: str = ""

    def __str__(self) -> str:
        return f"{self.sign}{self.value:.3f}"


def capacity_ratio(one: Capacity | None, other: Capacity | None) -> CapacityRatio | None:
    """Ratio of two capacities; None if one is not known, or if both lie beyond the same end of the rates."""
    if one is None or other is None:
        return None
    if (one.kept is None and other.kept is None) or (one.broken is None and other.broken is None):
        return None
    if other.kept is None:
        assert other.broken is not None
        return CapacityRatio(one.rate_rps / other.broken.rate_rps, ">")
    if one.kept is None:
        assert one.broken is not None
        return CapacityRatio(one.broken.rate_rps / other.rate_rps, "<")
    sign = ">=" if one.broken is None else "<=" if other.broken is None else ""
    return CapacityRatio(one.rate_rps / other.rate_rps, sign)
