"""`weft bench`: measurements. Each kind is a command of its own."""

import argparse
import json
from pathlib import Path

from weft.cli import fidelity, interference, latency, load, offline, ratesweep, streams, versus

SIZES = (1, 64, 256, 1024, 4096)


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "bench", help="measure", description="Measurements; each kind is a command of its own."
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    scheduler = kinds.add_parser(
        "scheduler",
        help="microseconds of the scheduler a step",
        description="Microseconds of plan and commit, records and outputs included: the mean over 2,000 steps, prefix "
        f"caching on, finished requests replaced by new ones, with {', '.join(map(str, SIZES))} running. Machines "
        "differ, also from hour to hour, so a bare loop over arrays is measured beside each.",
    )
    scheduler.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write a list of {running, us_per_step, us_per_request, bare_loop_us}",
    )
    scheduler.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    scheduler.set_defaults(run=run_scheduler)
    load.register(kinds)
    ratesweep.register(kinds)
    versus.register(kinds)
    offline.register(kinds)
    latency.register(kinds)
    interference.register(kinds)
    streams.register(kinds)
    fidelity.register(kinds)


def run_scheduler(arguments: argparse.Namespace) -> int:
    from weft.bench.scheduler import STEPS, bare_loop, measure
    from weft.progress import work_progress

    rows = []
    print(f"{'running':>8} {'us/step':>10} {'us/request':>11} {'bare loop':>10} {'ratio':>6}")
    for running in SIZES:
        with work_progress(f"{running} running", STEPS, arguments.progress) as advance:
            cost = measure(running, progress=advance)
        bare = bare_loop(running)
        rows.append({**cost._asdict(), "bare_loop_us": bare})
        shown = f"{cost.running:>8} {cost.us_per_step:>10.1f} {cost.us_per_request:>11.2f}"
        print(f"{shown} {bare:>10.3f} {cost.us_per_request / bare:>6.1f}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0
