"""`weft generate`: completes a prompt, or every line of a file."""

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from weft.cli.options import (
    add_engine_arguments,
    add_model_option,
    add_promise_arguments,
    add_sampling_arguments,
    choose_model,
    engine_options,
    sampling_params,
)
from weft.engine.params import SamplingParams, StructuredOutputs
from weft.errors import OptionError, PromptError, RequestError

if TYPE_CHECKING:
    from weft.llm import LLM, Generation, Metrics

EPILOG = """\
A line of --input is a JSON object with one of "prompt" (text or token ids) or "messages" (a conversation), and
optionally any sampling parameter, such as {"prompt": "The", "max_tokens": 8, "seed": 1}, or a form that the output must
have, as {"structured_outputs": {"json": SCHEMA}} (or regex, choice, grammar, json_object). A line of the output has the
input line's number and, for each completion, its text, token ids, finish reason and what was asked for, such as
logprobs; and the times of the first.
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
    add_model_option(parser)
    add_promise_arguments(parser)
    add_sampling_arguments(parser, max_tokens=256)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from weft.llm import LLM

    if arguments.prompt is not None and arguments.output is not None:
        raise OptionError("--output goes with --input; a single --prompt is written to standard output")
    given = sampling_params(arguments)  # bad values are reported before the model is loaded
    requests = None if arguments.input is None else _read_requests(arguments.input, given)
    choose_model(arguments)
    llm = LLM(**engine_options(arguments))
    params = sampling_params(arguments, llm.default_params)
    if requests is None:
        return _stream_prompt(llm, arguments.prompt, params)
    return _complete_requests(llm, requests, params, arguments)


@dataclass(frozen=True)
class _InputRequest:
    line: int
    prompt: str | list[int]
    messages: Any  # None: `prompt` is used
    sampling: dict[str, Any]  # sampling parameters of this line


def _stream_prompt(llm: "LLM", prompt: str, params: SamplingParams) -> int:
    deltas = llm.stream(prompt, params)  # rejects a prompt that cannot run, before anything is printed
    print(prompt, end="", flush=True)
    for delta in deltas:
        print(delta.text, end="", flush=True)
    print()
    if delta.finish_reason == "refused":
        print(f"weft: {_why_refused(delta.metrics)}", file=sys.stderr)
        return 1
    return 0


def _why_refused(metrics: "Metrics | None") -> str:
    if metrics is None or metrics.predicted_ttft is None or metrics.ttft_target is None:
        return "refused: its promise could not be kept beside what runs"
    return (
        f"refused: its first token would have come after {metrics.predicted_ttft:.3g} s, and it was promised within "
        f"{metrics.ttft_target:.3g} s; raise --ttft-target-ms or shorten the prompt"
    )


def _complete_requests(
    llm: "LLM", requests: list[_InputRequest], params: SamplingParams, arguments: argparse.Namespace
) -> int:
    if arguments.output is not None:
        _opened(arguments.output, "a").close()  # finds a bad path before the work, and overwrites nothing yet
    try:
        prompts = [
            request.prompt if request.messages is None else _render(llm, number, request)
            for number, request in enumerate(requests)
        ]
        params_of_each = [replace(params, **request.sampling) for request in requests]
        results = llm.generate(prompts, params_of_each, progress=arguments.progress)
    except PromptError as error:
        raise RequestError(f"{arguments.input}, line {requests[error.number].line}: {error.reason}") from None
    out = sys.stdout if arguments.output is None else _opened(arguments.output, "w")
    with out if out is not sys.stdout else nullcontext():
        for request, result in zip(requests, results, strict=True):
            out.write(json.dumps(_as_json(request, result), ensure_ascii=False) + "\n")
    return 0


def _render(llm: "LLM", number: int, request: _InputRequest) -> list[int]:
    try:
        return llm.chat_prompt(request.messages)
    except RequestError as error:
        raise PromptError(number, str(error)) from None


def _read_requests(path: Path, defaults: SamplingParams) -> list[_InputRequest]:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {path}: {error}") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise OptionError(f"{path} has no requests in it")
    return [_read_request(path, number, line, defaults) for number, line in lines]


def _read_request(path: Path, number: int, line: str, defaults: SamplingParams) -> _InputRequest:
    from weft.engine.structured import check_structure

    where = f"{path}, line {number}"
    try:
        data = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(data, dict) or ("prompt" in data) == ("messages" in data):
        raise RequestError(f'{where}: a JSON object with either "prompt" or "messages" is needed')
    keys = set(data)
    known = {field.name for field in fields(SamplingParams)}
    prompt, messages = data.pop("prompt", ""), data.pop("messages", None)
    unknown = sorted(set(data) - known)
    if unknown:
        raise RequestError(
            f"{where}: unknown field {unknown[0]!r}; known: prompt, messages, {', '.join(sorted(known))}"
        )
    if "messages" in keys and messages is None:
        raise RequestError(f"{where}: messages must be a list, not null")
    if not isinstance(prompt, str | list):
        raise RequestError(f"{where}: a prompt is text or a list of token ids, not {prompt!r}")
    if isinstance(data.get("logit_bias"), dict):  # keys of JSON objects are strings, never numbers
        data["logit_bias"] = {int(t) if t.isdecimal() else t: bias for t, bias in data["logit_bias"].items()}
    try:
        if data.get("structured_outputs") is not None:
            data["structured_outputs"] = StructuredOutputs.of(data["structured_outputs"])
            check_structure(data["structured_outputs"])
        replace(defaults, **data)
    except (RequestError, TypeError) as error:
        raise RequestError(f"{where}: {error}") from None
    return _InputRequest(number, prompt, messages, data)


def _as_json(request: _InputRequest, result: "Generation") -> dict[str, Any]:
    completions = []
    for completion in result.completions:
        shown: dict[str, Any] = {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop": completion.stop,
        }
        if completion.logprobs is not None:
            shown["logprobs"] = [one._asdict() for one in completion.logprobs]
        completions.append(shown)
    line: dict[str, Any] = {
        "line": request.line,
        "prompt_tokens": len(result.prompt_token_ids),
        "completions": completions,
    }
    if result.prompt_logprobs is not None:
        line["prompt_logprobs"] = [one and one._asdict() for one in result.prompt_logprobs]
    if result.metrics is not None:
        line["metrics"] = asdict(result.metrics)
    return line


def _opened(path: Path, mode: str) -> TextIO:
    try:
        return path.open(mode, encoding="utf-8")  # type: ignore[return-value]
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}") from None
