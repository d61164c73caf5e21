"""`weft chat`: a conversation in the terminal, with TTFT and token rate of each answer."""

import argparse
import sys
from typing import TYPE_CHECKING

from weft.cli.options import (
    add_engine_arguments,
    add_model_option,
    add_sampling_arguments,
    choose_model,
    engine_options,
    sampling_params,
)
from weft.engine.params import SamplingParams
from weft.errors import ModelError, RequestError

if TYPE_CHECKING:
    from weft.llm import LLM, Delta

EPILOG = "In the conversation: /reset starts over, /quit or Ctrl-D leaves, Ctrl-C interrupts an answer."


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="A conversation in the terminal. Every answer is followed by its time to first token and its rate.",
        epilog=EPILOG,
    )
    parser.add_argument("--system", metavar="TEXT", help="system message to begin with")
    parser.add_argument("--no-stats", dest="stats", action="store_false", help="no line of times after an answer")
    add_engine_arguments(parser)
    add_model_option(parser)
    add_sampling_arguments(parser, max_tokens=512)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from weft.llm import LLM, resolve_model_path

    sampling_params(arguments)  # rejects bad values before the model is loaded
    choose_model(arguments)
    resolve_model_path(arguments.model)  # before the line below, so that its output has a separate line
    print("loading the model ...", end="\r", file=sys.stderr, flush=True)
    llm = LLM(**engine_options(arguments))
    if not llm.chat_template:
        raise ModelError(f"{llm.path} has no chat template: use `weft generate`, or a model that was made for chat")
    name = arguments.model or "the small model that ships with weft (old stories, coffee orders)"
    print(f"weft chat: {name}. {EPILOG}", file=sys.stderr)
    _converse(llm, arguments, sampling_params(arguments, llm.default_params))
    return 0


def _converse(llm: "LLM", arguments: argparse.Namespace, params: SamplingParams) -> None:
    opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(opening)
    while (line := _ask()) is not None:
        if line == "/quit":
            return
        if line == "/reset":
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                answer = _answer(llm, messages, params, arguments.stats)
                messages.append({"role": "assistant", "content": answer})
            except RequestError as error:
                messages.pop()
                print(f"weft: {error} (/reset starts over)", file=sys.stderr)


def _ask() -> str | None:
    """The user's next line; None at the end of input. Echoes the line if input is not a terminal."""
    try:
        line = input("> ")
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    if not sys.stdin.isatty():
        print(line)
    return line.strip()


def _answer(llm: "LLM", messages: list[dict[str, str]], params: SamplingParams, stats: bool) -> str:
    """Streams an answer to the screen and returns its text. Ctrl-C ends the answer early."""
    text, tokens = "", 0
    deltas = llm.stream(llm.chat_prompt(messages), params)
    try:
        for delta in deltas:
            if delta.token_ids and not tokens:
                _show_prefill(None)
            elif not tokens:
                _show_prefill(delta)
            print(delta.text, end="", flush=True)
            text, tokens = text + delta.text, tokens + len(delta.token_ids)
    except KeyboardInterrupt:
        print(" [interrupted]")
        return text
    print()
    if stats and delta.metrics is not None:
        times = delta.metrics
        rate = f"{(tokens - 1) / times.decode:.0f} tokens/s" if times.decode > 0 and tokens > 1 else "one token"
        print(
            f"  [{tokens} tokens; first after {times.ttft * 1000:.0f} ms, then {rate}; prompt of "
            f"{delta.prompt_tokens} tokens, {times.cached_tokens} of them cached]",
            file=sys.stderr,
        )
    return text


def _show_prefill(delta: "Delta | None") -> None:
    """Shows the prefill progress of a long prompt on one line, which is erased when the answer begins (None)."""
    if not sys.stderr.isatty():
        return
    text = "" if delta is None else f"reading the prompt: {delta.prefilled} of {delta.prompt_tokens} tokens"
    print(f"\r\033[K{text}", end="\r" if delta is None else "", file=sys.stderr, flush=True)
