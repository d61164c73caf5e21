"""Capacity: the search on made-up shares, what counts as kept, the table, the file and its scheduler."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.test_sweep import INVENTED, ONE, SMALL, UNIT, command, invent, invented, make_trace
from tests.smooth import SMOOTH
from weft.core import Plan, Request, Scheduler, Targets, chunked, monolithic
from weft.errors import OptionError
from weft.sim import sweep_capacity
from weft.sim.compare import kept_promises
from weft.sim.profiles import load_profile
from weft.sim.score_table import ScoreTable
from weft.sim.simulator import Played, Truth, play
from weft.sim.sweep import missing_runs, sweep
from weft.sim.sweep_capacity import STEPS_BELOW, Capacity, best_capacity, capacity, families, find_best, ladder, search
from weft.sim.sweep_file import code_of, header_of, open_scores, read_scores
from weft.sim.sweep_findings import capacity_ratio
from weft.sim.sweep_grid import FINE, Grid, Row, Score, SweepRun, coarse_scale, fine_scales
from weft.sim.sweep_report import report_text
from weft.sim.sweep_run import load_material, score_run
from weft.sim.traces import Arrival, Trace

RATES = [coarse_scale(step) for step in range(-14, 9)]  # as the ladder of INVENTED


# --- the search ---


@pytest.mark.parametrize("limit", [1.15**-13.9, 0.5, 1.0, 1.15**0.99, 2.0, 3.0])
def test_the_search_finds_a_limit_to_three_percent_in_few_runs(limit: float) -> None:
    tried = []

    def kept(scale: float) -> bool:
        tried.append(scale)
        return scale <= limit

    found = search(kept, RATES)
    assert found is not None
    assert found <= limit < found * FINE * 1.0001
    assert len(tried) == len(set(tried)) <= 5 + 3
    assert all(scale in RATES or scale in fine_scales(RATES[0], RATES[-1]) for scale in tried)


def test_the_search_ends_at_both_ends() -> None:
    assert search(lambda scale: True, RATES) == RATES[-1]
    assert search(lambda scale: False, RATES) is None
    assert search(lambda scale: scale == RATES[0], RATES) == RATES[0]


def scores_of(kept: dict[float, int], policy: str = "slo") -> list[Score]:
    return [
        Score("mooncake", "exact", policy, scale, UNIT * scale, 15, share, 0.0, 0, 0, 100)
        for scale, share in kept.items()
    ]


def test_capacity_is_the_highest_rate_that_all_lower_rates_keep_too() -> None:
    found = capacity(scores_of({4.0: 95, 1.0: 100, 3.0: 89, 2.0: 90}), 0.9)
    assert found is not None
    assert (found.kept, found.broken) == tuple(scores_of({2.0: 90, 3.0: 89}))  # 4.0 keeps it again, which is no matter
    assert found.rate_rps == 2 * UNIT
    assert not found.is_fine
    assert capacity(scores_of({1.0: 98}), 0.99) == Capacity(None, scores_of({1.0: 98})[0])
    assert capacity(scores_of({1.0: 99}), 0.99) == Capacity(scores_of({1.0: 99})[0], None)
    assert capacity([], 0.9) is None
    near = capacity(scores_of({1.0: 99, FINE: 98}), 0.99)
    assert near is not None
    assert near.is_fine


def below(limits: dict[str, float]) -> Callable[[SweepRun, int], float]:
    """All is kept up to a scale, which depends on the policy; less than 90% above it."""
    return lambda run, gap: UNIT * run.scale * (1.0 if run.scale <= limits[run.policy] else 0.5)


def searched(grid: Grid, world: Callable[[SweepRun, int], float], table: ScoreTable) -> int:
    """Runs all that the capacities ask for, and says how many runs that were."""
    runs = 0
    while missing := missing_runs(table, "capacity"):
        for score in invented(grid, missing, world):
            table.add(score)
        runs += len(missing)
    return runs


LIMITS = {
    "slo": 2.5,
    "slo-order:64": 2.0,
    "slo-order:512": 1.2,
    "chunked:64": 0.9,
    "chunked:512": 1.6,
    "monolithic": 0.2,
}


def test_the_best_chunk_is_found_and_the_others_cost_one_run() -> None:
    table = ScoreTable(ONE)
    assert searched(ONE, below(LIMITS), table) < 70  # of 276 on the grid alone, for two gaps
    for gap in ONE.gaps_ms:
        for share in (0.9, 0.99):
            for family in families(ONE, gap):
                best = best_capacity(table, family, "mooncake", "exact", gap, share)
                assert best is not None
                assert best.policy == max(family, key=lambda policy: LIMITS[policy])
                assert best.rate_rps <= UNIT * LIMITS[best.policy] < best.rate_rps * FINE * 1.0001
                assert best.is_fine
    assert len(table.row(Row("mooncake", "exact", "chunked:64", 15))) == 1  # a larger one is tried first


def test_a_challenger_is_run_just_above_the_best_and_skipped_where_it_failed_below() -> None:
    tried: list[tuple[str, float]] = []

    def kept(policy: str, scale: float) -> bool:
        tried.append((policy, scale))
        return scale <= {"a": 1.0, "b": 0.5, "c": 1.5}[policy]

    best = find_best(["a", "b", "c"], kept, RATES)
    assert (best.policy, best.rejected) == ("c", {"b": FINE})
    assert [scale for policy, scale in tried if policy == "b"] == [FINE]
    tried.clear()
    again = find_best(["c", "a", "b"], kept, RATES, {"b": 0.9})
    assert again.scale == best.scale
    assert [scale for policy, scale in tried if policy == "b"] == [0.9]  # known before; no new run


def test_nothing_is_kept_at_any_rate() -> None:
    table = ScoreTable(ONE)
    searched(ONE, below(dict.fromkeys(LIMITS, 0.0)), table)
    lowest = ladder(ONE, "mooncake")[0]
    assert lowest == coarse_scale(-4 - STEPS_BELOW)
    for family in families(ONE, 15):
        best = best_capacity(table, family, "mooncake", "exact", 15, 0.9)
        assert best is not None
        assert best.kept is None
        assert best.limit_rps == UNIT * lowest


def test_capacity_runs_do_not_change_what_the_search_for_peaks_does() -> None:
    world = below(LIMITS)
    first, alone = ScoreTable(ONE), ScoreTable(ONE)
    searched(ONE, world, first)
    for table in (first, alone):
        while missing := table.missing():
            for score in invented(ONE, missing, world):
                table.add(score)
    assert set(alone.scores()) <= set(first.scores())
    for policy in ONE.policies:
        row = Row("mooncake", "exact", policy, 15)
        assert first.peak_search(row) == alone.peak_search(row)
        assert first.coarse_peak(row) == alone.coarse_peak(row)


# --- what counts as kept ---

TARGETS = Targets(gap=0.05, ttft=2.0, ttft_per_1k=0.0)


def trace_of(requests: int = 40, expensive: int = 8) -> Trace:
    """Requests of which every so manieth has a long prompt."""
    prompts = [3000 if number % 5 == 4 else 200 for number in range(requests)]
    assert prompts.count(3000) == expensive
    return Trace("made", tuple(Arrival(0.1 * number, prompt, 60) for number, prompt in enumerate(prompts)))


def played_by(scheduler: Scheduler, trace: Trace) -> Played:
    return play(trace, scheduler, Truth(SMOOTH.coefficients), TARGETS)


def scheduler_of(kind: type[Scheduler] = Scheduler, prefills_first: bool = False) -> Scheduler:
    policy = monolithic(16_384) if prefills_first else chunked(512)
    return kind(policy=policy, num_blocks=20_000, block_size=16, max_num_seqs=256)


class RefusesTheExpensive(Scheduler):
    def reset(self) -> None:
        super().reset()
        self.too_long: list[Request] = []

    def add(self, request: Request) -> None:
        if request.prompt_tokens > 1000:
            self.too_long.append(request)
        else:
            super().add(request)

    def plan(self, now: float) -> Plan:
        refused, self.too_long = self.too_long, []
        plan = super().plan(now)
        return plan._replace(refused=[*plan.refused, *refused])


def share_kept(played: Played) -> float:
    return float(kept_promises(played, TARGETS).mean())


def test_refusing_the_expensive_requests_cannot_raise_the_capacity() -> None:
    for rate in (0.1, 1.0, 10.0):
        played = played_by(scheduler_of(RefusesTheExpensive), trace_of().scaled(rate))
        assert played.refused.sum() == 8
        assert share_kept(played) <= 32 / 40  # at no rate 90%, however well it serves the others
    assert share_kept(played_by(scheduler_of(), trace_of().scaled(0.1))) == 1.0


def test_a_run_goes_on_until_the_last_token_and_decodes_that_are_put_off_are_late() -> None:
    """Prompts come faster than they are read, so that whole prompts first means no second token before they end."""
    trace = trace_of().scaled(50.0)
    played = played_by(scheduler_of(prefills_first=True), trace)
    assert played.ended > trace.span
    assert (played.finished <= played.ended).all()
    assert len(played.gaps) == sum(arrival.output_tokens - 1 for arrival in trace.arrivals)  # every one
    assert len(played.ttft) == len(trace.arrivals)
    put_off = played.gaps > TARGETS.gap
    assert len(set(played.gap_owner[put_off].tolist())) > 20
    assert share_kept(played) < 0.5
    until_arrivals_end = replace(played, gaps=played.gaps[~put_off], gap_owner=played.gap_owner[~put_off])
    assert share_kept(until_arrivals_end) > share_kept(played)  # as if nobody had looked at those


def test_a_request_that_never_finishes_is_broken(tmp_path: Path) -> None:
    class Loses(Scheduler):
        def add(self, request: Request) -> None:
            if request.id != "000003":
                super().add(request)

    played = played_by(scheduler_of(Loses), trace_of(10, 2).scaled(0.1))
    assert kept_promises(played, TARGETS).tolist() == [number != 3 for number in range(10)]
    make_trace(tmp_path / "t.csv")
    score = score_run(SweepRun("azure", "exact", "slo", 50, 1.0), load_material(SMALL, tmp_path))[0]
    assert score.requests == 20  # all of the slice
    assert score.kept_tokens is not None
    assert score.longest_gap_ms is not None
    assert 0 <= score.kept_tokens <= 1


# --- the file ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_trace(tmp_path / "t.csv")
    return tmp_path


class Stop(Exception):
    pass


def test_capacity_alone_is_resumed_and_adds_up_to_the_whole_sweep(folder: Path) -> None:
    material = load_material(SMALL, folder)
    assert sweep(material, folder / "once", 2, part="capacity") == 0

    def stop(done: int, total: int) -> None:
        if done >= 6:
            raise Stop

    stops, left = 0, 1
    while left:
        try:
            left = sweep(material, folder / "parts", 2, part="capacity", tell=stop)
        except Stop:
            stops += 1
    assert stops > 2
    assert (folder / "parts").read_bytes() == (folder / "once").read_bytes()
    table = ScoreTable(SMALL, read_scores(folder / "once")[1])
    assert missing_runs(table)
    assert not missing_runs(table, "capacity")
    assert sweep(material, folder / "parts", 2, part="peaks") == 0
    assert sweep(material, folder / "whole", 2) == 0
    assert (folder / "parts").read_bytes() == (folder / "whole").read_bytes()
    with pytest.raises(OptionError, match="there are all, peaks, capacity"):
        sweep(material, folder / "parts", 2, part="capacities")


def test_a_file_of_another_scheduler_is_not_added_to(tmp_path: Path) -> None:
    header = header_of(load_profile("h200-llama-3-8b"))
    assert len(header["scheduler"]) == 12
    path = tmp_path / "out"
    open_scores(path, {**header, "scheduler": "0123456789ab"})
    with pytest.raises(OptionError, match=r"scheduler 0123456789ab; this is .* choose another file"):
        open_scores(path, header)


def test_the_hash_is_of_the_code_and_not_of_what_is_said_about_it() -> None:
    plain = "def f(x):\n    return x + 1\n"
    said = '"""A module."""\n\n\ndef f(x):  # a comment\n    """A function."""\n    return (x +\n            1)\n'
    assert code_of(plain) == code_of(said)
    assert code_of(plain) != code_of(plain.replace("1", "2"))
    assert code_of('class A:\n    """Alone."""\n') == code_of("class A:\n    pass\n")


# --- the report ---


def whole(world: Callable[[SweepRun, int], float]) -> ScoreTable:
    table = ScoreTable(INVENTED)
    while missing := missing_runs(table):
        for score in invented(INVENTED, missing, world):
            table.add(score._replace(kept_tokens=0.25, longest_gap_ms=14.0))
    return table


def test_the_report_has_capacities_and_labels_peaks_as_what_they_are() -> None:
    def flood(run: SweepRun, gap: int) -> float:
        """slo's goodput goes on rising behind its capacity, as it chooses."""
        limit = LIMITS[run.policy]
        over = 0.5 if run.policy == "slo" else 0.3
        return UNIT * (run.scale if run.scale <= limit else limit + over * (run.scale - limit))

    table = whole(flood)
    header = header_of(load_profile("h200-llama-3-8b"))
    text = report_text("f", header, table)
    assert "Not finished" not in text
    assert f"scheduler\n{header['scheduler']})" in text
    assert "SweepRun the sweep anew" not in text
    row = next(line for line in text.splitlines() if line.startswith("| azure, 15 ms, 99% |")).split(" | ")
    slo, ablated, plain = (
        best_capacity(table, family, "azure", "exact", 15, 0.99)
        for family in (("slo",), INVENTED.ablated, INVENTED.fixed)
    )
    assert slo is not None
    assert ablated is not None
    assert plain is not None
    assert row[1:4] == [f"{slo.rate_rps:.3g}", f"64: {ablated.rate_rps:.3g}", f"512: {plain.rate_rps:.3g}"]
    assert row[5:] == [
        f"{slo.rate_rps / ablated.rate_rps:.3f}",
        f"{slo.rate_rps / plain.rate_rps:.3f}",
        "25%, 14 ms |",
    ]
    assert text.count("### Capacity, ") == text.count("### Peaks in a flood, ") == 2
    ratio = f"{slo.rate_rps / plain.rate_rps:.3f} times that of the best plain chunk (on 4 of 4 rows)"
    assert text.count(f"With 99% kept, the capacity of `slo` is {ratio} and ") == 2
    peak = table.peak(Row("azure", "exact", "slo", 15))
    assert peak is not None
    share = peak.kept / peak.requests
    assert share < 0.95
    assert f"At its peaks `slo` keeps {share:.0%} of all requests, with 25% of the tokens offered." in text
    assert f"({share:.0%} of {peak.rate_rps:.3g})" in text
    assert "choosing the short requests out of a flood" in text


