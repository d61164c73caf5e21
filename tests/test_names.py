"""One name has one meaning in src/weft, docstrings name classes that exist, and the prose names its subjects."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "weft").rglob("*.py"))
PAGES = sorted((ROOT / "docs").rglob("*.md"))

VAGUE = re.compile(r"\b(who|those|nobody|whoever)\b", re.IGNORECASE)
VAGUE_ALLOWED = 20


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_each_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 100
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_a_module_docstring_begins_with_a_name_of_the_module() -> None:
    """`Name:` at the beginning is a class or a function of the module, or the title of its file: replay.py, Replay."""
    wrong = []
    for path in SOURCES:
        module = parsed(path)
        title = re.match(r"([A-Z]\w*):", ast.get_docstring(module) or "")
        if title is None:
            continue
        defined = {node.name for node in module.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        stem = path.parent.name if path.name == "__init__.py" else path.stem
        if title[1] not in defined and title[1].lower() not in (stem, f"{stem}s"):
            wrong.append(f"{path.relative_to(ROOT)}:1: {title[1]}")
    assert wrong == []


def test_files_that_the_source_names_exist() -> None:
    known = [
        f"/{path.relative_to(ROOT)}" for folder in ("src", "tests", "scripts") for path in (ROOT / folder).rglob("*.py")
    ]
    wrong = []
    for path in SOURCES:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for name in re.findall(r"(?<![\w/{}])[a-z][\w/]*\.py\b", line):
                if not name.startswith("vllm/") and not any(file.endswith(f"/{name}") for file in known):
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {name}")
    assert wrong == []


def test_prose_uses_few_vague_pronouns() -> None:
    """The words who, those, nobody and whoever often hide the subject of a sentence: name it instead."""
    counts = Counter({str(path.relative_to(ROOT)): len(VAGUE.findall(path.read_text())) for path in [*SOURCES, *PAGES]})
    assert len(counts) > 100
    assert counts.total() <= VAGUE_ALLOWED, [item for item in counts.most_common() if item[1]]
