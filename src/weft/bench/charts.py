"""Pictures of benchmarks, as SVG. matplotlib is an optional extra."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.bench.interference import Interference
from weft.errors import OptionError

COLOURS = {"monolithic": "#c2410c", "chunked": "#a1a1aa", "slo": "#1d4ed8"}


def interference_chart(file: Path, panels: Sequence[tuple[str, Sequence[Interference]]]) -> None:
    """Every gap over time, one panel a machine: what each policy lets the streams feel of the long prompts."""
    try:
        import matplotlib
    except ImportError:
        raise OptionError("a chart needs matplotlib: pip install 'weft[charts]'") from None
    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "weft", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.4), squeeze=False)
    for axis, (title, runs) in zip(axes[0], panels, strict=True):
        for run in runs:
            ends, gaps = _steps(run)
            # At every moment, how long the wait for the next token is: a gap's height lasts as long as the gap.
            axis.plot(ends, gaps * 1000, drawstyle="steps-pre", lw=1.2, color=COLOURS[run.policy], label=run.policy)
        target = runs[-1].target * 1000
        axis.axhline(target, color="#15803d", lw=1, ls="--", label=f"target {target:.3g} ms")
        axis.set(title=title, yscale="log", xlabel="seconds since the long prompts came")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7, loc=(0.03, 0.58))
    axes[0][0].set_ylabel("time between tokens, ms")
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def _steps(run: Interference) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """When steps ended, and the gap that ended with each; the streams get their tokens together."""
    ends, index = np.unique(run.times.round(6), return_index=True)
    return np.concatenate([[0.0], ends]), np.concatenate([[run.gaps[index[0]]], run.gaps[index]])
