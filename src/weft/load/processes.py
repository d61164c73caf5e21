"""Clients in several processes that share the requests of a run.

One process reads about 10,000 tokens a second. Long before that, the tokens of one step wait for each other there, and
what is measured is the client.
"""

import asyncio
import gc
import multiprocessing
import os
import signal
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from weft.errors import EngineError
from weft.load.ask import Ask
from weft.load.client import Client, ClientSettings, Reply
from weft.load.drive import Run, drive
from weft.load.fast_loop import on_fast_loop

MOST_PROCESSES = 6
LEAD = 0.2  # seconds from the order to start until the start, so that every process has read its requests
LOOK = 0.05  # seconds between looks at what the processes have


def client_processes() -> int:
    """How many processes to send from: a server and its engine need cores too."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_PROCESSES, cores // 2 - 1))


class ClientProcesses:
    """Owns the processes. Use it as a context. With one, requests are sent by the caller's own process."""

    def __init__(self, client: Client, count: int) -> None:
        self._client = client
        self._count = count
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    async def __aenter__(self) -> "ClientProcesses":
        if self._count > 1:
            context = multiprocessing.get_context("spawn")
            for _ in range(self._count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(self._client.settings, theirs), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            for pipe in self._pipes:
                while not pipe.poll():  # until it has imported all it needs
                    await asyncio.sleep(LOOK)
                _received(pipe)
        return self

    async def __aexit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # which ends its process
        for process in self._processes:
            await asyncio.to_thread(process.join, 5.0)
            if process.is_alive():
                process.kill()
                process.join()

    async def drive(self, asks: Sequence[Ask], run: Run) -> None:
        """Sends all requests when they are due; see `drive`. `asks` are in the order of their times."""
        if self._count == 1:
            await drive(self._client, asks, run=run)
            return
        clock = self._client.clock
        start = clock() + LEAD
        numbers = [range(place, len(asks), self._count) for place in range(self._count)]
        for pipe, own in zip(self._pipes, numbers, strict=True):
            with suppress(BrokenPipeError):  # its end is noticed below
                pipe.send((start, [asks[number] for number in own]))
        run.planned = len(asks)
        times = [ask.at for ask in asks]
        open_pipes = dict(zip(self._pipes, numbers, strict=True))
        while open_pipes:
            await asyncio.sleep(LOOK)
            run.sent = bisect_right(times, clock() - start)
            for pipe, own in list(open_pipes.items()):
                while pipe in open_pipes and pipe.poll():
                    reply = _received(pipe)
                    if reply is None:
                        del open_pipes[pipe]
                        continue
                    reply.number = own[reply.number]
                    run.replies.append(reply)
        run.sent, run.seconds = len(asks), clock() - start


def _received(pipe: Connection) -> Reply | None:
    """A reply, or None: a process is ready, or has all its replies."""
    try:
        found: Reply | None = pipe.recv()
    except (EOFError, ConnectionError):
        raise EngineError("a process that sends requests has died") from None
    return found


def _work(settings: ClientSettings, pipe: Connection) -> None:
    """The life of one process: runs are sent to it until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the process that reads the replies
    with suppress(EOFError, BrokenPipeError):
        on_fast_loop(_serve(settings, pipe))


async def _serve(settings: ClientSettings, pipe: Connection) -> None:
    async with Client.of(settings) as client:
        pipe.send(None)
        while True:
            start, asks = pipe.recv()
            gc.collect()
            gc.freeze()  # Python's collector is not to look at all prompts while times are taken
            run = Run()
            await drive(client, asks, run=run, start=start)
            for reply in run.replies:
                pipe.send(reply)
            pipe.send(None)
