"""Report: one or several load tests as one self-contained HTML file, with charts as inline SVG."""

from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from itertools import cycle, groupby
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

import weft.bench.http.report_charts as charts
from weft.bench.http.figures import caveats, ttft
from weft.bench.http.report_data import METRICS, PARTS, ReportedRun, series_by_rate, short, slot_wait, ttft_parts

MISSING = "–"
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
SAMPLES = {"ttft": "requests", "gap": "gaps", "e2el": "requests"}  # metrics with a distribution, and what is counted
TEMPLATE = "report.html.jinja"


def html_report(runs: Sequence[tuple[str, dict[str, Any]]], title: str) -> str:
    """The HTML page; needs matplotlib. `runs` are pairs of a label and the result of `weft bench serve --json`."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    template = environment.from_string(files("weft.bench.http").joinpath(TEMPLATE).read_text(encoding="utf-8"))
    reported = [ReportedRun(label, number, found) for number, (label, found) in enumerate(runs)]
    return template.render(
        title=title,
        runs=reported,
        notes=[note for run in reported for note in _notes(run)],
        summary=_summary(reported),
        definitions=_definitions(reported),
        errors=_error_counts(reported),
        parts=PARTS,
        colours=charts.COLOURS,
        key_style=charts.key_style,
        **_charts(reported),
    )


def _charts(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """The charts by their names in the template. A chart without data is left out."""
    measured, several = [run for run in runs if run.done], len(runs) > 1
    series = series_by_rate(runs) if several else {}
    rates = {"goodput_share": ("Share of requests that kept all goals", "share of requests")}
    rates["request_goodput"] = ("Goodput against rate", "goodput, requests/s")
    with charts.style():
        distributions = [charts.distribution(measured, name, unit) for name, unit in SAMPLES.items()]
        by_run = [charts.percentiles_by_run(runs, name) for name in ("ttft", "gap") if several]
        return {
            "measured": measured,
            "distributions": [chart for chart in distributions if chart],
            "prompts": charts.ttft_by_prompt(measured) if measured else None,
            "gaps": charts.gaps_over_time(measured) if measured else None,
            "slowest": [(charts.slowest_requests(run), _ttft_sentence(run)) for run in measured if run.timed_by_server],
            "by_run": [chart for chart in by_run if chart],
            "percentile_markers": {kind.upper(): marker.text for kind, marker in charts.PERCENTILES.items()},
            "by_rate": [charts.goodput_by_rate(series, name, *told) for name, told in rates.items() if series],
            "series_markers": {name: marker.text for name, marker in zip(series, cycle(charts.MARKERS), strict=False)},
        }


def _notes(run: ReportedRun) -> list[str]:
    """Warnings that a reader needs before trusting the figures."""
    notes, requests = [], run.found.get("requests")
    if not run.found.get("completed"):
        notes.append(f"{run.label}: no request completed, so there are no times to show.")
    if run.found.get("was_interrupted"):
        notes.append(f"{run.label}: the run was interrupted; its figures are of what was done by then.")
    notes += [f"{run.label}: {caveat}." for caveat in caveats(run.found)]
    if requests is None:
        notes.append(
            f"{run.label}: charts of single requests are left out, since the requests were not saved. Use weft bench "
            "serve --json FILE with --save-detailed to have them."
        )
    elif len(requests) != run.found.get("num_prompts", len(requests)):
        notes.append(
            f"{run.label}: the table counts {run.found['num_prompts']} of {len(requests)} requests, those between "
            "--warmup and --cooldown; the charts show all that completed."
        )
    return notes


def _summary(runs: Sequence[ReportedRun]) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """The table's groups of rows. A row is a name and one cell per run."""
    if not runs:
        return []
    with_goals = any(run.found.get("request_goodput") is not None for run in runs)
    columns = [_column(run, with_goals) for run in runs]
    return [
        (group, [(name, [column[group, name] for column in columns]) for _, name in keys])
        for group, keys in groupby(columns[0], key=lambda key: key[0])
    ]


