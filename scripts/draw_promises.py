"""Draws the README's first picture: promises kept on one H200 over HTTP, weft next to vLLM.

    python scripts/draw_promises.py X3.json X4.5.json docs/promises.svg

The first two files are the output of `weft bench fidelity --json` for the Azure slices at 3 and 4.5 times their rate.
The figures of vLLM were measured from outside by an independent client, on a card of the same kind.
"""

import json
import sys
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

RATES = ("x3", "x4.5")
VLLM = {"vLLM 0.26, 512 tokens a step": (0.840, 0.135), "vLLM 0.26, defaults": (0.092, 0.034)}  # November 2026
COLOURS = ("#1d4ed8", "#a1a1aa", "#c2410c")
HEIGHT = 0.25


def main() -> None:
    *files, target = map(Path, sys.argv[1:])
    if len(files) != len(RATES):
        sys.exit(__doc__)
    runs = [json.loads(file.read_text()) for file in files]
    for rate, run in zip(RATES, runs, strict=True):
        if f" {rate}," not in run["slice"]:
            sys.exit(f"{run['slice']!r} is not the slice at {rate}")
    kept = {"weft": tuple(_kept(run) for run in runs), **VLLM}
    plt.rcParams.update({"svg.hashsalt": "weft", "svg.fonttype": "none", "font.size": 9})
    figure, axis = plt.subplots(figsize=(7.2, 2.5))
    for number, (name, shares) in enumerate(kept.items()):
        places = [place + (number - 1) * HEIGHT for place in range(len(RATES))]
        bars = axis.barh(places, [100 * share for share in shares], HEIGHT * 0.9, color=COLOURS[number], label=name)
        axis.bar_label(bars, [f"{100 * share:.1f}%" for share in shares], padding=3)
    labels = [f"{rate}\n{run['requests']} requests" for rate, run in zip(RATES, runs, strict=True)]
    axis.set_yticks(range(len(RATES)), labels)
    axis.invert_yaxis()
    axis.set(xlim=(0, 112), xlabel="% of requests: first token within 1 s and 99% of the gaps within 25 ms")
    axis.set_xticks(range(0, 101, 20))
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="upper center", ncol=len(kept), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.91))
    figure.savefig(target, metadata={"Date": None})


def _kept(run: dict) -> float:
    """Share of promises kept: the mean over all served runs under policy slo."""
    (slo,) = [policy for policy in run["policies"] if policy["policy"] == "slo"]
    return mean(served["kept"] for served in slo["runs"])


if __name__ == "__main__":
    main()
