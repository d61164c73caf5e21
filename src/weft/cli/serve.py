"""`weft serve`: an OpenAI-compatible server."""

import argparse
import os
from dataclasses import fields
from typing import Any

from weft.cli.environment import read_environment
from weft.cli.foreign_options import add_foreign_options, report_foreign_options
from weft.cli.options import (
    add_engine_arguments,
    add_model_option,
    add_promise_arguments,
    byte_size,
    choose_model,
    engine_options,
)
from weft.cli.structured import add_structured_arguments
from weft.engine.options import EngineOptions
from weft.engine.params import MAX_LOGPROBS
from weft.errors import OptionError

EPILOG = """\
Every option is also an environment variable: WEFT_ and its name in capitals, as in WEFT_MAX_NUM_SEQS=64,
WEFT_API_KEY=a,b or WEFT_SHARE_PREFIX_CACHE=1. The command line has precedence.

Clients may ask for other targets with the headers x-slo-ttft-ms and x-slo-gap-ms, and for none with
"service_tier": "flex". See docs/serving.md.
"""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve",
        help="an OpenAI-compatible server",
        description="Serves a model with the OpenAI API (/v1/chat/completions, /v1/completions, /v1/models and more)\n"
        "and with Anthropic's (/v1/messages).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_engine_arguments(parser)
    add_model_option(parser)
    add_promise_arguments(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--seed", type=int, metavar="N", help="for requests without a seed (default: a different one each time)"
    )
    server = parser.add_argument_group("server").add_argument
    _add_access(server)
    _add_chat_options(server)
    _add_limits(server)
    _add_parsers(server)
    _add_answers(parser.add_argument_group("answers").add_argument)
    _add_transport(parser.add_argument_group("transport").add_argument)
    _add_observation(server)
    _change_promise_defaults(parser)
    add_foreign_options(parser)
    parser.set_defaults(run=run)
    read_environment(parser, os.environ)


def _add_access(add: Any) -> None:
    """Adds options on the address, the model's names, and the clients that may send requests."""
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is open to the network (default: 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="0 takes any free port (default: 8000)")
    add(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that requests may use; answers have the first one (default: MODEL as given)",
    )
    add(
        "--api-key",
        action=_Several,
        default=[],
        metavar="KEY",
        help="requests must carry this key, as a bearer token or as x-api-key; may be given several times, each key is "
        "a tenant (default: no key is needed)",
    )
    add(
        "--allowed-origins",
        action=_Several,
        default=[],
        metavar="ORIGIN",
        help="origin of a web page that may send requests, as https://chat.example.org, or * for all; may be given "
        "several times; [] for none (default: pages of http://localhost and http://127.0.0.1, on any port)",
    )


def _add_chat_options(add: Any) -> None:
    """Adds options on chat templates and on what is kept between requests."""
    add("--chat-template", metavar="FILE", help="Jinja template instead of the model's; a file, or the text itself")
    add(
        "--chat-template-content-format",
        choices=("auto", "string", "openai"),
        default="auto",
        help="type of a message's content for the template: string (text), openai (a list of parts), or auto: the type "
        "that the template can show (default: auto)",
    )
    add(
        "--share-prefix-cache",
        action="store_true",
        help="share cached prefixes between keys; response times then reveal prompts of other keys (default: off)",
    )
    add(
        "--page",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="serve a page at / with a chat, a timeline of the requests and what-if questions (default: on)",
    )
    add(
        "--response-store",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep responses of /v1/responses in memory, to be continued or retrieved by id (default: on)",
    )


def _add_limits(add: Any) -> None:
    """Adds limits on requests and on shutdown."""
    add("--max-body-mb", type=float, default=8.0, metavar="MB", help="larger requests are refused (default: 8)")
    add("--requests-per-minute", type=int, metavar="N", help="limit for each key (default: no limit)")
    add("--max-concurrent-requests", type=int, metavar="N", help="limit for each key (default: no limit)")
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that running streams have to finish after SIGTERM or Ctrl-C (default: 30)",
    )


def _add_parsers(add: Any) -> None:
    """Adds the formats in which the model writes tool calls and reasoning."""
    add(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="format of the model's tool calls: auto (from its chat template), none, hermes, llama3_json, mistral",
    )
    add(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="format of the model's reasoning: auto (from its chat template), none, qwen3, deepseek_r1",
    )


