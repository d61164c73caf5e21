"""The sweep on a small trace made here, and its plan and report on scores made up here."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from weft.errors import EngineError, OptionError
from weft.sim.profiles import load_profile
from weft.sim.score_table import ScoreTable, highest
from weft.sim.sweep import missing_runs, sweep
from weft.sim.sweep_file import append_scores, header_of, open_scores, read_scores
from weft.sim.sweep_findings import Findings
from weft.sim.sweep_grid import (
    BEATEN,
    COURSES,
    FALLEN,
    Course,
    Grid,
    Row,
    Score,
    SweepRun,
    coarse_scale,
    fine_scale_from,
    fine_scales,
    is_plain,
    usefulness,
)
from weft.sim.sweep_report import report_text, write_report
from weft.sim.sweep_run import Material, load_material

SMALL = Grid(
    courses=(Course("azure", "t.csv", 1.0, 0.0, lowest=0, highest=2),),
    truths=("exact",),
    gaps_ms=(15, 50),
    chunks=(128, 1024),
    duration=60.0,
)
INVENTED = Grid(
    courses=(
        Course("azure", "a.csv", 1.0, 0.0, lowest=-4, highest=8),
        Course("mooncake", "m.jsonl", 1.0, 0.25, lowest=-4, highest=8),
    ),
    gaps_ms=(15, 50),
    chunks=(64, 512),
)
ONE = replace(INVENTED, courses=INVENTED.courses[1:], truths=("exact",))
REFUSING = [Row("mooncake", "exact", policy, gap) for policy in ("slo", *ONE.ablated) for gap in ONE.gaps_ms]
UNIT = 5.0  # requests in a second at the made-up traces' own rate


def make_trace(path: Path, requests: int = 20) -> None:
    rows = [f"2023-11-16 18:15:{i % 60:02d}.{i:03d}0000,{300 + 97 * i % 2500},{2 + i % 7}" for i in range(requests)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(sorted(rows)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_trace(tmp_path / "t.csv")
    return tmp_path


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a sweep in one go, of what is in `folder`; not to be written to."""
    home = tmp_path_factory.mktemp("fresh")
    make_trace(home / "t.csv")
    assert sweep(load_material(SMALL, home), home / "fresh", 3) == 0
    return home / "fresh"


World = Callable[[SweepRun, int], float]


def invent(run: SweepRun, gap: int, goodput: float) -> Score:
    """As in a real run, goodput must not be above the rate: what is not run follows from that."""
    assert goodput <= UNIT * run.scale * (1 + 1e-9)
    rate, requests = UNIT * run.scale, 1000
    kept = round(requests * goodput / rate)
    return Score(run.trace, run.truth, run.policy, run.scale, rate, gap, kept, goodput, 0, 0, requests)


def invented(grid: Grid, runs: Iterable[SweepRun], goodput: World) -> list[Score]:
    return [invent(run, gap, goodput(run, gap)) for run in runs for gap in run.gaps(grid)]


def filled(grid: Grid, goodput: World, scores: Iterable[Score] = ()) -> ScoreTable:
    """A table on which everything that is wanted was run, with made-up results."""
    table = ScoreTable(grid, scores)
    while missing := table.missing():
        for score in invented(grid, missing, goodput):
            table.add(score)
    return table


def hill(at: float, height: float) -> Callable[[float], float]:
    """Goodput that rises with the rate up to a peak and falls behind it, as the logarithm of the rate's distance."""
    return lambda scale: height * min(scale / at, at / scale)


def plain_falls(run: SweepRun, gap: int) -> float:
    """A world in which slo wins: the small chunk is good for tight gaps, the large one for the others."""
    if run.policy == "slo":
        return hill(2.0, 10.0)(run.scale) if run.scale < 2 else 10.0
    if run.policy == "monolithic":
        return 0.1
    good = (gap == 15) == run.policy.endswith(":64")
    return hill(2.3, 9.9 if good else 5.0)(run.scale) * (1.0 if run.policy.startswith("slo") else 0.6)


@cache
def won() -> ScoreTable:
    """That world's; not to be added to."""
    return filled(INVENTED, plain_falls)


def bumpy(seed: int) -> World:
    """Goodput that is anything from nothing to all of the rate, at every rate anew."""

    def goodput(run: SweepRun, gap: int) -> float:
        chance = random.Random(f"{seed} {run} {gap}")
        kept = chance.choice((0.0, 1.0, chance.random(), chance.random() ** 4))
        return UNIT * run.scale * kept

    return goodput


def smooth(seed: int) -> World:
    """A hill for each policy and gap, somewhere on the grid or beyond its ends; some are steep and some flat."""

    def goodput(run: SweepRun, gap: int) -> float:
        chance = random.Random(f"{seed} {run[:3]} {gap}")
        at, kept, steep = 1.15 ** chance.uniform(-6, 10), chance.random(), chance.choice((0.2, 1.0, 4.0, 20.0))
        return UNIT * kept * (run.scale if run.scale < at else at * (at / run.scale) ** steep)

    return goodput


