"""Trial: a chat template is rendered once before it serves anybody, in a process that can be killed.

A template is a program, and one that never ends or fills the memory would do so with the first chat. Where it runs in
a thread, nothing can end it. So it is tried where time and memory are bounded.

`python -m weft.serve.trial MODEL CONTENT_FORMAT [TEMPLATE]` is such a process: it prints what it has found as a line.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import ModelError, OptionError, RequestError
from weft.serve.bounds import limit_memory, limit_time
from weft.serve.texts import read_template
from weft.text.chat import ChatTemplate, RunawayError

CPU = 2.0  # seconds of processor time; a greeting takes milliseconds
MEMORY = 1 << 30  # bytes that it may take beside what Python has
PATIENCE = 60.0  # seconds that it may take on a busy machine
HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "description": "A tool", "parameters": {"type": "object"}}}
TOO_MUCH = (
    f"the chat template takes more than {CPU:g} s of processor time or {MEMORY >> 20} MiB of memory "
    "to render a greeting"
)


class Finding(msgspec.Struct):
    broken: str | None = None  # why no chat could be rendered
    refused: str | None = None  # why the greeting was not; others may be


class Trial:
    """Begins when it is made and is asked later, so that it takes its time beside other work."""

    def __init__(self, path: Path, template: str | None, content_format: str = "auto") -> None:
        given = () if template is None else (template,)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weft.serve.trial", str(path), content_format, *given],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )

    def finding(self) -> Finding:
        try:
            line, _ = self._process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return Finding(refused=f"its trial did not end within {PATIENCE:g} s: the machine is too busy")
        if not line:  # it died of its bounds
            return Finding(broken=TOO_MUCH)
        return msgspec.json.decode(line, type=Finding)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def main() -> int:
    path, content_format, given = Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None
    limit_memory(MEMORY)
    limit_time(CPU)
    found = Finding()
    try:
        template = read_template(path, given, content_format)
        found.refused = _refusal(template, []) if template else None
        if template:
            _refusal(template, [TOOL])  # many take no tools, which is no news
    except RunawayError:
        found.broken = TOO_MUCH
    except ModelError as error:
        found.broken = str(error)
    except OptionError:  # the server will find it out and say it as well
        pass
    limit_time(0.0)
    print(msgspec.json.encode(found).decode())
    return 0


def _refusal(template: ChatTemplate, tools: list[dict[str, Any]]) -> str | None:
    """Why a greeting is not rendered, where the template works as such."""
    try:
        template.render([HELLO], tools=tools)
    except RunawayError:
        raise
    except RequestError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
