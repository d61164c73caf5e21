"""DisconnectWatcher: ends a request when its client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from starlette.types import Receive

from weft.serve.engines.request_output_collector import RequestOutputCollector

T = TypeVar("T")
CLIENT_DISCONNECTED = "the client has disconnected"


class ClientDisconnected(Exception):
    """The client has disconnected."""


class Canceller(Protocol):
    """Ends a request early: the client has disconnected, or has cancelled it."""

    def attach(self, collector: RequestOutputCollector) -> None:
        """Sets the request to end. Ends it now if the reason already exists."""
        ...


class DisconnectWatcher:
    """Waits for the client to disconnect. Starts after its body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._watching = asyncio.create_task(self._watch(receive))
        self._collector: RequestOutputCollector | None = None

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work`. If the client disconnects before it ends, cancels it and raises ClientDisconnected."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self._watching), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnected
            return task.result()
        finally:
            task.cancel()

    def attach(self, collector: RequestOutputCollector) -> None:
        """Sets the request that ends when the client disconnects. Ends it now if the client has disconnected."""
        self._collector = collector
        if self._watching.done():
            collector.fail(CLIENT_DISCONNECTED)

    def close(self) -> None:
        self._watching.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if self._collector is not None:
            self._collector.fail(CLIENT_DISCONNECTED)
