"""The command line: one file per command. Heavy modules are imported only when needed, so that --help is instant."""

import sys
from collections.abc import Sequence

from weft import __version__
from weft.cli import bench, calibrate, chat, diagnose, generate, serve, simulate, sweep, timeline
from weft.cli.parser import Parser
from weft.errors import WeftError

COMMANDS = (serve, chat, generate, calibrate, simulate, sweep, diagnose, timeline, bench)


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """Replaces underscores in option names: --max_model_len is --max-model-len, as in vLLM."""
    return [
        name.replace("_", "-") + equals + value if name.startswith("--") else argument
        for argument in arguments
        for name, equals, value in [argument.partition("=")]
    ]


def make_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="weft", description="Language models whose token streams do not stutter when a long prompt arrives."
    )
    parser.add_argument("--version", action="version", version=f"weft {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.register(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = make_parser().parse_args(with_dashes(sys.argv[1:] if arguments is None else arguments))
    try:
        return int(chosen.run(chosen))
    except WeftError as error:
        print(f"weft: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        sys.stderr.close()
        return 141