# --- the plan ---


def test_the_grid_has_every_policy_and_plain_ones_once_for_all_gaps() -> None:
    runs = SMALL.coarse_runs()
    assert len(runs) == len(set(runs)) == 3 * (2 * 3 + 3)  # rates; gaps of slo and two ablated, three plain ones
    assert SweepRun("azure", "exact", "monolithic", None, 1.15) in runs
    assert SweepRun("azure", "exact", "slo-order:128", 50, coarse_scale(2)) in runs
    full = Grid()
    assert len(full.chunks) == 8
    assert [(course.lowest, course.highest) for course in COURSES] == [(3, 20), (-9, 4)]
    assert len(full.coarse_runs()) == 2 * (18 + 14) * (4 * 9 + 9)


def test_fine_rates_are_powers_of_one_ratio_strictly_between() -> None:
    scales = fine_scales(1 / 1.15, 1.15)
    assert scales == [pytest.approx(1.03**j, rel=1e-5) for j in range(-4, 5)]
    assert fine_scales(1.0, 1.03**2) == [1.03]
    assert fine_scale_from(1.5) == pytest.approx(1.03**14, rel=1e-5)
    assert fine_scale_from(1.03) == 1.03


def test_a_sweep_begins_with_the_highest_rate_of_who_refuses_and_the_lowest_of_who_does_not() -> None:
    wanted = ScoreTable(INVENTED).missing()
    assert len(wanted) == len(set(wanted)) == 2 * 2 * (2 + 3)  # traces, truths; slo for two gaps, three plain ones
    for run in wanted:
        assert run.policy not in INVENTED.ablated  # they wait for slo
        scales = INVENTED.scales(run.trace)
        assert run.scale == (scales[0] if is_plain(run.policy) else scales[-1])
    only_these = ScoreTable(INVENTED).wanted("azure", "exact", 15)
    assert set(only_these) == {run for run in wanted if run[:2] == ("azure", "exact") and run.gap_ms in (15, None)}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("world", [smooth, bumpy])
def test_rates_that_are_not_run_cannot_be_a_peak(world: Callable[[int], World], seed: int) -> None:
    goodput = world(seed)
    whole = ScoreTable(ONE, invented(ONE, ONE.coarse_runs(), goodput))
    table = filled(ONE, goodput)
    for row in REFUSING:
        full = {scale: whole.row(row)[scale] for scale in ONE.scales("mooncake")}
        found, expected = table.coarse_peak(row), highest(full.values())
        assert found is not None
        beaten = 0.0
        if row.policy != "slo":
            slo = table.coarse_peak(row._replace(policy="slo"))
            assert slo is not None
            beaten = BEATEN * slo.goodput_rps
        not_run = full.keys() - table.row(row).keys()
        assert all(UNIT * scale <= max(found.goodput_rps, beaten) * (1 + 1e-9) for scale in not_run)
        peak, most = table.peak(row), Findings(table, "mooncake", "exact", row.gap_ms).most(row.policy)
        assert peak is not None
        assert most is not None
        if found.goodput_rps == expected.goodput_rps:
            assert expected.goodput_rps == 0 or found.scale == expected.scale
            assert peak.goodput_rps >= expected.goodput_rps
        else:  # it was missed where it cannot matter
            assert row.policy != "slo"
            assert expected.goodput_rps <= beaten * (1 + 1e-9)
            assert most <= beaten * (1 + 1e-9) or most == peak.goodput_rps >= expected.goodput_rps  # at a finer rate
        anywhere = [SweepRun.of(*row, coarse_scale(step)) for step in range(-12, 9)]  # below the grid too
        assert most * (1 + 1e-9) >= max(peak.goodput_rps, *(goodput(run, row.gap_ms) for run in anywhere))


def test_who_refuses_is_run_down_to_the_rate_of_its_best_goodput_and_no_further() -> None:
    def flat(run: SweepRun, gap: int) -> float:
        return min(UNIT * run.scale, 10.0 if gap == 15 else 3.3)

    table = filled(ONE, flat)
    scales = ONE.scales("mooncake")
    for row in REFUSING:
        done = [scale for scale in scales if scale in table.row(row)]
        assert done == [scale for scale in scales if UNIT * scale > (10.0 if row.gap_ms == 15 else 3.3)]


def test_who_refuses_is_run_at_all_rates_while_it_has_less_goodput_than_any() -> None:
    table = filled(ONE, lambda run, gap: 0.5)
    for row in REFUSING:
        assert set(ONE.scales("mooncake")) <= table.row(row).keys()


