"""EventLog: the latest events of a background stream, for clients that reconnect."""

import asyncio
from collections import deque

from starlette.types import Receive, Send

from weft.serve.endpoints.disconnect_watcher import ClientDisconnected, DisconnectWatcher
from weft.serve.endpoints.response_generator import STREAM_HEADERS
from weft.serve.errors import ApiError

MAX_EVENT_BYTES = 2 << 20  # bytes of a stream kept for clients that reconnect: about 10,000 tokens
SEND_BYTES = 1 << 18  # bytes of events per send, so that slow clients buffer little


class EventLog:
    """The latest events of a stream, by sequence number. The oldest are dropped first; the last one is always kept."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self.first = 0  # sequence number of the oldest event that is kept
        self.ended = False
        self._max_bytes = max_bytes
        self._bytes = 0
        self._events: deque[bytes] = deque()
        self._changed: asyncio.Future[None] | None = None

    @classmethod
    def of(cls, events: tuple[bytes, ...], first: int) -> "EventLog":
        """The log of a stream that has ended."""
        log = cls()
        log.first, log.ended = first, True
        log._events.extend(events)
        return log

    def append(self, data: bytes) -> None:
        """Appends one or more complete events."""
        for event in data.split(b"\n\n")[:-1]:  # the JSON has no line breaks inside
            self._events.append(event + b"\n\n")
            self._bytes += len(event) + 2
        while self._bytes > self._max_bytes and len(self._events) > 1:
            self._bytes -= len(self._events.popleft())
            self.first += 1
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def since(self, number: int) -> list[bytes]:
        """The events from this sequence number on. `number` must be at least `first`."""
        events, start = self._events, number - self.first
        return [events[at] for at in range(start, len(events))]

    @property
    def events(self) -> tuple[bytes, ...]:
        return tuple(self._events)

    async def wait(self) -> None:
        """Waits until an event is appended or the stream ends."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)  # other clients wait for the same future

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None


async def follow(log: EventLog, number: int, headers: list[tuple[bytes, bytes]], receive: Receive, send: Send) -> None:
    """Sends the events from `number` on, until the stream ends or the client disconnects."""
    if number < log.first:
        raise ApiError(
            400, f"the events before number {log.first} are not kept any more: retrieve the response without stream"
        )

    async def work(number: int) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *headers]})
        while True:
            events = log.since(number) if number >= log.first else None
            if events is None:  # the client is so slow that its next event was dropped
                break
            if events:
                data = b""
                for event in events:  # limited, so that slow clients buffer little
                    data += event
                    number += 1
                    if len(data) > SEND_BYTES:
                        break
                await send({"type": "http.response.body", "body": data, "more_body": True})
            elif log.ended:
                break
            else:
                await log.wait()
        await send({"type": "http.response.body", "body": b""})

    watcher = DisconnectWatcher(receive)
    try:
        await watcher.during(work(number))
    except ClientDisconnected:
        pass
    finally:
        watcher.close()
