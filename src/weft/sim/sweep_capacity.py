"""Capacity: the highest rate at which a given share of all requests meet both targets. DistServe calls this goodput.

A refused request counts as missed, and a run goes on until the last token. So delayed decodes count, and refusing
expensive requests does not raise the capacity beyond the share that may be missed.

The kept share may fall and rise again as the rate grows. Therefore capacity is the highest rate that was run such that
it, and every lower rate that was run, keeps the share. `capacity` computes it from the scores. `wanted` returns the
runs that are still needed to know it to within FINE.

The search is a bisection on the grid of the peak search, extended to lower rates, and then between two rates of the
grid. It looks only at the rates of this bisection, so that a sweep that was stopped runs the same rates as one that
was not.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from weft.sim.score_table import ScoreTable
from weft.sim.sweep_grid import FINE, Grid, Row, Score, SweepRun, coarse_scale, fine_scales

CAPACITY_SHARES = (0.99, 0.9)  # of all requests; the higher first, because its runs also help for the lower
STEPS_BELOW = 10  # steps of COARSE below the lowest rate of the grid: to about a quarter of it
TOKENS_PER_MS = 20  # rough prefill speed of the profile's device: only decides which chunk is tried first

Keeps = Callable[[str, float], bool]  # (policy, scale): whether the share is kept there


class Capacity(NamedTuple):
    """Capacity lies between two rates: the highest one up to which all rates keep the share, and the next one run."""

    kept: Score | None  # None: not even the lowest rate that was run keeps the share
    broken: Score | None  # None: all rates that were run keep the share

    @property
    def rate_rps(self) -> float:
        return 0.0 if self.kept is None else self.kept.rate_rps

    @property
    def limit_rps(self) -> float:
        """Capacity is below this rate."""
        return math.inf if self.broken is None else self.broken.rate_rps

    @property
    def policy(self) -> str:
        score = self.kept or self.broken
        assert score is not None
        return score.policy

    @property
    def is_fine(self) -> bool:
        """Whether the two rates are neighbours on the fine grid. The tolerance covers scales rounded to six digits."""
        if self.kept is None or self.broken is None:
            return True
        return self.broken.scale <= self.kept.scale * FINE * 1.0001


def keeps(score: Score, share: float) -> bool:
    return score.kept >= share * score.requests


def capacity(scores: Iterable[Score], share: float) -> Capacity | None:
    """Capacity of one policy from all its scores for one trace, truth and gap target; None without scores."""
    kept = None
    for score in sorted(scores, key=lambda score: score.scale):
        if not keeps(score, share):
            return Capacity(kept, score)
        kept = score
    return None if kept is None else Capacity(kept, None)


def best_capacity(
    table: ScoreTable, policies: Sequence[str], trace: str, truth: str, gap: int, share: float
) -> Capacity | None:
    """The highest capacity of several policies. If no policy keeps the share, the one with the highest upper bound."""
    rows = (table.row(Row(trace, truth, policy, gap)).values() for policy in policies)
    found = [one for one in (capacity(row, share) for row in rows) if one is not None]
    return max(found, key=lambda one: (one.rate_rps, one.limit_rps), default=None)


def wanted(table: ScoreTable, trace: str, truth: str, gap: int) -> list[SweepRun]:
    """The next runs of the capacity search: at most one for each family of policies."""
    runs = []
    for family in families(table.grid, gap):
        try:
            _search_family(table, family, trace, truth, gap)
        except _Needed as needed:
            runs.append(needed.run)
    return list(dict.fromkeys(runs))


def families(grid: Grid, gap: int) -> list[list[str]]:
    """Groups of policies: slo, ablated chunks, plain chunks, monolithic. The best of a group counts; the likely best
    comes first."""

    def distance(policy: str) -> float:
        likely, chunk = TOKENS_PER_MS * gap, int(policy.partition(":")[2])
        return max(chunk / likely, likely / chunk)

    return [["slo"], sorted(grid.ablated, key=distance), sorted(grid.fixed, key=distance), ["monolithic"]]


def ladder(grid: Grid, trace: str) -> list[float]:
    """The rates of the first bisection: the grid's, and lower ones."""
    course = grid.course(trace)
    return [coarse_scale(step) for step in range(course.lowest - STEPS_BELOW, course.highest + 1)]


class _Needed(Exception):
    """Raised when a search needs the score of a rate that was not run."""

    def __init__(self, run: SweepRun) -> None:
        self.run = run


def _search_family(table: ScoreTable, policies: Sequence[str], trace: str, truth: str, gap: int) -> None:
    """Finds the best policy for every share. Raises _Needed at the first score that is missing."""
    rejected: Mapping[str, float] = {}
    for share in CAPACITY_SHARES:

        def keeps_share(policy: str, scale: float, share: float = share) -> bool:
            score = table.row(Row(trace, truth, policy, gap)).get(scale)
            if score is None:
                raise _Needed(SweepRun.of(trace, truth, policy, gap, scale))
            return keeps(score, share)

        best = find_best(policies, keeps_share, ladder(table.grid, trace), rejected)
        rejected = best.rejected
        policies = sorted(policies, key=lambda policy: policy != best.policy)  # the best one is likely to win again


class Best(NamedTuple):
    """The outcome of a search among several policies."""

    policy: str
    scale: float | None  # None: no policy keeps the share even at the lowest rate
    rejected: dict[str, float]  # policies that failed just above the best rate so far, with that rate


def find_best(
    policies: Sequence[str],
    keeps_share: Keeps,
    rates: Sequence[float],
    failed: Mapping[str, float] = MappingProxyType({}),
) -> Best:
    """The policy with the highest capacity. A policy that fails just above the best rate so far costs only one run.

    `failed` holds rates at which policies failed to keep a higher share. If they failed this share there too, the run
    is saved.
    """
    first, *others = policies
    best, rejected = Best(first, search(partial(keeps_share, first), rates), {}), {}
    for policy in others:
        if best.scale == rates[-1]:
            break
        above = rates[0] if best.scale is None else min(fine_scales(best.scale, best.scale * FINE**2)[0], rates[-1])
        if policy in failed and failed[policy] <= above and not keeps_share(policy, failed[policy]):
            continue
        if not keeps_share(policy, above):
            rejected[policy] = above
            continue
        scale = search(partial(keeps_share, policy), rates)
        if scale is not None and (best.scale is None or scale > best.scale):
            best = Best(policy, scale, {})
    return best._replace(rejected=rejected)


def search(keeps_share: Callable[[float], bool], rates: Sequence[float]) -> float | None:
    """The highest rate that keeps the share, by bisection on the grid and then between two grid rates; None if none."""
    low = _bisect(keeps_share, rates)
    if low is None or low == rates[-1]:
        return low
    finer = _bisect(keeps_share, fine_scales(low, rates[rates.index(low) + 1]))
    return low if finer is None else finer


def _bisect(keeps_share: Callable[[float], bool], rates: Sequence[float]) -> float | None:
    """The highest rate that keeps the share, if all lower rates do too; None if no rate does."""
    low, high = -1, len(rates)
    while high - low > 1:
        middle = (low + high) // 2
        if keeps_share(rates[middle]):
            low = middle
        else:
            high = middle
    return rates[low] if low >= 0 else None