def test_an_ablated_chunk_waits_for_slo_and_is_run_only_at_rates_that_slo_has_not_beaten() -> None:
    def poor(run: SweepRun, gap: int) -> float:
        return min(UNIT * run.scale, 10.0 if gap == 15 else 5.5) if run.policy == "slo" else 0.3

    stale = SweepRun("mooncake", "exact", "slo-order:64", 50, coarse_scale(-3))  # as from a file of another plan
    table = ScoreTable(ONE, invented(ONE, [stale], poor))
    while runs := [run for run in table.missing() if not is_plain(run.policy)]:
        for gap in ONE.gaps_ms:
            slo = Row("mooncake", "exact", "slo", gap)
            best = 10.0 if gap == 15 else 5.5
            needed = {scale for scale in ONE.scales("mooncake") if UNIT * scale > best}
            assert table.is_complete(slo) == (needed <= table.row(slo).keys())
            assert (table.coarse_peak(slo) is not None) == table.is_complete(slo)
            wanted = {run.policy for run in runs if run.gap_ms == gap}
            if not table.is_complete(slo):
                assert wanted == {"slo"}
                for policy in ONE.ablated:
                    assert not table.is_complete(slo._replace(policy=policy))
                    assert table.coarse_peak(slo._replace(policy=policy)) is None
        run = min(runs, key=lambda run: (run.policy == "slo", run))  # slo last: as soon as they can, the others go on
        for score in invented(ONE, [run], poor):
            table.add(score)
    for gap, peak in ((15, 10.0), (50, 5.5)):
        for policy in ONE.ablated:
            row = Row("mooncake", "exact", policy, gap)
            assert table.is_complete(row)
            done = set(ONE.scales("mooncake")) & table.row(row).keys() - {stale.scale}
            assert done == {scale for scale in ONE.scales("mooncake") if UNIT * scale > BEATEN * peak}


def plain_rates(table: ScoreTable, policy: str = "chunked:64") -> list[float]:
    """Those of the grid at which a plain policy was run, under every gap."""
    rows = [table.row(Row("mooncake", "exact", policy, gap)) for gap in ONE.gaps_ms]
    assert rows[0].keys() == rows[1].keys()
    return [scale for scale in ONE.scales("mooncake") if scale in rows[0]]


@pytest.mark.parametrize("last", [{15: 3, 50: 9}, {15: 9, 50: 3}, {15: 0, 50: 6}, {15: 0, 50: 1}])
def test_a_plain_policy_stops_after_it_has_fallen_for_all_gaps_and_not_before(last: dict[int, int]) -> None:
    scales = ONE.scales("mooncake")

    def drowns(run: SweepRun, gap: int) -> float:
        """All is kept at so many of the lowest rates; then a little less than FALLEN of that."""
        good = [UNIT * scale for scale in scales[: last[gap]]]
        best = max(good, default=0.0)
        return min(UNIT * run.scale, best) if UNIT * run.scale <= best else 0.99 * FALLEN * best

    table = ScoreTable(ONE)
    wanted = []
    while runs := [run for run in table.missing() if run.policy == "chunked:64"]:
        assert len(runs) == 1  # the next rate depends on this one
        assert not table.has_fallen("mooncake", "exact", "chunked:64")
        assert table.coarse_peak(Row("mooncake", "exact", "chunked:64", 15)) is None
        wanted.append(runs[0].scale)
        for score in invented(ONE, runs, drowns):
            table.add(score)
    assert table.has_fallen("mooncake", "exact", "chunked:64")
    assert wanted == scales[: max(last.values()) + 2]
    for gap, count in last.items():
        peak = table.coarse_peak(Row("mooncake", "exact", "chunked:64", gap))
        assert peak is not None
        assert peak.scale == scales[max(count - 1, 0)]


def test_a_plain_policy_goes_on_after_one_bad_rate_or_just_enough_goodput() -> None:
    scales = ONE.scales("mooncake")
    dips = dict(zip(scales, [2.0, 2.0, 0.0, 2.0, 0.0, 2.0], strict=False))
    table = filled(ONE, lambda run, gap: dips.get(run.scale, 0.1))
    assert plain_rates(table) == scales[:8]
    table = filled(ONE, lambda run, gap: 2.0 if run.scale < 1 else 2.0 * FALLEN)
    assert plain_rates(table) == scales


def test_finer_rates_do_not_make_a_plain_policy_fall() -> None:
    scales = ONE.scales("mooncake")
    table = filled(ONE, lambda run, gap: hill(1.15**5, 3.0)(run.scale) if run.scale in scales else 0.0)
    assert len(table.row(Row("mooncake", "exact", "chunked:64", 15))) > len(scales)
    assert plain_rates(table) == scales


