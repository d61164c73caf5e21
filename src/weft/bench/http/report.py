"""Report: one or several load tests as one self-contained HTML file, with charts as inline SVG."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from html import escape
from itertools import accumulate, cycle, groupby
from typing import Any

import numpy as np

from weft.bench.http.client import Reply
from weft.bench.http.figures import Array, caveats, gaps, lag, ttft

MOST_POINTS = 20_000  # per chart; browsers become slow with more
SLOWEST = 40  # requests in the TTFT breakdown
LARGEST_RANGE = 1000.0  # values below the largest by more than this factor are drawn at the edge of a log axis
WIDE_RANGE = 10.0  # lengths that differ by more than this factor get a log axis
SMALL, HALF, WIDE = (384, 300), (572, 300), (1160, 330)  # width and height of a chart in pixels
MISSING = "–"
READ = ("number", "due", "prompt_tokens", "sent", "times", "end", "output_tokens", "server")  # keys of a saved request
METRICS = {"ttft": "TTFT", "gap": "gap", "tpot": "TPOT", "e2el": "E2E", "lag": "client's lag"}
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
COMPARED = {"p50": "circle", "p99": "diamond", "p99.9": "triangle"}  # percentile and marker shape
SHAPES = {
    "circle": "m-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "diamond": "m0 -6l6 6l-6 6l-6 -6z",
    "triangle": "m0 -6l5.5 10h-11z",
    "square": "m-4.5 -4.5h9v9h-9z",
}
DASHES = ("none", "7 4", "2 3")  # for runs that share a colour, and for lines through several runs
PARTS = {  # parts of a TTFT in time order; except the last, which lies before and after the server's parts
    "place": "waiting for --max-concurrency",
    "lag": "client's lag before sending",
    "queue": "server: queue",
    "prefill": "server: prefill",
    "other": "server: other, until the token is taken from the engine",
    "rest": "network and client",
}
ROUND_NUMBERS = np.array([digit * 10.0**power for power in range(-4, 9) for digit in (1, 2, 5)])
# Colours of runs are from Okabe and Ito, colours of parts from Tol: colour-blind readers can distinguish both sets.
LIGHT = (
    "--ink:#1c2026;--soft:#5d6673;--rule:#e3e6ea;--page:#ffffff;--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;"
    "--c4:#e69f00;--c5:#56b4e9;--c6:#6b7280;--place:#999933;--lag:#cc6677;--queue:#ddcc77;--prefill:#44aa99;"
    "--other:#88ccee;--rest:#443399"
)
DARK = (
    "--ink:#e6e9ee;--soft:#9aa4b2;--rule:#2d333d;--page:#14171c;--c0:#3f97dc;--c1:#ee7733;--c2:#1fb88c;--c3:#d98cb8;"
    "--c4:#f0b429;--c5:#a4d8f7;--c6:#9aa1ac;--rest:#9a8cf0"
)
COLOURS = 7
STYLE = """
body{margin:0 auto;max-width:1180px;padding:40px 24px 64px;background:var(--page);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
h1{font-size:26px;font-weight:650;margin:0 0 20px}h2{font-size:19px;font-weight:600;margin:52px 0 6px}
p{max-width:76ch;margin:6px 0}.soft,figcaption span{color:var(--soft)}.note{border-left:3px solid var(--c4);
 padding-left:12px;margin:12px 0}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:14px;margin:14px 0}
th,td{padding:3px 14px;text-align:right;vertical-align:top;font-variant-numeric:tabular-nums;white-space:nowrap}
th{font-weight:500;text-align:left}thead th{text-align:right;font-weight:600}td.text{white-space:normal;min-width:30ch;
 text-align:left}
