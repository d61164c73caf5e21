"""`weft bench serve`: a load test for any OpenAI-compatible server."""

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from weft import __version__
from weft.errors import EngineError, OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.bench.http.client import Client
    from weft.bench.http.drive import LoadRun
    from weft.bench.http.figures import Goals
    from weft.bench.http.load_request import LoadRequest
    from weft.bench.http.prompts import Count
    from weft.bench.http.workload import RequestSpec

R = TypeVar("R")
SHOWN_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")
# Applied after parsing: with argparse defaults, a given value and a default could not be told apart.
DEFAULTS = {"input_len": "256", "output_len": "128", "rate_scale": 1.0, "pattern": "poisson", "burstiness": 1.0}
DEFAULT_REQUESTS = 100  # requests, if neither a number nor a duration is given
PREPARED_REQUESTS = 1000  # prepared requests of a closed loop with a duration: they repeat with other words
SLOW_CLIENT_MS = 50.0  # above this p99 lag, the figures describe the client rather than the server

EPILOG = """\
examples:
  weft bench serve --url http://127.0.0.1:8000 --request-rate 4 --num-prompts 40 --input-len 100 --output-len 20
  weft bench serve --url URL --trace AzureLLMInferenceTrace_conv.csv --duration 60 --rate-scale 0.1
  weft bench serve --url URL --max-concurrency 16 --input-len 100:1024 --output-len lognormal:200,0.8

Lengths are N (always so many tokens), LOW:HIGH (evenly between, both included), lognormal:MEDIAN,SIGMA, or a FILE with
one whole number a line.
"""


