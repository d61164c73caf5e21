"""Charts of benchmarks as SVG. matplotlib is an optional extra."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.bench.engine.interference import Interference
from weft.errors import OptionError

COLOURS = {"monolithic": "#c2410c", "chunked": "#a1a1aa", "slo": "#1d4ed8"}


SHADES = ("#c2410c", "#a1a1aa", "#1d4ed8", "#15803d", "#7e22ce", "#0e7490", "#a16207")
PERCENTILES = ("p50", "p99", "p99.9")


def variants_chart(file: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draws percentiles of gaps and TTFT: bars for the median over the runs of a variant, dots for the single runs."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 3.4))
    panels = (("gap", "time between tokens, ms"), ("ttft", "time to the first token, ms"))
    width = 0.8 / len(runs)
    for axis, (figure_name, label) in zip(axes, panels, strict=True):
        for number, (name, found) in enumerate(runs.items()):
            colour = COLOURS.get(name, SHADES[number % len(SHADES)])
            positions = np.arange(len(PERCENTILES)) + (number - (len(runs) - 1) / 2) * width
            values = np.array([[run[f"{kind}_{figure_name}_ms"] or np.nan for kind in PERCENTILES] for run in found])
            middle = np.median(values, axis=0)
            axis.bar(positions, middle, width * 0.92, color=colour, label=name)
            for run in values:
                axis.plot(positions, run, ".", color="#18181b", ms=3)
            for position, value in zip(positions, middle, strict=True):
                if np.isnan(value):  # answers of one token have no gaps
                    continue
                axis.annotate(
                    f"{value:.0f}", (position, value), (0, 3), textcoords="offset points", ha="center", fontsize=7
                )
        axis.set(yscale="log", title=label)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.set_xticks(range(len(PERCENTILES)), [kind.upper() for kind in PERCENTILES])
        axis.grid(alpha=0.25, axis="y")
        axis.margins(y=0.15)
    axes[0].legend(fontsize=8)
    _save(figure, file)


def interference_chart(file: Path, panels: Sequence[tuple[str, Sequence[Interference]]]) -> None:
    """Draws every gap over time, one panel per machine: the delay of the streams by long prompts under each policy."""
    plt = _pyplot()
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.4), squeeze=False)
    for axis, (title, runs) in zip(axes[0], panels, strict=True):
        for run in runs:
            ends, gaps = _steps(run)
            # The line shows the current gap at every moment: each gap is drawn over its whole duration.
            axis.plot(ends, gaps * 1000, drawstyle="steps-pre", lw=1.2, color=COLOURS[run.policy], label=run.policy)
        target = runs[-1].target * 1000
        axis.axhline(target, color="#15803d", lw=1, ls="--", label=f"target {target:.3g} ms")
        axis.set(title=title, yscale="log", xlabel="seconds since the long prompts came")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7, loc=(0.03, 0.58))
    axes[0][0].set_ylabel("time between tokens, ms")
    _save(figure, file)


def check_charts() -> None:
    """Raises OptionError if charts cannot be drawn. Call it before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise OptionError("a chart needs matplotlib, which is not installed: pip install 'weft[charts]'") from None


def _pyplot() -> Any:
    check_charts()
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "weft", "svg.fonttype": "none", "font.size": 9})
    return pyplot


def _save(figure: Any, file: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _steps(run: Interference) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """End times of steps, and the gap that ended with each step. All streams get their tokens at the same time."""
    ends, index = np.unique(run.times.round(6), return_index=True)
    return np.concatenate([[0.0], ends]), np.concatenate([[run.gaps[index[0]]], run.gaps[index]])
