"""`weft sweep`: capacity and goodput of every policy over rates and gap targets, with tables that compare them."""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.estimate import SWEEP, tell_estimate
from weft.errors import OptionError

if TYPE_CHECKING:
    from weft.sim.sweep_grid import SweepRun

EPILOG = """\
Names of runs are TRACE/TRUTH/POLICY/GAP, such as azure/exact/slo/25ms; plain policies (monolithic, chunked:N) look at
no targets, so that one run, such as mooncake/disturbed/chunked:512/, is scored for all of them. At which rates an
ablated chunk (slo-order:N) is run depends on slo's results for the same trace and gap, which therefore come first.

FILE has one line of JSON a run and gap target. What is in it is not run again: a sweep that was stopped goes on where
it was. It names the profile, the version of weft and the scheduler (a hash of the code that decides the outcome of a
run, without its comments): after a change of any of them, take another file. --report warns of another scheduler.

--part capacity runs only what the table of capacities needs: for slo, the best slo-order:N, the best chunked:N and
monolithic, the highest rates at which 90% and 99% of all requests keep their promises. --part peaks runs the rest.
"""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "sweep",
        help="compare all policies over rates and gap targets",
        description="Plays the Azure and the Mooncake trace under every policy, over a grid of rates, for four gap "
        "targets, with exact and with disturbed step times. Takes hours of CPU time, and can be stopped at any time.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--traces",
        type=Path,
        metavar="DIR",
        help="folder with AzureLLMInferenceTrace_conv.csv and mooncake_conversation_trace.jsonl (docs/start.md)",
    )
    add("--out", type=Path, required=True, metavar="FILE", help="results, JSON lines; added to if it is there")
    add("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    add("--only", default="", metavar="SUBSTRING", help="only runs with this in their name, see below")
    add("--part", choices=("all", "peaks", "capacity"), default="all", help="what to run, see below (default: all)")
    add("--table", type=Path, metavar="FILE.md", help="also write tables and claims, in Markdown")
    add("--report", action="store_true", help="only write --table from what is in --out; nothing is run")
    add("--no-progress", dest="progress", action="store_false", help="no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from weft.sim.sweep import check_jobs, sweep
    from weft.sim.sweep_grid import Grid
    from weft.sim.sweep_report import write_report
    from weft.sim.sweep_run import load_material

    if arguments.report and arguments.table is None:
        raise OptionError("--report needs --table FILE.md to write to")
    if not arguments.report:
        if arguments.traces is None:
            raise OptionError("--traces DIR is missing (only --report runs nothing and needs none)")
        jobs = (os.cpu_count() or 1) if arguments.jobs is None else arguments.jobs
        check_jobs(jobs)
        material = load_material(Grid(), arguments.traces)
        _tell_estimate(arguments, Grid().coarse_runs(), jobs)
        with _growing_bar(arguments.progress) as tell:
            sweep(material, arguments.out, jobs, arguments.only, part=arguments.part, tell=tell)
    if arguments.table is not None:
        write_report(arguments.out, arguments.table, Grid())
    return 0


def _tell_estimate(arguments: argparse.Namespace, runs: "list[SweepRun]", jobs: int) -> None:
    share = sum(arguments.only in run.name for run in runs) / len(runs)
    if not share:
        return  # `sweep` reports it as an error
    why = f"with {jobs} processes, less where {arguments.out} has runs already; it may be stopped, and goes on"
    tell_estimate(SWEEP * share / min(jobs, os.cpu_count() or 1), why)


@contextmanager
def _growing_bar(show: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar with a growing total: peaks that are found need more runs near them."""
    if not show:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Refreshed manually: a drawing thread is not safe when the workers are forked.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("", total=None)

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, refresh=True)

        yield tell
