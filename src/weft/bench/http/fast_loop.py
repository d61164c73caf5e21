"""The event loop of measuring clients."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


def on_fast_loop(measuring: Coroutine[Any, Any, R]) -> R:
    """Runs a coroutine to its end on uvloop if it is installed, else on asyncio."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(measuring)
    return uvloop.run(measuring)
