"""Real sockets under a virtual clock: time passes only where everybody waits, so that delays are exact."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE = 0.002  # seconds of real time for what is on its way through the kernel


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events and timeout != 0:
            events = super().select(PATIENCE if timeout is not None else None)
        if not events and timeout is not None:
            self.now += max(0.0, timeout)
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)
        self._clock_resolution = 1e-9  # else timers are due a little early

    def time(self) -> float:
        return self.selector.now


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)


def clock() -> float:
    return asyncio.get_running_loop().time()