def test_finer_rates_come_only_when_a_row_is_complete_and_only_near_the_peak_of_the_best() -> None:
    def goodput(run: SweepRun, gap: int) -> float:
        return hill(1.15**5, 3.0 if run.policy == "chunked:64" else 2.9)(run.scale)

    coarse = [run for run in ONE.coarse_runs() if run.policy in ONE.fixed]
    *most, other, last = sorted(coarse, key=lambda run: run.scale)
    table = ScoreTable(ONE, invented(ONE, most, goodput))
    for run in (other, last):  # while one is missing, either chunk may be the better one
        assert table.near_peaks("mooncake", "exact", 15) == {}
        assert {one.scale for one in table.missing() if one.policy == run.policy} == {run.scale}
        for score in invented(ONE, [run], goodput):
            table.add(score)
    wanted = [run for run in table.wanted("mooncake", "exact", 15) if is_plain(run.policy)]
    assert {run.policy for run in wanted} == {"chunked:64", "monolithic"}
    assert {run.gap_ms for run in wanted} == {None}
    assert [run.scale for run in wanted if run.policy == "chunked:64"] == fine_scales(1.15**4, 1.15**6)
    assert [run.scale for run in wanted if run.policy == "monolithic"] == ONE.scales("mooncake")[:1]


def test_finer_rates_are_for_slo_the_best_ablated_and_the_best_plain_chunk_alone() -> None:
    table = won()
    assert table.near_peaks("azure", "exact", 15).keys() == {"slo", "slo-order:64", "chunked:64"}
    assert table.near_peaks("azure", "exact", 50).keys() == {"slo", "slo-order:512", "chunked:512"}
    scales = set(INVENTED.scales("azure"))
    assert not table.row(Row("azure", "exact", "slo-order:512", 15)).keys() - scales
    assert not table.row(Row("azure", "exact", "slo-order:64", 50)).keys() - scales
    assert not table.row(Row("azure", "exact", "monolithic", 15)).keys() - scales
    assert table.row(Row("azure", "exact", "chunked:64", 15)).keys() - scales == set(fine_scales(1.15**5, 1.15**7))


def test_slo_and_the_best_ablated_chunk_share_their_finer_rates() -> None:
    table = won()
    near = table.near_peaks("azure", "exact", 15)
    assert table.best_of(INVENTED.ablated, "azure", "exact", 15) == "slo-order:64"
    assert near["slo"] == near["slo-order:64"] == set(fine_scales(1.15**4, 1.15**6) + fine_scales(1.15**5, 1.15**7))
    for scale in near["slo"]:
        assert scale in table.row(Row("azure", "exact", "slo", 15))
        assert scale in table.row(Row("azure", "exact", "slo-order:64", 15))


def test_slo_is_run_at_one_and_a_half_times_the_rate_of_its_peak() -> None:
    table = filled(INVENTED, lambda run, gap: hill(1.15**3 * 1.04, 5.0)(run.scale))
    row = Row("azure", "exact", "slo", 15)
    peak = table.peak(row)
    assert peak is not None
    assert peak.scale == pytest.approx(1.15**3 * 1.04, rel=0.015)  # nearer than the grid is
    scale = table.overload_scale("azure", "exact", 15)
    assert scale is not None
    assert 1.5 <= scale / peak.scale < 1.5 * 1.03
    assert scale in table.row(row)
    assert scale not in table.row(Row("azure", "exact", "slo-order:64", 15))


def test_the_overload_point_is_not_taken_for_a_peak() -> None:
    table = filled(INVENTED, lambda run, gap: run.scale)  # rises without end
    peak = table.peak(Row("azure", "exact", "slo", 15))
    assert peak is not None
    assert peak.scale == INVENTED.scales("azure")[-1]
    assert max(table.row(Row("azure", "exact", "slo", 15))) > 1.5 * peak.scale
    assert max(table.row(Row("azure", "exact", "slo-order:64", 15))) == peak.scale
    assert ")\\* |" in report_text("f", {}, table)


def test_the_useful_comes_first() -> None:
    order = sorted(INVENTED.coarse_runs(), key=lambda run: usefulness(INVENTED, run))
    truths = [run.truth for run in order]
    assert truths == sorted(truths, key=INVENTED.truths.index)
    exact = [run.policy.startswith("slo") for run in order if run.truth == "exact"]
    assert exact == sorted(exact, reverse=True)
    for row in (("azure", "exact", "slo", 15), ("azure", "exact", "chunked:64", None)):
        scales = [run.scale for run in order if run[:4] == row]
        assert scales == INVENTED.scales("azure")  # the longest run first
    alike = [run.policy for run in order if run[1:2] + run[4:] == ("exact", 1.0) and is_plain(run.policy)]
    assert alike == ["chunked:64"] * 2 + ["chunked:512"] * 2 + ["monolithic"] * 2


