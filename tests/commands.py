"""Runs a `weft` command: in this process, which saves a second or two of imports, or in a process of its own."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from weft.cli import main

Done = subprocess.CompletedProcess[str]


def run_here(*arguments: str | Path, text: str = "") -> Done:
    """Runs the command in this process; `text` is its standard input. Enough where the process is not the point."""
    command = [*map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), mock.patch("sys.stdin", io.StringIO(text)):
        try:
            code = main(command)
        except SystemExit as ended:
            code = ended.code  # type: ignore[assignment]
    return Done(command, code or 0, out.getvalue(), err.getvalue())


def run_process(*arguments: str | Path, text: str = "", **environment: str) -> Done:
    """Runs `python -m weft`, as a user does."""
    command = [sys.executable, "-m", "weft", *map(str, arguments)]
    own = {**os.environ, **environment}
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False, env=own)
