"""`weft diagnose`: which phase of a server hurts, the numbers that say so, and what to change."""

import argparse
import json
import math
import os
import sys
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import EngineError, OptionError

if TYPE_CHECKING:
    from weft.diagnose.facts import Yardsticks
    from weft.diagnose.finding import Finding
    from weft.diagnose.replay import Scores
    from weft.observe.recording import EngineRun, Recording

ENGINES = ("vllm", "sglang")
WIDTH = 110  # columns of the printed text
HEALTHY, SICK = 0, 1  # exit statuses; an error is 2, as in all commands

EPILOG = """\
A recording comes from `weft serve --record FILE`. With --url alone, a weft server is asked for the last seconds that it
holds in memory. With --engine, a server of another engine is read by its Prometheus metrics: twice, --seconds apart.
Metrics say less than a recording; what they cannot say is printed too.

A recording of an engine with a calibration is also replayed in the simulator: the requests as they arrived, then the
same requests with the proposed change.

exit status:
  0  healthy
  1  at least one finding
  2  an error: no such server or file, not what --engine claims, a damaged or foreign recording, no traffic
"""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "diagnose",
        help="say which phase of a server hurts, and what to change",
        description="Says which phase of a server hurts, the numbers that say so, what to inspect first and which "
        "setting to change.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--url", help="of a running server, such as http://127.0.0.1:8000")
    source.add_argument("--file", type=Path, metavar="FILE", help="a recording")
    add = parser.add_argument
    add("--engine", choices=ENGINES, help="of the server at --url, if it is not weft: its metrics are read")
    add("--api-key", metavar="KEY", help="of that server (default: the environment's OPENAI_API_KEY)")
    add(
        "--seconds",
        type=float,
        metavar="S",
        help="with --engine: between the two readings of metrics (default: 10); else: only the last S seconds that the "
        "server at --url holds (default: all)",
    )
    add(
        "--gap-target-ms",
        type=float,
        default=50.0,
        metavar="MS",
        help="wanted time between tokens, for requests without a target (default: 50)",
    )
    add(
        "--ttft-target-ms",
        type=float,
        default=1000.0,
        metavar="MS",
        help="wanted time to the first token, likewise; 250 ms are added per 1,000 prompt tokens (default: 1000)",
    )
    add(
        "--profile",
        metavar="NAME",
        help="hardware profile for the replay: a name, or a JSON file (default: the engine's own calibration)",
    )
    add("--no-replay", dest="replay", action="store_false", help="do not replay the recording in the simulator")
    add("--json", type=Path, metavar="FILE", help="also write the diagnosis as a JSON object")
    add("--no-progress", dest="progress", action="store_false", help="no progress bar")
    parser.set_defaults(run=run)


@dataclass
class Answer:
    """What is printed and written."""

    source: str
    findings: "list[Finding]" = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    facts: list[Any] = field(default_factory=list)
    unknown: tuple[str, ...] = ()  # what could not be known
    replays: "list[Scores]" = field(default_factory=list)
    replay_note: str = ""  # the simulator's known error, or why there is no replay


def run(arguments: argparse.Namespace) -> int:
    from weft.diagnose.facts import Yardsticks

    _check(arguments)
    yardsticks = Yardsticks(gap=arguments.gap_target_ms / 1000, ttft=arguments.ttft_target_ms / 1000)
    diagnosed = _from_recording if arguments.engine is None else _from_metrics
    try:
        answer = diagnosed(arguments, yardsticks)
    except (ArithmeticError, LookupError, ValueError) as error:  # not exit status 1, which means a finding
        source = arguments.url or arguments.file
        raise EngineError(
            f"{source} cannot be diagnosed, it may be damaged: {type(error).__name__}: {error}"
        ) from error
    if arguments.json is not None:  # first: printing may fail, if the reader of the output closes it
        _write(arguments.json, answer)
    _show(answer)
    return SICK if answer.findings else HEALTHY


