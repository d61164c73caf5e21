"""Connection: uvicorn's HTTP protocol with bounds on what a client may do before anybody knows who it is.

Heads are bounded in size and time, and so is what surrounds the pieces of a chunked body: trailers (which are dropped)
and extensions. Readers that stop reading are given up, and pipelined requests are not taken. Upgrades are refused, but
for an offer of HTTP/2 (h2c) beside an ordinary request, which some clients always make: it is ignored. A client that
closes its writing side waits for its answer, and one that is gone is told apart from it.
"""

import asyncio
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.serve.errors import ApiError
from weft.serve.formats import to_json

MOST_HEAD = 1 << 18  # bytes of a request line with its headers
HEAD_TIMEOUT = 30.0  # seconds that these may take
WRITE_TIMEOUT = 60.0  # seconds that a client may leave a full buffer unread
MOST_AROUND = 1 << 16  # bytes around the pieces of a chunked body,
AROUND_BYTE = 16  # and more for each byte in them: a piece of one byte has six around it
FIRST_LOOK = 0.005  # seconds after the end of what a client sends: is it still there? Short answers are out by then
LAST_LOOK = 1.0  # seconds between later looks, each of which waits twice as long as the one before
NO_UPGRADES = "this server speaks HTTP/1.1 alone: send the request without an upgrade to another protocol"


class Connection(HttpToolsProtocol):
    """One client's connection, for one request after the other."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stuck: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._late: asyncio.TimerHandle | None = None
        self._ignoring = False
        self._read = self._body = 0  # bytes since the head, with and without what is around the pieces of a body
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._stuck, self._late, self._look):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection is kept, for the answer to a request that is complete."""
        if self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            return False
        if self.transport.get_extra_info("sslcontext") is not None:  # TLS as Python has it ends both ways at once
            return False
        self.cycle.keep_alive = False
        if self._look is None:
            self._look = self.loop.call_later(FIRST_LOOK, self._look_for_client, FIRST_LOOK)
        return True

    def _look_for_client(self, waited: float) -> None:
        """Hangs up where the client has closed the connection, and not only its writing side.

        Both look the same from here: its last packet says that it sends no more. Only the answer to bytes that are
        sent to it tells them apart: the system of a client that is gone refuses them. Where tokens are streamed, the
        next one does. Before that, an interim answer is sent, which every client of HTTP/1.1 must pass over; one
        alone, as some take a few at most. A client that goes still later is noticed when it is answered.
        """
        cycle = self.cycle
        if self.transport.is_closing() or cycle.response_complete:
            return
        if waited == FIRST_LOOK and not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        delay = min(2 * waited, LAST_LOOK)
        self._look = self.loop.call_later(delay, self._look_for_client, delay)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        was_in_head = self._in_head
        try:
            self._feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.send_400_response("the request is not valid HTTP")
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head += len(data)
            if self._head > MOST_HEAD:
                self.send_400_response(f"the head of the request has more than {MOST_HEAD} bytes")
        elif not was_in_head:
            self._read += len(data)
            if self._read - self._body > MOST_AROUND + AROUND_BYTE * self._body:
                self.send_400_response("the body has too many trailers or extensions of its chunks")

    def _feed(self, data: bytes) -> None:
        """The parser stops behind a head with an upgrade, whatever the head says of a body."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            head = self._head_without_offer()
            if head is None:
                self.send_400_response(NO_UPGRADES)
                return
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(head + data[stop.args[0] :])

    def _head_without_offer(self) -> bytes | None:
        """The head that was just read, as if h2c had not been offered; None where something else was."""
        offers = [value for name, value in self.headers if name == b"upgrade"]
        if self.parser.get_method() == b"CONNECT" or [offer.lower() for offer in offers] != [b"h2c"]:
            return None
        lines = [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        first = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        return b"\r\n".join([first, *lines, b"", b""])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = False
        self._read = self._body = 0
        if self._late is not None:
            self._late.cancel()
        if self.cycle is not None and not self.cycle.response_complete:
            # A second request before the first is answered would hide that its client has gone.
            self._ignoring = True
            self.cycle.keep_alive = False
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        if not self._ignoring:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ignoring and not self.parser.should_upgrade():
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
        """Hangs up; says why, unless another answer is on its way."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
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
