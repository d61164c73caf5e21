"""`weft bench ab` and `weft bench compare`: compare servers or policies."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from weft.cli.estimate import tell_runs
from weft.cli.load import (
    add_load_arguments,
    api_key,
    check_folders,
    interrupted,
    measure_server,
    new_words,
    show_caveats,
    with_defaults,
    write_html,
    write_json,
)
from weft.errors import EngineError, OptionError

AB_EPILOG = """\
examples:
  weft bench ab --variant "chunked: weft serve --port {port} --policy chunked" \\
                --variant "slo: weft serve --port {port} --policy slo" --request-rate 2 --input-len lognormal:200,1
  weft bench ab --variant "weft: http://127.0.0.1:8000" --variant "vllm: http://127.0.0.1:8001" --repeats 5
"""


def register(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    ab = kinds.add_parser(
        "ab",
        help="compare servers or policies, side by side",
        description="Measures variants in turn on the same machine with requests of the same times and lengths, "
        "several times, and tells by how much they differ, with 95% confidence intervals. A variant is a server that "
        "runs, or a command that starts one, which is ended after each run.",
        epilog=AB_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = ab.add_argument
    add(
        "--variant",
        action="append",
        required=True,
        metavar="NAME: URL|COMMAND",
        help="at least two; in a command, {port} is where the port goes",
    )
    add("--repeats", type=int, default=3, metavar="N", help="runs of each (default: 3)")
    add_load_arguments(ab)
    add("--json", type=Path, metavar="FILE", help="also write all runs and ratios")
    add(
        "--html",
        type=Path,
        metavar="FILE.html",
        help="a report of the first run of each (needs weft[charts])",
    )
    add("--chart", type=Path, metavar="FILE.svg", help="also draw percentiles of all runs (needs weft[charts])")
    add("--no-progress", dest="progress", action="store_false", help="no live view")
    ab.set_defaults(run=run_ab)
    compare = kinds.add_parser(
        "compare",
        help="compare what bench serve wrote",
        description="Sets the figures of two or more files side by side, each also as a multiple of the first.",
    )
    compare.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="of weft bench serve --json")
    compare.set_defaults(run=run_compare)


def run_ab(arguments: argparse.Namespace) -> int:
    from weft.bench.http.variants import parse_variants, running
    from weft.bench.http.versus import run_order

    check_folders(arguments)
    arguments = with_defaults(arguments)
    variants = {variant.name: variant for variant in parse_variants(arguments.variant)}
    if len(variants) < 2:
        raise OptionError("--variant is needed twice or more: there is nothing to compare with")
    if arguments.repeats < 1:
        raise OptionError(f"--repeats {arguments.repeats} must be at least 1")
    starts = arguments.repeats * sum(not variant.is_running for variant in variants.values())
    tell_runs(arguments, [arguments.request_rate] * arguments.repeats * len(variants), starts)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    order, was_interrupted, words = run_order(list(variants), arguments.repeats), False, new_words()
    for number, name in enumerate(order, start=1):
        print(f"run {number} of {len(order)}: {name}", file=sys.stderr, flush=True)
        try:
            with running(variants[name], api_key(arguments)) as url:
                # Other prompts for each run: two variants may be one server, or share a prefix cache.
                found = measure_server(arguments, url, words + number)
            was_interrupted = found["was_interrupted"]
        except KeyboardInterrupt:
            was_interrupted = True
        except EngineError as error:  # the results so far are still shown
            print(f"weft: {error}", file=sys.stderr)
            break
        if was_interrupted:
            break
        runs[name].append(found)
    _show(runs)
    if arguments.json is not None:
        from weft.bench.http.versus import comparison

        whole = min(map(len, runs.values()))
        told = comparison({name: found[:whole] for name, found in runs.items()}) if whole else {}
        ratios = {
            name: {figure: None if one is None else vars(one) for figure, one in ratios.items()}
            for name, ratios in told.items()
        }
        write_json(arguments.json, {"runs": runs, "ratios": ratios})
    if arguments.html is not None and all(runs.values()):
        write_html(arguments.html, [(name, found[0]) for name, found in runs.items()], " against ".join(runs))
    if arguments.chart is not None and all(runs.values()):
        from weft.bench.charts import variants_chart

        variants_chart(arguments.chart, runs)
    done = sum(map(len, runs.values()))
    if was_interrupted:
        return interrupted(f"after {done} of {len(order)} runs")
    return 0 if done == len(order) else 1


def run_compare(arguments: argparse.Namespace) -> int:
    if len(arguments.files) < 2:
        raise OptionError(f"{arguments.files[0]} alone cannot be compared: name two files or more")
    runs: dict[str, list[dict[str, Any]]] = {}
    for file in arguments.files:
        try:
            found = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise OptionError(f"cannot read {file}: {error}") from None
        if not isinstance(found, dict) or "completed" not in found:
            raise OptionError(f"{file} is not what weft bench serve --json writes")
        runs[str(file)] = [found]
    _note_differences({name: found for name, (found,) in runs.items()})
    _show(runs)
    return 0


def _note_differences(runs: dict[str, dict[str, Any]]) -> None:
    """Prints a note if the files were measured with different settings: then they compare settings, not servers."""
    for key in ("request_rate", "model_id", "trace"):
        told = {name: run[key] for name, run in runs.items() if key in run}
        if len({json.dumps(value) for value in told.values()}) > 1:
            print(f"note: {key} differs: {', '.join(f'{name} {value}' for name, value in told.items())}")
    for name, run in runs.items():
        if run.get("was_interrupted"):
            print(f"note: {name} was interrupted")


def _show(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Prints medians, and the ratios of the other variants to the first."""
    from weft.bench.http.versus import COMPARED, comparison, medians

    whole = min(map(len, runs.values()))
    if not whole:
        print("no run was completed")
        return
    runs = {name: found[:whole] for name, found in runs.items()}
    middle = {name: medians(found) for name, found in runs.items()}
    told = comparison(runs)
    width = max(12, *(len(name) + 2 for name in runs))
    lost = {name: _failed(found) for name, found in runs.items()}
    for name, found in runs.items():
        show_caveats(found[-1], f"{name}: ")
    print(f"{'':<20}" + "".join(f"{name:>{width}}" for name in runs))
    print(f"{'failed':<20}" + "".join(f"{lost[name]:>{width}}" for name in runs))
    for figure in COMPARED:
        values = [middle[name][figure] for name in runs]
        if all(value is None for value in values):
            continue
        cells = "".join(f"{'-' if value is None else f'{value:.2f}':>{width}}" for value in values)
        print(f"{figure:<20}{cells}   {', '.join(_told(name, told[name][figure], COMPARED[figure]) for name in told)}")


def _failed(runs: list[dict[str, Any]]) -> str:
    """Total of failed requests; "-" if a file of another tool does not have it."""
    counts = [run["failed"] for run in runs if isinstance(run.get("failed"), int)]
    return str(sum(counts)) if len(counts) == len(runs) else "-"


def _told(name: str, ratio: Any, more_is_better: bool) -> str:
    if ratio is None:
        return f"{name} -"
    if ratio.low is None:
        return f"{name} x{ratio.value:.3f}"
    verdict = "" if not ratio.is_clear else " better" if (ratio.value > 1) == more_is_better else " worse"
    return f"{name} x{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f}){verdict}"
