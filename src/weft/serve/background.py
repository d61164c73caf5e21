"""Background responses: each goes on without its client, which may leave and come back."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from starlette.types import Message, Send

from weft.errors import RequestError
from weft.serve.client import Job, Update
from weft.serve.errors import ApiError, of_request
from weft.serve.formats import to_json
from weft.serve.infer import GONE, Gone, Watcher
from weft.serve.response_store import Stored
from weft.serve.responses import ResponsesFormat

MOST_EVENTS = 2 << 20  # bytes of a stream that are kept for clients that come back: about 10,000 tokens
MOST_STREAMED = 64  # streams in the background at once: 128 MiB of events
Work = Callable[[Watcher, Send], Awaitable[object]]  # runs a call to its end


class EventLog:
    """The last events of a stream, by sequence number. The oldest go first; the last one always stays."""

    def __init__(self, most: int = MOST_EVENTS) -> None:
        self.first = 0  # number of the first event that is kept
        self.ended = False
        self._most = most
        self._bytes = 0
        self._events: deque[bytes] = deque()
        self._news: asyncio.Future[None] | None = None

    @classmethod
    def of(cls, events: tuple[bytes, ...], first: int) -> "EventLog":
        """That of a stream that has ended."""
        log = cls()
        log.first, log.ended = first, True
        log._events.extend(events)
        return log

    def append(self, data: bytes) -> None:
        """Takes one or more whole events."""
        for event in data.split(b"\n\n")[:-1]:  # JSON has no line breaks within
            self._events.append(event + b"\n\n")
            self._bytes += len(event) + 2
        while self._bytes > self._most and len(self._events) > 1:
            self._bytes -= len(self._events.popleft())
            self.first += 1
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def since(self, number: int) -> list[bytes]:
        """The events from this number on; `number` is at least `first`."""
        events, start = self._events, number - self.first
        return [events[at] for at in range(start, len(events))]

    @property
    def events(self) -> tuple[bytes, ...]:
        return tuple(self._events)

    async def news(self) -> None:
        """Until something was appended, or the stream has ended."""
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._news)  # others wait for the same

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        self._news = None


class Running:
    """A background response on its way. It is the Watcher of its job: to cancel is as if the client had left."""

    def __init__(self, tenant: str, format: ResponsesFormat, input: bytes, streams: bool) -> None:
        self.tenant, self.format = tenant, format
        self.log = EventLog() if streams else None
        self.is_deleted = False
        self.ended = asyncio.Event()
        self.input = input
        self._body = b""
        self._job: Job | None = None
        self._is_cancelled = False
        if self.log is not None:
            self.log.append(format.queued())

    def tell(self, job: Job) -> None:
        self._job = job
        if self._is_cancelled:
            job.put(Update(0, None, lost=GONE))

    def cancel(self) -> None:
        """Ends it as soon as the job looks at its news; `ended` is set then."""
        self._is_cancelled = True
        if self._job is not None:
            self._job.put(Update(0, None, lost=GONE))

    @property
    def body(self) -> bytes:
        """The response as it stands."""
        begun = self._job is not None and bool(self._job.begins)
        return to_json(self.format.snapshot("in_progress" if begun else "queued"))

    async def run(self, work: Work, admission: ExitStack, failed: Callable[[], None]) -> Stored:
        """Runs the response to its end, whatever the end is, and returns it.

        `admission` counts it among the requests that run; `failed` is called for errors of the server itself.
        """
        with admission:
            try:
                await work(self, self._take)
            except Gone:
                self._take_event(self.format.cancelled())
            except RequestError as error:
                self.fail(of_request(error))
            except ApiError as error:
                self.fail(error)
            except Exception:
                failed()
                self.fail(ApiError(500, "something went wrong inside the server; its log says more", code="internal"))
            return self.result

    def fail(self, error: ApiError) -> None:
        self._body = b""
        self._take_event(self.format.error(error.body))

    @property
    def result(self) -> Stored:
        log = self.log
        return Stored(
            self.format.id,
            self.format.final or self._body,
            self.input,
            self.format.output,
            is_background=True,
            events=() if log is None else log.events,
            first_event=0 if log is None else log.first,
        )

    def close(self) -> None:
        """Its end is stored: clients that wait may go on."""
        self.ended.set()
        if self.log is not None:
            self.log.end()

    async def _take(self, message: Message) -> None:
        """What a client would be sent: events of a stream, or the whole response."""
        data = message.get("body", b"")
        if not data:
            return
        if self.log is None:
            self._body = data
        else:
            self.log.append(data)

    def _take_event(self, data: bytes) -> None:
        if self.log is not None:
            self.log.append(data)