def _add_answers(add: Any) -> None:
    """Adds options on the format and the limits of answers."""
    add(
        "--max-logprobs",
        type=int,
        default=MAX_LOGPROBS,
        metavar="N",
        help=f"most alternatives per token in logprobs, at most {MAX_LOGPROBS} (default: {MAX_LOGPROBS})",
    )
    add(
        "--return-tokens-as-token-ids",
        action="store_true",
        help="name tokens in logprobs by their ids, as token_id:42, unless a request says otherwise (default: off)",
    )
    add(
        "--enable-force-include-usage",
        action="store_true",
        help="end every stream with a chunk that has the usage, even if the request does not ask for it (default: off)",
    )
    add_structured_arguments(add)


def _add_transport(add: Any) -> None:
    """Adds options on how clients reach the server."""
    add("--ssl-certfile", metavar="FILE", help="speak HTTPS with this certificate (chain), PEM (default: HTTP)")
    add("--ssl-keyfile", metavar="FILE", help="the certificate's key, PEM, not encrypted (default: in --ssl-certfile)")
    add(
        "--root-path",
        default="",
        metavar="PREFIX",
        help="path prefix under which a proxy serves the API, as /llm; requests may have it or not (default: none)",
    )


def _add_observation(add: Any) -> None:
    """Adds traces and recordings."""
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="where OpenTelemetry spans are sent, as http://localhost:4318 (needs weft[otel]; default: nowhere)",
    )
    add(
        "--record",
        metavar="FILE",
        help="also write the recording to FILE, for weft diagnose and weft timeline: what ran in which step and when "
        "tokens were sent, without prompts and texts (default: the last minutes are kept in memory)",
    )
    add(
        "--record-max-bytes",
        type=byte_size,
        metavar="BYTES",
        default=1 << 30,
        help="of FILE and FILE.old, where the older half goes, as 100M or 1GiB (default: 1GiB)",
    )
    add(
        "--record-steps",
        metavar="FILE",
        help="write the content, the time and the host's cost of every step, as JSON lines (default: nowhere)",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.misread is not None:
        raise arguments.misread
    from weft.serve.options import ServeOptions
    from weft.serve.server import serve

    names = {field.name for field in fields(ServeOptions)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    for name in ("served_model_name", "api_key"):
        given[name] = tuple(given[name])
    given["allowed_origins"] = tuple(given["allowed_origins"]) or None
    report_foreign_options(arguments)
    given["reasoning_parser"] = _reasoning_parser(arguments)
    choose_model(arguments)
    options = {**engine_options(arguments), "default_targets": arguments.policy == "slo"}
    return serve(ServeOptions(**given), EngineOptions.of(**options, seed=arguments.seed))


def _reasoning_parser(arguments: argparse.Namespace) -> str:
    """The reasoning parser. It may be given by two options, as in vLLM."""
    own: str = arguments.reasoning_parser
    other: str = (arguments.structured_outputs_config or {}).get("reasoning_parser", own)
    if "auto" not in (own, other) and own != other:
        raise OptionError(f"--reasoning-parser {own} and --structured-outputs-config {other}: give one of them")
    return other if own == "auto" else own


MOST_REQUESTS = 8192  # default limit of waiting requests: bounds their memory and the time to plan them
MOST_TOKENS = 2**24  # default limit of their prompt tokens: 64 MiB of token ids


class _Several(argparse.Action):
    """Appends one value per use of the option. The first one replaces the default, which the environment may set."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [values] if before is self.default else [*before, values])


def _change_promise_defaults(parser: argparse.ArgumentParser) -> None:
    """Changes defaults for a server. It aims at targets even if none is set, but promises only targets that are set.
    Its queue is limited.
    """
    aimed = "default: no promise; the server aims at {}"
    auto = aimed.format("50, or at two measured decode steps if that is more")
    for name, about in (
        ("gap_target_ms", f"promised time between tokens ({auto})"),
        ("ttft_target_ms", f"promised time to the first token ({aimed.format('1000')})"),
        ("ttft_target_per_1k_ms", "added to the time to the first token, per 1,000 prompt tokens (default: 250)"),
    ):
        action = next(action for action in parser._actions if action.dest == name)
        action.help = about
        if name == "gap_target_ms":
            action.type = _gap_target
    for name, most in (("max_queued_requests", MOST_REQUESTS), ("max_queued_tokens", MOST_TOKENS)):
        action = next(action for action in parser._actions if action.dest == name)
        action.default = most
        action.help = str(action.help).replace("no limit", str(most))


def _gap_target(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of milliseconds nor auto") from None