def _column(run: ReportedRun, with_goals: bool) -> dict[tuple[str, str], str]:
    """The table's cells for a run, by (group, name) of the row."""
    share = run.figure("goodput_share")
    column = {
        ("measured", "server"): _said(run.found.get("base_url")),
        ("measured", "model"): _said(run.found.get("model_id")),
        ("measured", "date"): _date(_said(run.found.get("date"))),
        ("measured", "rate"): _rate(run),
        ("measured", "prompts"): _number(run, "num_prompts", 0),
        ("totals", "completed"): _number(run, "completed", 0),
        ("totals", "failed"): _number(run, "failed", 0),
        ("totals", "left out, too long"): _number(run, "left_out_too_long", 0),
        ("totals", "requests/s"): _number(run, "request_throughput"),
        ("totals", "output tokens/s"): _number(run, "output_throughput"),
    }
    if with_goals:
        column["totals", "goodput, requests/s"] = _number(run, "request_goodput")
        column["totals", "goodput, share"] = MISSING if share is None else f"{share:.1%}"
        column["totals", "goals"] = _goals(run)
    for name, shown in METRICS.items():
        column |= {(f"{shown}, ms", kind): _number(run, f"{kind}_{name}_ms") for kind in STATISTICS}
    return column


def _said(value: Any) -> str:
    return MISSING if value is None else str(value)


def _number(run: ReportedRun, name: str, digits: int = 2) -> str:
    value = run.figure(name)
    return MISSING if value is None else f"{value:,.{digits}f}"


def _date(text: str) -> str:
    try:
        return f"{datetime.strptime(text, '%Y%m%d-%H%M%S'):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return text


def _rate(run: ReportedRun) -> str:
    rate, at_once = run.figure("request_rate"), run.found.get("max_concurrency")
    if run.found.get("trace") is not None:
        told = f"trace {run.found['trace']} x {_said(run.found.get('rate_scale'))}"
        if (achieved := run.figure("achieved_request_rate")) is not None:
            told += f", {achieved:,.2f} requests/s"
    elif rate is not None:
        told = f"{short(rate)} requests/s, {_said(run.found.get('pattern'))}"
    else:
        told = "all at once" if at_once is None else "as fast as they are answered"
    return told if at_once is None else f"{told}, at most {at_once} at once"


def _goals(run: ReportedRun) -> str:
    goals = run.found.get("goodput_goals_ms") or {}
    return ", ".join(f"{METRICS.get(name, name)} {short(value)} ms" for name, value in goals.items()) or MISSING


def _definitions(runs: Sequence[ReportedRun]) -> dict[str, list[str]]:
    """The meanings of each metric. If the runs differ in one, all are shown."""
    told: dict[str, dict[str, None]] = {name: {} for name in METRICS}
    for run in runs:
        for name, text in (run.found.get("definitions") or {}).items():
            if name in told:
                told[name][text] = None
    return {METRICS[name]: list(texts) for name, texts in told.items() if texts}


def _error_counts(runs: Sequence[ReportedRun]) -> dict[str, list[int]]:
    """How often each error was met, one number per run."""
    met = dict.fromkeys(error for run in runs for error in run.found.get("error_counts") or ())
    return {error: [(run.found.get("error_counts") or {}).get(error, 0) for run in runs] for error in met}


def _ttft_sentence(run: ReportedRun) -> str:
    """Why the client's TTFT is longer than the server's."""
    replies = run.timed_by_server
    place, late, *_, rest = np.median([ttft_parts(reply) for reply in replies], axis=0).tolist()
    waited = f"waiting for --max-concurrency (median {place:.2f} ms), of " if any(map(slot_wait, replies)) else ""
    differences = [ttft(reply) * 1e3 - reply.server["ttft_ms"] for reply in replies if reply.server]
    return (
        f"{run.label}: the client's TTFT is {np.median(differences):.2f} ms longer than the server's (median of "
        f"{len(replies):,} requests). It consists of {waited}the client's lag before sending (median {late:.2f} ms), "
        "and of the network both ways, the server's work outside of its own clock, and the client's reading (median "
        f"{rest:.2f} ms)."
    )
