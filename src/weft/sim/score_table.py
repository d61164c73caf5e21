"""All scores of a sweep so far, and the runs that the search for goodput peaks still needs."""

import math
from collections.abc import Iterable, Mapping, Sequence

from weft.sim.sweep_grid import (
    BEATEN,
    FALLEN,
    OVERLOAD,
    Grid,
    Row,
    Score,
    SweepRun,
    fine_scale_from,
    fine_scales,
    is_plain,
)


class ScoreTable:
    """All scores so far, by row and rate."""

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

    def has(self, run: SweepRun) -> bool:
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

    def wanted(self, trace: str, truth: str, gap: int) -> list[SweepRun]:
        """Runs that the scores so far require and that are not done."""
        points = []
        for policy in self.grid.policies:
            scale = self.peak_search(Row(trace, truth, policy, gap))[1]
            points += [(policy, scale)] if scale is not None else []
        for policy, scales in self.near_peaks(trace, truth, gap).items():
            points += [(policy, scale) for scale in sorted(scales)]
        overload = self.overload_scale(trace, truth, gap)
        points += [("slo", overload)] if overload is not None else []
        runs = [SweepRun.of(trace, truth, policy, gap, scale) for policy, scale in points]
        return [run for run in runs if not self.has(run)]

    def missing(self) -> list[SweepRun]:
        """Wanted runs of all groups that are not done."""
        return list(dict.fromkeys(run for group in self.grid.groups() for run in self.wanted(*group)))


def _neighbours(scales: Sequence[float], scale: float) -> tuple[float, float]:
    """The scales on both sides; at an end of the grid, the end itself, because no policy is run beyond it."""
    index = scales.index(scale)
    return scales[max(index - 1, 0)], scales[min(index + 1, len(scales) - 1)]


def highest(scores: Iterable[Score]) -> Score:
    """The score with the highest goodput; among equals, the one at the lowest rate."""
    return max(scores, key=lambda score: (score.goodput_rps, -score.scale))
