"""StructureChecker: test-compiles the schemas, regexes and grammars that clients send, in child processes.

A few bytes can cost minutes of work and gigabytes of memory, in a library that cannot be interrupted. A child process
has limits on time and memory, and it can be killed: when it exceeds them, when the client disconnects, and when the
server ends. The engine compiles each structure again for its vocabulary after it has passed here.

`python -m weft.serve.requests.structure_checker` is such a process. It reads one structure per line and answers each
with one line.
"""

import asyncio
import os
import signal
import sys
from collections import OrderedDict

import msgspec

from weft.engine.params import StructuredOutputs
from weft.errors import RequestError
from weft.serve.errors import ApiError
from weft.serve.process_limits import limit_memory, limit_time

PROCESSES = 4  # most child processes; started when needed
CPU_S = 2.0  # seconds of CPU time for one structure
MEMORY_BYTES = 1 << 30  # bytes that compiling may add to a process
TIMEOUT_S = 30.0  # seconds of wall time for one structure, on a busy machine
MOST_CACHED = 256  # structures remembered as valid
NICE = 10  # a child process gets a tenth of a core if streams want it too
MOST_LINE = 1 << 20  # bytes; longest answer line

_encode = msgspec.json.Encoder().encode


class StructureCheckResult(msgspec.Struct):
    error: str | None


class StructureChecker:
    """A pool of child processes, and a cache of valid structures. All methods run on the event loop."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(PROCESSES)
        self._idle_processes: list[asyncio.subprocess.Process] = []
        self._processes: set[asyncio.subprocess.Process] = set()
        self._valid: OrderedDict[bytes, None] = OrderedDict()

    async def prepare(self) -> None:
        """Starts a process ahead of the first structure, because starting takes half a second."""
        self._idle_processes.append(await self._start())

    async def check(self, structure: StructuredOutputs) -> None:
        """Raises RequestError if the structure is invalid, unsupported, or too expensive to compile."""
        try:
            encoded = _encode(structure)
        except (OverflowError, TypeError, ValueError) as error:
            raise RequestError(f"structured_outputs.{structure.kind} cannot be passed on: {error}") from None
        if encoded in self._valid:
            self._valid.move_to_end(encoded)
            return
        async with self._slots:
            line = await self._ask(encoded)
        if not line:
            raise RequestError(
                f"structured_outputs.{structure.kind} takes more than {CPU_S:g} s of processor time or "
                f"{MEMORY_BYTES >> 20} MiB of memory to compile: simplify it"
            )
        verdict = msgspec.json.decode(line, type=StructureCheckResult)
        if verdict.error is not None:
            raise RequestError(verdict.error)
        self._valid[encoded] = None
        if len(self._valid) > MOST_CACHED:
            self._valid.popitem(last=False)

    async def _ask(self, encoded: bytes) -> bytes:
        """The answer line of a child process, or b"" if it died. Kills the process on a timeout or a cancellation."""
        self._idle_processes = [process for process in self._idle_processes if process.returncode is None]
        process = self._idle_processes.pop() if self._idle_processes else await self._start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(encoded + b"\n")
            async with asyncio.timeout(TIMEOUT_S):
                line = await process.stdout.readline()
        except TimeoutError:
            self._kill(process)
            raise ApiError(503, "too much else is to be done to check the schema: try again", retry_after=1) from None
        except BaseException:
            self._kill(process)
            raise
        if line:
            self._idle_processes.append(process)
        else:
            self._kill(process)
        return line

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "weft.serve.requests.structure_checker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
            limit=MOST_LINE,
        )
        self._processes.add(process)
        return process

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._processes.discard(process)
        if process.returncode is None:
            process.kill()

    def close(self) -> None:
        """Kills all child processes."""
        self._idle_processes.clear()
        for process in list(self._processes):
            self._kill(process)


def main() -> int:
    from weft.engine.structured import check_structure

    for number in (signal.SIGINT, signal.SIGTERM):  # the API process handles these signals
        signal.signal(number, signal.SIG_IGN)
    check_structure(StructuredOutputs(json_object=True))  # imports the remaining modules before the memory limit
    if hasattr(os, "nice"):  # not on Windows
        os.nice(NICE)  # streams have precedence
    limit_memory(MEMORY_BYTES)
    for line in sys.stdin.buffer:
        error = None
        limit_time(CPU_S)
        try:
            check_structure(msgspec.json.decode(line, type=StructuredOutputs))
        except (RequestError, msgspec.MsgspecError, RecursionError) as wrong:
            error = str(wrong)
        limit_time(0.0)
        sys.stdout.buffer.write(_encode(StructureCheckResult(error)) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