def test_the_report_says_what_is_unknown_and_whose_figures_it_shows() -> None:
    table = whole(below({**LIMITS, "chunked:64": 0.0, "chunked:512": 0.0, "slo": 99.0, "slo-order:64": 99.0}))
    text = report_text("f", {"scheduler": "0123456789ab"}, table)
    row = next(line for line in text.splitlines() if line.startswith("| azure, 15 ms, 90% |")).split(" | ")
    top, floor = UNIT * RATES[-1], UNIT * RATES[0]
    over = UNIT * max(table.row(Row("azure", "exact", "slo", 15)))  # in overload
    assert row[1:4] == [f">= {over:.3g}", f"64: >= {top:.3g}", f"< {floor:.3g}"]
    assert row[5:7] == ["-", f">{over / floor:.3f}"]
    assert "figures are of another scheduler, 0123456789ab" in text
    assert "a scheduler that the file does not name" in report_text("f", {}, table)
    some = ScoreTable(INVENTED, [invent(SweepRun("azure", "exact", "slo", 15, 1.0), 15, UNIT)])
    text = report_text("f", {}, some)
    assert "Not finished" in text
    assert "| azure, 15 ms, 90% | >= 5 | - | - | - | - | - | - |" in text
    assert "| azure, 15 ms | - | - |" in text  # a rate that was run for the capacity is not taken for a peak


