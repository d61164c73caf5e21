"""SubmittedRequest: one HTTP request that an engine works on, and the updates that come back."""

import asyncio
from collections import deque
from typing import NamedTuple, Self

from weft.engine.engine import RequestOptions
from weft.engine.executor import TokenLogprobs
from weft.engine.params import SamplingParams
from weft.serve.engines.messages import FirstToken, PromptLogprobs, RequestRejected, SequenceEnd


class EnginePrompt(NamedTuple):
    """One prompt of a request, as the engine needs it."""

    tokens: bytes  # int32
    params: SamplingParams
    options: RequestOptions
    salt: str


class SequenceUpdate(NamedTuple):
    """One result or event of one sequence of a request."""

    choice_index: int  # index of the sequence in its request, which is also the index of its Choice
    token: int | None
    end: SequenceEnd | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    rejected: RequestRejected | None = None  # the engine rejected the prompt; it has no sequences
    failure: str | None = None  # why the whole request ends: engine died, client disconnected, or server shuts down
    at: float = 0.0  # seconds on `clock`: arrival in the API process; the HTTP client may read it later
    embedding: bytes | None = None  # float32; set with `end` for a pooling request


class SubmittedRequest:
    """The sequences of one HTTP request in an engine, and a queue of their updates in order of arrival."""

    def __init__(self) -> None:
        self.keys: list[int] = []  # of the sequences, by choice index
        self.open: set[int] = set()  # keys of sequences that have not ended
        self.first_tokens: dict[int, FirstToken] = {}  # by choice index
        self._pending: deque[SequenceUpdate] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    def failed(cls, reason: str) -> Self:
        """A request that reaches no engine. Its one update has this reason."""
        submitted = cls()
        submitted.fail(reason)
        return submitted

    def put(self, update: SequenceUpdate) -> None:
        self._pending.append(update)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, reason: str) -> None:
        """Adds an update that ends the request."""
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
