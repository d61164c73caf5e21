"""Turns: how a burst of requests is read while streams go on."""

import asyncio
from collections import deque


class Turns:
    """Lets one request be read in each pass of the event loop.

    Reading a request (JSON, tokens, checks) takes about as long as handing out twenty tokens. All requests that came at
    once would be read in one pass, and no token would be handed out meanwhile.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_free = True

    async def wait(self) -> None:
        """Until it is the caller's turn. The turn ends with the pass, or when the caller waits for something."""
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
            if not turn.done():  # else its client has gone
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_free = True