def test_ratios_say_where_one_side_is_only_bounded() -> None:
    def between(kept: float | None, broken: float | None) -> Capacity:
        low, high = (None if scale is None else scores_of({scale: 1})[0] for scale in (kept, broken))
        return Capacity(low, high)

    known = between(2.0, 2.06)
    assert str(capacity_ratio(known, between(1.0, 1.03))) == "2.000"
    assert str(capacity_ratio(known, between(None, 0.5))) == ">4.000"
    assert str(capacity_ratio(between(None, 0.5), known)) == "<0.250"
    assert str(capacity_ratio(between(4.0, None), known)) == ">=2.000"
    assert str(capacity_ratio(known, between(4.0, None))) == "<=0.500"
    assert capacity_ratio(between(None, 0.5), between(None, 0.5)) is None
    assert capacity_ratio(between(4.0, None), between(3.0, None)) is None
    assert capacity_ratio(None, known) is None


# --- the command, and a real trace ---


def test_the_command_runs_only_what_capacity_needs(tmp_path: Path) -> None:
    make_trace(tmp_path / "AzureLLMInferenceTrace_conv.csv", requests=5)
    (tmp_path / "mooncake_conversation_trace.jsonl").write_text(
        '{"timestamp":0,"input_length":900,"output_length":5,"hash_ids":[1,2]}\n'
        '{"timestamp":3000,"input_length":900,"output_length":5,"hash_ids":[1,3]}\n'
    )
    out, table = tmp_path / "out.jsonl", tmp_path / "t.md"
    options = ("--traces", tmp_path, "--out", out, "--jobs", "1", "--table", table)
    done = command(*options, "--part", "capacity", "--only", "azure/exact/slo/25ms")
    assert done.returncode == 0, done.stderr
    scores = read_scores(out)[1]
    assert {score.row for score in scores} == {Row("azure", "exact", "slo", 25)}
    assert len(scores) <= 16
    assert "| azure, 25 ms, 99% | >= " in table.read_text()
    wrong = command(*options, "--part", "capacities")
    assert wrong.returncode == 2
    assert "--part" in wrong.stderr


@pytest.mark.skipif("WEFT_TRACES" not in os.environ, reason="WEFT_TRACES names no folder with the published traces")
def test_slo_keeps_more_at_a_lower_rate_of_a_real_trace() -> None:
    grid = replace(Grid(), duration=120.0)
    material = load_material(grid, Path(os.environ["WEFT_TRACES"]))
    low, high = (score_run(SweepRun("azure", "exact", "slo", 25, scale), material)[0] for scale in (1.0, 40.0))
    assert low.requests == high.requests == len(material.traces["azure"].arrivals)
    assert sweep_capacity.keeps(low, 0.99)
    assert not sweep_capacity.keeps(high, 0.9)
