"""TemplateCheck: renders the chat template once at start-up, in a child process that can be killed.

A template is a program. One that never ends or fills the memory would do so with the first chat, in a thread that
nothing can stop. So it is tested first in a process with limits on time and memory.

`python -m weft.serve.requests.template_check MODEL CONTENT_FORMAT [TEMPLATE]` is this process. It prints its
TemplateCheckResult as one line.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from weft.errors import ModelError, OptionError, RequestError
from weft.serve.process_limits import limit_memory, limit_time
from weft.serve.requests.text_processor import read_template
from weft.text.chat import ChatTemplate, RunawayError

CPU_S = 2.0  # seconds of CPU time; rendering a greeting takes milliseconds
MEMORY_BYTES = 1 << 30  # bytes that it may use in addition to Python's
TIMEOUT_S = 60.0  # seconds of wall time, on a busy machine
HELLO = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "description": "A tool", "parameters": {"type": "object"}}}
TOO_MUCH = (
    f"the chat template takes more than {CPU_S:g} s of processor time or {MEMORY_BYTES >> 20} MiB of memory "
    "to render a greeting"
)


class TemplateCheckResult(msgspec.Struct):
    broken: str | None = None  # why no chat can be rendered
    refused: str | None = None  # why the greeting was not rendered; other chats may be


class TemplateCheck:
    """Starts the process when constructed. `result` waits for it later, so that other work runs in parallel."""

    def __init__(self, path: Path, template: str | None, content_format: str = "auto") -> None:
        given = () if template is None else (template,)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weft.serve.requests.template_check", str(path), content_format, *given],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
        )

    def result(self) -> TemplateCheckResult:
        try:
            line, _ = self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return TemplateCheckResult(refused=f"its check did not end within {TIMEOUT_S:g} s: the machine is too busy")
        if not line:  # the limits killed it
            return TemplateCheckResult(broken=TOO_MUCH)
        return msgspec.json.decode(line, type=TemplateCheckResult)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def main() -> int:
    path, content_format, given = Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None
    limit_memory(MEMORY_BYTES)
    limit_time(CPU_S)
    found = TemplateCheckResult()
    try:
        template = read_template(path, given, content_format)
        found.refused = _refusal(template, []) if template else None
        if template:
            _refusal(template, [TOOL])  # a refusal is ignored, because many templates take no tools
    except RunawayError:
        found.broken = TOO_MUCH
    except ModelError as error:
        found.broken = str(error)
    except OptionError:  # the server finds the same error and reports it
        pass
    limit_time(0.0)
    print(msgspec.json.encode(found).decode())
    return 0


def _refusal(template: ChatTemplate, tools: list[dict[str, Any]]) -> str | None:
    """Why the template refuses to render a greeting, or None. Raises if the template itself is broken."""
    try:
        template.render([HELLO], tools=tools)
    except RunawayError:
        raise
    except RequestError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
