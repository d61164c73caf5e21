"""The report of a sweep: a document with tables and claims. Every number comes from the scores."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import OptionError
from weft.sim.compare import KEPT_GAPS
from weft.sim.score_table import ScoreTable
from weft.sim.sweep import missing_runs
from weft.sim.sweep_capacity import CAPACITY_SHARES, STEPS_BELOW, Capacity
from weft.sim.sweep_file import read_scores, scheduler_hash
from weft.sim.sweep_findings import Findings, capacity_ratio
from weft.sim.sweep_grid import BEATEN, COARSE, FALLEN, FINE, OVERLOAD, TRUTHS, Course, Grid, Score

SHARES = tuple(sorted(CAPACITY_SHARES))

# Thresholds of the four claims, and the trace of the third.
NEAR_BEST, FIXED_FALLS, WIN, HOLDS_UP = 0.99, 0.8, 1.25, 0.9
WIN_TRACE = "mooncake"


def write_report(path: Path, table: Path, grid: Grid) -> None:
    """Writes the tables and the claims to `table`, from the scores in the file `path`."""
    header, scores, _ = read_scores(path)
    if not scores:
        raise OptionError(f"{path} has no scores yet; run the sweep without --report first")
    table.write_text(report_text(path.name, header, ScoreTable(grid, scores)), encoding="utf-8")


def report_text(file: str, header: Mapping[str, Any], table: ScoreTable) -> str:
    grid = table.grid
    missing = len(missing_runs(table))
    groups = [Findings(table, *group) for group in grid.groups()]
    parts = [_preface(file, header, grid, missing)]
    for truth in grid.truths:
        here = [one for one in groups if one.truth == truth]
        parts += [f"## {truth.capitalize()} step times", _truth_text(truth)]
        parts += [f"### Capacity, {truth}", _capacity_table(here), *_capacity_summary(here)]
        parts += [f"### Peaks in a flood, {truth}", _flood_text(here), _peaks_table(here)]
    parts += [
        "\\* The peak is at an end of the grid; above the highest rate goodput may be higher.",
        "## Fixed chunks",
        "The row in which each fixed chunk does worst: its peak (or the most that it could be at rates which were not "
        "run) over the best peak of any policy in that row.",
        _chunks_table(groups, grid),
        "## The claims, so far" if missing else "## The claims",
        "They are about peaks, that is, about goodput in a flood, and not about capacity.",
        *(f"{number}. {line}" for number, line in enumerate(_claims(groups, grid), start=1)),
    ]
    return "\n\n".join(parts) + "\n"


def _preface(file: str, header: Mapping[str, Any], grid: Grid, missing: int) -> str:
    courses = "\n".join(f"- {course.name}: {_course_text(course, grid)}" for course in grid.courses)
    text = f"""# Capacity, and goodput over rates

Written by `weft sweep --report` from {file} (profile {header.get("profile")}, weft {header.get("weft")}, scheduler
{header.get("scheduler", "unknown")}), not by hand; `weft sweep --traces DIR --out FILE --table FILE.md` makes both.

A request keeps its promise if its first token is within its target and at least {KEPT_GAPS:.0%} of its gaps are within
theirs; a refused one is a broken promise.

**Capacity**, as DistServe defines goodput, is the highest rate at which {SHARES[0]:.0%} or {SHARES[1]:.0%} of all
requests keep both promises. Every request counts, and a run goes on until the last token has come. So decodes that are
put off count, and so do refusals: beyond the {1 - SHARES[0]:.0%} or {1 - SHARES[1]:.0%} that may be broken, refusing
the expensive requests cannot raise it. The share that is kept is not exactly monotone in
the rate: capacity is the highest rate that was run such that it and all lower rates that were run keep the share. It
is searched by bisection to {FINE - 1:.0%}, down to {COARSE**-STEPS_BELOW:.2g} times the lowest rate of the grid. Of the
chunks the best counts; the others fail at the next higher rate.

