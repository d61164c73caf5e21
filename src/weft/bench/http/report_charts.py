"""The charts of the report, drawn by matplotlib as SVG that an HTML page contains."""

import io
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from itertools import accumulate, cycle
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from weft.bench.http.figures import Array, ttft
from weft.bench.http.report_data import METRICS, PARTS, ReportedRun, chunk_gaps, goals_ms, short, thinned, ttft_parts

MOST_POINTS = 20_000  # per chart; browsers become slow with more
SLOWEST = 40  # requests in the TTFT breakdown
LARGEST_RANGE = 1000.0  # values below the largest by more than this factor are drawn at the edge of a log axis
WIDE_RANGE = 10.0  # lengths that differ by more than this factor get a log axis
SMALL, HALF, WIDE = (384, 300), (572, 300), (1160, 330)  # width and height of a chart in pixels
DASHES: tuple[Any, ...] = ("-", (0, (3.5, 2)), (0, (1, 1.5)))  # for runs that share a colour, and for series by rate
KEYS = ("solid", "dashed", "dotted")  # the same in CSS
ROUND_NUMBERS = np.array([digit * 10.0**power for power in range(-4, 9) for digit in (1, 2, 5)])
# Colours of runs are from Okabe and Ito, colours of parts from Tol: colour-blind readers can distinguish both sets.
# Every colour occurs once, because the page replaces it by a CSS variable of the same name.
COLOURS = {
    "ink": "#1c2026",
    "soft": "#5d6673",
    "rule": "#e3e6ea",
    "page": "#ffffff",
    "c0": "#0072b2",
    "c1": "#d55e00",
    "c2": "#009e73",
    "c3": "#cc79a7",
    "c4": "#e69f00",
    "c5": "#56b4e9",
    "c6": "#6b7280",
    "place": "#999933",
    "lag": "#cc6677",
    "queue": "#ddcc77",
    "prefill": "#44aa99",
    "other": "#88ccee",
    "rest": "#443399",
}
RUN_COLOURS = 7
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text, in the font of the page
    "svg.hashsalt": "weft",
    "text.parse_math": False,
    "text.color": COLOURS["ink"],
    "font.size": 11.5,
    "axes.edgecolor": COLOURS["rule"],
    "axes.labelcolor": COLOURS["soft"],
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLOURS["rule"],
    "xtick.color": COLOURS["rule"],
    "ytick.color": COLOURS["rule"],
    "xtick.labelcolor": COLOURS["soft"],
    "ytick.labelcolor": COLOURS["soft"],
    "path.simplify": False,
}
SVG = "http://www.w3.org/2000/svg"


class Marker(NamedTuple):
    code: str  # in matplotlib
    text: str  # in a legend


MARKERS = (Marker("o", "●"), Marker("D", "◆"), Marker("^", "▲"), Marker("s", "■"))
PERCENTILES = dict(zip(("p50", "p99", "p99.9"), MARKERS, strict=False))


class Chart(NamedTuple):
    title: str
    note: str
    svg: Markup
    is_wide: bool


class Axis(NamedTuple):
    title: str
    scale: str  # linear, log, tail (each further nine takes the same space), or names (no numbers)
    low: float
    high: float
    ticks: Sequence[float]
    labels: Sequence[str]

    def clip(self, values: Any) -> Array:
        """Values outside of the axis are drawn at its edge."""
        return np.clip(np.asarray(values, dtype=np.float64), self.low, self.high)

    @property
    def page_scale(self) -> str:
        """The scale and its limits, transformed so that they are even in pixels; read by the page's script."""
        low, high = self.low, self.high
        if self.scale == "log":
            low, high = math.log10(low), math.log10(high)
        elif self.scale == "tail":
            low, high = float(_nines(low)), float(_nines(high))
        return f"{self.scale} {low:.6g} {high:.6g}"


def log_axis(title: str, values: Iterable[float]) -> Axis:
    seen = [value for value in values if value > 0] or [1.0]
    low, high = max(min(seen), max(seen) / LARGEST_RANGE) * 0.99, max(seen) * 1.01
    first = int(np.clip(np.searchsorted(ROUND_NUMBERS, low) - 1, 0, len(ROUND_NUMBERS) - 2))
    last = min(len(ROUND_NUMBERS) - 1, max(int(np.searchsorted(ROUND_NUMBERS, high)), first + 1))
    ticks = ROUND_NUMBERS[first : last + 1].tolist()
    low, high = ticks[0], ticks[-1]
    if len(ticks) > 7:
        ticks = [tick for tick in ticks if round(math.log10(tick), 6).is_integer()]
    return Axis(title, "log", low, high, ticks, [short(tick) for tick in ticks])