def _check(arguments: argparse.Namespace) -> None:
    for name in ("gap_target_ms", "ttft_target_ms", "seconds"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise OptionError(f"--{name.replace('_', '-')} {value:g} must be above 0")
    if arguments.url is not None and not arguments.url.startswith(("http://", "https://")):
        raise OptionError(f"--url {arguments.url!r} must begin with http:// or https://")
    if arguments.file is not None and arguments.engine is not None:
        raise OptionError(f"--engine {arguments.engine} is for --url: a file is always a recording of weft")
    if arguments.file is not None and arguments.api_key is not None:
        raise OptionError("--api-key is for --url: leave it out")
    if arguments.profile is not None:
        from weft.sim.profiles import profile_path

        profile_path(arguments.profile)  # an unknown name is reported before the work
        if arguments.engine is not None or not arguments.replay:
            raise OptionError(f"--profile {arguments.profile} is for the replay of a recording: leave it out")
    if arguments.seconds is not None and arguments.url is None:
        raise OptionError("--seconds is for --url: a file is diagnosed whole")
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise OptionError(f"--json {arguments.json}: there is no folder {arguments.json.parent}")


def _from_metrics(arguments: argparse.Namespace, yardsticks: "Yardsticks") -> Answer:
    from weft.diagnose.download import read_metrics
    from weft.diagnose.outside import check_engine, outside_facts
    from weft.diagnose.outside_rules import diagnose_outside
    from weft.progress import work_progress

    seconds = 10.0 if arguments.seconds is None else arguments.seconds
    source = arguments.url.rstrip("/") + "/metrics"
    before = read_metrics(source, _key(arguments))
    check_engine(arguments.engine, before, source)  # not after the wait
    with work_progress("metrics", 100, arguments.progress) as advance:
        passed = _wait(seconds, advance)
    after = read_metrics(source, _key(arguments))
    facts = outside_facts(arguments.engine, before, after, passed, yardsticks, source)
    summary = [
        f"{facts.ttft.count:.0f} first tokens and {facts.gap.count:.0f} gaps in {passed:.0f} s, "
        f"{facts.running:.0f} requests running, {facts.waiting:.0f} waiting"
    ]
    return Answer(source, diagnose_outside(facts), summary, [facts], facts.unknown)


def _wait(seconds: float, advance: Any) -> float:
    """Waits. Returns the seconds that have passed."""
    import time

    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        advance(int(100 * passed / seconds))
        time.sleep(min(0.2, seconds - passed))
    return passed


def _from_recording(arguments: argparse.Namespace, yardsticks: "Yardsticks") -> Answer:
    from weft.diagnose.facts import facts_of
    from weft.diagnose.rules import diagnose, summary
    from weft.progress import work_progress

    recording, source = _recording(arguments)
    runs = [one for one in recording.runs if one.steps and one.prompts]
    if not runs:
        raise EngineError(f"{source} has no steps with their requests: send requests while it is recorded")
    answer = Answer(source)
    owners: dict[int, EngineRun] = {}
    for one in runs:
        with work_progress("late tokens", 100, arguments.progress) as advance:
            facts = facts_of(one, recording, yardsticks, advance)
        found = diagnose(facts)
        answer.facts.append(facts)
        answer.summary += summary(facts)
        answer.findings += found
        owners.update(dict.fromkeys(map(id, found), one))
    answer.findings.sort(key=lambda finding: -finding.weight)
    if answer.findings and arguments.replay:
        main = answer.findings[0]
        _replay(answer, owners[id(main)], arguments)
    return answer


def _recording(arguments: argparse.Namespace) -> "tuple[Recording, str]":
    """The recording, and what to call it."""
    from weft.diagnose.download import download_frames
    from weft.observe.recording import Recording
    from weft.progress import work_progress

    if arguments.file is None:
        return download_frames(arguments.url.rstrip("/"), _key(arguments), arguments.seconds), arguments.url
    try:
        with work_progress(arguments.file.name, arguments.file.stat().st_size, arguments.progress) as advance:
            return Recording.read(arguments.file, advance), str(arguments.file)
    except OSError as error:
        raise OptionError(f"cannot read the recording {arguments.file}: {error.strerror}") from None


def _replay(answer: Answer, run: "EngineRun", arguments: argparse.Namespace) -> None:
    from weft.diagnose.facts import profile_of_run
    from weft.diagnose.replay import START, recorded, replay, replayable
    from weft.progress import work_progress
    from weft.sim.fidelity import known_error
    from weft.sim.profiles import load_profile

    changes = answer.findings[0].changes
    profile = profile_of_run(run) if arguments.profile is None else load_profile(arguments.profile)
    reason = replayable(run, profile) if changes else "no setting of the scheduler would change it"
    if reason or profile is None or run.info is None:
        answer.replay_note = f"No replay: {reason}."
        return
    answer.replays.append(recorded(run))
    for change in (START, *changes):
        with work_progress(change.words, len(run.prompts), arguments.progress) as advance:
            answer.replays.append(replay(run, profile, change, advance))
    answer.replay_note = known_error(profile, run.info.policy)


def _key(arguments: argparse.Namespace) -> str | None:
    return arguments.api_key or os.environ.get("OPENAI_API_KEY")


def _write(file: Path, answer: Answer) -> None:
    data = {
        "source": answer.source,
        "healthy": not answer.findings,
        "findings": [_plain(finding) for finding in answer.findings],
        "facts": [_plain(facts) for facts in answer.facts],
        "unknown": answer.unknown,
        "replay": [_plain(scores) for scores in answer.replays],
        "replay_note": answer.replay_note,
    }
    try:
        file.write_text(json.dumps(_finite(data), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise EngineError(f"cannot write {file}: {error.strerror}") from None


def _plain(value: Any) -> Any:
    found = asdict(value)
    for change in found.get("changes", ()):
        change["without"] = sorted(change["without"])
    return found


def _finite(value: Any) -> Any:
    """JSON has no infinity: null stands for it. Names of buckets become text."""
    if isinstance(value, dict):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _show(answer: Answer) -> None:
    print(answer.source)
    for line in answer.summary:
        _print(line, "  ")
    if not answer.findings:
        print("\nHealthy: first tokens and gaps are within their targets, and nothing is wasted.")
    for number, finding in enumerate(answer.findings):
        where = f" (engine {finding.engine})" if len(answer.facts) > 1 else ""
        title = f"{finding.symptom}{where}"
        print()
        print(f"{title.upper() if number == 0 else title}: the phase that hurts is {finding.phase}")
        for line in finding.evidence:
            _print(line, "  - ")
        _print(f"inspect first: {finding.inspect}", "  ")
        _print(f"change: {finding.setting}", "  ")
    if answer.replays:
        print()
        _show_replays(answer.replays)
    if answer.replay_note:
        print()
        _print(answer.replay_note, "")
    if answer.unknown:
        print("\nNot known from outside:")
        for line in answer.unknown:
            _print(line, "  - ")


def _print(text: str, indent: str) -> None:
    print(textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=" " * max(2, len(indent))))


def _show_replays(replays: "list[Scores]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="replay of the main finding", title_justify="left")
    for heading in ("requests with", "requests", "refused", "TTFT ms p50 / p99", "gap ms p50 / p99", "targets kept"):
        table.add_column(heading, justify="left" if heading == "requests with" else "right")
    for number, one in enumerate(replays):
        table.add_row(
            one.name if number != 1 else f"simulated {one.name}",
            str(one.requests),
            str(one.refused),
            *(f"{1e3 * times.p50:.4g} / {1e3 * times.p99:.4g}" for times in (one.ttft, one.gap)),
            f"{one.kept:.1%}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