**Peaks** are another matter. Goodput is kept promises over the seconds of arrivals, after scaling; a peak
is the highest goodput over all rates. All policies run at the same absolute rates: a grid of {COARSE - 1:.0%}, and for
slo, the best ablated and the best plain chunk {FINE - 1:.0%} between the neighbours of the peak. Goodput is
never above the rate, so that a policy that refuses is run from the highest rate down only until the rate is below its
best goodput, an ablated chunk until it is below {BEATEN} of slo's peak; one that refuses nobody, from the lowest up
until it has kept less than {FALLEN:.0%} of its peak at two rates in a row, for every gap, after which it is taken for
drowned. In ratios and claims a peak counts with the most that it could be at rates which were not run.

The first {grid.duration:g} s of each trace are played:

{courses}

`slo-order:N` is the ablation: slo's order and refusal with a fixed chunk. Best means chosen in hindsight, for a row."""
    text += _scheduler_note(header)
    if missing:
        text += f"\n\n**Not finished: at least {missing} runs are missing, and the figures are of what is there.**"
    return text


def _scheduler_note(header: Mapping[str, Any]) -> str:
    """A warning if the scores come from another version of the scheduler than the code that writes the report."""
    there, here = header.get("scheduler"), scheduler_hash()
    if there == here:
        return ""
    from_what = "a scheduler that the file does not name" if there is None else f"another scheduler, {there}"
    return f"\n\n**The figures are of {from_what}; this one is {here}. SweepRun the sweep anew, into another file.**"


def _course_text(course: Course, grid: Grid) -> str:
    scales = grid.scales(course.name)
    per_1k = f" + {course.ttft_per_1k:g} s per 1,000 prompt tokens" if course.ttft_per_1k else ""
    spans = [grid.duration / scale for scale in (scales[0], scales[-1])]
    return (
        f"first token in {course.ttft:g} s{per_1k}; rates of x{scales[0]:.3g} to x{scales[-1]:.3g}, at which the "
        f"arrivals last {spans[0]:.0f} s to {spans[1]:.0f} s"
    )


def _truth_text(truth: str) -> str:
    disturbance = TRUTHS[truth]
    if not disturbance:
        return "Steps take what the scheduler's cost model says."
    return (
        f"Steps take {disturbance['bias']:.0%} longer than the scheduler's cost model says, with noise of "
        f"{disturbance['noise']:.0%} (seed {disturbance['seed']}). It is told of neither."
    )


def _capacity_table(groups: Sequence[Findings]) -> str:
    """Capacities in requests/s, for every gap target and share."""
    heads = (
        "trace, gap, kept",
        "slo",
        "best ablated",
        "best plain chunk",
        "monolithic",
        "slo / ablated",
        "slo / plain",
        "slo there",
    )
    rows = []
    for one in groups:
        for share in SHARES:
            grid = one.grid
            families = (("slo",), grid.ablated, grid.fixed, ("monolithic",))
            slo, ablated, plain, monolithic = (one.capacity(family, share) for family in families)
            ratios = (capacity_ratio(slo, ablated), capacity_ratio(slo, plain))
            rows.append(
                (
                    f"{one.name}, {share:.0%}",
                    *map(_capacity_text, (slo, ablated, plain, monolithic)),
                    *("-" if ratio is None else str(ratio) for ratio in ratios),
                    _there_text(slo),
                )
            )
    legend = (
        "Requests/s offered, of which that share is kept (for chunks, with the best one's tokens a step). < and >=: "
        "beyond the lowest or highest rate that was run. ~: the next higher rate that was run is more than "
        f"{FINE - 1:.0%} away. *slo there*: the share of the tokens offered that belong to requests which slo "
        f"keeps, and its longest gap; {1 - KEPT_GAPS:.0%} of a request's gaps may exceed the target."
    )
    return _markdown(heads, rows) + "\n\n" + legend