def register(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "serve",
        help="measure any OpenAI-compatible server",
        description="Sends requests to a server as many users would, and tells what they saw. Options have the names "
        "that vLLM's benchmark has for them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", required=True, help="of the server, with or without /v1")
    add_load_arguments(parser)
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="also write all figures as a JSON object, with vLLM's names")
    add("--save-detailed", action="store_true", help="with --json: every request with the times of its chunks")
    add(
        "--html",
        type=Path,
        metavar="FILE.html",
        help="also write a report with charts (needs weft[charts])",
    )
    add("--no-progress", dest="progress", action="store_false", help="no live view")
    parser.set_defaults(run=run)


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options on what is sent, when, and what counts, for all commands that measure servers."""
    add = parser.add_argument
    add("--model", help="name of the model (default: the first that the server names)")
    add(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="which interface is used (default: completions)",
    )
    add("--api-key", metavar="KEY", help="default: the environment's OPENAI_API_KEY")
    load = parser.add_argument_group("what is sent")
    add = load.add_argument
    add("--num-prompts", type=int, metavar="N", help="default: what --duration holds, all of a trace, or 100")
    add("--input-len", metavar="LENGTHS", help="tokens of a prompt (default: 256)")
    add("--output-len", metavar="LENGTHS", help="tokens of an answer (default: 128)")
    add("--trace", type=Path, metavar="FILE", help="Azure's CSV or Mooncake's JSON lines: times, lengths and prefixes")
    add("--sharegpt", type=Path, metavar="FILE.json", help="conversations: the first turn is asked")
    add("--rate-scale", type=float, metavar="X", help="a trace X times as fast (default: 1)")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of times and lengths (default: 0); words differ from run to run",
    )
    add("--tokenizer", type=Path, metavar="DIR", help="count tokens with this one instead of asking the server")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0")
    when = parser.add_argument_group("when it is sent")
    add = when.add_argument
    add("--request-rate", type=float, default=math.inf, metavar="R", help="requests a second (default: all at once)")
    add("--pattern", choices=("poisson", "constant", "ramp"), help="default: poisson")
    add("--burstiness", type=float, metavar="B", help="below 1: in bursts, above: evenly (default: 1)")
    add("--ramp-to", type=float, metavar="R", help="with --pattern ramp: the rate at the end of the run or --duration")
    add("--max-concurrency", type=int, metavar="N", help="most requests under way; without a rate, so many users")
    add("--duration", type=float, default=math.inf, metavar="S", help="send for so many seconds, then wait for answers")
    add("--timeout", type=float, default=600.0, metavar="S", help="for one answer (default: 600)")
    add(
        "--retry-refused",
        action="store_true",
        help="send a request that is refused (429 or 503) again after the server's Retry-After, 0.05 to 30 s, until "
        "--timeout has passed since it was first due; times are those of the last attempt",
    )
    told = parser.add_argument_group("what is told")
    add = told.add_argument
    add("--warmup", type=float, default=0.0, metavar="S", help="leave out who was due in the first S seconds")
    add("--cooldown", type=float, default=0.0, metavar="S", help="leave out who was due in the last S seconds")
    add(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="count requests that keep all of these: ttft, tpot, e2el, gap (99%% of the gaps), as ttft:1000 gap:100",
    )


def run(arguments: argparse.Namespace) -> int:
    check_folders(arguments)
    arguments = with_defaults(arguments)
    try:
        found = measure_server(arguments, arguments.url, new_words())
    except KeyboardInterrupt:  # before the first request; a later Ctrl-C still gives figures
        return interrupted("before the first request was sent: there are no figures")
    # Files are written first: printing may fail, if the reader of the output closes it.
    if arguments.html is not None:
        write_html(arguments.html, [(found["model_id"], found)], f"{found['model_id']} at {arguments.url}")
    if arguments.json is not None:
        requests = found.pop("requests")
        write_json(
            arguments.json, {**found, **_as_vllm(requests), "requests": requests} if arguments.save_detailed else found
        )
    _show(found)
    return 130 if found["was_interrupted"] else 0 if found["completed"] else 1


def interrupted(told: str) -> int:
    """Prints one line about a Ctrl-C. Returns the exit code."""
    print(f"weft: interrupted, {told}", file=sys.stderr)
    return 130


def check_folders(arguments: argparse.Namespace) -> None:
    """Raises OptionError before anything is measured if an output file cannot be written or a chart not drawn."""
    for name in ("json", "html", "chart"):
        file = getattr(arguments, name, None)
        if file is not None and not file.parent.is_dir():
            raise OptionError(f"--{name} {file}: there is no folder {file.parent}")
        if file is not None and file.is_dir():
            raise OptionError(f"--{name} {file} is a folder: name a file")
    if getattr(arguments, "chart", None) is not None or getattr(arguments, "html", None) is not None:
        from weft.bench.charts import check_charts

        check_charts()


def new_words() -> int:
    """A new seed of the prompts' words, so that the server's prefix cache does not have the prompts of earlier runs."""
    return time.time_ns() // 1_000_000


def measure_server(arguments: argparse.Namespace, url: str, words: int) -> dict[str, Any]:
    """One run against a server: all figures, and every request. A Ctrl-C before the run begins is raised.

    `arguments` must come from `settled`. `words` is a seed of the prompts' words; it does not change lengths or times.
    """
    from weft.bench.http.fast_loop import on_fast_loop
    from weft.bench.http.figures import Goals

    goals = Goals.parse(arguments.goodput) if arguments.goodput else None
    client, run = on_fast_loop(_measure(arguments, url, words))
    return {**_figures(run, arguments, url, client, goals), "requests": _detailed(run)}


def api_key(arguments: argparse.Namespace) -> str | None:
    return arguments.api_key or os.environ.get("OPENAI_API_KEY")


def with_defaults(arguments: argparse.Namespace, has_rate: bool = False) -> argparse.Namespace:
    """The arguments with defaults filled in, after all checks that need no server.

    `has_rate`: the command sets the rate of each run itself.
    """
    _check_effects(arguments, has_rate or arguments.request_rate < math.inf)
    given = {name: value for name, value in vars(arguments).items() if value is not None or name not in DEFAULTS}
    found = argparse.Namespace(**{**DEFAULTS, **given})
    _check(found)
    return found


def _check_effects(arguments: argparse.Namespace, has_rate: bool) -> None:
    """Rejects options without effect: a user who gives one expects an effect."""
    given = {name for name, value in vars(arguments).items() if value not in (None, math.inf)}
    if arguments.trace is not None and arguments.sharegpt is not None:
        raise OptionError(f"--trace {arguments.trace} and --sharegpt {arguments.sharegpt}: give one of them")
    if arguments.trace is not None:
        times = "a trace has its own times; leave it out, or scale them with --rate-scale"
        _refuse(arguments, given, ("request_rate", "pattern", "burstiness", "ramp_to"), times)
        _refuse(arguments, given, ("input_len", "output_len"), "a trace has its own lengths; leave it out")
        return
    _refuse(arguments, given, ("rate_scale",), "there is no --trace to scale; leave it out, or set --request-rate")
    if arguments.sharegpt is not None:
        _refuse(arguments, given, ("input_len", "output_len"), "conversations have their own lengths; leave it out")
    if not has_rate:
        told = "without --request-rate there are no intervals; give one, or leave it out"
        _refuse(arguments, given, ("pattern", "burstiness", "ramp_to"), told)


def _refuse(arguments: argparse.Namespace, given: set[str], names: "Sequence[str]", told: str) -> None:
    for name in names:
        if name in given:
            raise OptionError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: {told}")


def is_closed(arguments: argparse.Namespace) -> bool:
    """Whether the loop is closed: a fixed number of users, each sending a new request after each answer."""
    return bool(arguments.max_concurrency) and arguments.trace is None and arguments.request_rate == math.inf


def _check(arguments: argparse.Namespace) -> None:
    for name in ("num_prompts", "max_concurrency"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name.replace('_', '-')} {value} must be at least 1")
    for name in ("rate_scale", "duration", "timeout", "request_rate"):
        if not getattr(arguments, name) > 0:
            raise OptionError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be above 0")
    if arguments.timeout == math.inf:
        raise OptionError("--timeout inf must be a number of seconds")
    for name in ("warmup", "cooldown", "temperature", "seed"):
        if not getattr(arguments, name) >= 0:
            raise OptionError(f"--{name} {getattr(arguments, name)} must be at least 0")
    for name in ("warmup", "cooldown", "temperature"):
        if getattr(arguments, name) == math.inf:
            raise OptionError(f"--{name} inf must be a number")


async def _measure(arguments: argparse.Namespace, url: str, words: int) -> "tuple[Client, LoadRun]":
    """Sends all requests. Returns the client and the run; after a Ctrl-C, the run has the results so far."""
    from weft.bench.http.client import Client
    from weft.bench.http.drive import LoadRun, drive
    from weft.bench.http.live import live_view

    run = LoadRun()
    options = {"endpoint": arguments.endpoint, "key": api_key(arguments), "temperature": arguments.temperature}
    async with Client(url, arguments.model, timeout=arguments.timeout, **options) as client:
        await client.discover()
        requests, run.left_out = await _requests(arguments, client, words)
        show = arguments.progress and sys.stderr.isatty()
        async with live_view(run, show):
            driving = asyncio.create_task(
                drive(
                    client,
                    requests,
                    concurrency=arguments.max_concurrency,
                    open_loop=not is_closed(arguments),
                    duration=arguments.duration,
                    retry_for=arguments.timeout if arguments.retry_refused else 0.0,
                    run=run,
                )
            )
            with _interrupting(driving):
                try:
                    await driving
                except asyncio.CancelledError:  # perhaps before `drive` started and could set this itself
                    run.was_interrupted = True
    return client, run


@contextlib.contextmanager
def _interrupting(task: "asyncio.Task[LoadRun]") -> Any:
    """Makes Ctrl-C and SIGTERM cancel the task; the results so far are still reported."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            loop.add_signal_handler(number, task.cancel)
    except (NotImplementedError, RuntimeError, ValueError):  # not on the main thread, or not on this system
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler or signal.SIG_DFL)  # removing alone does not restore the previous handler