th:not([scope=row]):first-child,td.text{padding-left:0}tbody{border-top:1px solid var(--rule)}
th[scope=row]{color:var(--soft)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:3px 18px;font-size:14px;margin:14px 0}
dt{font-weight:500}dd{margin:0;color:var(--soft);grid-column:2}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(340px,1fr));gap:20px}
figure{margin:16px 0 0;break-inside:avoid;overflow-x:auto}figcaption{font-size:14px;margin-bottom:4px}
figcaption b{font-weight:600}figure>svg{display:block;width:100%;height:auto}figure.full>svg{min-width:760px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 22px;padding:0;margin:10px 0 0;font-size:14px}
.key{display:inline-block;width:22px;border-top:3px var(--line,solid) var(--c);vertical-align:middle;margin-right:7px}
.mark{width:14px;height:14px;vertical-align:-2px;margin-right:5px;fill:var(--soft)}
svg text{font-size:11.5px;fill:var(--soft);font-variant-numeric:tabular-nums}svg .at,svg .goal-text{fill:var(--ink);
 paint-order:stroke;stroke:var(--page);stroke-width:4px;stroke-linejoin:round}
.grid{stroke:var(--rule);fill:none}.line{stroke:var(--c);stroke-width:2;fill:none;stroke-dasharray:var(--dash)}
.beyond{stroke:var(--c);stroke-width:1.5;fill:none;stroke-dasharray:1 4}.fill{fill:var(--c)}
.points{stroke:var(--c);stroke-linecap:round;fill:none;stroke-opacity:.7}
.goal{stroke:var(--ink);stroke-dasharray:5 4;fill:none}.join{stroke:var(--soft);stroke-width:1.5;fill:none}
.place{--c:var(--place)}
.lag{--c:var(--lag)}.queue{--c:var(--queue)}.prefill{--c:var(--prefill)}.other{--c:var(--other)}.rest{--c:var(--rest)}
.bars .key{border-top-width:10px}
@media print{body{padding:0;max-width:none;print-color-adjust:exact;-webkit-print-color-adjust:exact}
 .wide,figure{overflow:visible}h2{break-after:avoid}}
