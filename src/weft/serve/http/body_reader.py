"""BodyReader: reads request bodies, with limits on their size and time."""

import asyncio

from starlette.types import Receive, Scope

from weft.serve.errors import ApiError

BODY_TIMEOUT_S = 30.0  # seconds; the most that a client may take to send its body
MOST_TOGETHER = 256 << 20  # bytes; limit for all incomplete bodies together, but at least four of the largest
UNCOUNTED_BYTES = 1 << 16  # bytes of each body that do not count: a connection buffers that many anyway


class BodyReader:
    """Reads request bodies. Limits the size of each, and the sum of all incomplete ones."""

    def __init__(self, most: int) -> None:
        self.most = most  # bytes of one body
        self.most_together = max(MOST_TOGETHER, 4 * most)
        self.incomplete_bytes = 0  # bytes of incomplete bodies, without the first UNCOUNTED_BYTES bytes of each

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Returns the whole body of a request. Raises if it takes longer than BODY_TIMEOUT_S."""
        length = scope["headers_by_name"].get(b"content-length", b"")
        if length.isdigit() and int(length) > self.most:
            raise _too_large(int(length), self.most)
        body = bytearray()  # not a list of pieces: they may be tiny, and each would be an object
        counted_bytes = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionResetError
                    body += message.get("body", b"")
                    if len(body) > self.most:
                        raise _too_large(len(body), self.most)
                    if not message.get("more_body", False):
                        return bytes(body)
                    more = max(0, len(body) - UNCOUNTED_BYTES) - counted_bytes
                    self._check(more)
                    counted_bytes += more
                    self.incomplete_bytes += more
        except TimeoutError:
            raise ApiError(400, f"the body did not come within {BODY_TIMEOUT_S:g} s", code="body_timeout") from None
        finally:
            self.incomplete_bytes -= counted_bytes

    def _check(self, more: int) -> None:
        """Raises if incomplete bodies would hold too much. Small bodies do not count, so stalled ones block none."""
        if more and self.incomplete_bytes + more > self.most_together:
            held, most = self.incomplete_bytes, self.most_together
            message = f"unfinished bodies have {held} bytes, and {most} may be: try again later"
            raise ApiError(503, message, code="bodies_full", retry_after=1)


def _too_large(size: int, limit: int) -> ApiError:
    message = f"the body has {size} bytes or more, and {limit} are allowed (--max-body-mb)"
    return ApiError(413, message, code="body_too_large")
