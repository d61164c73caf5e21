"""RequestOutputCollector: receives what an engine generates for one HTTP request."""

import asyncio
from collections import deque
from typing import NamedTuple, Self

from weft.engine.executor import TokenLogprobs
from weft.serve.engines.messages import PrefillDone, PromptLogprobs, RequestRejected, SequenceEnd


class SequenceUpdate(NamedTuple):
    """One result or event of one sequence of a request."""

    choice_index: int  # index of the sequence in its request, which is also the index of its Choice
    token: int | None
    end: SequenceEnd | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    rejected: RequestRejected | None = None  # the engine rejected the prompt: no sequence of it was started
    failure: str | None = None  # why the whole request ends: engine died, client disconnected, or server shuts down
    at: float = 0.0  # seconds on `clock`: when the API process received it; the client may receive it later
    embedding: bytes | None = None  # float32; set with `end` for a pooling request


class RequestOutputCollector:
    """The keys of one HTTP request's sequences, and a queue of their updates in order of arrival."""

    def __init__(self) -> None:
        self.keys: list[int] = []  # of the sequences, by choice index
        self.open_keys: set[int] = set()  # keys of sequences that have not ended
        self.prefills_done: dict[int, PrefillDone] = {}  # by choice index
        self._pending: deque[SequenceUpdate] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    def failed(cls, reason: str) -> Self:
        """For a request that reaches no engine. The one update has this reason."""
        collector = cls()
        collector.fail(reason)
        return collector

    def put(self, update: SequenceUpdate) -> None:
        self._pending.append(update)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, reason: str) -> None:
        """Adds an update that ends the whole request."""
        self.put(SequenceUpdate(0, None, failure=reason))

    async def updates(self) -> deque[SequenceUpdate]:
        """Returns all updates since the last call. Waits until there is at least one."""
        if not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, deque()
        return pending