@pytest.mark.parametrize("world", [plain_falls, smooth(1), bumpy(1), bumpy(2)])
def test_half_a_file_leads_to_the_same_points_as_a_sweep_in_one_go(tmp_path: Path, world: World) -> None:
    """Whatever the workers finished first, and wherever they were stopped."""
    grid = replace(ONE, courses=(replace(ONE.courses[0], lowest=0, highest=6),))
    expected = sorted(filled(grid, world).scores(), key=lambda score: score.order)
    header = header_of(load_profile("h200-llama-3-8b"))
    for seed in range(2):
        path, chance = tmp_path / f"{seed}", random.Random(seed)
        runs = 0
        table = ScoreTable(grid, open_scores(path, header))
        while missing := table.missing():
            scores = invented(grid, [chance.choice(missing)], world)
            append_scores(path, scores)
            for score in scores:
                table.add(score)
            runs += 1
            if chance.random() < 0.1:  # stopped, and started again
                table = ScoreTable(grid, open_scores(path, header))
        found = read_scores(path)[1]
        assert sorted(found, key=lambda score: score.order) == expected
        assert runs == len({SweepRun.of(*score.row, score.scale) for score in found})  # none twice


def falls_sooner_for_one_gap(run: SweepRun, gap: int) -> float:
    return UNIT * run.scale if run.scale < (1.5 if gap == 15 else 1.3) else 0.0


def falls_at_once(run: SweepRun, gap: int) -> float:
    return UNIT * run.scale if run.scale < 1.3 else 0.0


def plain_missing(table: ScoreTable) -> list[SweepRun]:
    return [run for run in table.missing() if is_plain(run.policy)]


@pytest.mark.parametrize(
    "world",
    [
        plain_falls,
        bumpy(1),
        falls_at_once,
        falls_sooner_for_one_gap,
    ],
)
def test_a_plain_run_of_which_some_lines_are_missing_is_run_again(world: World) -> None:
    """Wherever in the sweep it was stopped in the middle of writing them."""
    grid = replace(ONE, courses=(replace(ONE.courses[0], lowest=0, highest=6),), chunks=(64,))
    table = ScoreTable(grid)
    before: list[Score] = []
    cuts = []
    while missing := plain_missing(table):
        scores = invented(grid, missing[-1:], world)
        cuts.append([*before, *scores[:1]])
        before += scores
        for score in scores:
            table.add(score)
    assert len(cuts) > 10
    for cut in cuts:
        table = ScoreTable(grid, cut)
        while missing := plain_missing(table):
            for score in invented(grid, missing, world):
                table.add(score)
        assert set(table.scores()) == set(before)


# --- runs ---


def test_the_file_is_the_same_whatever_the_number_of_workers(folder: Path, fresh: Path) -> None:
    material = load_material(SMALL, folder)
    assert sweep(material, folder / "1", 1) == 0
    assert (folder / "1").read_bytes() == fresh.read_bytes()
    header, scores, _ = read_scores(folder / "1")
    assert header == header_of(load_profile("h200-llama-3-8b"))
    assert not missing_runs(ScoreTable(SMALL, scores))
    assert [score.order for score in scores] == sorted(score.order for score in scores)
    own = (len(material.traces["azure"].arrivals)) / material.traces["azure"].span
    for score in scores:
        assert score.rate_rps == pytest.approx(score.scale * own, rel=1e-4)
        assert score.goodput_rps == pytest.approx(score.rate_rps * score.kept / score.requests, rel=1e-4)
        assert score.kept + score.refused <= score.requests


def test_one_plain_run_scores_as_a_run_for_each_gap_would(folder: Path) -> None:
    sweep(load_material(SMALL, folder), folder / "both", 2, only="chunked:128")
    sweep(load_material(replace(SMALL, gaps_ms=(50,)), folder), folder / "one", 2, only="chunked:128")
    both = {(s.row, s.scale): s for s in read_scores(folder / "both")[1]}
    one = {(s.row, s.scale): s for s in read_scores(folder / "one")[1]}
    common = both.keys() & one.keys()
    assert len(common) >= len(SMALL.scales("azure"))
    assert all(both[key] == one[key] for key in common)
    assert {s.gap_ms for s in both.values()} == {15, 50}


def test_only_runs_what_was_asked_for_and_the_rest_can_follow(folder: Path, fresh: Path) -> None:
    material = load_material(SMALL, folder)
    sweep(material, folder / "parts", 2, only="/slo/15ms")
    assert {(s.policy, s.gap_ms) for s in read_scores(folder / "parts")[1]} == {("slo", 15)}
    sweep(material, folder / "parts", 2)
    assert (folder / "parts").read_bytes() == fresh.read_bytes()
    with pytest.raises(OptionError, match="such a name is azure/exact/slo/15ms"):
        sweep(material, folder / "parts", 2, only="sol")


def test_it_stops_in_time_and_says_what_is_left(folder: Path) -> None:
    material = load_material(SMALL, folder)
    assert sweep(material, folder / "out", 2, seconds=0) == len(missing_runs(ScoreTable(SMALL)))
    assert sweep(material, folder / "out", 2, seconds=0, part="peaks") == len(ScoreTable(SMALL).missing()) == 2 + 3
    assert read_scores(folder / "out")[1] == []


class Stop(Exception):
    pass


