"""Checker: compiles the schemas, regexes and grammars that clients send, in processes of their own.

A few bytes can ask for minutes of work and gigabytes of memory, in a library that cannot be interrupted. So the work is
done where time and memory are bounded and where it can be killed: when it takes too much, when its client has gone, and
when the server ends. The engine compiles a form again, for its tokens, once it has passed here.

`python -m weft.serve.checker` is such a process: it takes one form a line and answers each with a line.
"""

import asyncio
import os
import signal
import sys
from collections import OrderedDict

import msgspec

from weft.engine.params import StructuredOutputs
from weft.errors import RequestError
from weft.serve.bounds import limit_memory, limit_time
from weft.serve.errors import ApiError

PROCESSES = 4  # at once, started when they are needed
CPU = 2.0  # seconds of processor time for one form
MEMORY = 1 << 30  # bytes that one form may add to a process
PATIENCE = 30.0  # seconds that a form may take on a busy machine
CACHED = 256  # forms remembered as good
NICE = 10  # such a process gets a tenth of a core that a stream wants as well
LINE = 1 << 20  # bytes of an answer

_encode = msgspec.json.Encoder().encode


class Verdict(msgspec.Struct):
    error: str | None


class Checker:
    """Everything here runs on the event loop."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(PROCESSES)
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._good: OrderedDict[bytes, None] = OrderedDict()

    async def prepare(self) -> None:
        """Starts a process for the first form that comes: that takes half a second."""
        self._idle.append(await self._start())

    async def check(self, structure: StructuredOutputs) -> None:
        """Raises a RequestError where the form cannot be kept to, or takes too much to find out."""
        try:
            form = _encode(structure)
        except (OverflowError, TypeError, ValueError) as error:
            raise RequestError(f"structured_outputs.{structure.kind} cannot be passed on: {error}") from None
        if form in self._good:
            self._good.move_to_end(form)
            return
        async with self._free:
            line = await self._ask(form)
        if not line:
            raise RequestError(
                f"structured_outputs.{structure.kind} takes more than {CPU:g} s of processor time or "
                f"{MEMORY >> 20} MiB of memory to compile: simplify it"
            )
        verdict = msgspec.json.decode(line, type=Verdict)
        if verdict.error is not None:
            raise RequestError(verdict.error)
        self._good[form] = None
        if len(self._good) > CACHED:
            self._good.popitem(last=False)

    async def _ask(self, form: bytes) -> bytes:
        """What a process says of a form; nothing where it died of it. One that is not done when this ends is killed."""
        self._idle = [process for process in self._idle if process.returncode is None]
        process = self._idle.pop() if self._idle else await self._start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(form + b"\n")
            async with asyncio.timeout(PATIENCE):
                line = await process.stdout.readline()
        except TimeoutError:
            self._kill(process)
            raise ApiError(503, "too much else is to be done to check the schema: try again", retry_after=1) from None
        except BaseException:
            self._kill(process)
            raise
        if line:
            self._idle.append(process)
        else:
            self._kill(process)
        return line

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "weft.serve.checker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
            limit=LINE,
        )
        self._all.add(process)
        return process

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._all.discard(process)
        if process.returncode is None:
            process.kill()

    def close(self) -> None:
        """Ends all that is under way."""
        self._idle.clear()
        for process in list(self._all):
            self._kill(process)


def main() -> int:
    from weft.engine.structured import check_structure

    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the API process
        signal.signal(number, signal.SIG_IGN)
    check_structure(StructuredOutputs(json_object=True))  # imports the rest
    if hasattr(os, "nice"):  # not on Windows
        os.nice(NICE)  # streams go first
    limit_memory(MEMORY)
    for line in sys.stdin.buffer:
        error = None
        limit_time(CPU)
        try:
            check_structure(msgspec.json.decode(line, type=StructuredOutputs))
        except (RequestError, msgspec.MsgspecError, RecursionError) as wrong:
            error = str(wrong)
        limit_time(0.0)
        sys.stdout.buffer.write(_encode(Verdict(error)) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
