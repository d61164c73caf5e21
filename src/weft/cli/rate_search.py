"""`weft bench sweep`: measures a server at several rates, and finds the highest rate at which it keeps its goals."""

import argparse
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

from weft.cli.estimate import tell_runs
from weft.cli.load import (
    add_load_arguments,
    api_key,
    interrupted,
    measure_server,
    new_words,
    show_caveats,
    with_defaults,
)
from weft.errors import OptionError

COLUMNS = (
    "failed",
    "achieved_request_rate",
    "request_throughput",
    "output_throughput",
    "goodput_share",
    "p50_ttft_ms",
    "p99_ttft_ms",
    "p99_gap_ms",
)
SHOWN_ERRORS = 3  # kinds of errors that are printed per run
FIND_SECONDS = 60.0  # of each run with --find: at a high rate, 100 requests end before a queue builds up
# Arguments that do not change what is measured.
NO_SETTINGS = {
    *("run", "command", "kind", "variant", "rates", "find", "hold", "out", "progress", "request_rate", "api_key"),
}

EPILOG = """\
examples:
  weft bench sweep --variant "slo: weft serve --port {port} --policy slo" --rates 1 2 4 8 --goodput ttft:1000 gap:100
  weft bench sweep --find 0.5:16 --goodput ttft:1000 gap:100 \\
                   --variant "512: vllm serve M --port {port} --max-num-batched-tokens 512"
"""


def register(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "sweep",
        help="measure servers at several rates",
        description="Measures each variant at each rate, or finds the highest rate at which it keeps its goals and "
        "keeps up, by bisection. A variant is a server that runs, or a command that is started anew for every run; "
        "chunk sizes and policies are variants. What is in the file already is not measured again, unless nothing "
        "completed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--variant",
        action="append",
        required=True,
        metavar="NAME: URL|COMMAND",
        help="one or more; in a command, {port} is where the port goes",
    )
    add("--rates", type=float, nargs="+", metavar="R", help="requests a second, each measured")
    add(
        "--find",
        metavar="LOW:HIGH",
        help="find the highest rate in between at which the goals of --goodput are kept, and answers end at 95%% or "
        "more of the rate at which requests are sent; runs take 60 s unless --duration or --num-prompts is given",
    )
    add("--hold", type=float, default=0.99, metavar="SHARE", help="of requests that must keep them (default: 0.99)")
    add("--out", type=Path, default=Path("sweep.jsonl"), metavar="FILE", help="default: sweep.jsonl")
    add_load_arguments(parser)
    add("--no-progress", dest="progress", action="store_false", help="no live view")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    low, high = _range(arguments)
    arguments = with_defaults(arguments, has_rate=True)
    if arguments.find is not None and arguments.num_prompts is None and arguments.duration == math.inf:
        arguments.duration = FIND_SECONDS
    try:
        completed = _sweep(arguments, low, high)
    except KeyboardInterrupt:
        return interrupted(f"the same command goes on with what is in {arguments.out}")
    return 0 if completed else 1


def _sweep(arguments: argparse.Namespace, low: float, high: float) -> int:
    """Measures all variants. Returns the total number of completed requests."""
    from weft.bench.http.rate_search import RunFile, highest_rate, keeps_up, middle_rates, pace
    from weft.bench.http.variants import Variant, parse_variants, running

    variants, run_file, completed = parse_variants(arguments.variant), RunFile(arguments.out), 0
    settings = {name: str(value) for name, value in sorted(vars(arguments).items()) if name not in NO_SETTINGS}

    rates = [*(arguments.rates or ()), *([] if arguments.find is None else [low, high, *middle_rates(low, high)])]
    starts = len(rates) * sum(not variant.is_running for variant in variants)
    tell_runs(arguments, rates * len(variants), starts, most=True)

    def measure(variant: Variant, rate: float) -> dict[str, Any]:
        def now() -> dict[str, Any]:
            print(f"{variant.name} at {rate:g} requests/s", file=sys.stderr, flush=True)
            arguments.request_rate = rate
            with running(variant, api_key(arguments)) as url:
                found = measure_server(arguments, url, new_words())
            return {**found, "pace": pace(found.pop("requests"))}

        nonlocal completed
        about = {"variant": variant.name, "target": variant.target, "rate": rate, "settings": settings}
        found = run_file.get(about, now)
        if found["was_interrupted"]:
            raise KeyboardInterrupt
        completed += found["completed"]
        _print(variant.name, rate, found)
        show_caveats(found, f"{variant.name} at {rate:g}: ")
        return found

    def holds(variant: Variant, rate: float) -> bool:
        found = measure(variant, rate)
        return bool(found["goodput_share"] >= arguments.hold and keeps_up(found))

    print(f"{'variant':<16}{'rate':>8}" + "".join(f"{name:>{_width(name)}}" for name in COLUMNS))
    for variant in variants:
        for rate in arguments.rates or ():
            measure(variant, rate)
        if arguments.find is not None:
            best = highest_rate(low, high, partial(holds, variant))
            told = f"{best:.3g} requests/s" if best is not None else f"less than {low:g} requests/s"
            share = f"{100 * arguments.hold:g}%"
            print(f"{variant.name}: the goals are kept by {share} of the requests up to {told}", flush=True)
    return completed


def _range(arguments: argparse.Namespace) -> tuple[float, float]:
    if arguments.rates is None and arguments.find is None:
        raise OptionError("nothing to measure: give --rates, or --find LOW:HIGH")
    if any(not 0 < rate < math.inf for rate in arguments.rates or ()):
        raise OptionError(f"--rates {' '.join(f'{rate:g}' for rate in arguments.rates)} must all be above 0")
    if arguments.request_rate != math.inf:
        raise OptionError(f"--request-rate {arguments.request_rate:g}: a sweep has its rates from --rates and --find")
    if not 0 < arguments.hold <= 1:
        raise OptionError(f"--hold {arguments.hold:g} must be a share above 0, at most 1")
    if arguments.trace is not None:
        raise OptionError("--trace has its own times: use bench serve with --rate-scale")
    if arguments.find is None:
        return 0.0, 0.0
    if not arguments.goodput:
        raise OptionError("--find needs goals to keep: give --goodput, as in ttft:1000 gap:100")
    try:
        low, high = map(float, arguments.find.split(":"))
    except ValueError:
        low = high = 0.0
    if not 0 < low < high < math.inf:
        raise OptionError(f"--find {arguments.find!r} must be LOW:HIGH, two rates above 0, the lower one first")
    return low, high


def _print(name: str, rate: float, found: dict[str, Any]) -> None:
    shown = "".join(f"{_cell(found.get(column)):>{_width(column)}}" for column in COLUMNS)
    print(f"{name:<16}{rate:>8.3g}{shown}", flush=True)
    for error, count in list(found["error_counts"].items())[:SHOWN_ERRORS]:
        print(f"  {count} x {error}", flush=True)


def _cell(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"


def _width(column: str) -> int:
    return max(13, len(column) + 2)