"""
# Shows the pointer's position in the units of the axes. The rest of the page works without the script.
SCRIPT = """
const back = {linear: v => v, log: v => 10 ** v, tail: v => 1 - 10 ** -v};
for (const svg of document.querySelectorAll("svg[data-box]")) {
  const [left, top, width, height] = svg.dataset.box.split(" ").map(Number), out = svg.querySelector(".at");
  const value = (axis, share) => {
    const [kind, low, high] = axis.split(" ");
    return kind in back ? back[kind](+low + share * (high - low)).toPrecision(kind === "tail" ? 4 : 3) : "";
  };
  svg.addEventListener("pointermove", event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const x = (at.x - left) / width, y = 1 - (at.y - top) / height, inside = x >= 0 && x <= 1 && y >= 0 && y <= 1;
    out.textContent = inside ? [value(svg.dataset.x, x), value(svg.dataset.y, y)].filter(Boolean).join(" | ") : "";
  });
  svg.addEventListener("pointerleave", () => out.textContent = "");
}
"""


@dataclass(frozen=True, eq=False)
class _Run:
    label: str
    place: int  # index among the runs; determines the colour
    found: dict[str, Any]

    @cached_property
    def done(self) -> list[Reply]:
        """Requests that completed; empty if requests were not saved."""
        rows = [row for row in self.found.get("requests") or () if row["sent"] is not None and row["end"] is not None]
        return [reply for reply in map(_reply, rows) if reply.is_complete]

    @cached_property
    def milliseconds(self) -> dict[str, Array]:
        pooled = {
            "ttft": np.array([ttft(reply) for reply in self.done]),
            "gap": np.concatenate([np.empty(0), *map(gaps, self.done)]),
            "e2el": np.array([reply.end - reply.due for reply in self.done]),
        }
        return {name: values * 1e3 for name, values in pooled.items()}

    def figure(self, name: str) -> float | None:
        """A figure of the run; None if it is missing, not a number, or not finite."""
        value = self.found.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        return float(value)

    @property
    def css(self) -> str:
        return f"r{self.place}"


def _reply(row: dict[str, Any]) -> Reply:
    """The Reply of a saved request. Files of older versions have no `free`."""
    return Reply(**{name: row[name] for name in READ}, error=row["error"] or "", free=row.get("free") or 0.0)


@dataclass(frozen=True)
class _Axis:
    title: str
    kind: str  # linear, log, tail (-log10 of the share above), or names (no numbers)
    low: float  # after the transformation of the kind, as `high`
    high: float
    ticks: list[tuple[float, str]]

    def measured(self, values: Any) -> Array:
        numbers = np.asarray(values, dtype=np.float64)
        if self.kind == "log":
            numbers = np.log10(np.maximum(numbers, ROUND_NUMBERS[0]))
        elif self.kind == "tail":
            numbers = -np.log10(np.maximum(1 - numbers, 1e-12))
        return numbers

    def at(self, values: Any) -> Array:
        """Positions from 0 to 1; values outside are drawn at the edge."""
        return np.clip((self.measured(values) - self.low) / (self.high - self.low), 0.0, 1.0)


def _log_axis(title: str, values: Iterable[float]) -> _Axis:
    seen = [value for value in values if value > 0] or [1.0]
    low, high = max(min(seen), max(seen) / LARGEST_RANGE) * 0.99, max(seen) * 1.01
    first = int(np.clip(np.searchsorted(ROUND_NUMBERS, low) - 1, 0, len(ROUND_NUMBERS) - 2))
    last = min(len(ROUND_NUMBERS) - 1, max(int(np.searchsorted(ROUND_NUMBERS, high)), first + 1))
    ticks = ROUND_NUMBERS[first : last + 1]
    ends = np.log10(ticks[[0, -1]])
    if len(ticks) > 7:
        ticks = np.array([tick for tick in ticks if round(math.log10(tick), 6).is_integer()])
    return _Axis(title, "log", float(ends[0]), float(ends[1]), [(tick, _short(tick)) for tick in ticks])


def _linear_axis(title: str, low: float, high: float) -> _Axis:
    span = max(high - low, 1e-3)
    step = float(ROUND_NUMBERS[np.searchsorted(ROUND_NUMBERS, span / 6)])
    first, last = math.floor(low / step), math.ceil((low + span) / step)
    ticks = [(count * step, _short(count * step)) for count in range(first, last + 1)]
    return _Axis(title, "linear", first * step, last * step, ticks)


def _tail_axis(title: str, samples: int) -> _Axis:
    """An axis of percentiles on which each further nine takes the same space, so that the tail is readable."""
    nines = min(6, max(3, math.ceil(math.log10(max(samples, 1)))))
    shares = [0.0, 0.5, *(1 - 10.0**-count for count in range(1, nines + 1))]
    return _Axis(title, "tail", 0.0, float(nines), [(share, _short(share)) for share in shares])


def _names_axis(title: str, names: Sequence[str]) -> _Axis:
    return _Axis(title, "names", -0.6, len(names) - 0.4, list(enumerate(names)))


def _short(value: float) -> str:
    return f"{value:,.9g}"


@dataclass(frozen=True)
class _Plot:
    x: _Axis
    y: _Axis
    size: tuple[int, int]
    left: int = 62  # pixels for the y axis's labels

    @property
    def box(self) -> tuple[int, int, int, int]:
        """Left, top, width and height of the area within the axes."""
        return self.left, 20, self.size[0] - self.left - 24, self.size[1] - 20 - 44

    def place(self, xs: Any, ys: Any) -> list[tuple[float, float]]:
        left, top, width, height = self.box
        across, down = left + width * self.x.at(xs), top + height * (1 - self.y.at(ys))
        return list(zip(across.tolist(), down.tolist(), strict=True))

    def line(self, xs: Any, ys: Any, css: str, dash: str = "") -> str:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in self.place(xs, ys))
        style = f' style="stroke-dasharray:{dash}"' if dash else ""
        return f'<path class="{css}" d="M{path}"{style}/>'

    def points(self, xs: Any, ys: Any, css: str, width: float) -> str:
        """One path for all points: one element per point would make the file ten times as large."""
        path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in self.place(xs, ys))
        return f'<path class="points {css}" stroke-width="{width:g}" d="{path}"/>'

    def mark(self, x: float, y: float, shape: str, css: str, text: str) -> str:
        [(across, down)] = self.place([x], [y])
        path = f"M{across:.1f} {down:.1f}{SHAPES[shape]}"
        return f'<path class="fill {css}" d="{path}"><title>{escape(text)}</title></path>'

    def goals(self, runs: Sequence[_Run], name: str) -> list[str]:
        """A line at each goal in milliseconds, with its name."""
        left, _, width, _ = self.box
        drawn = []
        for goal in _goals_of(runs, name):
            down = self.place([0.0], [goal])[0][1]
            drawn.append(f'<path class="goal" d="M{left} {down:.1f}h{width}"/>')
            drawn.append(_text(left + 8, down - 5, f"{METRICS[name]} goal {_short(goal)} ms", "start", "goal-text"))
        return drawn

    def figure(self, title: str, note: str, marks: Sequence[str]) -> str:
        (width, height), (left, top, inner, tall) = self.size, self.box
        data = " ".join(
            f'data-{name}="{axis.kind} {axis.low:.6g} {axis.high:.6g}"' for name, axis in (("x", self.x), ("y", self.y))
        )
        caption = f"<figcaption><b>{escape(title)}</b> <span>{escape(note)}</span></figcaption>"
        turned = f'<g transform="translate(14 {top + tall / 2:g}) rotate(-90)">{_text(0, 0, self.y.title)}</g>'
        return "".join(
            [
                f'<figure class="{"full" if self.size == WIDE else "part"}">{caption}',
                f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" {data} ',
                f'data-box="{left} {top} {inner} {tall}">{self._grid()}{"".join(marks)}',
                f"{_text(left + inner / 2, height - 6, self.x.title)}{turned}",
                f'<text class="at" x="{left + inner}" y="13" text-anchor="end"></text></svg></figure>',
            ]
        )

    def _grid(self) -> str:
        left, top, width, height = self.box
        drawn = [f'<rect class="grid" x="{left}" y="{top}" width="{width}" height="{height}"/>']
        for value, name in self.x.ticks:
            across = left + width * float(self.x.at(value))
            drawn.append(f'<path class="grid" d="M{across:.1f} {top}v{height}"/>' if self.x.kind != "names" else "")
            drawn.append(_text(across, top + height + 17, name))
        for value, name in self.y.ticks:
            down = top + height * (1 - float(self.y.at(value)))
            drawn.append(f'<path class="grid" d="M{left} {down:.1f}h{width}"/>')
            drawn.append(_text(left - 7, down + 4, name, "end"))
        return "".join(drawn)


def _text(x: float, y: float, text: str, anchor: str = "middle", css: str = "") -> str:
    name = f' class="{css}"' if css else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def html_report(runs: Sequence[tuple[str, dict[str, Any]]], title: str) -> str:
    """The HTML page. `runs` are pairs of a label and the result of `weft bench serve --json`."""
    taken = [_Run(label, place, found) for place, (label, found) in enumerate(runs)]
    measured = [run for run in taken if run.done]
    sections = [_head(taken)]
    if measured:
        sections += [_distributions(measured), _prompts(measured), _over_time(measured), _breakdown(measured)]
    sections.append(_comparison(taken))
    colours = "".join(
        f".r{run.place}{{--c:var(--c{run.place % COLOURS});--dash:{DASHES[run.place // COLOURS % len(DASHES)]};"
        f"--line:{('solid', 'dashed', 'dotted')[run.place // COLOURS % len(DASHES)]}}}"
        for run in taken
    )
    # Dark colours apply to screens only: paper is light.
    theme = f":root{{color-scheme:light dark;{LIGHT}}}@media screen and (prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{theme}{STYLE}{colours}</style>'
        f"</head><body><h1>{escape(title)}</h1>\n" + "\n".join(sections) + f"<script>{SCRIPT}</script></body></html>\n"
    )


def _head(runs: Sequence[_Run]) -> str:
    if not runs:
        return '<p class="note">There are no runs to report.</p>'
    notes = "".join(f'<p class="note">{escape(note)}</p>' for run in runs for note in _notes(run))
    told: dict[str, dict[str, None]] = {name: {} for name in METRICS}  # if definitions differ, all are shown
    for run in runs:
        for name, text in (run.found.get("definitions") or {}).items():
            if name in told:
                told[name][text] = None
    terms = "".join(
        f"<dt>{escape(METRICS[name])}</dt>" + "".join(f"<dd>{escape(text)}</dd>" for text in texts)
        for name, texts in told.items()
        if texts
    )
    definitions = f"<h2>Definitions</h2><dl>{terms}</dl>" if terms else ""
    return f"{notes}{_summary(runs)}{definitions}{_errors(runs)}"


def _notes(run: _Run) -> list[str]:
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


def _summary(runs: Sequence[_Run]) -> str:
    with_goals = any(run.found.get("request_goodput") is not None for run in runs)
    columns = [_column(run, with_goals) for run in runs]
    body = []
    for group, rows in groupby(columns[0], key=lambda row: row[0]):
        names = [name for _, name in rows]
        body.append(f'<tbody><tr><th scope="rowgroup" rowspan="{len(names)}">{escape(group)}</th>')
        for name in names:
            cells = "".join(f"<td>{escape(column[group, name])}</td>" for column in columns)
            body.append(f'{"<tr>" * (name != names[0])}<th scope="row">{escape(name)}</th>{cells}</tr>')
        body.append("</tbody>")
    head = "".join(f"<th>{_named(run)}</th>" for run in runs)
    return f'<div class="wide"><table><thead><tr><th></th><th></th>{head}</tr></thead>{"".join(body)}</table></div>'


def _column(run: _Run, with_goals: bool) -> dict[tuple[str, str], str]:
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


def _named(run: _Run) -> str:
    return f'<span class="key {run.css}"></span>{escape(run.label)}'


def _said(value: Any) -> str:
    return MISSING if value is None else str(value)


def _number(run: _Run, name: str, digits: int = 2) -> str:
    value = run.figure(name)
    return MISSING if value is None else f"{value:,.{digits}f}"


def _date(text: str) -> str:
    try:
        return f"{datetime.strptime(text, '%Y%m%d-%H%M%S'):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return text


def _rate(run: _Run) -> str:
    rate, at_once = run.figure("request_rate"), run.found.get("max_concurrency")
    if run.found.get("trace") is not None:
        told = f"trace {run.found['trace']} x {_said(run.found.get('rate_scale'))}"
        if (achieved := run.figure("achieved_request_rate")) is not None:
            told += f", {achieved:,.2f} requests/s"
    elif rate is not None:
        told = f"{_short(rate)} requests/s, {_said(run.found.get('pattern'))}"
    else:
        told = "all at once" if at_once is None else "as fast as they are answered"
    return told if at_once is None else f"{told}, at most {at_once} at once"


def _goals(run: _Run) -> str:
    goals = run.found.get("goodput_goals_ms") or {}
    return ", ".join(f"{METRICS.get(name, name)} {_short(value)} ms" for name, value in goals.items()) or MISSING


def _errors(runs: Sequence[_Run]) -> str:
    met = dict.fromkeys(error for run in runs for error in run.found.get("error_counts") or ())
    if not met:
        return ""
    head = "".join(f"<th>{_named(run)}</th>" for run in runs)
    rows = "".join(
        f'<tr><td class="text">{escape(error)}</td>'
        + "".join(f"<td>{(run.found.get('error_counts') or {}).get(error, 0)}</td>" for run in runs)
        + "</tr>"
        for error in met
    )
    return (
        '<h2>Errors</h2><p class="soft">How often each was met; those that differ in numbers alone count as one, '
        "but for the status of HTTP.</p>"
        f'<div class="wide"><table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _legend(runs: Sequence[_Run]) -> str:
    if len(runs) < 2:
        return ""
    return f'<ul class="legend">{"".join(f"<li>{_named(run)}</li>" for run in runs)}</ul>'


def _distributions(runs: Sequence[_Run]) -> str:
    of = {"ttft": "requests", "gap": "gaps", "e2el": "requests"}
    charts = "".join(_cdf([run for run in runs if len(run.milliseconds[name])], name, of[name]) for name in of)
    return (
        '<h2>Latency distributions</h2><p class="soft">The share that took at most so long. Every nine has as much '
        "room as the one before, so that the tail can be read. Dotted: less than one sample is above, so that the "
        f'figure hangs on the largest alone.</p>{_legend(runs)}<div class="charts">{charts}</div>'
    )


def _cdf(runs: Sequence[_Run], name: str, of: str) -> str:
    """A chart of the distribution, with percentiles computed as in the table."""
    if not runs:
        return ""
    samples = {run: run.milliseconds[name] for run in runs}
    pooled = np.concatenate(list(samples.values()))
    x = _log_axis(f"{METRICS[name]}, ms", pooled.tolist())
    y = _tail_axis(f"share of {of}", max(map(len, samples.values())))
    plot, marks = _Plot(x, y, SMALL), []
    for run, values in samples.items():
        known = min(y.high, math.log10(len(values)))  # nines up to which at least one sample lies above
        for begin, end, css in ((0.0, known, "line"), (known, y.high, "beyond")):
            shares = 1 - 10.0 ** -np.linspace(begin, end, 200)
            marks.append(plot.line(np.quantile(values, shares), shares, f"{css} {run.css}") if end > begin else "")
    note = f"{len(pooled):,} {of}{_edge(x, pooled, 'left')}"
    return plot.figure(f"{METRICS[name]} distribution", note, marks)


def _prompts(runs: Sequence[_Run]) -> str:
    lengths = {run: np.array([float(reply.prompt_tokens) for reply in run.done]) for run in runs}
    pooled = np.concatenate(list(lengths.values()))
    title, low, high = "prompt, tokens", float(pooled.min()), float(pooled.max())
    x = _log_axis(title, pooled.tolist()) if high > WIDE_RANGE * max(low, 1.0) else _linear_axis(title, low, high)
    times = np.concatenate([run.milliseconds["ttft"] for run in runs])
    plot = _Plot(x, _log_axis("TTFT, ms", [*times.tolist(), *_goals_of(runs, "ttft")]), WIDE)
    pairs = {run: (length, run.milliseconds["ttft"]) for run, length in lengths.items()}
    figure = plot.figure(
        "TTFT against prompt length",
        _count(len(times), "requests") + _edge(plot.y, times, "lower"),
        _scatter(plot, pairs, len(times), 6) + plot.goals(runs, "ttft"),
    )
    return f"<h2>Prompt length</h2>{_legend(runs)}{figure}"


def _over_time(runs: Sequence[_Run]) -> str:
    """A chart of every wait for a chunk. The zero gaps between tokens of one chunk are not drawn."""
    pairs = {run: _waits(run) for run in runs}
    ends, waits = (np.concatenate(parts) for parts in zip(*pairs.values(), strict=True))
    if not len(waits):
        return ""
    y = _log_axis("gap, ms", [*waits.tolist(), *_goals_of(runs, "gap")])
    plot = _Plot(_linear_axis("time since the run began, s", 0.0, float(ends.max())), y, WIDE)
    figure = plot.figure(
        "Gaps over time",
        _count(len(waits), "gaps") + _edge(y, waits, "lower"),
        _scatter(plot, pairs, len(waits), 3) + plot.goals(runs, "gap"),
    )
    return (
        '<h2>Gaps over time</h2><p class="soft">Every wait for the next piece of an answer, at the time at which it '
        f"ended.</p>{_legend(runs)}{figure}"
    )


def _waits(run: _Run) -> tuple[Array, Array]:
    """For every chunk except the first: when it arrived (s), and the time since the previous chunk (ms)."""
    ends = np.concatenate([np.empty(0), *(reply.times[1:] for reply in run.done)])
    return ends, np.concatenate([np.empty(0), *(np.diff(reply.times) for reply in run.done)]) * 1e3


def _goals_of(runs: Sequence[_Run], name: str) -> list[float]:
    """The distinct goals of the runs in milliseconds; usually one."""
    return sorted({goals[name] for run in runs if name in (goals := run.found.get("goodput_goals_ms") or {})})


def _count(number: int, of: str) -> str:
    return f"{number:,} {of}" + f", thinned out to {MOST_POINTS:,}; the largest are kept" * (number > MOST_POINTS)


def _edge(axis: _Axis, values: Array, side: str) -> str:
    """A note if some values are too small for a log axis, else an empty string."""
    least = 10**axis.low
    return f"; {side} edge: {_short(least)} ms or less" if values.min() < least * 0.999 else ""


def _scatter(plot: _Plot, pairs: dict[_Run, tuple[Array, Array]], total: int, width: float) -> list[str]:
    """Points of each run. If there are too many in total, every run is thinned by the same share."""
    most = {run: max(1, MOST_POINTS * len(ys) // max(total, MOST_POINTS)) for run, (_, ys) in pairs.items()}
    return [plot.points(*thinned(*pair, most[run]), run.css, width) for run, pair in pairs.items()]


def thinned(xs: Array, ys: Array, most: int) -> tuple[Array, Array]:
    """At most `most` points: half of them with the largest y, the others evenly from the rest."""
    if len(ys) <= most:
        return xs, ys
    largest = most - most // 2
    order = np.argsort(-ys, kind="stable")
    rest = np.sort(order[largest:])
    even = rest[np.linspace(0, len(rest) - 1, most // 2).astype(np.int64)]
    kept = np.sort(np.concatenate([order[:largest], even]))
    return xs[kept], ys[kept]


def _breakdown(runs: Sequence[_Run]) -> str:
    told = {run: [reply for reply in run.done if (reply.server or {}).get("ttft_ms") is not None] for run in runs}
    charts = "".join(_slowest(run, replies) for run, replies in told.items() if replies)
    if not charts:
        return ""
    keys = "".join(f'<li><span class="key {css}"></span>{escape(name)}</li>' for css, name in PARTS.items())
    return f'<h2>Where the time to the first token went</h2><ul class="legend bars">{keys}</ul>{charts}'


def _slowest(run: _Run, replies: Sequence[Reply]) -> str:
    slow = sorted(replies, key=ttft, reverse=True)[:SLOWEST]
    parts = [_parts(reply) for reply in slow]
    x = _names_axis("number of the request, slowest first", [str(reply.number) for reply in slow])
    plot = _Plot(x, _linear_axis("TTFT, ms", 0.0, max(map(sum, parts))), WIDE)
    marks = [_bar(plot, place, values) for place, values in enumerate(parts)]
    title = f"{run.label}: the {len(slow)} slowest of {len(replies):,} requests by TTFT"
    place, late, *_, rest = np.median([_parts(reply) for reply in replies], axis=0).tolist()
    waited = f"waiting for --max-concurrency (median {place:.2f} ms), of " if any(map(_waited, replies)) else ""
    differences = [ttft(reply) * 1e3 - reply.server["ttft_ms"] for reply in replies if reply.server]
    sentence = (
        f"{run.label}: the client's TTFT is {np.median(differences):.2f} ms longer than the server's (median of "
        f"{len(replies):,} requests). It consists of {waited}the client's lag before sending (median {late:.2f} ms), "
        "and of the network both ways, the server's work outside of its own clock, and the client's reading (median "
        f"{rest:.2f} ms)."
    )
    return plot.figure(title, "", marks) + f"<p>{escape(sentence)}</p>"


def _parts(reply: Reply) -> list[float]:
    """Milliseconds of each of PARTS, at least 0: with several choices the server reports the slowest, so that a
    difference may be negative."""
    server, place, late = reply.server or {}, _waited(reply) * 1e3, lag(reply) * 1e3
    within, queue, prefill = (float(server.get(f"{name}_ms") or 0.0) for name in ("ttft", "queue", "prefill"))
    parts = [place, late, queue, prefill, within - queue - prefill, ttft(reply) * 1e3 - place - late - within]
    return [max(0.0, part) for part in parts]


def _waited(reply: Reply) -> float:
    """Seconds that the request waited for the concurrency limit."""
    return max(0.0, reply.free - reply.due)


def _bar(plot: _Plot, place: int, parts: list[float]) -> str:
    told = "\n".join(f"{name}: {value:.2f} ms" for name, value in zip(PARTS.values(), parts, strict=True) if value)
    levels = plot.place([place] * (len(parts) + 1), [0.0, *accumulate(parts)])
    half = 0.36 * plot.box[2] / (plot.x.high - plot.x.low)
    bars = "".join(
        f'<rect class="fill {css}" x="{x - half:.1f}" y="{top:.1f}" width="{2 * half:.1f}" height="{low - top:.2f}"/>'
        for css, (x, low), (_, top) in zip(PARTS, levels, levels[1:], strict=False)
    )
    return f"<g><title>{escape(told)}</title>{bars}</g>"


def _comparison(runs: Sequence[_Run]) -> str:
    if len(runs) < 2:
        return ""
    charts = "".join(_dots(runs, name) for name in ("ttft", "gap"))
    shapes = _shapes({kind.upper(): shape for kind, shape in COMPARED.items()})
    compared = f'{shapes}<div class="charts">{charts}</div>' if charts else ""
    content = compared + _by_rate(runs)
    return f"<h2>Runs compared</h2>{_legend(runs)}{content}" if content else ""


def _shapes(names: dict[str, str]) -> str:
    keys = "".join(
        f'<li><svg class="mark" viewBox="-7 -7 14 14"><path d="M0 0{SHAPES[shape]}"/></svg>{escape(name)}</li>'
        for name, shape in names.items()
    )
    return f'<ul class="legend">{keys}</ul>'


def _dots(runs: Sequence[_Run], name: str) -> str:
    """A chart with one row per run, the first on top."""
    rows = [(run, {kind: run.figure(f"{kind}_{name}_ms") for kind in COMPARED}) for run in reversed(runs)]
    values = [value for _, row in rows for value in row.values() if value is not None]
    if not values:
        return ""
    labels = _names_axis("", [run.label if len(run.label) <= 24 else run.label[:23] + "…" for run, _ in rows])
    plot = _Plot(_log_axis(f"{METRICS[name]}, ms", values), labels, (HALF[0], 96 + 26 * len(runs)), left=168)
    marks = []
    for place, (run, row) in enumerate(rows):
        known = [(kind, value) for kind, value in row.items() if value is not None]
        if known:
            marks.append(plot.line([value for _, value in known], [place] * len(known), "join"))
        for kind, value in known:
            text = f"{run.label}: {kind.upper()} {value:,.2f} ms"
            marks.append(plot.mark(value, place, COMPARED[kind], run.css, text))
    return plot.figure(f"{METRICS[name]} by run", "P50, P99 and P99.9", marks)


def _by_rate(runs: Sequence[_Run]) -> str:
    """Charts of goodput against rate. Runs with the same label before " @ " form one line."""
    series: dict[str, list[_Run]] = {}
    for run in sorted(runs, key=lambda run: run.figure("request_rate") or 0.0):
        if None not in (run.figure("request_rate"), run.figure("goodput_share")):
            series.setdefault(run.label.split(" @ ")[0], []).append(run)
    if len({run.found["request_rate"] for line in series.values() for run in line}) < 2:
        return ""
    charts = _rate_chart(series, "goodput_share", "Share of requests that kept all goals", "share of requests")
    charts += _rate_chart(series, "request_goodput", "Goodput against rate", "goodput, requests/s")
    return f'{_shapes(dict(zip(series, cycle(SHAPES), strict=False)))}<div class="charts">{charts}</div>'


def _rate_chart(series: dict[str, list[_Run]], name: str, title: str, unit: str) -> str:
    every = [run.found for line in series.values() for run in line]
    x = _linear_axis("request rate, requests/s", 0.0, max(found["request_rate"] for found in every))
    y = _linear_axis(unit, 0.0, 1.0 if name == "goodput_share" else max(found[name] for found in every) or 1.0)
    plot, marks = _Plot(x, y, HALF), []
    for line, shape, dash in zip(series.values(), cycle(SHAPES), cycle(DASHES), strict=False):
        rates, values = [run.found["request_rate"] for run in line], [run.found[name] for run in line]
        marks.append(plot.line(rates, values, "join", dash))
        for run, rate, value in zip(line, rates, values, strict=True):
            text = f"{run.label}: {value:.3g} at {_short(rate)} requests/s"
            marks.append(plot.mark(rate, value, shape, run.css, text))
    return plot.figure(title, "", marks)
