"""EngineHandle: one engine of the server. It keeps a process running, and passes jobs to it."""

import asyncio
import contextlib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.errors import QueueFullError, RequestError
from weft.observe.engine_metrics import EngineStep
from weft.serve.engines.engine_connection import EngineConnection, EngineLoad
from weft.serve.engines.engine_folder import EngineFolder
from weft.serve.engines.engine_process import DEATHS_WITHIN, EngineProcess, RestartBackoff
from weft.serve.engines.messages import EngineInfo, EngineProcessConfig, clock
from weft.serve.engines.submitted_request import EnginePrompt, SubmittedRequest

DIED = "the engine process died"
LAST_MESSAGE = 0.05  # seconds to wait for the last message of a process that has exited


class EngineHealth(enum.Enum):
    """Whether an engine takes requests; the best first."""

    READY = "ready"
    SILENT = "silent"  # the process was ready, but shows no heartbeat now
    STARTING = "starting"  # no process is ready: one loads the model, or will be started
    FATAL = "fatal"  # given up: no process will be started again


@dataclass(frozen=True)
class EngineCallbacks:
    """Callbacks for events of one engine."""

    on_step: Callable[[EngineStep], None]
    on_ready: Callable[[EngineInfo], str | None]  # returns why the engine must not serve, or None
    on_death: Callable[[], None]
    on_given_up: Callable[[], None]
    on_log: Callable[[str], None]


class EngineClient:
    """Keeps one engine process running, at most one at a time. All methods run on the event loop."""

    def __init__(self, name: str, orders: EngineProcessConfig, events: EngineCallbacks) -> None:
        self.name = name  # the value of the label "engine" of its metrics
        self.fatal: str | None = None  # why no process will be started again; None: one may be
        self._orders, self._events = orders, events
        self._restarts = RestartBackoff()
        self._process: EngineProcess | None = None
        self._connection: EngineConnection | None = None
        self._is_ending = False  # the process has exited, or will be made to; its jobs do not know yet
        self._was_ready = False  # whether any process was ever ready
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def facts(self) -> EngineInfo | None:
        """Of the process that is ready. None: no process is ready."""
        return None if self._connection is None or self._is_ending else self._connection.facts

    @property
    def load(self) -> EngineLoad:
        return EngineLoad() if self._connection is None or self._is_ending else self._connection.load

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def health(self) -> EngineHealth:
        if self.facts is None:
            return EngineHealth.STARTING if self.fatal is None else EngineHealth.FATAL
        return EngineHealth.SILENT if self._process is not None and self._process.is_silent else EngineHealth.READY

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        """Ends the engine process. Requests that still run are lost."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    # Jobs

    def check_queue(self, streams: int = 1) -> None:
        """Raises QueueFullError if the queue has no room for `streams` more. Streams sent but not yet read count too.

        Raises RequestError if that many would not fit even into an idle engine.
        """
        most, facts = self._orders.options["max_queued_requests"], self.facts
        if most is None or facts is None:
            return
        seats, load = facts.max_num_seqs, self.load
        if streams > most + seats:
            raise RequestError(
                f"prompt: {streams} completions are asked for, but at most {seats} run (--max-num-seqs) and {most} "
                "wait (--max-queued-requests): send fewer prompts at once, or lower n"
            )
        waiting = load.waiting + load.sent - (seats - load.running)  # negative: free running slots
        if waiting + streams > most:
            raise QueueFullError(
                f"{max(0, waiting)} requests wait already, and {most} may (--max-queued-requests): try again later"
            )

    def submit(self, prompts: Sequence[EnginePrompt], arrival: float) -> SubmittedRequest:
        """Sends prompts as one job. Its streams are ordered by prompt: all n of the first, all n of the second, ..."""
        if self._connection is None or self.facts is None:  # the engine died while the request was read
            return SubmittedRequest.lost(DIED)
        return self._connection.submit(prompts, arrival)

    def abort(self, job: SubmittedRequest, index: int | None = None) -> None:
        """Ends one stream of a job, or all open ones. The job gets no further updates of them."""
        if self._connection is not None:  # else the job was lost with it
            self._connection.abort(job, index)

    def lose_jobs(self, reason: str) -> None:
        """Ends all jobs with an error."""
        if self._connection is not None:
            self._connection.lose_jobs(reason)

    def reset_cache(self) -> None:
        if self._connection is not None:
            self._connection.reset_cache()

    # The process

    async def _supervise(self) -> None:
        while True:
            reason = DIED
            try:
                reason = await self._run() or DIED
            except Exception as error:
                # Without `fatal`, a server that cannot start its engine would report "starting" for ever.
                reason = f"the engine process cannot be run: {str(error) or type(error).__name__}"
                if not self._was_ready:
                    self.fatal = reason
            self._events.on_death()
            self.lose_jobs(self.fatal or reason)
            self._process = self._connection = None
            if self.fatal is not None or self._closing:
                break
            delay = self._restarts.delay(clock())
            if delay is None:
                self.fatal = f"the engine process died {len(self._restarts)} times within {DEATHS_WITHIN:g} s"
                if reason != DIED:
                    self.fatal += f"; at last: {reason}"
                break
            self._events.on_log(f"{reason}; starting another")
            await asyncio.sleep(delay)
        if self.fatal is not None:
            self._events.on_given_up()

    async def _run(self) -> str | None:
        """Runs one engine process from start to exit. Returns why it was killed, or None if it exited by itself."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(contextlib.closing(EngineFolder()))
            connection = EngineConnection(folder.address, self._ready, self._events.on_step)
            stack.enter_context(contextlib.closing(connection))
            process = await EngineProcess.start(self._orders, folder)
            self._process, self._connection, self._is_ending = process, connection, False
            reading = asyncio.create_task(connection.read())
            ended = asyncio.create_task(process.ended())
            try:
                await asyncio.wait((reading, ended), return_when=asyncio.FIRST_COMPLETED)
                self._is_ending = True
                killed = ended.result() if ended.done() else None
                if killed is not None:
                    return killed
                if not reading.done():
                    await asyncio.wait((reading,), timeout=LAST_MESSAGE)
                if reading.done():
                    self.fatal = reading.result()  # raises if a message could not be decoded
            finally:
                reading.cancel()
                ended.cancel()
                await process.end()
        return None

    def _ready(self, facts: EngineInfo) -> str | None:
        reason = self._events.on_ready(facts)
        self._was_ready = self._was_ready or reason is None
        return reason
