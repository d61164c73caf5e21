"""Estimates of how long a measurement takes: one line on stderr before it begins, from the command's parameters.

Estimates are rough: the time that a server needs after the last request is sent is not known in advance.
"""

import argparse
import math
import sys
from collections.abc import Sequence

SERVER_START = 20.0  # seconds: a small model on a CPU, including the first calibration; a large model takes longer
ENGINE_START = 25.0
INTERFERENCE_RUN = 15.0  # seconds of one run on two CPU cores, with prompts of 3,000 tokens
INTERFERENCE_SHAPE = 6.0  # seconds of one run on a GPU
INTERFERENCE_OUTSIDE = 12.0  # seconds of one run against a server: 3 s before and after, and the prompts
SWEEP = 6 * 3600.0  # CPU seconds of all runs of `weft sweep`


def tell_estimate(seconds: float | None, why: str) -> None:
    """Prints an estimate. `seconds` is None if it is not known."""
    print(f"weft: {'' if seconds is None else f'about {in_words(seconds)}: '}{why}", file=sys.stderr, flush=True)


def in_words(seconds: float) -> str:
    """A duration as text, such as 40 s, 12 min or 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def sending_seconds(arguments: argparse.Namespace, rate: float) -> float | None:
    """Seconds in which the requests of one run are sent; None if this depends only on the server."""
    from weft.cli.load import DEFAULT_REQUESTS

    longest: float = arguments.duration
    if arguments.trace is not None:
        from weft.sim.traces import load_trace

        arrivals = load_trace(arguments.trace).scaled(arguments.rate_scale).arrivals[: arguments.num_prompts]
        return min(longest, arrivals[-1].time if arrivals else 0.0)
    if rate < math.inf and (arguments.num_prompts is not None or longest == math.inf):
        longest = min(longest, (arguments.num_prompts or DEFAULT_REQUESTS) / rate)
    return longest if longest < math.inf else None


def tell_runs(arguments: argparse.Namespace, rates: Sequence[float], starts: int, *, most: bool = False) -> None:
    """Prints an estimate for runs against servers, one for each rate. `starts` is the number of server starts."""
    each = [sending_seconds(arguments, rate) for rate in rates]
    known = [one for one in each if one is not None]
    what = f"{'at most ' if most else ''}{len(rates)} runs"
    begun = f", and {starts} starts of servers" if starts else ""
    if len(known) < len(each):
        tell_estimate(None, f"{what}{begun}; each takes as long as the server needs, as no --request-rate is given")
        return
    lengths = f"{in_words(min(known))}" + (f" to {in_words(max(known))}" if max(known) > 1.1 * min(known) else "")
    tell_estimate(sum(known) + starts * SERVER_START, f"{what} of {lengths}{begun}; a slow server takes longer")
