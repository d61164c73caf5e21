"""EngineClient: starts, watches and restarts the engine process, and delivers its results to the waiting jobs."""

import asyncio
import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from weft.errors import QueueFullError, RequestError
from weft.observe.engine_metrics import EngineStep
from weft.serve.folder import EngineFolder, sweep
from weft.serve.jobs import Job, Prompt, Update
from weft.serve.messages import (
    Abort,
    Facts,
    Fatal,
    News,
    Orders,
    Ready,
    Rejected,
    ResetCache,
    Submit,
    clock,
    decode_for_api,
    encode,
)
from weft.serve.pulse import LOOK, Watch

MOST_DEATHS = 5  # of the engine process within DEATHS_WITHIN; after one more it is not restarted
DEATHS_WITHIN = 300.0  # seconds
DIED = "the engine process died"
PATIENCE = 5.0  # seconds that the engine process has to exit after it was told to


@dataclass(slots=True)
class Load:
    """How busy the engine is: its last step's numbers, plus the streams sent since."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    sent: int = 0  # streams that were sent, but that the engine had not read as of its last report


@dataclass
class Listener:
    """Callbacks for events of the engine process as a whole."""

    on_step: Callable[[EngineStep], None] = lambda step: None
    on_ready: Callable[[Facts], None] = lambda facts: None
    on_death: Callable[[], None] = lambda: None
    on_log: Callable[[str], None] = field(default=lambda line: print(f"weft: {line}", file=sys.stderr, flush=True))


class EngineClient:
    """Runs one engine process at a time. All methods run on the event loop."""

    def __init__(
        self,
        path: str,
        eos_ids: Sequence[int],
        options: dict[str, Any],
        listener: Listener,
        record_steps: str | None = None,
    ) -> None:
        self.facts: Facts | None = None  # of the engine that is ready; None: no engine is ready
        self.fatal: str | None = None  # why no engine will be started again; None: it may be
        self.load = Load()
        self.pid: int | None = None
        self.changed = asyncio.Event()  # set when the engine becomes ready, or when it is given up
        self._orders = Orders("", path, tuple(eos_ids), options, record_steps)
        self._listener = listener
        self._numbers = itertools.count()
        self._sent = 0  # streams sent to the current engine process
        self._routes: dict[int, tuple[Job, int]] = {}
        self._socket: zmq.asyncio.Socket | None = None
        self._deaths: deque[float] = deque()
        self._watch: Watch | None = None
        self._was_up = False  # whether an engine process was ever ready
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_silent(self) -> bool:
        """Whether an engine process runs, but has shown no heartbeat for SILENT seconds (see pulse.py)."""
        return self._watch is not None and self._watch.is_silent

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        """Ends the engine process. Requests that still run are lost."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def check_queue(self, streams: int = 1) -> None:
        """Raises QueueFullError if the queue has no room for `streams` more. Streams sent but not yet read count too.

        Raises RequestError if that many would not fit even into an idle engine.
        """
        most = self._orders.options["max_queued_requests"]
        if most is None or self.facts is None:
            return
        seats, load = self.facts.max_num_seqs, self.load
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

    def submit(self, prompts: Sequence[Prompt], arrival: float) -> Job:
        """Sends prompts as one job. Its streams are ordered by prompt: all n of the first, all n of the second, ..."""
        job = Job()
        messages = []
        for prompt in prompts:
            keys = list(itertools.islice(self._numbers, prompt.params.n))
            job.keys += keys
            message = Submit(keys[0], prompt.tokens, prompt.params, prompt.wishes, prompt.salt, arrival)
            try:
                messages.append(encode(message))
            except (OverflowError, TypeError, ValueError) as error:  # a number in a schema that needs over 64 bits
                raise RequestError(f"the request cannot be passed on: {error}") from None
        if self._socket is None or self.facts is None:  # the engine died while the request was read
            return Job.lost(DIED)
        self._sent += len(job.keys)
        self._routes.update((key, (job, index)) for index, key in enumerate(job.keys))
        job.open.update(job.keys)
        self.load.sent += len(job.keys)
        for data in messages:
            self._socket.send(data)  # no high-water mark is set, so this never blocks
        return job

    def abort(self, job: Job, index: int | None = None) -> None:
        """Ends one stream of a job, or all open ones. The job gets no further updates of them."""
        keys = sorted(job.open) if index is None else [job.keys[index]]
        keys = [key for key in keys if key in job.open]
        for key in keys:
            del self._routes[key]
            job.open.remove(key)
        if keys and self.facts is not None:
            self._send(Abort(keys))

    def reset_cache(self) -> None:
        self._send(ResetCache())

    def _send(self, message: Abort | ResetCache) -> None:
        if self._socket is not None:
            self._socket.send(encode(message))

    async def _supervise(self) -> None:
        with contextlib.suppress(OSError):
            sweep()
        while True:
            why = DIED
            try:
                why = await self._live() or DIED
            except Exception as error:
                # Without `fatal`, a server that cannot start its engine would report "starting" for ever.
                why = f"the engine process cannot be run: {str(error) or type(error).__name__}"
                if not self._was_up:
                    self.fatal = why
            self._listener.on_death()
            self.lose_everybody(self.fatal or why)
            if self.fatal is not None or self._closing:
                break
            now = clock()
            self._deaths.append(now)
            while self._deaths[0] < now - DEATHS_WITHIN:
                self._deaths.popleft()
            if len(self._deaths) > MOST_DEATHS:
                self.fatal = f"the engine process died {len(self._deaths)} times within {DEATHS_WITHIN:g} s"
                if why != DIED:
                    self.fatal += f"; at last: {why}"
                break
            self._listener.on_log(f"{why}; starting another")
            await asyncio.sleep(0.1 * 2 ** (len(self._deaths) - 1) if len(self._deaths) > 1 else 0)
        self.changed.set()

    async def _live(self) -> str | None:
        """Runs one engine process from start to exit. Returns why it was killed, or None if it exited by itself."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(contextlib.closing(EngineFolder()))
            socket = stack.enter_context(zmq.asyncio.Context.instance().socket(zmq.PAIR))
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(folder.address)
            watch = stack.enter_context(contextlib.closing(Watch(folder.pulse)))
            stack.callback(self._forget)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "weft.serve.worker"),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # so that Ctrl-C in the terminal does not reach it
            )
            assert process.stdin is not None
            self.pid = process.pid
            orders = msgspec.structs.replace(self._orders, address=folder.address, pulse=str(folder.pulse))
            process.stdin.write(msgspec.json.encode(orders) + b"\n")
            self._socket, self._watch = socket, watch
            listening = asyncio.create_task(self._listen(socket))
            ended = asyncio.create_task(process.wait())
            watching = asyncio.create_task(_wedged(watch))
            try:
                await asyncio.wait((listening, ended, watching), return_when=asyncio.FIRST_COMPLETED)
                if watching.done() and process.returncode is None:
                    process.kill()  # it does not react to anything else
                    return watching.result()
                if not listening.done():  # it exited; its last message may still be in the socket
                    await asyncio.wait((listening,), timeout=0.05)
                if listening.done():
                    listening.result()  # raises if a message could not be decoded
            finally:
                listening.cancel()
                watching.cancel()
                await _end(process, ended)
        return None

    def _forget(self) -> None:
        """Clears the state that belonged to the engine process that ended."""
        self._socket, self._watch, self.facts, self.pid, self.load, self._sent = None, None, None, None, Load(), 0

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        """Handles the engine's messages until it reports a fatal error."""
        while True:
            data = await socket.recv()
            message = decode_for_api(data)
            match message:
                case News():
                    self._spread(message)
                case Rejected():
                    self._reject(message)
                case Ready(facts):
                    self.load = Load(free_blocks=facts.num_blocks)
                    self.facts, self._was_up = facts, True
                    self._listener.on_ready(facts)
                    self.changed.set()
                case Fatal(reason):
                    self.fatal = reason
                    return

    def _spread(self, news: News) -> None:
        routes, logprobs, now = self._routes, news.logprobs, clock()
        for described in news.prompt_logprobs:
            if (route := routes.get(described.key)) is not None:
                route[0].put(Update(route[1], None, prompt_logprobs=described))
        for begin in news.begins:
            if (route := routes.get(begin.key)) is not None:
                route[0].begins[route[1]] = begin
        for key, token in zip(news.keys, news.tokens, strict=True):
            route = routes.get(key)
            if route is not None:  # None: it was aborted in the meantime
                job, index = route
                job.put(Update(index, token, None, logprobs.get(key) if logprobs else None, None, None, None, now))
        for end in news.ends:
            route = routes.pop(end.key, None)
            if route is not None:
                job, index = route
                job.open.discard(end.key)
                embedding = news.embeddings.get(end.key) if news.embeddings else None
                job.put(Update(index, end.token, end, logprobs.get(end.key), at=now, embedding=embedding))
        if (step := news.step) is not None:
            unread = self._sent - step.taken
            self.load = Load(step.running, step.waiting, step.queued_tokens, step.free_blocks, unread)
            self._listener.on_step(step)

    def _reject(self, message: Rejected) -> None:
        """Tells the job, which then aborts its other streams."""
        if (route := self._routes.get(message.key)) is not None:
            route[0].put(Update(route[1], None, rejected=message))

    def lose_everybody(self, reason: str) -> None:
        """Ends all jobs with an error."""
        routes, self._routes = self._routes, {}
        for job, index in routes.values():
            job.open.clear()
            job.put(Update(index, None, lost=reason))


async def _wedged(watch: Watch) -> str:
    """Waits until the engine must be replaced, and returns the reason."""
    while (verdict := watch.verdict) is None:
        await asyncio.sleep(LOOK)
        watch.look()
    return verdict


async def _end(process: asyncio.subprocess.Process, ended: "asyncio.Task[int]") -> None:
    """Closes the process's standard input, which tells it to exit. Kills it if it does not within PATIENCE."""
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is None:
        await asyncio.wait((ended,), timeout=PATIENCE)
    if process.returncode is None:
        process.kill()
        done, _ = await asyncio.wait((ended,), timeout=PATIENCE)
        if not done:  # it hangs in the kernel and still holds device memory
            raise RuntimeError(f"process {process.pid} cannot be killed")
