"""`weft serve`: an OpenAI-compatible server."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from weft.cli.foreign import Foreign, add_foreign, tell_foreign
from weft.cli.options import add_engine_arguments, add_model_option, add_promise_arguments, choose_model, engine_options
from weft.cli.structured import add_structured_arguments
from weft.engine.options import EngineOptions
from weft.engine.params import MAX_LOGPROBS
from weft.errors import OptionError

PREFIX = "WEFT_"
EPILOG = """\
Every option is also an environment variable: WEFT_ and its name in capitals, as in WEFT_MAX_NUM_SEQS=64,
WEFT_API_KEY=a,b or WEFT_SHARE_PREFIX_CACHE=1. The command line goes first.

Clients may ask for times of their own with the headers x-slo-ttft-ms and x-slo-gap-ms, and for none with
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
    engine = parser.add_argument_group("sampling")
    engine.add_argument("--seed", type=int, metavar="N", help="for requests without a seed (default: different always)")
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is open to the network (default: 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="0 takes any that is free (default: 8000)")
    add(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names that requests may use, the first one is in answers (default: MODEL as given)",
    )
    add(
        "--api-key",
        action=_Several,
        default=[],
        metavar="KEY",
        help="who does not send one (as a bearer token or as x-api-key) is turned away; may be given several times, "
        "each key is a tenant (default: none)",
    )
    add(
        "--allowed-origins",
        action=_Several,
        default=[],
        metavar="ORIGIN",
        help="a web page that may ask from a browser, as https://chat.example.org, or * for all; may be given several "
        "times; [] for none (default: pages of http://localhost and http://127.0.0.1, on any port)",
    )
    add("--chat-template", metavar="FILE", help="Jinja template instead of the model's own; a file, or the text itself")
    add(
        "--chat-template-content-format",
        choices=("auto", "string", "openai"),
        default="auto",
        help="what the template gets as a message's content: string (text), openai (a list of parts), or auto: what it "
        "can show (default: auto)",
    )
    add(
        "--share-prefix-cache",
        action="store_true",
        help="let keys share cached prefixes; one can then time what another has asked (default: off)",
    )
    add(
        "--response-store",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep responses of /v1/responses in memory, to be continued or retrieved by id (default: on)",
    )
    add("--max-body-mb", type=float, default=8.0, metavar="MB", help="larger requests are refused (default: 8)")
    add("--requests-per-minute", type=int, metavar="N", help="that one key may send (default: no limit)")
    add("--max-concurrent-requests", type=int, metavar="N", help="of one key (default: no limit)")
    add(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that running streams get to finish after SIGTERM or Ctrl-C (default: 30)",
    )
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
        help="how the model marks its thoughts: auto (from its chat template), none, qwen3, deepseek_r1",
    )
    _add_answers(parser.add_argument_group("answers").add_argument)
    _add_transport(parser.add_argument_group("transport").add_argument)
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send OpenTelemetry spans there, as http://localhost:4318 (needs weft[otel]; default: nowhere)",
    )
    add(
        "--record-steps",
        metavar="FILE",
        help="write what every step carried, took and cost the host, as JSON lines (default: nowhere)",
    )
    _promises_of_a_server(parser)
    add_foreign(parser)
    parser.set_defaults(run=run)
    read_environment(parser, os.environ)


def _add_answers(add: Any) -> None:
    """Adds options on the format and the limits of answers."""
    add(
        "--max-logprobs",
        type=int,
        default=MAX_LOGPROBS,
        metavar="N",
        help=f"most alternatives a token that logprobs may ask for, at most {MAX_LOGPROBS} (default: {MAX_LOGPROBS})",
    )
    add(
        "--return-tokens-as-token-ids",
        action="store_true",
        help="name tokens in logprobs by their ids, as token_id:42, unless a request says otherwise (default: off)",
    )
    add(
        "--enable-force-include-usage",
        action="store_true",
        help="end every stream with a chunk that has the usage, asked for or not (default: off)",
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
        help="path under which a proxy shows the server, as /llm; requests are taken with it and without (default: "
        "none)",
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
    tell_foreign(arguments)
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
    """Appends one value per use of the option. The first value replaces the default, which may be from the
    environment."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [values] if before is self.default else [*before, values])


def _promises_of_a_server(parser: argparse.ArgumentParser) -> None:
    """Changes the defaults for a server: it aims at targets even if none is set, but promises only targets that are
    set, and its queue is limited."""
    aimed = "default: nothing is promised, and {} is aimed at"
    auto = aimed.format("50, or two measured decode steps where that is more,")
    for name, about in (
        ("gap_target_ms", f"promised time between tokens ({auto})"),
        ("ttft_target_ms", f"promised time to the first token ({aimed.format('1000')})"),
        ("ttft_target_per_1k_ms", "and on top of it, per 1,000 prompt tokens (default: 250)"),
    ):
        action = next(action for action in parser._actions if action.dest == name)
        action.help = about
        if name == "gap_target_ms":
            action.type = _gap
    for name, most in (("max_queued_requests", MOST_REQUESTS), ("max_queued_tokens", MOST_TOKENS)):
        action = next(action for action in parser._actions if action.dest == name)
        action.default = most
        action.help = str(action.help).replace("no limit", str(most))


def _gap(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of milliseconds nor auto") from None


def read_environment(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Sets defaults from WEFT_... variables. A bad value is reported when the command runs."""
    misread: list[OptionError] = []
    for action in parser._actions:
        if not action.option_strings or action.dest == "help" or isinstance(action, Foreign):
            continue
        name = PREFIX + action.option_strings[0].removeprefix("--").replace("-", "_").upper()
        text = environment.get(name, "").strip()
        if not text or "." in name:  # no shell can set a variable with a dot
            continue
        if action.dest == "port" and text.startswith("tcp://"):
            continue  # Kubernetes sets WEFT_PORT like this in all containers next to a service named weft
        try:
            action.default = _from_environment(name, action, text)
        except OptionError as error:
            misread.append(error)
    parser.set_defaults(misread=misread[0] if misread else None)


def _from_environment(name: str, action: argparse.Action, text: str) -> Any:
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        lowered = text.strip().lower()
        if lowered not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            raise OptionError(f"{name}={text!r} is neither true nor false: write 1 or 0")
        return lowered in ("1", "true", "yes", "on")
    if action.dest == "allowed_origins" and text.lstrip().startswith("["):
        return [text]  # a JSON list, as on the command line
    if isinstance(action.default, list):
        parts = text.replace(",", " ").split()
        if not parts:  # an empty key list must not leave the server open
            raise OptionError(f"{name}={text!r} has no value in it: write one, or several with commas between them")
        return parts
    if action.choices is not None and text not in action.choices:
        raise OptionError(f"{name}={text!r} is unknown: choose {', '.join(action.choices)}")
    if action.type is None:
        return text
    try:
        return action.type(text)  # type: ignore[operator]
    except argparse.ArgumentTypeError as error:
        raise OptionError(f"{name}={text!r}: {error}") from None
    except ValueError:
        raise OptionError(f"{name}={text!r} is not a value for {action.option_strings[0]}") from None
