"""Drive: sends all requests of a run, each when it is due, or as fast as answers come."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.load.ask import Ask
from weft.load.client import Client, Reply

LEAST_WAIT, MOST_WAIT = 0.05, 30.0  # seconds before a refused request is sent again, whatever the server says
EARLY = 1e-4  # seconds by which a request may be sent too soon


@dataclass
class Run:
    """What is known of a run, while it lasts and afterwards. Times are seconds from its start."""

    replies: list[Reply] = field(default_factory=list)  # in the order of their ends
    sent: int = 0
    planned: int | None = None  # None: as many as the time allows
    seconds: float = 0.0  # until the last answer, or until it was interrupted
    was_interrupted: bool = False
    left_out: int = 0  # requests longer than the model's context, and so not among the planned
    unanswered: dict[int, float] = field(default_factory=dict)  # when those that have no answer yet were due, by number

    @property
    def in_flight(self) -> int:
        return self.sent - len(self.replies)


class _Places:
    """So many may be under way. Whoever leaves notes when: the next one may take long to wake up, and that is lag."""

    def __init__(self, count: int, now: Callable[[], float]) -> None:
        self._gate = asyncio.Semaphore(count)
        self._now = now
        self._free_since = deque([-math.inf] * count)

    async def take(self) -> float:
        """Since when the place was free; first that which is free the longest."""
        await self._gate.acquire()
        return self._free_since.popleft()

    def leave(self) -> None:
        self._free_since.append(self._now())
        self._gate.release()


async def drive(
    client: Client,
    asks: Sequence[Ask],
    *,
    concurrency: int | None = None,
    open_loop: bool = True,
    duration: float = math.inf,
    retry_for: float = 0.0,
    run: Run | None = None,
    progress: Callable[[], None] = lambda: None,
    start: float | None = None,
) -> Run:
    """All answers. `duration` bounds the time in which requests are sent; those under way are waited for.

    In an open loop a request is due at its time, however slow the server is: a stalled server shows in all who come
    meanwhile. `concurrency` bounds those under way; who waits for that is late from when it was due. In a closed loop
    a request is due when one of `concurrency` users has had the answer before, or at the start.

    A request that is refused (429 or 503) with a Retry-After is sent again after that time, for `retry_for` seconds
    from when it was first due, and within the `duration`. The last attempt is its reply: all times are that attempt's,
    as each is a request of its own to the server. Its place among `concurrency` is kept meanwhile.

    `start` is when the run starts on the client's clock, where it is not now. Cancelled, it leaves what is known in
    `run`.
    """
    run = Run() if run is None else run
    run.planned = len(asks) if open_loop or duration == math.inf else None
    clock = client.clock
    start = clock() if start is None else start
    tasks: set[asyncio.Task[None]] = set()
    places = _Places(min(concurrency, len(asks)), lambda: clock() - start) if concurrency is not None else None
    begun = 0  # how many have had their turn: they are sent, or wait for a place

    async def one(ask: Ask, number: int, due: float) -> None:
        free = max(due, await places.take()) if places is not None and open_loop else due
        try:
            run.sent += 1
            reply = await _answer(client, ask, number, start, due, min(due + retry_for, duration))
            reply.free = free
            run.replies.append(reply)
            del run.unanswered[number]
            progress()
        finally:
            if places is not None:
                places.leave()

    try:
        for number, ask in enumerate(asks):
            if open_loop:
                if ask.at > duration:
                    break
                while (wait := ask.at - (clock() - start)) > EARLY:  # a sleep may end too soon
                    await asyncio.sleep(wait)
                due = ask.at
            else:
                assert places is not None, "a closed loop needs a number of users"
                due = max(0.0, await places.take())
                if due > duration:
                    break
            run.unanswered[number] = due
            begun = number + 1
            task = asyncio.create_task(one(ask, number, due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        while tasks:
            await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        run.was_interrupted = True
        if open_loop:  # a client that is late may not have come to all that were due
            now = min(clock() - start, duration)
            run.unanswered |= {number: ask.at for number, ask in enumerate(asks) if number >= begun and ask.at <= now}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    finally:
        run.seconds = clock() - start
    return run


async def _answer(client: Client, ask: Ask, number: int, start: float, due: float, until: float) -> Reply:
    """The reply to the last attempt: none begins after `until`, in seconds from the start of the run."""
    reply = await client.send(ask, number, start, due)
    while reply.retry_after is not None:
        again = reply.end + min(max(reply.retry_after, LEAST_WAIT), MOST_WAIT)
        if again > until:
            break
        while (wait := again - (client.clock() - start)) > EARLY:
            await asyncio.sleep(wait)
        retries = reply.retries + 1
        reply = await client.send(ask, number, start, again)
        reply.retries, reply.retry_wait = retries, again - due
    return reply
