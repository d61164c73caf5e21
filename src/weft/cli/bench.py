"""`weft bench`: measurements. Each kind is a separate subcommand."""

import argparse
import json
from pathlib import Path

from weft.cli import fidelity, interference, latency, load, offline, rate_search, streams, versus
from weft.errors import OptionError

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
        f"caching on, finished requests replaced by new ones, with {', '.join(map(str, SIZES))} running, under chunked "
        "and slo; and the longest plan when 1,000 requests come at once beside 256 running ones, under slo with "
        "promises of 25 ms and 1 s on the profile of an H200, in virtual time. Times are processor time, medians of "
        "--repeats. "
        "Machines differ, also from hour to hour, so a bare loop over arrays is measured beside each.",
    )
    scheduler.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each (default: 3)")
    scheduler.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write {steady: [{policy, running, us_per_step, us_per_request, bare_loop_us}], burst: {...}}",
    )
    scheduler.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    scheduler.set_defaults(run=run_scheduler)
    load.register(kinds)
    rate_search.register(kinds)
    versus.register(kinds)
    offline.register(kinds)
    latency.register(kinds)
    interference.register(kinds)
    streams.register(kinds)
    fidelity.register(kinds)


def run_scheduler(arguments: argparse.Namespace) -> int:
    from statistics import median

    from weft.bench.engine.scheduler import DEFAULT_STEPS, bare_loop, measure, measure_burst
    from weft.progress import work_progress

    if arguments.repeats < 1:
        raise OptionError(f"--repeats {arguments.repeats} must be at least 1")
    rows = []
    print(f"{'policy':>8} {'running':>8} {'us/step':>10} {'us/request':>11} {'bare loop':>10} {'ratio':>6}")
    for policy in ("chunked", "slo"):
        for running in SIZES:
            total = DEFAULT_STEPS * arguments.repeats
            with work_progress(f"{policy}, {running} running", total, arguments.progress) as advance:
                costs = []
                for number in range(arguments.repeats):
                    costs.append(measure(running, policy))
                    advance((number + 1) * DEFAULT_STEPS)
            step, each = median(cost.us_per_step for cost in costs), median(cost.us_per_request for cost in costs)
            bare = bare_loop(running)
            rows.append(
                {
                    "policy": policy,
                    "running": running,
                    "us_per_step": step,
                    "us_per_request": each,
                    "bare_loop_us": bare,
                }
            )
            shown = f"{policy:>8} {running:>8} {step:>10.1f} {each:>11.2f}"
            print(f"{shown} {bare:>10.3f} {each / bare:>6.1f}", flush=True)
    bursts = [measure_burst() for _ in range(arguments.repeats)]
    longest, screened = (median(getattr(one, name) for one in bursts) for name in ("longest_plan_ms", "screened_s"))
    burst = bursts[0]._replace(longest_plan_ms=longest, screened_s=screened)
    print(
        f"\n{burst.newcomers} newcomers at once beside {burst.running} running streams: the longest plan takes "
        f"{burst.longest_plan_ms:.2f} ms; all are screened within {burst.screened_s:.2f} s of virtual time "
        f"({burst.refused} refused)"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"steady": rows, "burst": burst._asdict()}, indent=1) + "\n")
    return 0
