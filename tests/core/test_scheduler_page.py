"""The table of docs/internals/scheduler.md names classes that are in the files that it names."""

import re
from pathlib import Path

import weft.core

CORE = Path(weft.core.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "internals" / "scheduler.md"


def test_the_table_of_rules_leads_to_the_code() -> None:
    rows = [line.split("|")[2:4] for line in PAGE.read_text().splitlines() if line.endswith(".py |")]
    assert len(rows) > 15
    for names, files in rows:
        source = "".join((CORE / file.strip()).read_text() for file in files.split(","))
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names):
            assert re.search(rf"^ *(class|def) {name}\b", source, re.MULTILINE), f"{name} is not in {files}"
