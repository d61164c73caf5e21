"""EngineConnection: the messages to and from one engine process, and the routes from its sequences to requests."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import zmq
import zmq.asyncio

from weft.errors import RequestError
from weft.observe.engine_metrics import EngineStep
from weft.serve.engines.engine_prompt import EnginePrompt
from weft.serve.engines.messages import (
    AbortSequences,
    AddPrompt,
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
from weft.serve.engines.request_output_collector import RequestOutputCollector, SequenceUpdate


@dataclass(slots=True)
class EngineLoad:
    """How busy an engine is: the counts of its last step, plus the sequences sent since."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    sent: int = 0  # sequences that were sent, but that the engine had not read at its last step

    @property
    def sequences(self) -> int:
        """Sequences that the engine has, or will have once it has read its messages."""
        return self.running + self.waiting + self.sent


class Route(NamedTuple):
    """Where the outputs of one sequence go."""

    collector: RequestOutputCollector
    choice_index: int


class EngineConnection:
    """Owns the socket to one engine process, and the routes from its sequences to requests. Runs on the event loop."""

    def __init__(
        self,
        address: str,
        on_ready: Callable[[EngineInfo], str | None],
        on_step: Callable[[EngineStep], None],
        on_frames: Callable[[list[bytes], bytes], None] = lambda prompts, step: None,
    ) -> None:
        """Binds the address. `on_ready` returns why the engine must not serve, or None."""
        self.info: EngineInfo | None = None  # None: the engine is not ready, or the connection is closed
        self.load = EngineLoad()
        self._on_ready, self._on_step, self._on_frames = on_ready, on_step, on_frames
        self._next_key = itertools.count()
        self._sent = 0  # sequences since the start
        self._routes: dict[int, Route] = {}  # by key
        self._socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        try:
            self._socket.set_hwm(0)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(address)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self.info, self.load = None, EngineLoad()
        self._socket.close()

    def submit(self, prompts: Sequence[EnginePrompt], arrival: float) -> RequestOutputCollector:
        """Sends the prompts of one request. Sequences are ordered by prompt: all n of the first, then of the second.

        Returns the collector of their outputs.
        """
        collector = RequestOutputCollector()
        messages = []
        for prompt in prompts:
            keys = list(itertools.islice(self._next_key, prompt.params.n))
            collector.keys += keys
            message = AddPrompt(
                keys[0], prompt.tokens, prompt.params, prompt.options, prompt.salt, arrival, prompt.request_id
            )
            try:
                messages.append(encode(message))
            except (OverflowError, TypeError, ValueError) as error:  # a number in a schema that needs over 64 bits
                raise RequestError(f"the request cannot be passed on: {error}") from None
        self._sent += len(collector.keys)
        self._routes.update((key, Route(collector, index)) for index, key in enumerate(collector.keys))
        collector.open_keys.update(collector.keys)
        self.load.sent += len(collector.keys)
        for data in messages:
            self._socket.send(data)  # no high-water mark is set, so this never blocks
        return collector

    def abort(self, collector: RequestOutputCollector, index: int | None = None) -> None:
        """Ends one sequence of a request, or all open ones. No further updates of them arrive."""
        keys = sorted(collector.open_keys) if index is None else [collector.keys[index]]
        keys = [key for key in keys if key in collector.open_keys]
        for key in keys:
            del self._routes[key]
            collector.open_keys.remove(key)
        if keys and self.info is not None:
            self._socket.send(encode(AbortSequences(keys)))

    def reset_cache(self) -> None:
        if self.info is not None:  # an engine that is not ready has an empty cache
            self._socket.send(encode(ResetPrefixCache()))

    def fail_requests(self, reason: str) -> None:
        """Ends all requests with an error."""
        routes, self._routes = self._routes, {}
        for collector, index in routes.values():
            collector.open_keys.clear()
            collector.put(SequenceUpdate(index, None, failure=reason))

    async def read(self) -> str:
        """Handles the engine's messages until one says that the engine cannot serve. Returns the reason."""
        while True:
            data = await self._socket.recv()
            message = decode_for_api(data)
            match message:
                case StepOutputs():
                    self._deliver(message)
                case RequestRejected():
                    self._reject(message)
                case EngineReady(info):
                    if (reason := self._on_ready(info)) is not None:
                        return reason
                    self.info, self.load = info, EngineLoad(free_blocks=info.num_blocks)
                case EngineFailed(reason):
                    return reason

    def _deliver(self, outputs: StepOutputs) -> None:
        routes, logprobs, now = self._routes, outputs.logprobs, clock()
        for entry in outputs.prompt_logprobs:
            if (route := routes.get(entry.key)) is not None:
                route.collector.put(SequenceUpdate(route.choice_index, None, prompt_logprobs=entry))
        for prefill in outputs.prefills_done:
            if (route := routes.get(prefill.key)) is not None:
                route.collector.prefills_done[route.choice_index] = prefill
        for key, token in zip(outputs.keys, outputs.tokens, strict=True):
            route = routes.get(key)
            if route is not None:  # None: it was aborted in the meantime
                found = logprobs.get(key) if logprobs else None
                route.collector.put(SequenceUpdate(route.choice_index, token, None, found, None, None, None, now))
        for end in outputs.sequence_ends:
            route = routes.pop(end.key, None)
            if route is not None:
                collector, index = route
                collector.open_keys.discard(end.key)
                embedding = outputs.embeddings.get(end.key) if outputs.embeddings else None
                collector.put(SequenceUpdate(index, end.token, end, logprobs.get(end.key), at=now, embedding=embedding))
        if outputs.step_frame or outputs.prompt_frames:
            self._on_frames(outputs.prompt_frames, outputs.step_frame)
        if (step := outputs.step) is not None:
            unread = self._sent - step.num_handled
            self.load = EngineLoad(step.running, step.waiting, step.queued_tokens, step.free_blocks, unread)
            self._on_step(step)

    def _reject(self, message: RequestRejected) -> None:
        """Passes the rejection on. The ResponseGenerator then aborts the other sequences."""
        if (route := self._routes.get(message.key)) is not None:
            route.collector.put(SequenceUpdate(route.choice_index, None, rejected=message))
