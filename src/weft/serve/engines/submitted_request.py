"""Job: what one HTTP request has submitted to an engine, and the updates that come back."""

import asyncio
from collections import deque
from typing import NamedTuple, Self

from weft.engine.engine import Wishes
from weft.engine.executor import TokenLogprobs
from weft.engine.params import SamplingParams
from weft.serve.engines.messages import FirstToken, PromptLogprobs, RequestRejected, SequenceEnd


class EnginePrompt(NamedTuple):
    tokens: bytes  # int32
    params: SamplingParams
    wishes: Wishes
    salt: str


class SequenceUpdate(NamedTuple):
    """One result or event of one stream of a job."""

    place: int  # index of the stream in the job
    token: int | None
    end: SequenceEnd | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    rejected: RequestRejected | None = None  # the engine rejected the prompt; it has no streams
    lost: str | None = None  # why the job ends: the engine died, the client disconnected, or the server shuts down
    at: float = 0.0  # seconds on `clock`: when the message arrived here; the HTTP client may read it later
    embedding: bytes | None = None  # float32; set with `end` for a pooling request


class SubmittedRequest:
    """The streams of one HTTP request, and a queue of their updates in order of arrival."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.open: set[int] = set()  # keys of streams that have not ended
        self.begins: dict[int, FirstToken] = {}  # by place, for streams that have their first token
        self._pending: deque[SequenceUpdate] = deque()
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    def lost(cls, reason: str) -> Self:
        """A job that was not submitted, and that ends with this reason."""
        job = cls()
        job.put(SequenceUpdate(0, None, lost=reason))
        return job

    def put(self, update: SequenceUpdate) -> None:
        self._pending.append(update)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def news(self) -> deque[SequenceUpdate]:
        """Returns all updates since the last call. Waits until there is at least one."""
        if not self._pending:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pending, self._pending = self._pending, deque()
        return pending
