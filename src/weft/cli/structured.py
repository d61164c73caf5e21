"""`--structured-outputs-config`, as in vLLM: a JSON object, or one field at a time after a dot.

weft has one backend, llguidance. A field is accepted if its value is what weft does, and rejected by name otherwise.
"""

import argparse
import json
from functools import partial
from typing import Any

NAME = "structured-outputs-config"
SO_HERE = {  # values that match what weft always does
    "backend": ("auto", "guidance"),
    "disable_fallback": (True, False),  # there is no other backend to fall back on
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "enable_in_reasoning": (False,),
}
FIELDS = (*SO_HERE, "reasoning_parser")
WORDS = {"true": True, "false": False}


def add_structured_arguments(add: Any) -> None:
    """Adds the options; `add` is a group's add_argument. Values merge into the dict `structured_outputs_config`."""
    add(
        f"--{NAME}",
        type=config,
        action=_Merge,
        metavar="JSON",
        help='as {"backend": "guidance"}; or one field at a time, as --structured-outputs-config.backend guidance. '
        "Fields: backend (auto or guidance), reasoning_parser (as --reasoning-parser), disable_fallback, and those "
        "that must be false here: disable_any_whitespace, disable_additional_properties, enable_in_reasoning",
    )
    for field in FIELDS:
        names = [f"--{NAME}.{field.replace('_', '-')}"]
        if field == "backend":
            names.append("--guided-decoding-backend")  # vLLM's older name
        add(*names, dest="structured_outputs_config", type=partial(one, field), action=_Merge, help=argparse.SUPPRESS)


def config(text: str) -> dict[str, Any]:
    """The fields of a JSON object, checked."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f'{text!r:.100} is not a JSON object, as {{"backend": "guidance"}} is one')
    for field, value in given.items():
        _check(field, value)
    return given


def one(field: str, text: str) -> dict[str, Any]:
    """One field, checked."""
    value = text if isinstance(SO_HERE.get(field, ("",))[0], str) else WORDS.get(text.lower(), text)
    _check(field, value)
    return {field: value}


def _check(field: str, value: Any) -> None:
    if field not in FIELDS:
        raise argparse.ArgumentTypeError(f"{field!r:.40} is not known here: choose of {', '.join(FIELDS)}")
    if field == "reasoning_parser" and isinstance(value, str):
        return  # checked later, like --reasoning-parser
    known = SO_HERE.get(field, ())
    if not any(value is one or (value == one and isinstance(value, str)) for one in known):
        shown = " or ".join(json.dumps(one).strip('"') for one in known) or "a name"
        raise argparse.ArgumentTypeError(f"{field} {value!r:.40} is not supported here, only {shown}")


class _Merge(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), **values})