async def _requests(arguments: argparse.Namespace, client: "Client", words: int) -> "tuple[Sequence[LoadRequest], int]":
    """The requests to send, and the number of requests left out because they are too long for the model."""
    from weft.bench.http.prompts import Atoms, RepeatingRequests, make_requests, with_token_counts
    from weft.bench.http.workload import cut

    count, seed = _token_counter(arguments, client), arguments.seed + 1_000_003 * words
    specs, left_out = _specs(arguments), None
    atoms = await Atoms.find(count)
    if arguments.sharegpt is not None:
        specs = await with_token_counts(specs, atoms, seed, count)
    longest = await _context_length(client)
    if longest is not None:
        specs, left_out = cut(specs, longest)
        if left_out is not None:
            print(f"weft: {left_out}", file=sys.stderr)
    if not specs:
        raise OptionError("no requests are left to send: choose shorter lengths, or another trace")
    if arguments.trace is not None:  # some of its prompts may be shorter than the tokens that a server adds to each
        specs = [spec._replace(prompt_tokens=max(spec.prompt_tokens, atoms.least_tokens)) for spec in specs]
    _check_window(arguments, max(spec.at for spec in specs))
    requests = await make_requests(specs, atoms, seed, count)
    sent = RepeatingRequests(requests, specs, atoms, seed) if _fills_its_time(arguments) else requests
    return sent, 0 if left_out is None else left_out.count


