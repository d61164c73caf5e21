"""EngineClient: one engine of the server. It keeps a process running, and submits requests to it."""

import asyncio
import contextlib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.errors import QueueFullError, RequestError
from weft.observe.engine_metrics import EngineStep
from weft.serve.engines.engine_connection import EngineConnection, EngineLoad
from weft.serve.engines.engine_folder import EngineFolder
from weft.serve.engines.engine_process import DEATHS_WITHIN_S, EngineProcess, RestartBackoff
from weft.serve.engines.engine_prompt import EnginePrompt
from weft.serve.engines.messages import EngineInfo, EngineProcessConfig, clock
from weft.serve.engines.request_output_collector import RequestOutputCollector

DIED = "the engine process died"
LAST_MESSAGE_TIMEOUT_S = 0.05  # seconds to wait for the last message of a process that has exited


class EngineHealth(enum.Enum):
    """The states of an engine, in order of preference for a new request."""

    READY = "ready"
    SILENT = "silent"  # the process was ready, but shows no heartbeat now
    STARTING = "starting"  # no process is ready: one loads the model, or will be started
    FAILED = "failed"  # no process will be started again


@dataclass(frozen=True)
class EngineCallbacks:
    """Callbacks for events of one engine."""

    on_step: Callable[[EngineStep], None]
    on_frames: Callable[[list[bytes], bytes], None]  # for the recording: of prompts, and of a step, or b""
    on_ready: Callable[[EngineInfo], str | None]  # returns why the engine must not serve, or None
    on_death: Callable[[], None]
    on_failure: Callable[[], None]  # no process will be started again
    on_log_line: Callable[[str], None]


class EngineClient:
    """Keeps one engine process running, at most one at a time. All methods run on the event loop."""

    def __init__(self, name: str, config: EngineProcessConfig, events: EngineCallbacks) -> None:
        self.name = name  # the value of the label "engine" of its metrics
        self.failure: str | None = None  # why no process will be started again; None: one may be
        self._config, self._events = config, events
        self._restarts = RestartBackoff()
        self._process: EngineProcess | None = None
        self._connection: EngineConnection | None = None
        self._is_ending = False  # the process has exited, or will be killed; its requests have not failed yet
        self._was_ready = False  # whether any process was ever ready
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo | None:
        """The EngineInfo of the running process, or None if none is ready."""
        return None if self._connection is None or self._is_ending else self._connection.info

    @property
    def load(self) -> EngineLoad:
        return EngineLoad() if self._connection is None or self._is_ending else self._connection.load

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def health(self) -> EngineHealth:
        if self.info is None:
            return EngineHealth.STARTING if self.failure is None else EngineHealth.FAILED
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

    # Requests

    def check_queue(self, sequences: int = 1) -> None:
        """Raises QueueFullError if the queue has no room for `sequences` more.

        Sequences that the engine has not read yet count as waiting. Raises RequestError if even an idle engine could
        not hold `sequences`.
        """
        most, info = self._config.options["max_queued_requests"], self.info
        if most is None or info is None:
            return
        slots, load = info.max_num_seqs, self.load
        if sequences > most + slots:
            raise RequestError(
                f"prompt: {sequences} completions are asked for, but at most {slots} run (--max-num-seqs) and {most} "
                "wait (--max-queued-requests): send fewer prompts at once, or lower n"
            )
        waiting = load.waiting + load.sent - (slots - load.running)  # negative: free running slots
        if waiting + sequences > most:
            raise QueueFullError(
                f"{max(0, waiting)} requests wait already, and {most} may (--max-queued-requests): try again later"
            )

    def submit(self, prompts: Sequence[EnginePrompt], arrival: float) -> RequestOutputCollector:
        """Sends the prompts of one request. Sequences are ordered by prompt: all n of the first, then of the second.

        Returns the collector of their outputs.
        """
        if self._connection is None or self.info is None:  # the engine died while the request was read
            return RequestOutputCollector.failed(DIED)
        return self._connection.submit(prompts, arrival)

    def abort(self, collector: RequestOutputCollector, index: int | None = None) -> None:
        """Ends one sequence of a request, or all open ones. No further updates of them arrive."""
        if self._connection is not None:  # else the request has failed with it
            self._connection.abort(collector, index)

    def fail_requests(self, reason: str) -> None:
        """Ends all requests with an error."""
        if self._connection is not None:
            self._connection.fail_requests(reason)

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
                # Without `failure`, a server that cannot start its engine would report "starting" for ever.
                reason = f"the engine process cannot be run: {str(error) or type(error).__name__}"
                if not self._was_ready:
                    self.failure = reason
            self._events.on_death()
            self.fail_requests(self.failure or reason)
            self._process = self._connection = None
            if self.failure is not None or self._closing:
                break
            delay = self._restarts.delay(clock())
            if delay is None:
                self.failure = f"the engine process died {len(self._restarts)} times within {DEATHS_WITHIN_S:g} s"
                if reason != DIED:
                    self.failure += f"; at last: {reason}"
                break
            self._events.on_log_line(f"{reason}; starting another")
            await asyncio.sleep(delay)
        if self.failure is not None:
            self._events.on_failure()

    async def _run(self) -> str | None:
        """Runs one engine process from start to exit. Returns why it was killed, or None if it exited by itself."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(contextlib.closing(EngineFolder()))
            connection = EngineConnection(folder.address, self._ready, self._events.on_step, self._events.on_frames)
            stack.enter_context(contextlib.closing(connection))
            process = await EngineProcess.start(self._config, folder)
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
                    await asyncio.wait((reading,), timeout=LAST_MESSAGE_TIMEOUT_S)
                if reading.done():
                    self.failure = reading.result()  # raises if a message could not be decoded
            finally:
                reading.cancel()
                ended.cancel()
                await process.end()
        return None

    def _ready(self, info: EngineInfo) -> str | None:
        reason = self._events.on_ready(info)
        self._was_ready = self._was_ready or reason is None
        return reason
