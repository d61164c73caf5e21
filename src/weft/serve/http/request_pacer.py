"""RequestPacer: spreads the parsing of a request burst over time, so that running streams are not delayed."""

import asyncio
from collections import deque


class RequestPacer:
    """Lets one request be parsed in each pass of the event loop.

    Parsing a request (JSON, tokens, checks) takes about as long as sending twenty tokens. Without the pacer, all
    requests of a burst would be parsed in one pass, and no token would be sent during it.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_free = True

    async def wait(self) -> None:
        """Waits until this request may be parsed. The next request follows in the next pass of the event loop."""
        loop = asyncio.get_running_loop()
        if self._is_free:
            self._is_free = False
            loop.call_soon(self._next)
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # done: cancelled, because its client has disconnected
                waiter.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_free = True
