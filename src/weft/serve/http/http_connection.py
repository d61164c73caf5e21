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
HEAD_TIMEOUT_S = 30.0  # the most that receiving them may take
WRITE_TIMEOUT_S = 60.0  # time that a client may leave a full send buffer unread
# Bytes of chunk headers and trailers that any chunked body may have, and more for each byte of the body itself. A chunk
# of one byte has an overhead of six.
MOST_OVERHEAD = 1 << 16
MOST_OVERHEAD_PER_BYTE = 16
# Time between the client's FIN and the first check whether the client is still connected. Most short answers have been
# sent by then. Each later check waits twice as long as the one before, up to the last time.
FIRST_LIVENESS_CHECK_S = 0.005
LAST_LIVENESS_CHECK_S = 1.0
NO_UPGRADES = "this server speaks HTTP/1.1 alone: send the request without an upgrade to another protocol"


class HttpConnection(HttpToolsProtocol):
    """One client connection. Handles its requests one after the other."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._write_timer: asyncio.TimerHandle | None = None
        self._liveness_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._ignores_request = False  # a pipelined request: it is dropped
        self._wire_bytes = self._body_bytes = 0  # since the head, with and without the overhead of chunks
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._write_timer, self._head_timer, self._liveness_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns True to keep the connection open, if a complete request has not been answered yet."""
        if self.cycle is None or self.cycle.more_body or self.cycle.response_complete:
            return False
        if self.transport.get_extra_info("sslcontext") is not None:  # Python's TLS closes both directions at once
            return False
        self.cycle.keep_alive = False
        if self._liveness_timer is None:
            self._liveness_timer = self.loop.call_later(
                FIRST_LIVENESS_CHECK_S, self._check_liveness, FIRST_LIVENESS_CHECK_S
            )
        return True

    def _check_liveness(self, waited: float) -> None:
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
        if waited == FIRST_LIVENESS_CHECK_S and not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        delay = min(2 * waited, LAST_LIVENESS_CHECK_S)
        self._liveness_timer = self.loop.call_later(delay, self._check_liveness, delay)

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
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD:
                self.send_400_response(f"the head of the request has more than {MOST_HEAD} bytes")
        elif not was_in_head:
            self._wire_bytes += len(data)
            if self._wire_bytes - self._body_bytes > MOST_OVERHEAD + MOST_OVERHEAD_PER_BYTE * self._body_bytes:
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
        self._wire_bytes = self._body_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self.cycle is not None and not self.cycle.response_complete:
            # A pipelined request would hide that the client of the first one has disconnected.
            self._ignores_request = True
            self.cycle.keep_alive = False
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if not self._ignores_request:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ignores_request and not self.parser.should_upgrade():
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
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
        self._in_head, self._head_bytes = True, 0
        timer: Any = self._head_timer
        if timer is not None:
            timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close_late_head)

    def _close_late_head(self) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._in_head and not answering and not self.transport.is_closing():
            self.transport.close()