def _capacity_text(found: Capacity | None) -> str:
    if found is None:
        return "-"
    chunk = found.policy.partition(":")[2]
    if found.kept is None:
        assert found.broken is not None
        return f"< {found.broken.rate_rps:.3g}"
    sign = ">= " if found.broken is None else "" if found.is_fine else "~"
    return (f"{chunk}: " if chunk else "") + f"{sign}{found.rate_rps:.3g}"


def _there_text(found: Capacity | None) -> str:
    """Share of kept tokens and longest gap at the capacity; a dash if an old score lacks them."""
    score = None if found is None else found.kept
    if score is None or score.kept_tokens is None or score.longest_gap_ms is None:
        return "-"
    return f"{score.kept_tokens:.0%}, {score.longest_gap_ms:.3g} ms"


def _capacity_summary(groups: Sequence[Findings]) -> list[str]:
    """For each share: the range of slo's capacity divided by the best chunk's, over rows where slo's is known."""
    lines = []
    for share in SHARES:
        texts = []
        for name in ("plain", "ablated"):
            found = [one.capacity(one.grid.fixed if name == "plain" else one.grid.ablated, share) for one in groups]
            ratios = [
                capacity_ratio(one.capacity(("slo",), share), other) for one, other in zip(groups, found, strict=True)
            ]
            known = sorted(ratio for ratio in ratios if ratio is not None and not ratio.sign.startswith("<"))
            rows = f"on {len(known)} of {len(groups)} rows"
            span = " to ".join(dict.fromkeys(str(ratio) for ratio in (*known[:1], *known[-1:])))
            texts += [f"{span} times that of the best {name} chunk ({rows})"] if known else []
        lines += [f"With {share:.0%} kept, the capacity of `slo` is {' and '.join(texts)}."] if texts else []
    return lines


def _flood_text(groups: Sequence[Findings]) -> str:
    """Explains peaks: which share of the offered requests and tokens slo keeps at its peaks."""
    peaks = [one.peaks["slo"] for one in groups if "slo" in one.peaks]
    text = (
        "A peak is no capacity. Its rate is the one that suits goodput best, however many requests are refused or late "
        "there. "
    )
    if peaks:
        text += f"At its peaks `slo` keeps {_range_text([peak.kept / peak.requests for peak in peaks])} of all requests"
        tokens = [peak.kept_tokens for peak in peaks if peak.kept_tokens is not None]
        text += f", with {_range_text(tokens)} of the tokens offered. " if len(tokens) == len(peaks) else ". "
    return text + (
        "Where a policy keeps far less than all, its goodput comes from choosing the short requests out of a flood, "
        "not from serving the traffic that comes."
    )


