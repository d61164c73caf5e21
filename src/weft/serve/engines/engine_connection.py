"""EngineConnection: the messages to and from one engine process, and the routes of its results to jobs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
import zmq.asyncio

from weft.errors import RequestError
from weft.observe.engine_metrics import EngineStep
from weft.serve.engines.messages import (
    AbortSequences,
    AddRequest,
    EngineFailed,
    EngineInfo,
    EngineReady,
    RequestRejected,
    ResetPrefixCache,
    StepOutputs,
    clock,
    decode_for_api,
    encode,
)
from weft.serve.engines.submitted_request import EnginePrompt, SequenceUpdate, SubmittedRequest


@dataclass(slots=True)
class EngineLoad:
    """How busy an engine is: its last step's numbers, plus the streams sent since."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    sent: int = 0  # streams that were sent, but that the engine had not read as of its last report

    @property
    def streams(self) -> int:
        """Streams that the engine has, or will have once it has read its messages."""
        return self.running + self.waiting + self.sent


class EngineConnection:
    """Owns the socket to one engine process, and the routes from its streams to jobs. All on the event loop."""

    def __init__(
        self, address: str, on_ready: Callable[[EngineInfo], str | None], on_step: Callable[[EngineStep], None]
    ) -> None:
        """Binds the address. `on_ready` returns why the engine must not serve, or None."""
        self.facts: EngineInfo | None = None  # None: the engine is not ready, or the connection is closed
        self.load = EngineLoad()
        self._on_ready, self._on_step = on_ready, on_step
        self._numbers = itertools.count()
        self._sent = 0  # streams
        self._routes: dict[int, tuple[SubmittedRequest, int]] = {}
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        try:
            self._socket.set_hwm(0)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(address)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self.facts, self.load = None, EngineLoad()
        self._socket.close()

    def submit(self, prompts: Sequence[EnginePrompt], arrival: float) -> SubmittedRequest:
        """Sends prompts as one job. Its streams are ordered by prompt: all n of the first, all n of the second, ..."""
        job = SubmittedRequest()
        messages = []
        for prompt in prompts:
            keys = list(itertools.islice(self._numbers, prompt.params.n))
            job.keys += keys
            message = AddRequest(keys[0], prompt.tokens, prompt.params, prompt.wishes, prompt.salt, arrival)
            try:
                messages.append(encode(message))
            except (OverflowError, TypeError, ValueError) as error:  # a number in a schema that needs over 64 bits
                raise RequestError(f"the request cannot be passed on: {error}") from None
        self._sent += len(job.keys)
        self._routes.update((key, (job, index)) for index, key in enumerate(job.keys))
        job.open.update(job.keys)
        self.load.sent += len(job.keys)
        for data in messages:
            self._socket.send(data)  # no high-water mark is set, so this never blocks
        return job

    def abort(self, job: SubmittedRequest, index: int | None = None) -> None:
        """Ends one stream of a job, or all open ones. The job gets no further updates of them."""
        keys = sorted(job.open) if index is None else [job.keys[index]]
        keys = [key for key in keys if key in job.open]
        for key in keys:
            del self._routes[key]
            job.open.remove(key)
        if keys and self.facts is not None:
            self._socket.send(encode(AbortSequences(keys)))

    def reset_cache(self) -> None:
        if self.facts is not None:  # an engine that is not ready has an empty cache
            self._socket.send(encode(ResetPrefixCache()))

    def lose_jobs(self, reason: str) -> None:
        """Ends all jobs with an error."""
        routes, self._routes = self._routes, {}
        for job, index in routes.values():
            job.open.clear()
            job.put(SequenceUpdate(index, None, lost=reason))

    async def read(self) -> str:
        """Handles the engine's messages until one says that the engine cannot serve. Returns the reason."""
        while True:
            data = await self._socket.recv()
            message = decode_for_api(data)
            match message:
                case StepOutputs():
                    self._spread(message)
                case RequestRejected():
                    self._reject(message)
                case EngineReady(facts):
                    if (reason := self._on_ready(facts)) is not None:
                        return reason
                    self.facts, self.load = facts, EngineLoad(free_blocks=facts.num_blocks)
                case EngineFailed(reason):
                    return reason

    def _spread(self, news: StepOutputs) -> None:
        routes, logprobs, now = self._routes, news.logprobs, clock()
        for described in news.prompt_logprobs:
            if (route := routes.get(described.key)) is not None:
                route[0].put(SequenceUpdate(route[1], None, prompt_logprobs=described))
        for begin in news.begins:
            if (route := routes.get(begin.key)) is not None:
                route[0].begins[route[1]] = begin
        for key, token in zip(news.keys, news.tokens, strict=True):
            route = routes.get(key)
            if route is not None:  # None: it was aborted in the meantime
                job, index = route
                job.put(
                    SequenceUpdate(index, token, None, logprobs.get(key) if logprobs else None, None, None, None, now)
                )
        for end in news.ends:
            route = routes.pop(end.key, None)
            if route is not None:
                job, index = route
                job.open.discard(end.key)
                embedding = news.embeddings.get(end.key) if news.embeddings else None
                job.put(SequenceUpdate(index, end.token, end, logprobs.get(end.key), at=now, embedding=embedding))
        if (step := news.step) is not None:
            unread = self._sent - step.taken
            self.load = EngineLoad(step.running, step.waiting, step.queued_tokens, step.free_blocks, unread)
            self._on_step(step)

    def _reject(self, message: RequestRejected) -> None:
        """Tells the job, which then aborts its other streams."""
        if (route := self._routes.get(message.key)) is not None:
            route[0].put(SequenceUpdate(route[1], None, rejected=message))
