"""`weft generate`: completes a prompt, or every line of a file."""

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from weft.cli.options import add_engine_arguments, add_sampling_arguments, engine_options, sampling_params
from weft.engine.params import SamplingParams
from weft.errors import OptionError, PromptError, RequestError

if TYPE_CHECKING:
    from weft.llm import LLM, Generation

EPILOG = """\
A line of --input is a JSON object with one of "prompt" (text or token ids) or "messages" (a conversation), and
optionally any sampling parameter, such as {"prompt": "The", "max_tokens": 8, "seed": 1}. A line of the output has the
input line's number and, for each completion, its text, token ids and finish reason, and the times of the first.
"""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "generate",
        help="complete a prompt, or every line of a file",
        description="Completes a prompt, or every line of a file, all lines in one batch.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="complete this text, as it is written")
    source.add_argument("--input", metavar="FILE.jsonl", type=Path, help="one request a line; - reads standard input")
    parser.add_argument(
        "--output", metavar="FILE.jsonl", type=Path, help="write results here (default: standard output)"
    )
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    add_engine_arguments(parser)
    add_sampling_arguments(parser, max_tokens=256, temperature=1.0)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from weft.llm import LLM

    if arguments.prompt is not None and arguments.output is not None:
        raise OptionError("--output goes with --input; a single --prompt is written to standard output")
    params = sampling_params(arguments)
    jobs = None if arguments.input is None else _read_jobs(arguments.input, params)
    llm = LLM(**engine_options(arguments))
    if jobs is None:
        return _stream_prompt(llm, arguments.prompt, params)
    return _complete_jobs(llm, jobs, arguments)


@dataclass(frozen=True)
class _Job:
    line: int
    prompt: str | list[int]
    messages: list[dict[str, Any]] | None
    params: SamplingParams


def _stream_prompt(llm: "LLM", prompt: str, params: SamplingParams) -> int:
    deltas = llm.stream(prompt, params)  # refuses a prompt that cannot run before anything is printed
    print(prompt, end="", flush=True)
    for delta in deltas:
        print(delta.text, end="", flush=True)
    print()
    return 0


def _complete_jobs(llm: "LLM", jobs: list[_Job], arguments: argparse.Namespace) -> int:
    with _opened(arguments.output) as out:  # before the work, so that nothing is lost to a bad path
        prompts = [job.prompt if job.messages is None else _render(llm, job) for job in jobs]
        try:
            results = llm.generate(prompts, [job.params for job in jobs], progress=arguments.progress)
        except PromptError as error:
            raise RequestError(f"{arguments.input}, line {jobs[error.number].line}: {error.reason}") from None
        for job, result in zip(jobs, results, strict=True):
            out.write(json.dumps(_as_json(job, result), ensure_ascii=False) + "\n")
    return 0


def _render(llm: "LLM", job: _Job) -> list[int]:
    try:
        return llm.chat_prompt(job.messages or [])
    except RequestError as error:
        raise RequestError(f"line {job.line}: {error}") from None


def _read_jobs(path: Path, defaults: SamplingParams) -> list[_Job]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {path}: {error}") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise OptionError(f"{path} has no requests in it")
    return [_read_job(path, number, line, defaults) for number, line in lines]


def _read_job(path: Path, number: int, line: str, defaults: SamplingParams) -> _Job:
    where = f"{path}, line {number}"
    try:
        data = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(data, dict) or ("prompt" in data) == ("messages" in data):
        raise RequestError(f'{where}: a JSON object with either "prompt" or "messages" is needed')
    known = {field.name for field in fields(SamplingParams)}
    prompt, messages = data.pop("prompt", ""), data.pop("messages", None)
    unknown = sorted(set(data) - known)
    if unknown:
        raise RequestError(
            f"{where}: unknown field {unknown[0]!r}; known: prompt, messages, {', '.join(sorted(known))}"
        )
    if not isinstance(prompt, str | list):
        raise RequestError(f"{where}: a prompt is text or a list of token ids, not {prompt!r}")
    if isinstance(data.get("logit_bias"), dict):  # JSON has no numbers for keys
        data["logit_bias"] = {int(t) if t.isdecimal() else t: bias for t, bias in data["logit_bias"].items()}
    try:
        return _Job(number, prompt, messages, replace(defaults, **data))
    except (RequestError, TypeError) as error:
        raise RequestError(f"{where}: {error}") from None


def _as_json(job: _Job, result: "Generation") -> dict[str, Any]:
    metrics = result.metrics
    return {
        "line": job.line,
        "prompt_tokens": len(result.prompt_token_ids),
        "completions": [
            {"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason} for c in result.completions
        ],
        "metrics": None if metrics is None else {f.name: getattr(metrics, f.name) for f in fields(metrics)},
    }


def _opened(path: Path | None) -> AbstractContextManager[TextIO]:
    if path is None:
        return nullcontext(sys.stdout)
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}") from None
