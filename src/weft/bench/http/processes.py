"""Clients in several processes that share the requests of a run.

One process reads about 10,000 tokens per second. Long before that limit, the tokens of one step queue up in the client,
and the client is measured instead of the server.
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

from weft.bench.http.client import Client, ClientSettings, Reply
from weft.bench.http.drive import LoadRun, drive
from weft.bench.http.fast_loop import on_fast_loop
from weft.bench.http.load_request import LoadRequest
from weft.errors import EngineError

MOST_PROCESSES = 6
START_DELAY_S = 0.2  # time from sending the requests to the processes until the start, so that all have read them
POLL_S = 0.05  # time between checks for replies


def client_processes() -> int:
    """Number of client processes. Leaves cores for the server and its engine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_PROCESSES, cores // 2 - 1))


class ClientProcesses:
    """Owns the client processes. Use it as a context manager. With a count of 1, the caller's process sends."""

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
                while not pipe.poll():  # until the process has finished its imports
                    await asyncio.sleep(POLL_S)
                _received(pipe)
        return self

    async def __aexit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # this ends the process
        for process in self._processes:
            await asyncio.to_thread(process.join, 5.0)
            if process.is_alive():
                process.kill()
                process.join()

    async def drive(self, requests: Sequence[LoadRequest], run: LoadRun) -> None:
        """Sends all requests when they are due; see `drive`. `requests` are sorted by time."""
        if self._count == 1:
            await drive(self._client, requests, run=run)
            return
        clock = self._client.clock
        start = clock() + START_DELAY_S
        numbers = [range(index, len(requests), self._count) for index in range(self._count)]
        for pipe, own in zip(self._pipes, numbers, strict=True):
            with suppress(BrokenPipeError):  # a dead process is detected below
                pipe.send((start, [requests[number] for number in own]))
        run.planned = len(requests)
        times = [request.at for request in requests]
        open_pipes = dict(zip(self._pipes, numbers, strict=True))
        while open_pipes:
            await asyncio.sleep(POLL_S)
            run.sent = bisect_right(times, clock() - start)
            for pipe, own in list(open_pipes.items()):
                while pipe in open_pipes and pipe.poll():
                    reply = _received(pipe)
                    if reply is None:
                        del open_pipes[pipe]
                        continue
                    reply.number = own[reply.number]
                    run.replies.append(reply)
        run.sent, run.seconds = len(requests), clock() - start


def _received(pipe: Connection) -> Reply | None:
    """A reply, or None if the process is ready or has sent all its replies."""
    try:
        found: Reply | None = pipe.recv()
    except (EOFError, ConnectionError):
        raise EngineError("a process that sends requests has died") from None
    return found


def _work(settings: ClientSettings, pipe: Connection) -> None:
    """Main function of a client process: executes runs from the pipe until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    with suppress(EOFError, BrokenPipeError):
        on_fast_loop(_serve(settings, pipe))


async def _serve(settings: ClientSettings, pipe: Connection) -> None:
    async with Client.of(settings) as client:
        pipe.send(None)
        while True:
            start, requests = pipe.recv()
            gc.collect()
            gc.freeze()  # keeps the garbage collector from scanning all prompts during the measurement
            run = LoadRun()
            await drive(client, requests, run=run, start=start)
            for reply in run.replies:
                pipe.send(reply)
            pipe.send(None)
