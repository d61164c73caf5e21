"""The event loop of clients that measure."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


def on_fast_loop(measuring: Coroutine[Any, Any, R]) -> R:
    """Runs to the end on the fastest event loop that there is."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(measuring)
    return uvloop.run(measuring)
