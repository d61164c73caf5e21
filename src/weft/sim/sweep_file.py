"""The file of a sweep: JSON lines, a header and then one score per line, written as they arrive."""

import ast
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from weft import __version__
from weft.errors import OptionError
from weft.sim.profiles import Profile
from weft.sim.sweep_grid import Score

DECISIVE = ("compare.py", "simulator.py", "traces.py")  # files of sim/ in the scheduler hash, with all of core/
UNUSED = ("name", "mean", "spread", "residuals", "fidelity")  # fields of a profile that no run depends on


def header_of(profile: Profile) -> dict[str, Any]:
    content = {name: value for name, value in asdict(profile).items() if name not in UNUSED}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    return {"profile": profile.name, "profile_hash": digest, "weft": __version__, "scheduler": scheduler_hash()}


@cache
def scheduler_hash() -> str:
    """Hash of the code that determines scores: the core, the simulator, the check of targets, the trace reader."""
    package = Path(__file__).parents[1]
    files = [*sorted((package / "core").rglob("*.py")), *(package / "sim" / name for name in DECISIVE)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + code_of(file.read_text(encoding="utf-8")).encode() + b"\0")
    return digest.hexdigest()[:12]


def code_of(source: str) -> str:
    """The code without comments, docstrings and layout; the same text in every version of Python."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return repr(_plain(tree))


def _plain(node: Any) -> Any:
    """A syntax tree as lists, without empty fields: newer versions of Python have more of them."""
    if isinstance(node, list):
        return [_plain(one) for one in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, _plain(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
    return [type(node).__name__, *fields]


def read_scores(path: Path) -> tuple[dict[str, Any], list[Score], int]:
    """The header, the scores, and the number of bytes that they take. A last line that was cut off is left out."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OptionError(f"cannot read {path}: {error.strerror}") from None
    whole = data.rfind(b"\n") + 1
    rows = []
    for number, line in enumerate(data[:whole].splitlines(), start=1):
        try:
            rows.append(dict(json.loads(line)) if number == 1 else Score(**json.loads(line)))
        except (ValueError, TypeError):
            raise OptionError(f"{path}, line {number} is not from a sweep; choose another file") from None
    if not rows and not b'{"profile":'.startswith(data[:11]):
        raise OptionError(f"{path} is not from a sweep; choose another file")
    header = rows[0] if rows and isinstance(rows[0], dict) else {}
    return header, [row for row in rows if isinstance(row, Score)], whole


def open_scores(path: Path, header: Mapping[str, Any]) -> list[Score]:
    """The scores of an earlier sweep. Prepares the file for appending; a new file gets the header."""
    found, scores, whole = read_scores(path) if path.exists() else ({}, [], 0)
    if found and found != header:
        there, here = (", ".join(f"{name} {value}" for name, value in one.items()) for one in (found, header))
        raise OptionError(f"{path} is from {there}; this is {here}: choose another file")
    try:
        with path.open("ab") as file:
            file.truncate(whole)
            if not found:
                file.write(_line(header))
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}") from None
    return scores


def append_scores(path: Path, scores: Iterable[Score]) -> None:
    with path.open("ab") as file:
        file.write(b"".join(_line(score._asdict()) for score in scores))


def sort_scores(path: Path, header: Mapping[str, Any], scores: Iterable[Score]) -> None:
    """Rewrites the file in a fixed order, so that it does not depend on the order of the runs."""
    draft = path.with_name(path.name + ".tmp")
    lines = [score._asdict() for score in sorted(scores, key=lambda score: score.order)]
    draft.write_bytes(b"".join(map(_line, [header, *lines])))
    os.replace(draft, path)


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"
