"""EngineProcess: one engine process from start to exit. RestartBackoff: the delays between restarts."""

import asyncio
import sys
from collections import deque
from typing import Self

import msgspec

from weft.serve.engines.engine_folder import EngineFolder
from weft.serve.engines.heartbeat import CHECK_INTERVAL_S, HeartbeatMonitor
from weft.serve.engines.messages import EngineProcessConfig

MAX_DEATHS = 5  # deaths of one engine within DEATHS_WITHIN_S; after one more it is not restarted
DEATHS_WITHIN_S = 300.0  # seconds
FIRST_DELAY_S = 0.2  # seconds before the restart after a second recent death; doubled for each further one
EXIT_TIMEOUT_S = 5.0  # seconds that the process has to exit after it was told to


class EngineProcess:
    """Owns one engine process and the check of its heartbeat."""

    def __init__(self, process: asyncio.subprocess.Process, monitor: HeartbeatMonitor) -> None:
        self._process, self._monitor = process, monitor
        self._exit = asyncio.create_task(process.wait())

    @classmethod
    async def start(cls, config: EngineProcessConfig, folder: EngineFolder) -> Self:
        """Starts a process that uses this folder. Sets the paths in `config` to its files."""
        monitor = HeartbeatMonitor(folder.heartbeat_file)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "weft.serve.engines.engine_main"),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
            )
        except BaseException:
            monitor.close()
            raise
        assert process.stdin is not None
        config = msgspec.structs.replace(config, address=folder.address, heartbeat_file=str(folder.heartbeat_file))
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        return cls(process, monitor)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_silent(self) -> bool:
        """Whether the process has shown no heartbeat for SILENT_CHECKS checks in a row."""
        return self._monitor.is_silent

    async def ended(self) -> str | None:
        """Waits for the process to exit. Kills it if it does not respond, and then returns the reason."""
        while not self._exit.done():
            await asyncio.wait((self._exit,), timeout=CHECK_INTERVAL_S)
            self._monitor.check()
            if self._monitor.failure is not None and self._process.returncode is None:
                self._process.kill()  # it does not react to anything else
                return self._monitor.failure
        return None

    async def end(self) -> None:
        """Closes the process's standard input, so that it exits. Kills it if it does not exit within EXIT_TIMEOUT_S."""
        process = self._process
        self._monitor.close()
        if process.stdin is not None:
            process.stdin.close()
        if process.returncode is None:
            await asyncio.wait((self._exit,), timeout=EXIT_TIMEOUT_S)
        if process.returncode is None:
            process.kill()
            done, _ = await asyncio.wait((self._exit,), timeout=EXIT_TIMEOUT_S)
            if not done:  # it hangs in the kernel and still holds device memory
                raise RuntimeError(f"process {process.pid} cannot be killed")


class RestartBackoff:
    """The recent deaths of one engine's processes."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()  # seconds, ascending

    def __len__(self) -> int:
        return len(self._deaths)

    def delay(self, now: float) -> float | None:
        """Records a death. Returns the seconds until the next start, or None if too many processes died."""
        self._deaths.append(now)
        while self._deaths[0] < now - DEATHS_WITHIN_S:
            self._deaths.popleft()
        number = len(self._deaths)
        if number > MAX_DEATHS:
            return None
        return FIRST_DELAY_S * 2 ** (number - 2) if number > 1 else 0.0
