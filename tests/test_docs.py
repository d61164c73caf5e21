"""Commands in README.md and docs/ are commands of weft, as they are printed; files and pages that are named exist."""

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
