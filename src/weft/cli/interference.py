"""`weft bench interference`: the effect of long prompts on decoding streams, in virtual time and on real hardware."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.estimate import (
    ENGINE_START,
    INTERFERENCE_OUTSIDE,
    INTERFERENCE_RUN,
    INTERFERENCE_SHAPE,
    tell_estimate,
)
from weft.cli.load import api_key, check_folders, interrupted, write_json
from weft.cli.shapes import SHAPE_HELP
from weft.engine.options import check_milliseconds
from weft.errors import OptionError

if TYPE_CHECKING:
    from weft.bench.engine.interference import Interference
    from weft.bench.http.interference import ObservedInterference
    from weft.engine.engine import Engine

PROFILE = "h200-llama-3-8b"
SIMULATED_PROMPT = 60_000  # tokens
SHAPE_TOKENS = 16_384  # max_num_batched_tokens with --shape
SIMULATED_GAP = 0.025  # seconds
STREAM_TOKENS = 4000  # requested output tokens of each stream with --url: more than it produces during a run
REAL_FACTOR, SIMULATED_FACTOR = 1.3, 1.1  # multiples of the target that the 99.9th percentile must not exceed


def register(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "interference",
        help="what decoding streams notice of long prompts",
        description="Lets 32 streams decode, then brings two long prompts at once, and looks at the time between the "
        "streams' tokens while these are read: under monolithic, chunked (2,048 tokens a step) and slo, in virtual "
        "time on a hardware profile and for real on this machine. There the target of slo is three times the "
        "decode-only step that is measured first. With --shape the scenario is the one that GPU engines are compared "
        "by: four prompts of 16,000 tokens, one every half second, and a target of 25 ms. With --url a running server "
        "is measured instead.",
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="left out: the small model that ships with weft")
    add("--shape", metavar="S", help=f"{SHAPE_HELP}, instead of MODEL, with random weights")
    add("--url", metavar="URL", help="of a running OpenAI-compatible server, instead of all else: seen from outside")
    add("--api-key", metavar="KEY", help="of that server (default: the environment's OPENAI_API_KEY)")
    add(
        "--runs",
        type=int,
        default=5,
        metavar="N",
        help="real runs of slo, or of the server, of which the median counts (default: 5)",
    )
    add(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="of each long prompt, for real (default: 3000, or 16000 with --shape)",
    )
    add(
        "--gap-target-ms",
        type=float,
        metavar="MS",
        help="of slo, for real (default: three decode-only steps, or 25 with --shape); with --url, what the server's "
        "gaps are held against (default: nothing)",
    )
    add("--profile", metavar="NAME", help=f"for virtual time (default: {PROFILE})")
    add("--simulated-only", action="store_true", help="virtual time only")
    add("--json", type=Path, metavar="FILE", help="also write a list with one object a run")
    add("--chart", type=Path, metavar="FILE.svg", help="also draw every gap over time (needs weft[charts])")
    add("--no-progress", dest="progress", action="store_false", help="no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    _tell_estimate(arguments)
    if arguments.url is not None:
        return _measure_server(arguments)
    profile = arguments.profile or PROFILE
    print(
        f"{'where':<44} {'policy':<11} {'target':>8} {'p50':>8} {'p99':>8} {'p99.9':>8} {'max':>8} {'read in':>9}  ms"
    )
    found = [(f"virtual time, {profile}", _simulate(profile, 0.0, 0.0))]
    disturbed = (f"virtual time, {profile}, disturbed", _simulate(profile, 0.1, 0.05))
    for where, runs in (*found, disturbed):
        for run in runs:
            _print_gaps(where, run)
    real = [] if arguments.simulated_only else _measure_engine(arguments)
    for where, runs in (*found, disturbed):
        worst = max(run.p999 / run.target for run in runs if run.policy == "slo")
        print(f"{where}: slo's p99.9 is {worst:.2f} of the target ({_verdict(worst / SIMULATED_FACTOR)} 1.1)")
    if real:
        _print_shares("this machine: slo's", [run.within(REAL_FACTOR) for run in real if run.policy == "slo"])
    if arguments.json is not None:
        rows = [_row(where, run) for where, runs in [*found, disturbed, ("this machine", real)] for run in runs]
        write_json(arguments.json, rows)
    if arguments.chart is not None:
        from weft.bench.charts import interference_chart

        panels = [(f"{profile} (simulated)", found[0][1])]
        if real:
            panels.append((f"{arguments.model or arguments.shape or 'default model'} (measured)", _typical(real)))
        interference_chart(arguments.chart, panels)
    return 0


def _tell_estimate(arguments: argparse.Namespace) -> None:
    if arguments.simulated_only:
        return  # takes only about a second
    if arguments.url is not None:
        why = f"{arguments.runs} runs against the server; a slow one takes longer"
        tell_estimate(arguments.runs * INTERFERENCE_OUTSIDE, why)
        return
    runs = arguments.runs + 2  # plus one run of monolithic and one of chunked
    if arguments.shape is not None:
        tell_estimate(ENGINE_START + runs * INTERFERENCE_SHAPE, f"{runs} runs on this machine, if it has a GPU")
        return
    each = INTERFERENCE_RUN * max(1.0, (arguments.prompt_tokens or 0) / 3000)
    why = f"{runs} runs on this machine of {each:.0f} s each on two cores; MODEL may take longer"
    tell_estimate(ENGINE_START + runs * each, why)


def _check(arguments: argparse.Namespace) -> None:
    if arguments.runs < 1:
        raise OptionError(f"--runs {arguments.runs} must be at least 1")
    if arguments.prompt_tokens is not None and arguments.prompt_tokens < 1:
        raise OptionError(f"--prompt-tokens {arguments.prompt_tokens} must be at least 1")
    if arguments.gap_target_ms is not None:
        check_milliseconds("--gap-target-ms", arguments.gap_target_ms)
    if arguments.url is None and arguments.model is not None and arguments.shape is not None:
        raise OptionError(f"MODEL {arguments.model} and --shape {arguments.shape}: give one of them")
    if arguments.url is None and arguments.api_key is not None:
        raise OptionError("--api-key is for a server: name it with --url, or leave the key out")
    for name in ("shape", "profile", "simulated_only", "chart") if arguments.url is not None else ():
        if getattr(arguments, name):
            raise OptionError(f"--{name.replace('_', '-')} says nothing of a server: leave it out, or --url")
    check_folders(arguments)


def _measure_server(arguments: argparse.Namespace) -> int:
    """Measures a running server. MODEL is the name of the model there."""
    import asyncio

    observed: list[ObservedInterference] = []
    was_interrupted = False
    print(f"{'run':<8}{'gaps, ms':<10} {'p50':>8} {'p99':>8} {'p99.9':>8} {'max':>8} {'read in':>9}")
    try:
        asyncio.run(_interfere(arguments, observed))
    except KeyboardInterrupt:  # the results so far are still printed
        was_interrupted = True
    if observed:
        _print_medians(observed)
    target = arguments.gap_target_ms
    told = [run for run in observed if len(run.before) and len(run.during)]  # a slow server may have no gaps at all
    if target is not None and told:
        _print_shares(f"{arguments.url}: the", [_share(run, target / 1000) for run in told])
    if arguments.json is not None and observed:
        write_json(arguments.json, [_observed_row(arguments.url, target, run) for run in observed])
    return interrupted(f"after {len(observed)} of {arguments.runs} runs") if was_interrupted else 0


async def _interfere(arguments: argparse.Namespace, observed: "list[ObservedInterference]") -> None:
    """Performs all runs and appends each to `observed`."""
    import time

    from weft.bench.engine.interference import Scenario
    from weft.bench.http.client import Client
    from weft.bench.http.interference import interfere
    from weft.bench.http.prompts import Atoms, make_requests
    from weft.bench.http.workload import RequestSpec

    scenario = Scenario()
    tokens = arguments.prompt_tokens or scenario.prompt_tokens
    streams = [RequestSpec(0.0, scenario.stream_prompt, STREAM_TOKENS)] * scenario.streams
    prompts = [RequestSpec(number * scenario.every, tokens, 1) for number in range(scenario.prompts)]
    words = int(time.time())  # new prompts in every run: a prompt in the server's prefix cache would disturb nothing
    async with Client(arguments.url, arguments.model, key=api_key(arguments)) as client:
        await client.discover()
        if not client.asks_to_ignore_eos:
            print("note: the server refused ignore_eos: streams may end too soon", file=sys.stderr)
        atoms = await Atoms.find(client.count)
        for number in range(arguments.runs):
            requests = await make_requests([*streams, *prompts], atoms, words + number, client.count)
            observed.append(await interfere(client, requests[: len(streams)], requests[len(streams) :]))
            _print_parts(f"{number + 1}", _parts(observed[-1]), observed[-1].read)
            print("  first tokens of the long prompts after", _milliseconds(observed[-1].ttfts), flush=True)


def _parts(observed: "ObservedInterference") -> dict[str, dict[str, float]]:
    parts = {"before": observed.before, "during": observed.during, "after": observed.after}
    return {name: _percentiles(gaps.tolist()) for name, gaps in parts.items()}


def _print_parts(run: str, parts: dict[str, dict[str, float]], read: float) -> None:
    for name, found in parts.items():
        cells = " ".join(f"{value:>8.1f}" for value in found.values()) if found else "none"
        print(f"{run:<8}{name:<10} {cells}" + f" {1000 * read:>9.1f}" * (name == "during"), flush=True)


def _print_medians(observed: "list[ObservedInterference]") -> None:
    """Prints the median of each figure over the runs."""
    import numpy as np

    every = [_parts(run) for run in observed]
    parts: dict[str, dict[str, float]] = {}
    for name in every[0]:
        known = [one[name] for one in every if one[name]]
        parts[name] = {kind: float(np.median([found[kind] for found in known])) for kind in known[0]} if known else {}
    _print_parts("median", parts, float(np.median([run.read for run in observed])))


def _share(observed: "ObservedInterference", target: float) -> float:
    """`Interference.within` for a run against a server. `target` is in seconds."""
    from weft.bench.engine.interference import Interference

    run = Interference("", target, observed.before, observed.during, observed.times, 0, observed.read, observed.ttfts)
    return run.within(REAL_FACTOR)


def _observed_row(url: str, target_ms: float | None, observed: "ObservedInterference") -> dict[str, Any]:
    parts = _parts(observed)
    return {
        "where": url,
        "policy": None,
        "target_ms": target_ms,
        "quiet_gap_ms": parts["before"],
        "gap_ms": parts["during"],
        "after_gap_ms": parts["after"],
        "steps_with_prefill": None,
        "read_in_s": observed.read,
        "ttft_ms": [1000 * ttft for ttft in observed.ttfts],
    }


def _simulate(name: str, bias: float, noise: float) -> "list[Interference]":
    from weft.bench.engine.interference import POLICIES, Scenario, measure
    from weft.bench.engine.virtual import virtual_engine
    from weft.sim.profiles import load_profile
    from weft.sim.simulator import Truth

    profile = load_profile(name)
    truth = Truth(profile.coefficients, bias, noise)
    return [
        measure(virtual_engine(profile, truth), policy, Scenario(prompt_tokens=SIMULATED_PROMPT), target=SIMULATED_GAP)
        for policy in POLICIES
    ]


def _measure_engine(arguments: argparse.Namespace) -> "list[Interference]":
    """Runs slo several times, and each other policy once, for comparison."""
    from weft.bench.engine.interference import GPU_SCENARIO, POLICIES, Scenario, measure
    from weft.progress import work_progress

    scenario = Scenario() if arguments.shape is None else GPU_SCENARIO
    if arguments.prompt_tokens is not None:
        scenario = replace(scenario, prompt_tokens=arguments.prompt_tokens)
    target = None if arguments.shape is None else SIMULATED_GAP
    if arguments.gap_target_ms is not None:
        target = arguments.gap_target_ms / 1000
    order = [policy for policy in POLICIES if policy != "slo"] + ["slo"] * arguments.runs
    runs = []
    with _engine(arguments) as engine:
        for number, policy in enumerate(order):
            tokens = scenario.prompts * scenario.prompt_tokens
            with work_progress(f"{policy}, run {number + 1} of {len(order)}", tokens, arguments.progress) as advance:
                run = measure(engine, policy, scenario, target=target, seed=number, progress=advance)
            _print_gaps("this machine", run)
            if scenario.every:
                print("  first tokens of the long prompts after", _milliseconds(run.ttfts), flush=True)
            runs.append(run)
    return runs


@contextmanager
def _engine(arguments: argparse.Namespace) -> "Iterator[Engine]":
    target = {"gap_target_ms": 1000}  # any target makes the engine calibrate its step times
    if arguments.shape is None:
        from weft.llm import LLM

        with LLM(arguments.model, **target) as llm:
            yield llm.engine
        return
    from weft.bench.engine.shapes import closing_engine, shape_directory
    from weft.engine.options import EngineOptions

    options = EngineOptions.of(
        load_format="dummy", max_num_batched_tokens=SHAPE_TOKENS, enable_prefix_caching=False, **target
    )
    with shape_directory(arguments.shape) as path, closing_engine(options, path) as engine:
        yield engine


def _typical(runs: "list[Interference]") -> "list[Interference]":
    """One run per policy: the median run if there are several."""
    by_policy: dict[str, list[Interference]] = {}
    for run in sorted(runs, key=lambda run: run.within(REAL_FACTOR)):
        by_policy.setdefault(run.policy, []).append(run)
    found = {policy: every[len(every) // 2] for policy, every in by_policy.items()}
    return [found[policy] for policy in dict.fromkeys(run.policy for run in runs)]


def _milliseconds(seconds: Sequence[float]) -> str:
    return ", ".join(f"{1000 * one:.0f}" for one in seconds) + " ms"


def _print_gaps(where: str, run: "Interference") -> None:
    import numpy as np

    times = [run.target, *np.percentile(run.gaps, (50, 99, 99.9, 100)), run.prefill]
    cells = " ".join(f"{1000 * time:>8.1f}" for time in times)
    print(f"{where:<44} {run.policy:<11} {cells}   {run.steps} steps with prefill", flush=True)


def _print_shares(whose: str, shares: Sequence[float]) -> None:
    import numpy as np

    middle = float(np.median(shares))
    print(
        f"{whose} p99.9 over (1.3 targets + the noise of decoding alone) is {middle:.2f}, median of {len(shares)} runs "
        f"({', '.join(f'{share:.2f}' for share in shares)}): {_verdict(middle)} 1"
    )


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles in milliseconds; empty if there are no values."""
    import numpy as np

    if not seconds:
        return {}
    found = np.percentile(seconds, (50, 99, 99.9, 100)) * 1000
    return dict(zip(("p50", "p99", "p999", "max"), found.tolist(), strict=True))


def _row(where: str, run: "Interference") -> dict[str, Any]:
    return {
        "where": where,
        "policy": run.policy,
        "target_ms": run.target * 1000,
        "quiet_gap_ms": _percentiles(run.quiet.tolist()),
        "gap_ms": _percentiles(run.gaps.tolist()),
        "after_gap_ms": {},  # not measured
        "steps_with_prefill": run.steps,
        "read_in_s": run.prefill,
        "ttft_ms": [1000 * ttft for ttft in run.ttfts],
    }


def _verdict(share: float) -> str:
    return "within" if share <= 1 else "NOT within"