def test_a_sweep_that_is_interrupted_again_and_again_ends_with_the_same_file(folder: Path, fresh: Path) -> None:
    material = load_material(SMALL, folder)

    def stop(done: int, total: int) -> None:
        if done >= 8:
            raise Stop

    stops = 0
    while stops < 50:
        try:
            assert sweep(material, folder / "parts", 2, tell=stop) == 0
            break
        except Stop:
            stops += 1
    assert stops > 2
    assert (folder / "parts").read_bytes() == fresh.read_bytes()


def crash(run: SweepRun, material: Material) -> list[Score]:
    os._exit(1)


def fail(run: SweepRun, material: Material) -> list[Score]:
    raise ValueError("no such thing")


@pytest.mark.skipif(sys.platform != "linux", reason="only forked workers inherit the replaced function")
@pytest.mark.parametrize(
    ("score", "told"),
    [
        (crash, r"a worker was killed while the workers ran azure/exact/.* at x.*; was it memory\? try fewer --jobs"),
        (fail, r"azure/exact/[^ ]* at x[0-9.]* failed:(.|\n)*in fail(.|\n)*ValueError: no such thing"),
    ],
)
def test_a_run_that_fails_and_a_worker_that_dies_are_clear_errors(
    folder: Path, monkeypatch: pytest.MonkeyPatch, score: Callable[..., list[Score]], told: str
) -> None:
    monkeypatch.setattr("weft.sim.sweep_workers.score_run", score)
    with pytest.raises(EngineError, match=told):
        sweep(load_material(SMALL, folder), folder / "out", 2)
    assert read_scores(folder / "out")[1] == []


@pytest.mark.parametrize("nth", [0, -1])
def test_a_file_cut_in_the_middle_of_a_plain_run_leads_to_that_of_a_fresh_sweep(
    folder: Path, fresh: Path, nth: int
) -> None:
    """All but one line of a run, and half of that one: the first rate of the grid, or the last of the finer ones."""
    header, *lines = fresh.read_bytes().splitlines(keepends=True)
    scores = [Score(**json.loads(line)) for line in lines]
    of_one = [score for score in scores if score.policy == "chunked:128"]
    scale = sorted({score.scale for score in of_one}, key=lambda scale: (scale not in SMALL.scales("azure"), scale))[
        nth
    ]
    last = [i for i, score in enumerate(scores) if score.policy == "chunked:128" and score.scale == scale]
    assert len(last) == 2
    whole = [line for i, line in enumerate(lines) if i not in last]
    out = folder / "cut"
    out.write_bytes(b"".join([header, *whole, lines[last[0]], lines[last[1]][:40]]))
    totals = []
    assert sweep(load_material(SMALL, folder), out, 2, tell=lambda done, total: totals.append(total)) == 0
    assert totals[-1] == 1  # that run
    assert out.read_bytes() == fresh.read_bytes()


PROCESS = """
import sys
from pathlib import Path
from tests.sim.test_sweep import SMALL
from weft.sim.sweep import sweep
from weft.sim.sweep_run import load_material
folder = Path(sys.argv[1])
sweep(load_material(SMALL, folder), folder / "killed", jobs=2)
"""


def test_a_sweep_that_was_killed_goes_on_where_it_was(folder: Path, fresh: Path) -> None:
    out = folder / "killed"
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", PROCESS, folder], cwd=root, start_new_session=True) as process:
        patience = time.monotonic() + 60
        while not (out.exists() and out.read_bytes().count(b"\n") > 5):
            assert time.monotonic() < patience
            assert process.poll() is None, "it was done before it could be killed"
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    while _is_alive(process.pid):  # its workers notice
        assert time.monotonic() < patience
        time.sleep(0.05)
    done = out.read_bytes().count(b"\n") - 1
    with out.open("ab") as file:
        file.write(b'{"trace":"azure","truth":"ex')  # as a kill in the middle of a write leaves it
    material = load_material(SMALL, folder)
    totals = []
    assert sweep(material, out, 2, tell=lambda done, total: totals.append(total)) == 0
    assert out.read_bytes() == fresh.read_bytes()
    # A plain run makes two lines, others one.
    assert totals[-1] <= len({SweepRun.of(*s.row, s.scale) for s in read_scores(out)[1]}) - done / 2


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# --- the file ---


def test_a_file_of_another_profile_version_or_kind_is_not_touched(tmp_path: Path) -> None:
    profile = load_profile("h200-llama-3-8b")
    path = tmp_path / "out"
    assert open_scores(path, header_of(profile)) == []
    before = path.read_bytes()
    for other in (header_of(replace(profile, kv_tokens=1000)), {**header_of(profile), "weft": "9.9"}):
        with pytest.raises(OptionError, match="choose another file"):
            open_scores(path, other)
    assert path.read_bytes() == before
    for text in ("dear diary", "dear diary\n", '{"profile":"x"}\n{"a":1}\n'):
        path.write_text(text)
        with pytest.raises(OptionError, match="not from a sweep"):
            open_scores(path, header_of(profile))
        assert path.read_text() == text


