"""Commands in README.md and docs/ are commands of weft, as they are printed; files, pages and classes that are named
exist.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.cli import make_parser, with_dashes

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "deploy/README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> Iterator[str]:
    """Indented lines that begin with weft, joined where one goes on in the next."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    for line in text.splitlines():
        if line.startswith("    ") and re.match(r"(?:time |python -m )?weft ", line.strip()):
            yield re.sub(r"^(time |python -m )", "", line.strip())


EVERY = [pytest.param(line, id=f"{page.stem}-{line[:60]}") for page in PAGES for line in commands(page)]


@pytest.mark.parametrize("line", EVERY)
def test_a_printed_command_parses(line: str) -> None:
    words = shlex.split(line, comments=True)
    if "|" in words:
        words = words[: words.index("|")]
    chosen = make_parser().parse_args(with_dashes(words[1:]))
    assert callable(chosen.run)


def test_there_are_commands_to_look_at() -> None:
    assert len(EVERY) > 40


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_trace_without_a_word_on_where_it_comes_from(page: Path) -> None:
    text = page.read_text()
    if page.name not in ("start.md", "performance.md") and re.search(r"--traces? ", "\n".join(commands(page))):
        assert "start.md#traces" in text


INTERNALS = sorted((ROOT / "docs" / "internals").glob("*.md"))
ARCHITECTURE = ROOT / "docs" / "architecture.md"
SOURCES = {path: path.read_text() for path in (ROOT / "src" / "weft").rglob("*.py")}
NODES = [node for text in SOURCES.values() for node in ast.walk(ast.parse(text))]
CLASSES = {node.name for node in NODES if isinstance(node, ast.ClassDef)}
DOCSTRINGS = {id(node.value) for node in NODES if isinstance(node, ast.Expr)}


def identifiers(node: ast.AST) -> Iterator[str]:
    """The names in a piece of code, and the words of its texts, such as the name of an HTTP field."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in DOCSTRINGS:
        yield from re.findall(r"\w+", node.value)
    for field in ("name", "id", "attr", "arg", "module"):
        if isinstance(name := getattr(node, field, None), str):
            yield from name.split(".")


WORDS = {name for node in NODES for name in identifiers(node)}
OTHER_NAMES = {"MHz", "ZeroMQ", "CPU", "GPU", "OpenTelemetry"}  # names that look like names of classes
QUOTED = re.compile(r"`([^`\n]+)`")
NAME = re.compile(r"\w+(\.\w+)*(\(\))?")
CAMEL_CASE = re.compile(r"\b[A-Z]+[a-z]+(?:[A-Z]+[a-z]*)+\b|\b[A-Z]{2,}[a-z]+\w*\b")
FILE_NAME = re.compile(r"(?<![\w./-])[\w/]+\.(?:py|md|json)\b")
FOLDER_NAME = re.compile(r"(?<![\w./-])(?:\w+/)+(?!\w)")


def unknown_names(line: str) -> Iterator[str]:
    """Names of classes, attributes, files and folders in a line that src/weft does not have."""
    for quoted in QUOTED.findall(line):
        if NAME.fullmatch(quoted) and not FILE_NAME.fullmatch(quoted):
            first, *rest = quoted.removesuffix("()").split(".")
            if first not in (CLASSES if CAMEL_CASE.fullmatch(first) else WORDS) or not WORDS.issuperset(rest):
                yield quoted
    for name in CAMEL_CASE.findall(QUOTED.sub("", line)):
        if not {name, name.removesuffix("s"), name.removesuffix("es")} & (CLASSES | OTHER_NAMES):
            yield name
    for name in FILE_NAME.findall(line):
        is_there = any((root / name).is_file() for root in (ROOT, ROOT / "src" / "weft"))
        if not is_there and ("/" in name or not any(path.name == name for path in SOURCES)):
            yield name
    for name in FOLDER_NAME.findall(line):
        if not any((root / name).is_dir() for root in (ROOT, ROOT / "src" / "weft")):
            yield name


@pytest.mark.parametrize("page", INTERNALS, ids=lambda page: page.stem)
def test_names_in_the_pages_about_the_code_exist(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), start=1)
    assert [
        f"{page.relative_to(ROOT)}:{number}: {name}" for number, line in lines for name in unknown_names(line)
    ] == []


def test_names_in_the_glossary_exist() -> None:
    """The first column of the vocabulary has names of classes, and words that the code uses."""
    vocabulary = re.search(r"^## Vocabulary\n(.*?)^##", ARCHITECTURE.read_text(), re.DOTALL | re.MULTILINE)
    assert vocabulary
    rows = [line for line in vocabulary[1].splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 20
    words = [word for row in rows for word in re.findall(r"\w+", row.split("|")[1])]
    assert [
        word for word in words if word not in CLASSES and (word.lower() not in WORDS or CAMEL_CASE.fullmatch(word))
    ] == []


def test_the_way_of_a_request_exists() -> None:
    """Rows `| stop | file.py | `Class.function` |` of architecture.md: a name is defined in one of its row's files."""
    rows = re.findall(
        r"^\| [^|]+ \| ([\w/., ]+\.py) \| (`[^|]+`) \|$", (ROOT / "docs/architecture.md").read_text(), re.M
    )
    assert len(rows) > 20
    wrong = []
    for files, names in rows:
        source = "\n".join((ROOT / "src/weft" / name.strip()).read_text() for name in files.split(","))
        for name in re.findall(r"[\w.]+", names):
            if not all(re.search(rf"\b(class|def) {part}\b", source) for part in name.split(".")):
                wrong.append(f"{files}: {name}")
    assert wrong == []
