"""HttpConnection: uvicorn's HTTP protocol with limits on what a client may do before it is authenticated.

The head of a request is limited in size and time. The overhead of a chunked body (extensions, and trailers, which are
dropped) is limited in size. A client that stops reading its answer is disconnected. Pipelined requests are ignored.
Protocol upgrades are refused, except for an offer of HTTP/2 (h2c): some clients send it with every request, and it is
ignored. A client that has closed only its writing side still gets its answer. A client that has left is detected.
"""

import asyncio
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.serve.errors import ApiError
from weft.serve.protocols.formatter import to_json

MOST_HEAD = 1 << 18  # bytes; the largest request line with headers
HEAD_TIMEOUT = 30.0  # seconds; the most that receiving them may take
WRITE_TIMEOUT = 60.0  # seconds that a client may leave a full send buffer unread
MOST_AROUND = 1 << 16  # bytes; limit for the overhead of a chunked body,
AROUND_BYTE = 16  # plus so many for each body byte: a chunk of one byte has an overhead of six
FIRST_LOOK = 0.005  # seconds from the client's end of file to the first check for it; short answers are sent by then
LAST_LOOK = 1.0  # seconds; longest time between checks: each waits twice as long as the one before
NO_UPGRADES = "this server speaks HTTP/1.1 alone: send the request without an upgrade to another protocol"


class HttpConnection(HttpToolsProtocol):
    """One client connection. Handles its requests one after the other."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stuck: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._late: asyncio.TimerHandle | None = None
        self._ignoring = False
        self._read = self._body = 0  # bytes since the head, with and without chunk overhead
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._stuck, self._late, self._look):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to keep the connection open: yes, if a complete request still waits for its answer."""
        if self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            return False
        if self.transport.get_extra_info("sslcontext") is not None:  # Python's TLS closes both directions at once
            return False
        self.cycle.keep_alive = False
        if self._look is None:
            self._look = self.loop.call_later(FIRST_LOOK, self._look_for_client, FIRST_LOOK)
        return True

    def _look_for_client(self, waited: float) -> None:
        """Aborts the connection if the client has closed it completely, and not only its writing side.

        Both cases look the same here: the last packet (FIN) only says that the client sends no more. To tell them
        apart, something must be sent: the operating system of a client that has left answers with a reset. In a stream,
        the next token does this. Before the first token, an interim response (100 Continue) does; every HTTP/1.1 client
        must skip it. It is sent only once, because some clients accept only a few. A client that leaves after that is
        noticed when its answer is sent.
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
        """Feeds the parser. It stops after a head with an upgrade offer, even if a body follows."""
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
        """The head that was just read, without its h2c offer. None if another upgrade was offered."""
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
        if self._in_head:  # otherwise it is a trailer: drop it
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = False
        self._read = self._body = 0
        if self._late is not None:
            self._late.cancel()
        if self.cycle is not None and not self.cycle.response_complete:
            # A pipelined request would hide that the client of the first one has disconnected.
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
        """Closes the connection. Sends the reason first, unless a response has already started."""
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