def _range_text(shares: Sequence[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low} to {high}"


def _peaks_table(groups: Sequence[Findings]) -> str:
    heads = (
        "trace, gap",
        "slo",
        "best ablated",
        "best plain chunk",
        "monolithic",
        "slo / ablated",
        "least, common rate",
        "slo / plain",
        f"at {OVERLOAD:g}x",
    )
    rows = []
    for one in groups:
        peaks = (
            one.peaks.get("slo"),
            one.best(one.grid.ablated),
            one.best(one.grid.fixed),
            one.peaks.get("monolithic"),
        )
        ratios = (one.over_ablated(), one.least_over_ablated(), one.over_plain(), one.in_overload())
        rows.append((one.name, *(_peak_text(one, peak) for peak in peaks), *map(_ratio_text, ratios)))
    legend = (
        "Peaks are requests/s that kept their promise (that share of so many requests/s offered). *least, common "
        "rate*: slo over the best ablated chunk, chosen anew at every rate that both were run at, the smallest. "
        f"*at {OVERLOAD:g}x*: slo's goodput at {OVERLOAD:g} times the rate of its peak, over the peak."
    )
    return _markdown(heads, rows) + "\n\n" + legend


def _chunks_table(groups: Sequence[Findings], grid: Grid) -> str:
    rows = []
    for policy in (*grid.fixed, *grid.ablated):
        cells = []
        for truth in grid.truths:
            worst = _worst_row(groups, truth, policy)
            cells.append("-" if worst is None else f"{worst[0]:.3f} ({worst[1]})")
        rows.append((policy, *cells))
    return _markdown(("chunk", *(f"worst row, {truth}" for truth in grid.truths)), rows)


def _worst_row(groups: Sequence[Findings], truth: str, policy: str) -> tuple[float, str] | None:
    return _least((one.over_best(policy), one.name) for one in groups if one.truth == truth)


def _least(pairs: Iterable[tuple[float | None, str]]) -> tuple[float, str] | None:
    return min(((value, name) for value, name in pairs if value is not None), default=None)


def _claims(groups: Sequence[Findings], grid: Grid) -> list[str]:
    """Each claim with its verdict from the scores, for each truth."""
    claims: list[tuple[str, Callable[[str, list[Findings]], str]]] = [
        (
            f"`slo`, never tuned, has at least {NEAR_BEST} times the goodput of the best ablated chunk on every row.",
            _near_claim,
        ),
        (
            f"Any one fixed chunk, plain or ablated, falls to {FIXED_FALLS} or less on some row.",
            _fixed_claim,
        ),
        (
            f"On {WIN_TRACE} the peak of `slo` is at least {WIN} times the best plain chunk's, for every gap target.",
            _win_claim,
        ),
        (
            f"At {OVERLOAD:g} times the rate of its peak, the goodput of `slo` is at least {HOLDS_UP} of the peak.",
            _overload_claim,
        ),
    ]
    lines = []
    for text, verdict in claims:
        verdicts = (
            f"{truth}: {verdict(truth, [one for one in groups if one.truth == truth])}" for truth in grid.truths
        )
        lines.append(f"{text} {'; '.join(verdicts)}.")
    return lines


def _near_claim(truth: str, groups: list[Findings]) -> str:
    near = _least((one.over_ablated(), one.name) for one in groups)
    everywhere = _least((one.least_over_ablated(), one.name) for one in groups)
    if near is None or everywhere is None:
        return "no data"
    return (
        f"{_verdict(near[0] >= NEAR_BEST)} (peaks: {near[0]:.3f} or more, least for {near[1]}; at every common rate: "
        f"{everywhere[0]:.3f} or more, least for {everywhere[1]})"
    )


def _fixed_claim(truth: str, groups: list[Findings]) -> str:
    """Verdict on the steadiest chunk: the chunk with the best worst row."""
    worst = []
    for policy in (*groups[0].grid.fixed, *groups[0].grid.ablated):
        found = _worst_row(groups, truth, policy)
        worst += [] if found is None else [(*found, policy)]
    if not worst:
        return "no data"
    share, row, chunk = max(worst)
    return f"{_verdict(share <= FIXED_FALLS)} (the steadiest is {chunk}, which falls to {share:.3f} for {row})"


def _win_claim(truth: str, groups: list[Findings]) -> str:
    return _at_least(WIN, ((one.over_plain(), one.name) for one in groups if one.trace == WIN_TRACE))


def _overload_claim(truth: str, groups: list[Findings]) -> str:
    return _at_least(HOLDS_UP, ((one.in_overload(), one.name) for one in groups))


def _at_least(limit: float, pairs: Iterable[tuple[float | None, str]]) -> str:
    least = _least(pairs)
    return (
        "no data" if least is None else f"{_verdict(least[0] >= limit)} ({least[0]:.3f} or more, least for {least[1]})"
    )


def _verdict(holds: bool) -> str:
    return "**holds**" if holds else "**does not hold**"


def _peak_text(one: Findings, peak: Score | None) -> str:
    if peak is None:
        return "-"
    chunk = peak.policy.partition(":")[2]
    share = peak.kept / peak.requests
    star = "\\*" if one.is_at_an_end(peak) else ""
    return (f"{chunk}: " if chunk else "") + f"{peak.goodput_rps:.3g} ({share:.0%} of {peak.rate_rps:.3g}){star}"


def _ratio_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