def _check_window(arguments: argparse.Namespace, last: float) -> None:
    """Raises, before anything is sent, if --warmup and --cooldown leave nothing. `last` is the last request's due time.

    In a closed loop this is not known in advance, only that it is within the duration.
    """
    if is_closed(arguments):
        last = arguments.duration
    if arguments.warmup + arguments.cooldown and arguments.warmup + arguments.cooldown >= last:
        raise OptionError(
            f"--warmup {arguments.warmup:g} and --cooldown {arguments.cooldown:g} leave nothing of a run whose last "
            f"request is due after {last:.1f} s: make them shorter, or the run longer"
        )


def _fills_its_time(arguments: argparse.Namespace) -> bool:
    """Whether a closed loop is limited only by its duration, so that the number of requests is not known in advance."""
    return is_closed(arguments) and arguments.num_prompts is None and arguments.duration < math.inf


def _specs(arguments: argparse.Namespace) -> "list[RequestSpec]":
    """The specs: lengths or texts, with times. Given texts (ShareGPT) have no lengths yet."""
    import numpy as np

    from weft.bench.http import workload

    random = np.random.default_rng(arguments.seed)
    if arguments.trace is not None:
        specs = workload.of_trace(
            arguments.trace, rate_scale=arguments.rate_scale, duration=None, count=arguments.num_prompts
        )
        return [spec for spec in specs if spec.at <= arguments.duration]
    number = arguments.num_prompts
    is_timed = arguments.duration < math.inf and arguments.request_rate < math.inf
    if number is None and not is_timed:
        number = PREPARED_REQUESTS if _fills_its_time(arguments) else DEFAULT_REQUESTS
    conversations = []
    if arguments.sharegpt is not None:
        conversations = workload.of_sharegpt(arguments.sharegpt, number, random)
        if arguments.num_prompts is not None and len(conversations) < arguments.num_prompts:
            _note_few(arguments.sharegpt, len(conversations), arguments.num_prompts)
        number = len(conversations) if not is_timed else None
    times = workload.arrival_times(
        number,
        arguments.request_rate,
        pattern=arguments.pattern,
        burstiness=arguments.burstiness,
        ramp_to=arguments.ramp_to,
        duration=arguments.duration if is_timed else math.inf,
        random=random,
    )
    if conversations:
        if arguments.num_prompts is None and is_timed and len(conversations) < len(times):
            _note_few(arguments.sharegpt, len(conversations), len(times))
        return [spec._replace(at=float(at)) for spec, at in zip(conversations, times, strict=False)]
    prompt = workload.parse_lengths(arguments.input_len, "--input-len")
    output = workload.parse_lengths(arguments.output_len, "--output-len")
    return workload.drawn(len(times), times, prompt, output, random)


