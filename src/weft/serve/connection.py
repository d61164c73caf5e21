"""Connection: uvicorn's HTTP protocol with bounds on what a client may do before anybody knows who it is.

Heads are bounded in size and time, readers that stop reading are given up, pipelined requests are not taken, and offers
to speak another protocol are ignored.
"""

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.serve.errors import ApiError
from weft.serve.formats import to_json

MOST_HEAD = 1 << 18  # bytes of a request line with its headers
HEAD_TIMEOUT = 30.0  # seconds that these may take
WRITE_TIMEOUT = 60.0  # seconds that a client may leave a full buffer unread
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class Connection(HttpToolsProtocol):
    """One client's connection, for one request after the other."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stuck: asyncio.TimerHandle | None = None
        self._late: asyncio.TimerHandle | None = None
        self._ignoring = False
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._stuck, self._late):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head and b"pgrade" in data:
            data = _UPGRADE.sub(b"", data, count=1)  # as if it had not been offered
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head += len(data)
            if self._head > MOST_HEAD:
                self.send_400_response(f"the head of the request has more than {MOST_HEAD} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._late is not None:
            self._late.cancel()
        if self.cycle is not None and not self.cycle.response_complete:
            # A second request before the first is answered would hide that its client has gone.
            self._ignoring = True
            self.cycle.keep_alive = False
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._ignoring:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ignoring:
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stuck is None:
            self._stuck = self.loop.call_later(WRITE_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        body = to_json(ApiError(400, msg).body)
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self.transport.close()

    def _expect_head(self) -> None:
        self._in_head, self._head = True, 0
        late: Any = self._late
        if late is not None:
            late.cancel()
        self._late = self.loop.call_later(HEAD_TIMEOUT, self._give_up)

    def _give_up(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._in_head and not answering and not self.transport.is_closing():
            self.transport.close()
