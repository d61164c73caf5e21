"""`weft bench fidelity`: serves requests on a real engine, simulates the same requests, and compares the results."""

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft import __version__
from weft.bench.engine.other_processes import OtherProcesses
from weft.bench.engine.shapes import shape_directory
from weft.cli.estimate import SERVER_START, in_words, tell_estimate
from weft.cli.load import api_key, check_folders, new_words, write_json
from weft.cli.options import add_engine_arguments, engine_options, serve_arguments
from weft.cli.shapes import SHAPE_HELP
from weft.engine.options import POLICIES, EngineOptions
from weft.errors import EngineError, OptionError

if TYPE_CHECKING:
    from weft.sim.fidelity import Served
    from weft.sim.profiles import Profile
    from weft.sim.traces import Trace

TARGETS = {"gap_target_ms": 50.0, "ttft_target_ms": 1000.0, "ttft_target_per_1k_ms": 250.0}
# Options that do not affect the result.
OUTPUT_OPTIONS = ("json", "table", "update_profile", "from_json", "progress", "api_key", "help")
BEGIN, END = "<!-- results: written by weft bench fidelity --table -->", "<!-- end of results -->"
COLUMN_WIDTHS = (28, 12, 12, 14, 20)  # column widths on the terminal

EPILOG = """\
examples:
  weft bench fidelity --workload "poisson:rate=2,prompt=lognormal:150:1.0,output=uniform:20:60,duration=60"
  weft bench fidelity --shape llama-3-8b --trace AzureLLMInferenceTrace_conv.csv --rate-scale 3 --duration 40 \\
      --policy slo,chunked --gap-target-ms 25 --ttft-target-per-1k-ms 0 --no-enable-prefix-caching
  weft bench fidelity --from result.json --table docs/fidelity.md

The engine is measured before the play (its calibration); nothing is fitted to what is played. See docs/fidelity.md.
"""