def linear_axis(title: str, low: float, high: float) -> Axis:
    ticks: list[float] = np.asarray(MaxNLocator(6).tick_values(low, max(high, low + 1e-3))).tolist()
    return Axis(title, "linear", ticks[0], ticks[-1], ticks, [short(tick) for tick in ticks])


def tail_axis(title: str, samples: int) -> Axis:
    """An axis of percentiles on which the tail is readable."""
    nines = min(6, max(3, math.ceil(math.log10(max(samples, 1)))))
    shares = [0.0, 0.5, *(1 - 10.0**-count for count in range(1, nines + 1))]
    return Axis(title, "tail", 0.0, shares[-1], shares, [short(share) for share in shares])


def names_axis(title: str, names: Sequence[str]) -> Axis:
    return Axis(title, "names", -0.6, len(names) - 0.4, range(len(names)), names)


def _nines(shares: Any) -> Any:
    return np.abs(np.log10(np.maximum(1 - np.asarray(shares), 1e-12)))


def _share(nines: Any) -> Any:
    return 1 - 10.0 ** -np.asarray(nines)


class Canvas:
    """A chart while it is drawn. `name` is unique in the page."""

    def __init__(self, name: str, x: Axis, y: Axis, size: tuple[int, int], left: int = 62) -> None:
        self.name, self.x, self.y, self.size = name, x, y, size
        self.box = (left, 20, size[0] - left - 24, size[1] - 20 - 44)  # left, top, width and height within the axes
        self.tooltips: dict[str, str] = {}
        (width, height), (_, top, inner, tall) = size, self.box
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        self.figure.patch.set_visible(False)
        self.axes = self.figure.add_axes((left / width, 1 - (top + tall) / height, inner / width, tall / height))
        self.axes.patch.set_visible(False)
        drawn = ((x, self.axes.xaxis, self.axes.set_xscale), (y, self.axes.yaxis, self.axes.set_yscale))
        for axis, axis_drawn, set_scale in drawn:
            if axis.scale == "log":
                set_scale("log")
            elif axis.scale == "tail":
                set_scale("function", functions=(_nines, _share))
            axis_drawn.set_ticks(axis.ticks, labels=axis.labels)
            axis_drawn.set_ticks([], minor=True)
            axis_drawn.set_tick_params(length=0, pad=6)
        self.axes.set(xlim=(x.low, x.high), ylim=(y.low, y.high), xlabel=x.title, ylabel=y.title)
        if x.scale == "names":
            self.axes.grid(False, axis="x")

    def line(self, xs: Any, ys: Any, colour: str, style: Any = "-", width: float = 2.0, name: str = "line") -> None:
        xs, ys = self.x.clip(xs), self.y.clip(ys)
        self.axes.plot(xs, ys, linestyle=style, lw=width, color=COLOURS[colour], gid=self._id(name))

    def points(self, xs: Any, ys: Any, colour: str, width: float) -> None:
        """All points as one path of empty round strokes: an element for each would make the file ten times as large."""
        vertices = np.repeat(np.column_stack([self.x.clip(xs), self.y.clip(ys)]), 2, axis=0)
        codes = np.tile([Path.MOVETO, Path.CLOSEPOLY], len(vertices) // 2)
        dots = PathPatch(Path(vertices, codes), fill=False, ec=COLOURS[colour], lw=width, alpha=0.7, capstyle="round")
        dots.set_gid(self._id("points"))
        self.axes.add_patch(dots)

    def mark(self, x: float, y: float, marker: str, colour: str, tooltip: str) -> None:
        [drawn] = self.axes.plot(self.x.clip([x]), self.y.clip([y]), marker, color=COLOURS[colour], ms=8, clip_on=False)
        drawn.set_gid(self._id("mark", tooltip))

    def bar(self, x: float, bottom: float, height: float, colour: str, tooltip: str) -> None:
        [drawn] = self.axes.bar(x, height, 0.72, bottom, color=COLOURS[colour])
        drawn.set_gid(self._id("bar", tooltip))

    def goals(self, runs: Sequence[ReportedRun], name: str) -> None:
        """A line at each goal in milliseconds, with its name."""
        for goal in goals_ms(runs, name):
            self.axes.axhline(goal, color=COLOURS["ink"], lw=1, ls=(0, (5, 4)))
            text = f"{METRICS[name]} goal {short(goal)} ms"
            self.axes.annotate(text, (0, goal), (8, 4), self.axes.get_yaxis_transform(), "offset points")

    def chart(self, title: str, note: str = "") -> Chart:
        return Chart(title, note, self._svg(title), self.size == WIDE)

    def _id(self, name: str, tooltip: str = "") -> str:
        identity = f"{name}-{len(self.tooltips)}"
        self.tooltips[identity] = tooltip
        return identity

    def _svg(self, title: str) -> Markup:
        """The drawing as an SVG element: unique ids, tooltips, and CSS variables for colours."""
        file = io.StringIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # the browser has other fonts
            self.figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        root = ElementTree.fromstring(file.getvalue())
        root.remove(root[0])  # a style that would apply to the whole page
        for element in root.iter():
            if "d" in element.attrib:  # hundredths of a pixel are enough
                element.set("d", re.sub(r"(\.\d\d)\d+", r"\1", element.attrib["d"]))
            if tooltip := self.tooltips.get(element.get("id", "")):
                element.insert(0, ElementTree.Element(f"{{{SVG}}}title"))
                element[0].text = tooltip
        del root.attrib["width"], root.attrib["height"]
        left, top, width, height = self.box
        root.attrib |= {"role": "img", "aria-label": title, "data-box": f"{left} {top} {width} {height}"}
        root.attrib |= {"data-x": self.x.page_scale, "data-y": self.y.page_scale}
        pointer = {"class": "at", "x": str(left + width), "y": "13", "text-anchor": "end"}
        ElementTree.SubElement(root, f"{{{SVG}}}text", pointer).text = ""
        ElementTree.register_namespace("", SVG)
        ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
        text = ElementTree.tostring(root, encoding="unicode")
        text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{self.name}-", text)
        variables = {colour: f"var(--{name})" for name, colour in COLOURS.items()}
        return Markup(re.sub(r": (#[0-9a-f]{6})\b", lambda at: f": {variables.get(at[1], at[1])}", text))


def style() -> Any:
    """A context in which charts have the page's style."""
    return matplotlib.rc_context(STYLE)


def key_style(run: ReportedRun) -> str:
    """The CSS of the run's key in a legend."""
    return f"--c:var(--{colour_of(run)});--line:{KEYS[run.number // RUN_COLOURS % len(KEYS)]}"


def colour_of(run: ReportedRun) -> str:
    return f"c{run.number % RUN_COLOURS}"


def dash_of(run: ReportedRun) -> Any:
    return DASHES[run.number // RUN_COLOURS % len(DASHES)]


def distribution(runs: Sequence[ReportedRun], name: str, unit: str) -> Chart | None:
    """The share of samples at or below each time, with percentiles computed as in the table."""
    samples = {run: run.milliseconds[name] for run in runs if len(run.milliseconds[name])}
    if not samples:
        return None
    pooled = np.concatenate(list(samples.values()))
    x = log_axis(f"{METRICS[name]}, ms", pooled.tolist())
    y = tail_axis(f"share of {unit}", max(map(len, samples.values())))
    canvas = Canvas(f"{name}-distribution", x, y, SMALL)
    most = float(_nines(y.high))
    for run, values in samples.items():
        known = min(most, math.log10(len(values)))  # nines up to which at least one sample lies above
        for begin, end, style, width in ((0.0, known, dash_of(run), 2.0), (known, most, (0, (1, 3)), 1.5)):
            shares = _share(np.linspace(begin, end, 200))
            if end > begin:
                canvas.line(np.quantile(values, shares), shares, colour_of(run), style, width)
    return canvas.chart(f"{METRICS[name]} distribution", f"{len(pooled):,} {unit}{_edge(x, pooled, 'left')}")


def ttft_by_prompt(runs: Sequence[ReportedRun]) -> Chart:
    lengths = {run: np.array([float(reply.prompt_tokens) for reply in run.done]) for run in runs}
    pooled = np.concatenate(list(lengths.values()))
    title, low, high = "prompt, tokens", float(pooled.min()), float(pooled.max())
    x = log_axis(title, pooled.tolist()) if high > WIDE_RANGE * max(low, 1.0) else linear_axis(title, low, high)
    times = np.concatenate([run.milliseconds["ttft"] for run in runs])
    y = log_axis("TTFT, ms", [*times.tolist(), *goals_ms(runs, "ttft")])
    canvas = Canvas("prompts", x, y, WIDE)
    _scatter(canvas, {run: (length, run.milliseconds["ttft"]) for run, length in lengths.items()}, 6)
    canvas.goals(runs, "ttft")
    return canvas.chart("TTFT against prompt length", _count(len(times), "requests") + _edge(y, times, "lower"))


def gaps_over_time(runs: Sequence[ReportedRun]) -> Chart | None:
    """Every wait for a chunk. The zero gaps between tokens of one chunk are not drawn."""
    pairs = {run: chunk_gaps(run) for run in runs}
    ends, waits = (np.concatenate(parts) for parts in zip(*pairs.values(), strict=True))
    if not len(waits):
        return None
    y = log_axis("gap, ms", [*waits.tolist(), *goals_ms(runs, "gap")])
    canvas = Canvas("gaps", linear_axis("time since the run began, s", 0.0, float(ends.max())), y, WIDE)
    _scatter(canvas, pairs, 3)
    canvas.goals(runs, "gap")
    return canvas.chart("Gaps over time", _count(len(waits), "gaps") + _edge(y, waits, "lower"))


def slowest_requests(run: ReportedRun) -> Chart:
    """A bar for each of the slowest requests, divided into the parts of its TTFT."""
    replies = run.timed_by_server
    slow = sorted(replies, key=ttft, reverse=True)[:SLOWEST]
    parts = [ttft_parts(reply) for reply in slow]
    x = names_axis("number of the request, slowest first", [str(reply.number) for reply in slow])
    canvas = Canvas(f"slowest{run.number}", x, linear_axis("TTFT, ms", 0.0, max(map(sum, parts))), WIDE)
    for place, values in enumerate(parts):
        named = zip(PARTS.values(), values, strict=True)
        tooltip = "\n".join(f"{name}: {value:.2f} ms" for name, value in named if value)
        for part, value, bottom in zip(PARTS, values, accumulate(values, initial=0.0), strict=False):
            if value:
                canvas.bar(place, bottom, value, part, tooltip)
    return canvas.chart(f"{run.label}: the {len(slow)} slowest of {len(replies):,} requests by TTFT")


def percentiles_by_run(runs: Sequence[ReportedRun], name: str) -> Chart | None:
    """A chart with one row per run, the first on top."""
    rows = [(run, {kind: run.figure(f"{kind}_{name}_ms") for kind in PERCENTILES}) for run in reversed(runs)]
    values = [value for _, row in rows for value in row.values() if value is not None]
    if not values:
        return None
    labels = names_axis("", [run.label if len(run.label) <= 24 else run.label[:23] + "…" for run, _ in rows])
    x = log_axis(f"{METRICS[name]}, ms", values)
    canvas = Canvas(f"{name}-by-run", x, labels, (HALF[0], 96 + 26 * len(runs)), left=168)
    for place, (run, row) in enumerate(rows):
        known = [(kind, value) for kind, value in row.items() if value is not None]
        if known:
            canvas.line([value for _, value in known], [place] * len(known), "soft", width=1.5, name="join")
        for kind, value in known:
            text = f"{run.label}: {kind.upper()} {value:,.2f} ms"
            canvas.mark(value, place, PERCENTILES[kind].code, colour_of(run), text)
    return canvas.chart(f"{METRICS[name]} by run", "P50, P99 and P99.9")


def goodput_by_rate(series: dict[str, list[ReportedRun]], name: str, title: str, unit: str) -> Chart:
    every = [run.found for line in series.values() for run in line]
    x = linear_axis("request rate, requests/s", 0.0, max(found["request_rate"] for found in every))
    y = linear_axis(unit, 0.0, 1.0 if name == "goodput_share" else max(found[name] for found in every) or 1.0)
    canvas = Canvas(f"{name}-by-rate", x, y, HALF)
    for line, marker, dash in zip(series.values(), cycle(MARKERS), cycle(DASHES), strict=False):
        rates, values = [run.found["request_rate"] for run in line], [run.found[name] for run in line]
        canvas.line(rates, values, "soft", dash, 1.5, name="join")
        for run, rate, value in zip(line, rates, values, strict=True):
            text = f"{run.label}: {value:.3g} at {short(rate)} requests/s"
            canvas.mark(rate, value, marker.code, colour_of(run), text)
    return canvas.chart(title)


def _scatter(canvas: Canvas, pairs: dict[ReportedRun, tuple[Array, Array]], width: float) -> None:
    """Points of each run. If there are too many in total, every run is thinned by the same share."""
    total = sum(len(ys) for _, ys in pairs.values())
    for run, (xs, ys) in pairs.items():
        most = max(1, MOST_POINTS * len(ys) // max(total, MOST_POINTS))
        canvas.points(*thinned(xs, ys, most), colour_of(run), width)


def _count(number: int, unit: str) -> str:
    return f"{number:,} {unit}" + f", thinned out to {MOST_POINTS:,}; the largest are kept" * (number > MOST_POINTS)


def _edge(axis: Axis, values: Array, side: str) -> str:
    """A note if some values are too small for a log axis, else an empty string."""
    return f"; {side} edge: {short(axis.low)} ms or less" if values.min() < axis.low * 0.999 else ""