def _note_few(file: Path, known: int, wanted: int) -> None:
    print(f"note: {file} has {known} conversations: so many are sent, not {wanted}", file=sys.stderr)


def _token_counter(arguments: argparse.Namespace, client: "Client") -> "Count":
    from weft.bench.http.prompts import local_count

    if arguments.tokenizer is None:
        return client.count
    if arguments.endpoint == "chat":
        raise OptionError("--tokenizer counts prompts, not conversations: use --endpoint completions, or leave it out")
    return local_count(arguments.tokenizer)


async def _context_length(client: "Client") -> int | None:
    """The model's context length in tokens; None if the server does not report it."""
    models = await client.get("/v1/models")
    for model in (models or {}).get("data", ()):
        if model.get("id") == client.model and model.get("max_model_len"):
            return int(model["max_model_len"])
    return None


def _figures(
    run: "LoadRun", arguments: argparse.Namespace, url: str, client: "Client", goals: "Goals | None"
) -> dict[str, Any]:
    from weft.bench.http.figures import DEFINITIONS, MeasurementWindow, figures

    about = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": "openai" if arguments.endpoint == "completions" else "openai-chat",
        "base_url": url,
        "model_id": client.model,
        "client": f"weft {__version__}",
        **_timing(arguments),
        "max_concurrency": arguments.max_concurrency,
        "seed": arguments.seed,
        "ignore_eos": client.asks_to_ignore_eos,
        "retry_refused": arguments.retry_refused,
    }
    try:
        window = MeasurementWindow.of(run.replies, arguments.warmup, arguments.cooldown)
    except OptionError as error:  # the run was interrupted early, or a closed loop ended early
        print(f"weft: {error}; all requests are counted", file=sys.stderr)
        window = MeasurementWindow(0.0, math.inf)
    counted = {"warmup_s": arguments.warmup, "cooldown_s": arguments.cooldown}
    return {**about, **counted, **figures(run, window, goals), "definitions": DEFINITIONS}


