"""WhatIfProcess: the process that simulates what-if questions, so that they delay neither streams nor steps."""

import asyncio
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from weft.errors import WeftError

ANSWER_S = 20.0  # seconds to start the process and to answer; the process itself stops after fewer
MOST_ANSWER_BYTES = 8 << 20


class WhatIfFailed(WeftError):
    """The process did not answer. The next question starts another one."""


class Superseded(WeftError):
    """A newer question came while this one waited."""


class WhatIfProcess:
    """Asks one question at a time. Of the questions of one tenant that wait, only the newest is asked.

    The process starts with the first question. It reads JSON lines and answers each with one. It ends when this process
    does, because its standard input ends.
    """

    def __init__(self, command: Sequence[str], answer_s: float = ANSWER_S) -> None:
        self._command, self._answer_s = command, answer_s
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._newest: dict[str, int] = {}  # number of the newest question, by tenant
        self._asked = 0
        self._closed = False

    async def ask(self, question: bytes, tenant: str = "") -> bytes:
        """The answer to a question. Both are JSON without a line break."""
        self._asked += 1
        number = self._newest[tenant] = self._asked
        async with self._turn:
            if number != self._newest[tenant]:
                raise Superseded("a newer question came")
            try:
                return await asyncio.wait_for(self._exchange(question), self._answer_s)
            except TimeoutError:
                await self._end()
                raise WhatIfFailed(f"the simulation took more than {self._answer_s:g} s; ask for less") from None
            except (OSError, ValueError) as error:  # ValueError: the answer is too long
                await self._end()
                raise WhatIfFailed(f"the simulation failed: {error}") from None
            except BaseException:  # its answer would be taken for that of the next question
                await self._end()
                raise

    async def close(self) -> None:
        """Ends the process. No question may be asked afterwards."""
        self._closed = True
        await self._end()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def _exchange(self, question: bytes) -> bytes:
        if self._closed:
            raise WhatIfFailed("the server is shutting down")
        process = self._process
        if process is None or process.returncode is not None:
            # A session of its own: Ctrl-C in the server's terminal is for the server alone.
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, limit=MOST_ANSWER_BYTES, start_new_session=True
            )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(question + b"\n")
        await process.stdin.drain()
        answer = await process.stdout.readline()
        if not answer.endswith(b"\n"):
            raise WhatIfFailed("the process of the simulation ended; the server's log may say why")
        return answer[:-1]

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
