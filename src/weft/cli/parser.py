"""Parser: argparse with errors of one line, which name the nearest option and the help of the command."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with short errors. Commands made with `add_subparsers` are Parsers as well."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        given = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:  # otherwise a subcommand checks its options
            self._check_names(given)
        found, extra = super().parse_known_args(given, namespace)
        if extra:
            self.error(f"{extra[0]!r} is one argument too many")
        return found, extra

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"weft: {' '.join(message.split())} (see {self.prog} --help)\n")

    def _check_names(self, given: Sequence[str]) -> None:
        """Reports unknown options before argparse reports missing ones, which may only be misspelt."""
        for argument in given:
            if argument == "--":  # no options follow it
                return
            name = argument.partition("=")[0]
            if name.startswith("--") and " " not in argument and not self._knows(name):
                self.error(f"{name} is unknown{self._nearest(name)}")

    def _knows(self, name: str) -> bool:
        """Whether this is an option or, as in argparse, the beginning of one."""
        return any(option.startswith(name) for option in self._option_string_actions)

    def _nearest(self, name: str) -> str:
        shown = {
            option
            for action in self._actions
            if action.help is not argparse.SUPPRESS
            for option in action.option_strings
            if option.startswith("--")
        }
        near = difflib.get_close_matches(name, sorted(shown), n=1)
        return f": did you mean {near[0]}?" if near else ""
