"""`weft bench`: measurements. Each kind is a command of its own."""

import argparse
import json
from pathlib import Path

from weft.cli import interference

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
        f"caching on, finished requests replaced by new ones, with {', '.join(map(str, SIZES))} running.",
    )
    scheduler.add_argument(
        "--json", type=Path, metavar="FILE", help="also write a list of {running, us_per_step, us_per_request}"
    )
    scheduler.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    scheduler.set_defaults(run=run_scheduler)
    interference.register(kinds)


def run_scheduler(arguments: argparse.Namespace) -> int:
    from weft.bench.scheduler import STEPS, measure
    from weft.progress import work_progress

    costs = []
    print(f"{'running':>8} {'us/step':>10} {'us/request':>11}")
    for running in SIZES:
        with work_progress(f"{running} running", STEPS, arguments.progress) as advance:
            cost = measure(running, progress=advance)
        costs.append(cost)
        print(f"{cost.running:>8} {cost.us_per_step:>10.1f} {cost.us_per_request:>11.2f}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([cost._asdict() for cost in costs], indent=1) + "\n")
    return 0
