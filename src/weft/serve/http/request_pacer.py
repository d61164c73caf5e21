"""Turns: spreads the reading of a request burst over time, so that streams go on."""

import asyncio
from collections import deque


class RequestPacer:
    """Lets one request be read in each pass of the event loop.

    Reading a request (JSON, tokens, checks) takes about as long as sending twenty tokens. Without this, all requests of
    a burst would be read in one pass, and no token would be sent during it.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_free = True

    async def wait(self) -> None:
        """Waits for the caller's turn. The turn ends with the pass of the event loop, or when the caller awaits."""
        loop = asyncio.get_running_loop()
        if self._is_free:
            self._is_free = False
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # a cancelled one has no client any more
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_free = True