def test_a_line_that_was_cut_off_is_dropped_even_the_first(tmp_path: Path) -> None:
    header = header_of(load_profile("h200-llama-3-8b"))
    path = tmp_path / "out"
    open_scores(path, header)
    whole = path.read_bytes()
    for cut in (0, 5, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert open_scores(path, header) == []
        assert path.read_bytes() == whole
    path.write_bytes(whole + whole[:9])
    assert open_scores(path, header) == []
    assert path.read_bytes() == whole


# --- the report ---


def claims_in(text: str) -> list[str]:
    """Its numbered paragraphs."""
    return [part for part in text.split("## The claims")[1].strip().split("\n\n") if part[0].isdigit()]


def test_the_report_states_what_the_scores_say() -> None:
    text = report_text("s.jsonl", {"profile": "p", "weft": "1"}, won())
    claims = text.split("## The claims")[1]
    assert claims.count("**holds**") == 8  # four claims, two truths
    assert "does not" not in claims
    row = next(line for line in text.splitlines() if line.startswith("| mooncake, 15 ms |"))
    assert "| 10 (" in row
    assert "| 64: 9." in row
    assert "| 64: 5.9" in row
    assert row.endswith("| 1.000 |")  # in overload
    assert text.count("| slo / ablated | least, common rate | slo / plain | at 1.5x |") == 2
    assert claims.count("at every common rate: 1.01") == 2
    chunks = text.split("## Fixed chunks")[1]
    assert "| chunked:64 | 0.29" in chunks  # 3 of 10, but for the distance of its peak to the next rate that was run
    # It has 5 of 10, and was not run at rates that are below 8.
    peak = won().peak(Row("azure", "exact", "slo-order:64", 50))
    assert peak is not None
    assert 4.9 < peak.goodput_rps < 5
    assert f"| slo-order:64 | {UNIT * coarse_scale(3) / 10:.3f} (azure, 50 ms) |" in chunks
    assert claims.count(f"slo-order:64, which falls to {UNIT * coarse_scale(3) / 10:.3f} for azure, 50 ms") == 2
    preface = " ".join(text.split("##")[0].split())
    assert f"an ablated chunk until it is below {BEATEN} of slo's peak" in preface
    assert "a peak counts with the most that it could be at rates which were not run" in preface


def test_the_report_says_where_a_claim_fails() -> None:
    def fails(run: SweepRun, gap: int) -> float:
        if run.truth == "disturbed" and run.policy == "slo" and run.scale > 2:
            return 0.5 * plain_falls(run, gap)
        return plain_falls(run, gap)

    claims = claims_in(report_text("f", {}, filled(INVENTED, fails)))
    assert [claim.count("**does not hold**") for claim in claims] == [0, 0, 0, 1]
    assert "disturbed: **does not hold** (0.50" in claims[3]

    def slow(run: SweepRun, gap: int) -> float:
        return 0.5 * plain_falls(run, gap) if run.policy == "slo" and run.trace == "mooncake" else plain_falls(run, gap)

    claims = claims_in(report_text("f", {}, filled(INVENTED, slow)))
    assert [claim.count("**does not hold**") for claim in claims] == [2, 0, 2, 0]
    assert "least for mooncake, 15 ms" in claims[0]


LOWEST = UNIT * coarse_scale(-4)


def capped(slo: float, plain: float, at: float) -> World:
    """slo keeps all up to so many requests/s, and so does one ablated chunk; plain chunks have a peak at this scale."""

    def goodput(run: SweepRun, gap: int) -> float:
        if is_plain(run.policy):
            return hill(at, plain)(run.scale)
        good = run.policy == "slo" or (gap == 15) == run.policy.endswith(":64")
        return min(UNIT * run.scale, slo) if good else hill(coarse_scale(3), 1.0)(run.scale)

    return goodput


@pytest.mark.parametrize("step", [-4, -3])
def test_a_peak_below_the_lowest_rate_counts_as_that_rate(step: int) -> None:
    """Wherever it is: at lower rates, which are not run, there might be a higher one."""
    table = filled(INVENTED, capped(3.5, 0.5, coarse_scale(step)))
    one = Findings(table, "mooncake", "exact", 15)
    assert one.peaks["chunked:64"].goodput_rps == one.peaks["chunked:512"].goodput_rps == 0.5
    assert one.most("chunked:64") == one.most("chunked:512") == pytest.approx(LOWEST)
    assert one.over_plain() == pytest.approx(3.5 / LOWEST)
    assert one.over_best("chunked:64") == pytest.approx(LOWEST / 3.5)
    assert one.peaks["slo-order:512"].goodput_rps == 1.0
    assert one.most("slo-order:512") == pytest.approx(LOWEST)  # it is above BEATEN of slo's peak, so it was run there
    text = report_text("f", {}, table)
    rows = [line for line in text.splitlines() if line.startswith("| mooncake, 15 ms |")]
    star, rate = "\\*" if step == -4 else "", UNIT * coarse_scale(step)
    share = round(1000 * 0.5 / rate) / 1000
    assert [row.count(f"| 64: 0.5 ({share:.0%} of {rate:.3g}){star} |") for row in rows] == [1, 1]
    assert [row.count(f"| {3.5 / LOWEST:.3f} |") for row in rows] == [1, 1]
    claims = claims_in(text)
    assert [claim.count("**does not hold**") for claim in claims] == [0, 2, 2, 0]
    for policy in (*INVENTED.fixed, *INVENTED.ablated):
        assert f"| {policy} | {LOWEST / 3.5:.3f} (" in text
    assert f"falls to {LOWEST / 3.5:.3f} for" in claims[1]
    assert f"({3.5 / LOWEST:.3f} or more, least for mooncake, 15 ms)" in claims[2]


def test_a_peak_above_the_lowest_rate_counts_as_what_it_is() -> None:
    table = filled(INVENTED, capped(7.0, 3.0, coarse_scale(2)))
    one = Findings(table, "mooncake", "exact", 15)
    assert LOWEST < 3
    assert one.most("chunked:64") == one.peaks["chunked:64"].goodput_rps == 3.0
    assert one.over_plain() == pytest.approx(7 / 3)
    assert one.over_best("chunked:64") == pytest.approx(3 / 7)
    assert one.most("slo-order:64") == one.most("slo") == 7.0
    assert one.over_ablated() == 1.0
    claims = claims_in(report_text("f", {}, table))
    assert [claim.count("**holds**") for claim in claims] == [2, 2, 2, 2]
    assert "(2.333 or more, least for mooncake, 15 ms)" in claims[2]


def test_an_ablated_peak_counts_as_the_highest_rate_that_was_not_run() -> None:
    table = filled(ONE, lambda run, gap: min(UNIT * run.scale, 7.0 if run.policy == "slo" else 1.0))
    one = Findings(table, "mooncake", "exact", 15)
    lowest = min(table.row(Row("mooncake", "exact", "slo-order:512", 15)))
    assert UNIT * coarse_scale(0) < BEATEN * 7.0 < UNIT * lowest
    assert one.peaks["slo-order:512"].goodput_rps == 1.0
    assert one.most("slo-order:512") == pytest.approx(UNIT * coarse_scale(0))
    assert one.over_best("slo-order:512") == pytest.approx(UNIT * coarse_scale(0) / 7)
    assert one.over_ablated() == pytest.approx(7 / UNIT / coarse_scale(0))
    unknown = Findings(ScoreTable(ONE), "mooncake", "exact", 15)
    assert unknown.most("slo-order:512") is unknown.over_best("slo-order:512") is unknown.over_ablated() is None


def test_a_report_of_half_a_sweep_says_so(tmp_path: Path) -> None:
    path = tmp_path / "out"
    open_scores(path, header_of(load_profile("h200-llama-3-8b")))
    with pytest.raises(OptionError, match="has no scores yet"):
        write_report(path, tmp_path / "t.md", INVENTED)
    scores = [invent(run, run.gap_ms or 15, 1.0) for run in INVENTED.coarse_runs()[:3]]
    path.write_bytes(path.read_bytes() + b"".join(json.dumps(s._asdict()).encode() + b"\n" for s in scores))
    write_report(path, tmp_path / "t.md", INVENTED)
    text = (tmp_path / "t.md").read_text()
    assert "Not finished" in text
    assert "no data" in text


# --- the commands ---


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Tiny ones, under the names of the real ones."""
    make_trace(tmp_path / "AzureLLMInferenceTrace_conv.csv", requests=5)
    lines = [{"timestamp": 3000 * i, "input_length": 900, "output_length": 5, "hash_ids": [1, i]} for i in range(4)]
    (tmp_path / "mooncake_conversation_trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "weft", "sweep", "--no-progress", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_runs_and_reports(traces: Path) -> None:
    out, table = traces / "out.jsonl", traces / "t.md"
    options = ("--traces", traces, "--out", out, "--jobs", "2", "--only", "mooncake/exact/slo/50ms", "--table", table)
    done = command(*options)
    assert done.returncode == 0, done.stderr
    assert "| mooncake, 50 ms |" in table.read_text()
    scores = read_scores(out)[1]
    assert {score.row for score in scores} == {Row("mooncake", "exact", "slo", 50)}
    table.unlink()
    before = out.read_bytes()
    assert command("--out", out, "--table", table, "--report").returncode == 0
    assert "Not finished" in table.read_text()
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--report",), "--report needs --table"),
        ((), "--traces DIR is missing"),
        (("--traces", "/no/such"), "--traces /no/such is not a folder"),
        (("--traces", ".", "--jobs", "0"), "--jobs 0 must be at least 1"),
        (("--traces", "."), "cannot read the trace AzureLLMInferenceTrace_conv.csv"),
        (("--report", "--table", "t.md"), "cannot read"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = command("--out", tmp_path / "out", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
