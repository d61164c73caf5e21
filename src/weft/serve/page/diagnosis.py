"""Diagnosis: runs `weft diagnose` on the frames of the last minute, in a process of its own."""

import asyncio
import os
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from weft.errors import WeftError
from weft.observe.frames import HEADER
from weft.observe.recording_buffer import RecordingBuffer
from weft.serve.engines.messages import clock

RECORDED_S = 60.0  # seconds of the recording that are diagnosed
MOST_BYTES = 16 << 20  # of that recording
ANSWER_S = 60.0  # seconds that the command may take
NOTHING_TO_SAY = "has no steps with their requests"  # the command's error where no request ran


class DiagnosisFailed(WeftError):
    """There is no diagnosis; the message says why."""


class Diagnosis:
    """Diagnoses one recording at a time."""

    command: Sequence[str] = (sys.executable, "-m", "weft", "diagnose", "--no-progress")

    def __init__(self, recording: RecordingBuffer, answer_s: float = ANSWER_S) -> None:
        self._recording, self._answer_s = recording, answer_s
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[bytes]] = set()

    async def make(self, tenant: str) -> bytes:
        """What `weft diagnose --json` writes, from what this tenant may see. b"{}": no request ran."""
        if self._turn.locked():
            raise DiagnosisFailed("another diagnosis is being made; ask again in a few seconds")
        async with self._turn:
            task = asyncio.create_task(self._make(tenant))
            self._tasks.add(task)
            try:
                return await asyncio.wait_for(task, self._answer_s)
            except TimeoutError:
                raise DiagnosisFailed(f"the diagnosis took more than {self._answer_s:g} s") from None
            finally:
                self._tasks.discard(task)

    async def close(self) -> None:
        """Ends what is being made."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _make(self, tenant: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="weft-diagnosis-") as folder:
            recorded, answer = Path(folder) / "recording", Path(folder) / "answer.json"
            parts = await self._frames(tenant)
            await asyncio.to_thread(recorded.write_bytes, b"".join((HEADER, *parts)))
            error = await self._run("--file", str(recorded), "--json", str(answer))
            if answer.exists():
                return answer.read_bytes()
        if NOTHING_TO_SAY in error:
            return b"{}"
        raise DiagnosisFailed(error or "the diagnosis ended without an answer")

    async def _frames(self, tenant: str) -> list[bytes]:
        """The frames of the last minute. Read in parts, so that streams go on in between."""
        part = self._recording.read(None, clock() - RECORDED_S, tenant)
        parts = [part.data]
        while part.has_more:
            await asyncio.sleep(0)
            part = self._recording.read(part.next, None, tenant)
            parts.append(part.data)
            if sum(map(len, parts)) > MOST_BYTES and len(parts) > 2:
                del parts[1]  # the newest frames count; the first part begins with those of the engines
        return parts

    async def _run(self, *arguments: str) -> str:
        """Runs the command. Returns what it said about an error."""
        process = await asyncio.create_subprocess_exec(
            *self.command, *arguments, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, start_new_session=True
        )
        with suppress(OSError, AttributeError):  # AttributeError: not on Windows
            os.setpriority(os.PRIO_PROCESS, process.pid, 19)  # a device that is a CPU has more important work
        try:
            _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return said.decode(errors="replace").strip()[-500:]
