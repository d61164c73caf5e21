"""Defaults of options from environment variables: WEFT_ and the option's name in capitals."""

import argparse
from collections.abc import Mapping
from typing import Any

from weft.cli.foreign_options import ForeignOption
from weft.errors import OptionError

PREFIX = "WEFT_"
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def read_environment(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Sets defaults from WEFT_... variables. `arguments.misread` is the error of the first bad value, or None."""
    misread: list[OptionError] = []
    for action in parser._actions:
        if not action.option_strings or action.dest == "help" or isinstance(action, ForeignOption):
            continue
        name = PREFIX + action.option_strings[0].removeprefix("--").replace("-", "_").upper()
        text = environment.get(name, "").strip()
        if not text or "." in name:  # no shell can set a variable with a dot
            continue
        if action.dest == "port" and text.startswith("tcp://"):
            continue  # Kubernetes sets WEFT_PORT like this in all containers next to a service named weft
        try:
            action.default = _value(name, action, text)
        except OptionError as error:
            misread.append(error)
    parser.set_defaults(misread=misread[0] if misread else None)


def _value(name: str, action: argparse.Action, text: str) -> Any:
    """The default of an option from the text of its variable."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        lowered = text.lower()
        if lowered not in (*TRUE, *FALSE):
            raise OptionError(f"{name}={text!r} is neither true nor false: write 1 or 0")
        return lowered in TRUE
    if action.dest == "allowed_origins" and text.startswith("["):
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
