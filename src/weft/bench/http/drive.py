"""Drive: sends all requests of a run, each when it is due (open loop) or as fast as answers arrive (closed loop)."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.bench.http.client import Client, Reply
from weft.bench.http.load_request import LoadRequest

LEAST_WAIT_S, MOST_WAIT_S = 0.05, 30.0  # limits on the server's Retry-After
MOST_EARLY_S = 1e-4  # time by which a request may be sent too early


@dataclass
class LoadRun:
    """The state of a run, during and after it. Times are seconds from its start."""

    replies: list[Reply] = field(default_factory=list)  # in order of completion
    sent: int = 0
    planned: int | None = None  # None: as many as the time allows
    seconds: float = 0.0  # until the last answer, or until the interruption
    was_interrupted: bool = False
    left_out: int = 0  # requests longer than the model's context; not counted in `planned`
    unanswered: dict[int, float] = field(default_factory=dict)  # due times of requests without an answer, by number

    @property
    def in_flight(self) -> int:
        return self.sent - len(self.replies)


class _ConcurrencyLimit:
    """A semaphore for requests in flight that records when each of its places became free.

    The time from then until the next request wakes up is client lag.
    """

    def __init__(self, count: int, now: Callable[[], float]) -> None:
        self._gate = asyncio.Semaphore(count)
        self._now = now
        self._free_since = deque([-math.inf] * count)

    async def acquire(self) -> float:
        """Waits for a place. Returns since when it was free; the place that was free longest is taken first."""
        await self._gate.acquire()
        return self._free_since.popleft()

    def release(self) -> None:
        self._free_since.append(self._now())
        self._gate.release()


async def drive(
    client: Client,
    requests: Sequence[LoadRequest],
    *,
    concurrency: int | None = None,
    open_loop: bool = True,
    duration: float = math.inf,
    retry_for: float = 0.0,
    run: LoadRun | None = None,
    progress: Callable[[], None] = lambda: None,
    start: float | None = None,
) -> LoadRun:
    """Sends the requests and waits for all answers. `duration` limits the time in which requests are sent.

    Open loop: a request is due at its time, however slow the server is. So a stall of the server shows in the latency
    of every request that arrives meanwhile. `concurrency` limits the requests in flight; a request that waits for a
    place is measured from its due time. Closed loop: a request is due when one of `concurrency` users has its previous
    answer, or at the start.

    A request that is refused (429 or 503) with a Retry-After is sent again after that time, for at most `retry_for`
    seconds from its first due time, and within `duration`. The reply is that of the last attempt, and so are all its
    times, because each attempt is a separate request for the server. The request keeps its place among `concurrency`
    meanwhile.

    `start` is the run's start on the client's clock (default: now). If cancelled, `run` keeps the results so far.
    """
    run = LoadRun() if run is None else run
    run.planned = len(requests) if open_loop or duration == math.inf else None
    clock = client.clock
    start = clock() if start is None else start
    tasks: set[asyncio.Task[None]] = set()
    limit = (
        _ConcurrencyLimit(min(concurrency, len(requests)), lambda: clock() - start) if concurrency is not None else None
    )
    num_started = 0  # requests with a task: sent, or waiting for a place

    async def send_one(request: LoadRequest, number: int, due: float) -> None:
        free = max(due, await limit.acquire()) if limit is not None and open_loop else due
        try:
            run.sent += 1
            reply = await _answer(client, request, number, start, due, min(due + retry_for, duration))
            reply.free = free
            run.replies.append(reply)
            del run.unanswered[number]
            progress()
        finally:
            if limit is not None:
                limit.release()

    try:
        for number, request in enumerate(requests):
            if open_loop:
                if request.at > duration:
                    break
                while (wait := request.at - (clock() - start)) > MOST_EARLY_S:  # a sleep may end early
                    await asyncio.sleep(wait)
                due = request.at
            else:
                assert limit is not None, "a closed loop needs a number of users"
                due = max(0.0, await limit.acquire())
                if due > duration:
                    break
            run.unanswered[number] = due
            num_started = number + 1
            task = asyncio.create_task(send_one(request, number, due))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        while tasks:
            await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        run.was_interrupted = True
        if open_loop:  # a late client may not have started all requests that were due
            now = min(clock() - start, duration)
            run.unanswered |= {
                number: request.at
                for number, request in enumerate(requests)
                if number >= num_started and request.at <= now
            }
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    finally:
        run.seconds = clock() - start
    return run


async def _answer(client: Client, request: LoadRequest, number: int, start: float, due: float, until: float) -> Reply:
    """The reply to the last attempt. No attempt begins after `until`, in seconds from the start of the run."""
    reply = await client.send(request, number, start, due)
    while reply.retry_after is not None:
        again = reply.end + min(max(reply.retry_after, LEAST_WAIT_S), MOST_WAIT_S)
        if again > until:
            break
        while (wait := again - (client.clock() - start)) > MOST_EARLY_S:
            await asyncio.sleep(wait)
        retries = reply.retries + 1
        reply = await client.send(request, number, start, again)
        reply.retries, reply.retry_wait = retries, again - due
    return reply