def register(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "fidelity",
        help="how far the simulator is from a real engine",
        description="Plays a trace or a workload against a real engine, over HTTP, and in the simulator, with the "
        "profile that the engine's calibration makes. Prints time to first token, time between tokens, throughput and "
        "promises kept of both, and the error. A server is started for every served run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", metavar="S", help=f"{SHAPE_HELP}, instead of MODEL, with random weights")
    add("--url", help="of a running weft server, instead of MODEL: it has its own policy, targets and limits")
    add("--api-key", metavar="KEY", help="of that server (default: the environment's OPENAI_API_KEY)")
    add("--embedded", action="store_true", help="an engine in this process instead of a server: no HTTP")
    played = parser.add_argument_group("what is played")
    add = played.add_argument
    add("--trace", type=Path, metavar="FILE", help="Azure's CSV or Mooncake's JSON lines")
    add("--workload", metavar="SPEC", help="invented traffic instead, as weft simulate --help explains")
    add("--rate-scale", type=float, metavar="X", help="a trace X times as fast (default: 1)")
    add("--duration", type=float, metavar="S", help="the first S seconds of a trace, after it is scaled")
    add("--seed", type=int, metavar="N", help="of the workload (default: 0)")
    add("--repeats", type=int, default=2, metavar="N", help="served runs of each policy (default: 2)")
    promises = parser.add_argument_group("policies and targets")
    add = promises.add_argument
    add("--policy", metavar="P,P,...", help=f"one or more of {', '.join(POLICIES)} (default: slo)")
    add("--gap-target-ms", type=float, metavar="MS", help="between tokens (default: 50)")
    add("--ttft-target-ms", type=float, metavar="MS", help="to the first token (default: 1000)")
    add("--ttft-target-per-1k-ms", type=float, metavar="MS", help="and per 1,000 prompt tokens (default: 250)")
    add("--profile", metavar="NAME", help="instead of the engine's own calibration: a name, or a JSON file")
    told = parser.add_argument_group("what is told")
    add = told.add_argument
    add("--json", type=Path, metavar="FILE", help="also write the result as a JSON object")
    add("--from", dest="from_json", type=Path, metavar="FILE", help="play nothing, tell what --json wrote")
    add("--table", type=Path, metavar="FILE.md", help="also put the tables between the result marks of this file")
    add("--update-profile", metavar="NAME", help="also note the errors in this profile, for weft simulate to tell")
    add("--no-progress", dest="progress", action="store_false", help="no live view")
    add_engine_arguments(parser)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    result = _measured(arguments) if arguments.from_json is None else _read(arguments.from_json)
    # Files are written first: printing may fail, if the reader of the output closes it.
    if arguments.json is not None:
        write_json(arguments.json, result)
    if arguments.table is not None:
        _write_table(arguments.table, result)
    if arguments.update_profile is not None:
        _update_profile(arguments.update_profile, result)
    _show(result)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    from weft.sim.profiles import profile_path

    check_folders(arguments)
    for name in (arguments.profile, arguments.update_profile):
        if name is not None:
            profile_path(name)
    if arguments.table is not None:
        _parts(arguments.table)
    if arguments.from_json is not None:
        _refuse(arguments, _given(arguments) - {*OUTPUT_OPTIONS}, "--from plays nothing; leave it out")
        return
    if (arguments.trace is None) == (arguments.workload is None):
        raise OptionError("give either --trace FILE or --workload SPEC: there must be something to play")
    if arguments.workload is not None:
        _refuse(arguments, {"rate_scale", "duration"}, "it is for a trace; a workload has its own rate and duration")
    else:
        _refuse(arguments, {"seed"}, "it is for a workload; a trace has its own times")
    _check_subject(arguments)
    for policy in _policies(arguments):
        if policy not in POLICIES:
            raise OptionError(f"--policy {policy!r} is unknown: choose of {', '.join(POLICIES)}")
    for name in ("rate_scale", "duration", "gap_target_ms", "ttft_target_ms"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise OptionError(f"--{name.replace('_', '-')} {value:g} must be above 0")
    if arguments.ttft_target_per_1k_ms is not None and not 0 <= arguments.ttft_target_per_1k_ms < math.inf:
        raise OptionError(f"--ttft-target-per-1k-ms {arguments.ttft_target_per_1k_ms:g} must be at least 0")
    if arguments.repeats < 1:
        raise OptionError(f"--repeats {arguments.repeats} must be at least 1")


def _check_subject(arguments: argparse.Namespace) -> None:
    """Raises if an option does not apply to the chosen kind of engine (--url or MODEL)."""
    if arguments.url is None:
        _refuse(arguments, {"api_key"}, "it is for a running server; name that with --url, or leave the key out")
        if arguments.model is not None and arguments.shape is not None:
            raise OptionError(f"MODEL {arguments.model} and --shape {arguments.shape}: give one of them")
        return
    group = next(group for group in arguments.parser._action_groups if group.title == "engine")
    own = {action.dest for action in group._group_actions}
    _refuse(arguments, {*own, "model", "shape", "embedded", "policy"}, "the server at --url has its own; leave it out")


def _given(arguments: argparse.Namespace) -> set[str]:
    """Names of options that differ from their defaults."""
    actions = arguments.parser._actions
    return {one.dest for one in actions if hasattr(arguments, one.dest) and getattr(arguments, one.dest) != one.default}


def _refuse(arguments: argparse.Namespace, names: set[str], told: str) -> None:
    for name in sorted(names & _given(arguments)):
        shown = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
        raise OptionError(f"{shown} {getattr(arguments, name)}: {told}")


def _policies(arguments: argparse.Namespace) -> list[str]:
    """The policies, slo first: its start makes the calibration that all policies are simulated with."""
    names = dict.fromkeys((arguments.policy or "slo").split(","))  # with --url the name is not used: any one works
    return sorted(names, key=lambda name: name != "slo")


# --- the engine under test ---


@dataclass(frozen=True)
class ServedEngine:
    """An engine that is ready to serve."""

    facts: dict[str, Any]  # as in /server_info
    max_num_batched_tokens: int
    model: str
    play: "Callable[[Trace, int], Served]"  # the int is a seed of the prompts

    def profile(self, calibrated: "Profile") -> "Profile":
        """The calibration with this engine's limits: the free memory of a device may differ between starts."""
        return replace(
            calibrated,
            max_model_len=self.facts["max_model_len"],
            kv_tokens=self.facts["num_blocks"] * self.facts["block_size"],
            block_size=self.facts["block_size"],
            max_num_seqs=self.facts["max_num_seqs"],
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


@contextmanager
def _served_engine(arguments: argparse.Namespace, policy: str) -> Iterator[ServedEngine]:
    if arguments.embedded:
        with _embedded(arguments, policy) as found:
            yield found
        return
    from weft.bench.http.fast_loop import on_fast_loop
    from weft.bench.http.replay import replay, server_info
    from weft.bench.http.variants import Variant, running

    command = [sys.executable, "-m", "weft", "serve", "--port", "{port}", *serve_arguments(_engine(arguments, policy))]
    key = api_key(arguments) if arguments.url is not None else os.environ.get("WEFT_API_KEY", "").partition(",")[0]
    with running(Variant(policy, arguments.url or shlex.join(command)), key or None) as url:
        info = on_fast_loop(server_info(url, key or None))
        facts = info["engine"]

        own = [pid for pid in info["processes"].values() if pid is not None]

        def play(trace: "Trace", words: int) -> "Served":
            others = OtherProcesses(own)
            show = arguments.progress and sys.stderr.isatty()
            vocab_size = facts["vocab_size"]
            served = on_fast_loop(replay(url, trace, vocab_size=vocab_size, words=words, key=key or None, show=show))
            return served if arguments.url is not None else replace(served, others=others.share())

        yield ServedEngine(facts, info["engine_options"]["max_num_batched_tokens"], info["model"], play)


@contextmanager
def _embedded(arguments: argparse.Namespace, policy: str) -> Iterator[ServedEngine]:
    import msgspec

    from weft.bench.engine.replay import replay
    from weft.bench.engine.shapes import closing_engine
    from weft.bench.http.replay import token_prompts
    from weft.llm import resolve_model_path
    from weft.progress import work_progress
    from weft.serve.engines.engine_main import engine_info_of

    options = EngineOptions.of(**engine_options(_engine(arguments, policy)))
    with closing_engine(options, resolve_model_path(options.model)) as engine:
        facts = msgspec.to_builtins(engine_info_of(engine, asdict(options)))

        def play(trace: "Trace", words: int) -> "Served":
            warm, prompts = token_prompts(trace, facts["vocab_size"], words)
            replay(engine, warm, prompts[len(trace.arrivals) :])
            with work_progress(f"{policy}, served", len(trace.arrivals), arguments.progress) as advance:
                others = OtherProcesses()
                return replace(replay(engine, trace, prompts, advance), others=others.share())

        yield ServedEngine(facts, options.max_num_batched_tokens, options.model or "default model", play)


def _engine(arguments: argparse.Namespace, policy: str) -> argparse.Namespace:
    """The engine's options for a policy. Only slo has targets."""
    none = dict.fromkeys(("gap_target_ms", "ttft_target_ms")) | {"ttft_target_per_1k_ms": 0.0}
    targets = _targets_ms(arguments) if policy == "slo" else none
    return argparse.Namespace(**{**vars(arguments), "policy": policy, **targets})


def _has_targets(facts: dict[str, Any]) -> bool:
    return facts["gap_target"] is not None or facts["ttft_target"] is not None


def _targets_ms(arguments: argparse.Namespace, facts: dict[str, Any] | None = None) -> dict[str, float]:
    """Targets in milliseconds, by option name: those of a server at --url if it has any, else the given ones."""
    if arguments.url is None or facts is None or not _has_targets(facts):
        return {
            name: default if getattr(arguments, name) is None else getattr(arguments, name)
            for name, default in TARGETS.items()
        }
    values = facts["gap_target"], facts["ttft_target"], facts["ttft_target_per_1k"]
    return {name: math.inf if one is None else 1e3 * one for name, one in zip(TARGETS, values, strict=True)}


# --- served and simulated results ---


@dataclass(frozen=True)
class PolicyRuns:
    """Served results of one policy, and the inputs of its simulation."""

    policy: str
    facts: dict[str, Any]
    model: str
    calibration: "Profile"
    profile: "Profile"  # the calibration with this engine's limits
    trace: "Trace"
    left_out: int  # requests longer than the context
    runs: "list[Served]"


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Serves and simulates all policies. Returns the whole result, ready for JSON."""
    from weft.sim.profiles import load_profile

    command, policies = _command(arguments), _policies(arguments)
    _tell_estimate(arguments, len(policies))
    name = arguments.shape
    plays: list[PolicyRuns] = []
    with ExitStack() as stack:
        if arguments.shape is not None:
            arguments.model = str(stack.enter_context(shape_directory(arguments.shape)))
            arguments.load_format = "dummy"
        calibration = load_profile(arguments.profile) if arguments.profile is not None else None
        if calibration is None and arguments.url is None and policies[0] != "slo":
            _say("starting an engine with targets for its calibration")
            with _served_engine(arguments, "slo") as engine:
                calibration = _calibrated(engine)
        for policy in policies:
            plays.append(_serve_policy(arguments, policy, calibration))
            calibration = plays[-1].calibration
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "weft": __version__,
        "command": command,
        "how": "embedded" if arguments.embedded else "over HTTP",
        **_about(arguments, plays[-1], name),
        "policies": [_result(arguments, play) for play in plays],
    }


def _tell_estimate(arguments: argparse.Namespace, policies: int) -> None:
    from weft.sim.traces import load_trace
    from weft.sim.workloads import parse_workload

    if arguments.workload is not None:
        each = parse_workload(arguments.workload).duration
    else:
        each = min(load_trace(arguments.trace).span / (arguments.rate_scale or 1.0), arguments.duration or math.inf)
    runs = policies * arguments.repeats
    starts = 0 if arguments.url is not None else runs
    told = f"{runs} served runs of {in_words(each)}" + (f", and {starts} starts of the engine" if starts else "")
    tell_estimate(runs * each + starts * SERVER_START, f"{told}; a large model takes longer to start")


def _serve_policy(arguments: argparse.Namespace, policy: str, calibration: "Profile | None") -> PolicyRuns:
    """Serves all runs of a policy. Every run has a new engine, because an engine learns while it serves. A server at
    --url serves all runs."""
    runs: list[Served] = []
    words = new_words()
    with ExitStack() as stack:
        for number in range(arguments.repeats):
            if number == 0 or arguments.url is None:
                stack.close()
                _say(f"{arguments.url or policy}: waiting for the engine")
                engine = stack.enter_context(_served_engine(arguments, policy))
                calibration = calibration or _calibrated(engine)
                if _has_targets(engine.facts) and arguments.url is not None:
                    _refuse(arguments, {*TARGETS}, "the server at --url has targets of its own; leave it out")
                trace, left_out = _trace_slice(arguments, engine.facts)
            _say(f"served run {number + 1} of {arguments.repeats}: {len(trace.arrivals)} requests")
            runs.append(engine.play(trace, words + number))
    facts = engine.facts
    assert calibration is not None
    # Without a target, slo cannot limit the size of a step and serves like chunked.
    served_as = "chunked" if facts["policy"] == "slo" and not _has_targets(facts) else facts["policy"]
    profile = engine.profile(calibration)
    request = sum(run.request for run in runs) / len(runs)  # measured before each run, like the calibration
    profile = replace(profile, host=replace(profile.host, request=request))
    return PolicyRuns(served_as, facts, engine.model, calibration, profile, trace, left_out, runs)


def _result(arguments: argparse.Namespace, play: PolicyRuns) -> dict[str, Any]:
    """Simulates one policy. Returns its served and simulated results, ready for JSON."""
    from weft.core import Source, Targets
    from weft.progress import work_progress
    from weft.sim import fidelity
    from weft.sim.compare import report

    gap, ttft, per_1k = (value / 1e3 for value in _targets_ms(arguments, play.facts).values())
    sources = Source(play.facts["gap_source"]), Source(play.facts["ttft_source"])
    targets = Targets(gap, ttft, per_1k, *sources)
    policy, min_gap = play.policy, play.facts["min_gap_target"] or 0.0
    tokens = [one.token for one in play.runs if one.token is not None]
    token = sum(tokens) / len(tokens) if tokens else None
    correction, profile = fidelity.Correction(), play.profile
    if play.facts.get("device_type") == "cpu":  # then the clients and the API process use the engine's cores
        correction = fidelity.correction_of(profile, [probe for one in play.runs for probe in one.probes], token)
        profile = replace(profile, host=replace(profile.host, request=correction.request or profile.host.request))
    with work_progress(f"{policy}, simulated", len(play.trace.arrivals), arguments.progress) as advance:
        simulated = fidelity.simulate(policy, play.trace, profile, targets, min_gap, token, advance, correction)
    runs, virtual = [report(policy, one.played, targets) for one in play.runs], report(policy, simulated, targets)
    failures: dict[str, int] = {}
    for one in play.runs:
        failures |= {error: failures.get(error, 0) + count for error, count in one.failures.items()}
    return {
        "policy": policy,
        "runs": [asdict(one) for one in runs],
        "simulated": asdict(virtual),
        "lines": [line._asdict() for line in fidelity.compared(runs, virtual)],
        "inside": [line._asdict() for line in fidelity.inside_figures(play.runs, virtual)],
        "outside_ms": fidelity.outside_ms(play.runs),
        "token_ms": None if token is None else token * 1e3,
        "correction_ms": {name: value * 1e3 for name, value in correction._asdict().items()},
        "step_errors": fidelity.step_errors(play.runs, play.profile),
        "others": [one.others for one in play.runs if one.others is not None],
        "failures": failures,
    }


def _about(arguments: argparse.Namespace, play: PolicyRuns, shape: str | None) -> dict[str, Any]:
    """The part of the result that all policies share."""
    from weft.sim.fidelity import truth_of

    truth, targets = truth_of(play.profile), _targets_ms(arguments, play.facts)
    return {
        "device": play.facts["device"],
        "model": _plain_name(shape or play.model),
        "slice": _trace_slice_name(arguments),
        "requests": len(play.trace.arrivals),
        "seconds": play.trace.span,
        "left_out_too_long": play.left_out,
        "targets_ms": dict(zip(("gap", "ttft", "ttft_per_1k"), map(_finite, targets.values()), strict=True)),
        "profile": {**asdict(play.profile), "fidelity": []},
        "truth": {
            "bias": truth.bias,
            "noise": truth.noise,
            "seed": truth.seed,
            "residuals": None if truth.residuals is None else asdict(truth.residuals),
        },
    }


def _calibrated(engine: ServedEngine) -> "Profile":
    from weft.sim.profiles import read_profile

    if engine.facts.get("profile") is None:
        raise OptionError(
            "the engine has no calibration, as it has no targets: give --profile, as weft calibrate --profile writes it"
        )
    return read_profile("calibration", engine.facts["profile"])


def _trace_slice(arguments: argparse.Namespace, facts: dict[str, Any]) -> "tuple[Trace, int]":
    """The trace to play, and the number of requests left out because they are longer than the context."""
    from weft.sim.traces import load_trace
    from weft.sim.workloads import parse_workload

    context = facts["max_model_len"]
    if arguments.workload is not None:
        return parse_workload(arguments.workload).trace(arguments.seed or 0, context), 0
    trace = load_trace(arguments.trace).scaled(arguments.rate_scale or 1.0)
    if arguments.duration is not None:
        trace = trace.first(arguments.duration)
    trace, left_out = trace.fitting(context)
    if left_out is not None:
        _say(f"{arguments.trace}: {left_out}")
    if not facts["enable_prefix_caching"]:  # the engine reuses no prefixes, so the simulator must not either
        trace = replace(trace, arrivals=tuple(replace(one, prefix_ids=()) for one in trace.arrivals))
    return trace, 0 if left_out is None else left_out.count


def _trace_slice_name(arguments: argparse.Namespace) -> str:
    if arguments.workload is not None:
        return str(arguments.workload)
    name = f"{arguments.trace.stem} x{arguments.rate_scale or 1.0:g}"
    return name if arguments.duration is None else f"{name}, first {arguments.duration:g} s"


def _command(arguments: argparse.Namespace) -> str:
    """The command line that repeats this run. Files appear without folders, which differ between machines."""
    words = ["weft", "bench", "fidelity"]
    for action in arguments.parser._actions:
        value = getattr(arguments, action.dest, None)
        if action.dest in OUTPUT_OPTIONS or value == action.default:
            continue
        if not action.option_strings:
            words.insert(3, _plain_name(str(value)))
        elif isinstance(value, bool):
            words.append(action.option_strings[0 if value else -1])
        else:
            words += [action.option_strings[0], value.name if isinstance(value, Path) else _plain_name(str(value))]
    return shlex.join(words)


def _plain_name(name: str) -> str:
    """The name of a model or a file without the folders of this machine. A hub id stays as it is."""
    return Path(name).name if Path(name).is_absolute() or Path(name).exists() else name


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _say(line: str) -> None:
    print(f"weft: {line}", file=sys.stderr, flush=True)


# --- output ---


def _show(result: dict[str, Any]) -> None:
    from weft.sim.fidelity import cells, heading, remarks

    print(f"{heading(result)}, {result['how']}: {result['requests']} requests in {result['seconds']:.0f} s")
    print(f"profile: {result['profile']['origin']}")
    truth = result["truth"]
    found = truth.get("residuals")
    if found is None:
        told = f"steps {truth['bias']:+.1%} and noise of {truth['noise']:.1%}"
    else:
        told = (
            f"steps {math.expm1(found['decode']):+.1%} (decodes) and {math.expm1(found['prefill']):+.1%} (with "
            f"prefill), {math.expm1(found['hot']):+.1%} after much prefill, and noise of {found['decode_noise']:.1%} "
            f"and {found['prefill_noise']:.1%}"
        )
    print(f"simulated with {told}, as the calibration found them")
    for one in result["policies"]:
        head = (one["policy"], "served", "simulated", "error", "between served runs")
        rows = [head, *(cells(line) for line in [*one["lines"], *one["inside"]])]
        print()
        for name, *values in rows:
            print(
                f"{name:<{COLUMN_WIDTHS[0]}}"
                + "".join(f"{one:>{width}}" for one, width in zip(values, COLUMN_WIDTHS[1:], strict=True))
            )
        print("\n".join(remarks(one)))


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read {file}: {error}") from None
    if not isinstance(found, dict) or "policies" not in found or "targets_ms" not in found:
        raise OptionError(f"{file} is not what weft bench fidelity --json writes")
    return found


def _parts(file: Path) -> tuple[str, list[str], str]:
    """The parts of a file: text before the results, sections of the results, text after them."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read {file}: {error}") from None
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end:
        raise OptionError(f"{file} has no place for results: put the lines {BEGIN} and {END} into it")
    return before, [f"### {part.strip()}" for part in inside.split("### ")[1:]], after


def _write_table(file: Path, result: dict[str, Any]) -> None:
    """Writes a result into the file. It replaces an older result with the same heading."""
    from weft.sim.fidelity import heading, markdown

    before, sections, after = _parts(file)
    kept = [one for one in sections if one.splitlines()[0] != f"### {heading(result)}"]
    body = "\n\n".join([BEGIN, *kept, markdown(result).strip(), END])
    try:
        file.write_text(before + body + after, encoding="utf-8")
    except OSError as error:
        raise EngineError(f"cannot write {file}: {error.strerror}") from None


def _update_profile(name: str, result: dict[str, Any]) -> None:
    from weft.sim.fidelity import entries, with_entries
    from weft.sim.profiles import profile_path

    path = profile_path(name)
    data = json.loads(path.read_text(encoding="utf-8"))
    data["fidelity"] = with_entries(data.get("fidelity", ()), entries(result))
    try:
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise EngineError(f"cannot write {path}: {error.strerror}") from None
