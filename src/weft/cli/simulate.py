"""`weft simulate`: plays a trace, or synthetic traffic, against the real scheduler, under a virtual clock."""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import OptionError

if TYPE_CHECKING:
    from weft.sim.compare import Report
    from weft.sim.record import Write
    from weft.sim.traces import Trace

EPILOG = """\
policies:
  slo            prefill gets what the tightest gap target leaves, least slack first; what cannot be kept is refused
  chunked:N      a fixed budget of N tokens a step, decodes (which are never cut) included
  monolithic     whole prompts, before anything else: the problem that the others solve
  slo-order:N    slo's order and refusal with chunked's fixed budget, to see which part of the difference is which

A promise is kept if the first token comes within its target and 99% of the gaps between tokens are within theirs; a
refused request is a broken promise. Goodput is kept promises in a second of arrivals. --noise and --bias make the steps
take longer than the scheduler is told.

workloads:
  poisson:rate=R,prompt=L,output=L,duration=S        arrivals at random, R in a second, for S seconds
  gamma:rate=R,cv=C,prompt=L,output=L,duration=S     gaps between them with a coefficient of variation of C: 1 is
                                                     poisson, 3 comes in bursts
  L is fixed:N, uniform:A:B, lognormal:MEDIAN:SIGMA or exponential:MEAN, in tokens, cut to what the context holds.
  Such as --workload "gamma:rate=5,cv=3,prompt=lognormal:1000:1.0,output=uniform:50:400,duration=600"
"""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "simulate",
        help="play a trace against the scheduler, under a virtual clock",
        description="Plays a trace against the very scheduler that serves, on a hardware profile and a virtual clock.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    traffic = parser.add_mutually_exclusive_group(required=True)
    traffic.add_argument("--trace", type=Path, metavar="FILE", help="Azure's CSV or Mooncake's JSON lines")
    traffic.add_argument("--workload", metavar="SPEC", help="invented traffic instead of a trace, see below")
    add(
        "--profile", required=True, metavar="NAME", help="hardware profile: a name that ships with weft, or a JSON file"
    )
    add("--policy", default="slo", metavar="P", help="see below (default: slo)")
    add("--compare", metavar="P,P,...", help="run several policies over the same trace")
    add("--duration", type=float, metavar="S", help="only the first S seconds of the trace, before it is scaled")
    add("--rate-scale", type=float, default=1.0, metavar="X", help="arrivals X times as fast (default: 1)")
    add("--gap-target-ms", type=float, default=50.0, metavar="G", help="promised time between tokens (default: 50)")
    add(
        "--ttft-target-ms", type=float, default=1000.0, metavar="T", help="promised time to first token (default: 1000)"
    )
    add(
        "--ttft-target-per-1k-ms",
        type=float,
        default=250.0,
        metavar="U",
        help="and per 1,000 prompt tokens (default: 250)",
    )
    add(
        "--noise",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="random error of step times, such as 0.05 (default: 0)",
    )
    add(
        "--bias", type=float, default=0.0, metavar="SHARE", help="steps take this much longer, such as 0.1 (default: 0)"
    )
    add("--seed", type=int, default=0, metavar="N", help="of the noise and the workload (default: 0)")
    add("--json", type=Path, metavar="FILE", help="also write a list with one object a policy")
    add(
        "--record",
        type=Path,
        metavar="FILE",
        help="also write a recording, as weft serve --record does, for weft timeline; one policy only",
    )
    add("--no-progress", dest="progress", action="store_false", help="no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from weft.core import Targets
    from weft.progress import work_progress
    from weft.sim.compare import make_policy, report, run_policy
    from weft.sim.fidelity import known_error
    from weft.sim.profiles import load_profile
    from weft.sim.record import write_recording
    from weft.sim.simulator import Truth

    _check(arguments)
    profile = load_profile(arguments.profile)
    names = (arguments.compare or arguments.policy).split(",")
    for name in names:
        make_policy(name, profile)  # an unknown name is reported before the work
    trace, left_out = _trace(arguments, profile.max_model_len)
    targets = Targets(
        gap=arguments.gap_target_ms / 1000,
        ttft=arguments.ttft_target_ms / 1000,
        ttft_per_1k=arguments.ttft_target_per_1k_ms / 1000,
    )
    smallest = profile.coefficients.smallest_step
    if targets.gap <= smallest:
        raise OptionError(
            f"--gap-target-ms {arguments.gap_target_ms:g} cannot be met: an empty step takes {smallest * 1000:.2f} ms "
            f"on {profile.name}"
        )
    truth = Truth(profile.coefficients, arguments.bias, arguments.noise, arguments.seed)
    reports = []
    for name in names:
        with work_progress(name, len(trace.arrivals), arguments.progress) as advance:
            with _recording(arguments.record) as write:
                if write is None:
                    played = run_policy(name, trace, profile, targets, truth, advance)
                else:
                    played = write_recording(write, name, trace, profile, targets, truth, advance)
            reports.append(report(name, played, targets))
    _show(reports, trace, arguments)
    for name in names:
        print(known_error(profile, name))
    if arguments.json is not None:
        rows = [{**asdict(one), "left_out_too_long": left_out} for one in reports]
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    for name in ("rate_scale", "gap_target_ms", "ttft_target_ms", "duration"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise OptionError(f"--{name.replace('_', '-')} {value} must be above 0")
    for name in ("ttft_target_per_1k_ms", "noise"):
        if not 0 <= getattr(arguments, name) < math.inf:
            raise OptionError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least 0")
    if not -1 < arguments.bias < math.inf:
        raise OptionError(f"--bias {arguments.bias} must be above -1")
    if arguments.record is not None and "," in (arguments.compare or ""):
        raise OptionError(f"--record holds one run, but --compare {arguments.compare} names several: name one policy")


@contextmanager
def _recording(path: Path | None) -> "Iterator[Write | None]":
    """Yields a function that writes an encoded frame to the file; None if no file is given."""
    if path is None:
        yield None
        return
    from weft.observe.frames import HEADER, packed

    try:
        with path.open("wb") as file:
            file.write(HEADER)
            yield lambda frame: file.write(packed([frame]))
    except OSError as error:
        raise OptionError(f"--record {path}: {error.strerror}; name a file that can be written") from None


def _trace(arguments: argparse.Namespace, max_model_len: int) -> "tuple[Trace, int]":
    """The trace to play, and the number of requests left out because they are longer than the context."""
    from weft.sim.traces import load_trace
    from weft.sim.workloads import parse_workload

    if arguments.workload is not None:
        trace = parse_workload(arguments.workload).trace(arguments.seed, max_model_len)
    else:
        trace = load_trace(arguments.trace)
    if trace.was_unsorted:
        print(f"weft: {arguments.trace} was not in order of time; it was sorted", file=sys.stderr)
    if arguments.duration is not None:
        trace = trace.first(arguments.duration)
    trace, left_out = trace.fitting(max_model_len)
    if left_out is not None:
        print(f"weft: {arguments.trace}: {left_out}", file=sys.stderr)
    return trace.scaled(arguments.rate_scale), 0 if left_out is None else left_out.count


def _show(reports: "list[Report]", trace: "Trace", arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    promise = f"{arguments.ttft_target_ms:g} ms + {arguments.ttft_target_per_1k_ms:g} per 1,000 tokens"
    title = (
        f"{trace.name}, {len(trace.arrivals)} requests in {trace.span:.0f} s on {arguments.profile}; "
        f"promised: first token in {promise}, gaps of {arguments.gap_target_ms:g} ms"
    )
    table = Table(title=title, title_justify="left")
    for heading in (
        "policy",
        "kept",
        "goodput/s",
        "refused",
        "TTFT ms",
        "TPOT ms",
        "gap ms",
        "tok/s",
        "hits",
        "preempted",
    ):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for one in reports:
        times = [" / ".join(f"{value:.4g}" for value in t.values()) for t in (one.ttft_ms, one.tpot_ms, one.gap_ms)]
        table.add_row(
            one.policy,
            f"{one.kept:.1%}",
            f"{one.goodput_rps:.2f}",
            str(one.refused),
            *times,
            f"{one.output_tokens_per_s:.0f}",
            f"{one.prefix_hit_rate:.1%}",
            str(one.preemptions),
        )
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    console.print("times: p50 / p99 / p99.9 / max")
