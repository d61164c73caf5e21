"""Drive: sends all requests of a run, each when it is due, or as fast as answers come."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.load.ask import Ask
from weft.load.client import Client, Reply

EARLY = 1e-4  # seconds by which a request may be sent too soon


@dataclass
class Run:
    """What is known of a run, while it lasts and afterwards. Times are seconds from its start."""

    replies: list[Reply] = field(default_factory=list)  # in the order of their ends
    sent: int = 0
    planned: int = 0
    seconds: float = 0.0  # until the last answer, or until it was interrupted
    was_interrupted: bool = False
    left_out: int = 0  # requests longer than the model's context, and so not among the planned

    @property
    def in_flight(self) -> int:
        return self.sent - len(self.replies)


async def drive(
    client: Client,
    asks: Sequence[Ask],
    *,
    concurrency: int | None = None,
    open_loop: bool = True,
    duration: float = math.inf,
    run: Run | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Run:
    """All answers. `duration` bounds the time in which requests are sent; those under way are waited for.

    In an open loop a request is due at its time, however slow the server is: a stalled server shows in all who come
    meanwhile. `concurrency` bounds those under way; who waits for that is late from when it was due. In a closed loop
    a request is due when one of `concurrency` users has had the answer before.

    Cancelled, it leaves what is known in `run`.
    """
    run = Run() if run is None else run
    run.planned = len(asks)
    clock = client.clock
    start = clock()
    tasks: set[asyncio.Task[None]] = set()
    gate = asyncio.Semaphore(concurrency) if concurrency is not None else None

    async def one(ask: Ask, number: int, due: float) -> None:
        try:
            if gate is not None and open_loop:
                await gate.acquire()
            run.sent += 1
            free = clock() - start
            reply = await client.send(ask, number, start, due)
            reply.free = free if gate is not None else due
            run.replies.append(reply)
            progress()
        finally:
            if gate is not None:
                gate.release()

    try:
        for number, ask in enumerate(asks):
            if open_loop:
                if ask.at > duration:
                    break
                while (wait := ask.at - (clock() - start)) > EARLY:  # a sleep may end too soon
                    await asyncio.sleep(wait)
                due = ask.at
            else:
                assert gate is not None, "a closed loop needs a number of users"
                await gate.acquire()
                due = clock() - start
                if due > duration:
                    break
            task = asyncio.create_task(one(ask, number, due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        while tasks:
            await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        run.was_interrupted = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    finally:
        run.seconds = clock() - start
    return run