def _timing(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of the send times. With a trace: its name and scale. Otherwise: rate, burstiness and pattern."""
    if arguments.trace is not None:
        own = dict.fromkeys(("request_rate", "burstiness", "pattern"))
        return {**own, "trace": arguments.trace.name, "rate_scale": arguments.rate_scale}
    rate = arguments.request_rate
    return {
        "request_rate": rate if rate < math.inf else "inf",
        "burstiness": arguments.burstiness,
        "pattern": arguments.pattern,
        "trace": None,
        "rate_scale": None,
    }


def show_caveats(found: dict[str, Any], prefix: str = "") -> None:
    """Prints the caveats of a run. `prefix` names the run."""
    from weft.bench.http.figures import caveats

    for caveat in caveats(found):
        print(f"note: {prefix}{caveat}")


def _show(found: dict[str, Any]) -> None:
    print(f"{found['base_url']}, {found['model_id']}" + (" (interrupted)" if found["was_interrupted"] else ""))
    print(
        f"{found['completed']} requests completed, {found['failed']} failed, {found['unfinished']} unfinished, in "
        f"{found['duration']:.2f} s; at most {found['max_concurrent_requests']} at once"
    )
    for error, count in list(found["error_counts"].items())[:5]:
        print(f"  {count} x {error}")
    if found["retries"]:
        print(
            f"{found['retries']} retries: {found['retried_requests']} requests were refused at first, and waited "
            f"{found['p50_retry_wait_ms'] / 1e3:.1f} s (p50), {found['p99_retry_wait_ms'] / 1e3:.1f} s (p99) before "
            "the attempt that is counted"
        )
    show_caveats(found)
    if found["achieved_request_rate"] is not None:
        whose = "" if found["trace"] is None else f"{found['trace']} x {found['rate_scale']:g}: "
        print(f"{whose}sent at {found['achieved_request_rate']:.2f} requests/s")
    print(
        f"{found['request_throughput']:.2f} requests/s, {found['output_throughput']:.1f} output tokens/s, "
        f"{found['total_token_throughput']:.1f} tokens/s in all"
    )
    if found["request_goodput"] is not None:
        goals = ", ".join(f"{name} {value:g} ms" for name, value in found["goodput_goals_ms"].items())
        print(
            f"goodput {found['request_goodput']:.2f} requests/s with {found['goodput_output_throughput']:.1f} output "
            f"tokens/s, {found['goodput_share']:.1%} of all requests ({goals})"
        )
    print(f"\n{'ms':<6}" + "".join(f"{kind:>10}" for kind in SHOWN_STATISTICS))
    for name in found["definitions"]:
        row = [found[f"{kind}_{name}_ms"] for kind in SHOWN_STATISTICS]
        print(f"{name:<6}" + "".join(f"{value:>10.2f}" if value is not None else f"{'-':>10}" for value in row))
    print("\n" + "\n".join(f"{name}: {meaning}" for name, meaning in found["definitions"].items()))
    if "p50_outside_ms" in found:
        parts = {"its queue": "server_queue", "prefill": "server_prefill", "outside of it": "outside"}
        shown = ", ".join(f"{found[f'p50_{key}_ms']:.1f} ms {name}" for name, key in parts.items())
        print(
            f"\nthe server's own account of the time to the first token (medians): {shown} (network, parsing); "
            f"{found['total_cached_tokens']} of {found['total_input_tokens']} prompt tokens came from its cache"
        )
    elif "total_cached_tokens" in found:
        print(f"\n{found['total_cached_tokens']} of {found['total_input_tokens']} prompt tokens came from its cache")
    lag = found["p99_lag_ms"]
    if lag is not None and lag > SLOW_CLIENT_MS:
        print(
            f"\nThe client could not send this fast: it was {lag:.0f} ms late at the 99th percentile.", file=sys.stderr
        )


def _detailed(run: "LoadRun") -> list[dict[str, Any]]:
    return [
        {
            "number": reply.number,
            "due": reply.due,
            "free": reply.free,
            "sent": _number(reply.sent),
            "end": _number(reply.end),
            "times": reply.times,
            "prompt_tokens": reply.prompt_tokens,
            "output_tokens": reply.output_tokens,
            "cached_tokens": reply.cached_tokens,
            "error": reply.error or None,
            "retries": reply.retries,
            "retry_wait": reply.retry_wait,
            "server": reply.server,
        }
        for reply in sorted(run.replies, key=lambda reply: reply.number)
    ]


def _as_vllm(requests: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The requests in vLLM's format: one list per quantity, in seconds. A TTFT counts from the request's due time."""
    times = [request["times"] for request in requests]
    return {
        "input_lens": [request["prompt_tokens"] for request in requests],
        "output_lens": [request["output_tokens"] for request in requests],
        "ttfts": [found[0] - request["due"] if found else 0.0 for found, request in zip(times, requests, strict=True)],
        "itls": [[after - before for before, after in pairwise(found)] for found in times],
        "start_times": [request["sent"] for request in requests],
        "errors": [request["error"] or "" for request in requests],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def write_html(file: Path, runs: "Sequence[tuple[str, dict[str, Any]]]", title: str) -> None:
    from weft.bench.http.report import html_report

    _write(file, html_report(runs, title))


def write_json(file: Path, data: Any) -> None:
    _write(file, json.dumps(data, indent=1, allow_nan=False) + "\n")


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise EngineError(f"cannot write {file}: {error.strerror}; the figures are above") from None
