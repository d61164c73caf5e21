"""Runs an inference request: submits it, streams or collects the answer, and aborts it if the client disconnects."""

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.types import Receive, Send

from weft.core import Promise
from weft.errors import RequestError
from weft.observe.engine_metrics import EngineMetrics, RequestDone
from weft.observe.metrics import ServerMetrics
from weft.serve.engines.engine_client import EngineClient
from weft.serve.engines.engine_pool import EnginePool
from weft.serve.engines.messages import SequenceEnd, clock
from weft.serve.engines.submitted_request import EnginePrompt, SequenceUpdate, SubmittedRequest
from weft.serve.errors import ApiError, of_request
from weft.serve.output.choice import Choice
from weft.serve.protocols.formatter import Formatter, Json, to_json

T = TypeVar("T")
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
TTFT_HEADER = b"x-slo-ttft-ms"
JSON_HEADERS = [(b"content-type", b"application/json")]


@dataclass
class ParsedRequest:
    """A checked request: the prompts for the engine, and the format of the answer."""

    format: Formatter
    prompts: list[EnginePrompt]
    prompt_tokens: list[int]  # of each prompt
    choices: list[Choice]
    arrival: float
    max_tokens: int | None
    promise: Promise
    stream: bool = False
    includes_usage: bool = False
    counts_always: bool = False  # every chunk has the usage so far
    counts_first: bool = False  # the opening chunk has the usage so far
    is_background: bool = False  # goes on after the client has disconnected
    may_be_large: bool = False  # the answer has log probabilities or embeddings
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


FAILURES = ("engine_died", "step_failed", "shutdown")  # other error codes are refusals: nothing had started


class ClientDisconnected(Exception):
    """The client has disconnected."""


class TokenTimes:
    """Token times of one request, in seconds; updates the latency metrics."""

    def __init__(self, call: ParsedRequest, metrics: EngineMetrics) -> None:
        self.call, self.metrics = call, metrics
        self.first: float | None = None
        self.largest_gap = 0.0
        self.tokens = 0
        self._last: list[float] = [0.0] * len(call.choices)
        self._ttft, self._gap = finite(call.promise.promised_ttft), finite(call.promise.promised_gap)

    def last(self, index: int) -> float:
        """When a choice got its latest token."""
        return self._last[index]

    def token(self, index: int, now: float) -> None:
        """Records a token. Runs for every token."""
        self.tokens += 1
        last = self._last[index]
        self._last[index] = now
        if last:
            gap = now - last
            if gap > self.largest_gap:
                self.largest_gap = gap
            self.metrics.gap(gap, self._gap)
        else:
            if self.first is None:
                self.first = now
            self.metrics.first_token(now - self.call.arrival, self._ttft)


class Canceller(Protocol):
    """Tells a job when it must end early."""

    def tell(self, job: SubmittedRequest) -> None:
        """Sets the job to tell. If the end has come already, tells it now."""
        ...


class DisconnectWatcher:
    """Watches for the client to disconnect, once its body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._watching = asyncio.create_task(self._watch(receive))
        self._job: SubmittedRequest | None = None

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work`, before there is a job. If the client disconnects, cancels it and raises Gone."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self._watching), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnected
            return task.result()
        finally:
            task.cancel()

    def tell(self, job: SubmittedRequest) -> None:
        """Tells the job when the client disconnects, or now if it has."""
        self._job = job
        if self._watching.done():
            job.put(SequenceUpdate(0, None, lost=CLIENT_DISCONNECTED))

    def close(self) -> None:
        self._watching.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if self._job is not None:
            self._job.put(SequenceUpdate(0, None, lost=CLIENT_DISCONNECTED))


async def respond(
    call: ParsedRequest, engines: EnginePool, metrics: ServerMetrics, there: Canceller, send: Send
) -> "ResponseGenerator":
    """Runs a call to its end on one engine, and returns its Exchange. Always aborts streams that are still open."""
    handle = engines.choose(call.prompts)
    handle.check_queue(sum(prompt.params.n for prompt in call.prompts))
    job = handle.submit(call.prompts, call.arrival)
    there.tell(job)
    exchange = ResponseGenerator(call, handle, job, metrics.engines[handle.name])
    try:
        if call.stream:
            await exchange.stream(send)
        else:
            await exchange.collect(send)
    except ClientDisconnected:
        exchange.finish("abort")
        raise
    except ApiError as error:
        if error.code in FAILURES:
            exchange.finish("error")
        raise
    finally:
        handle.abort(job)
    return exchange


class ResponseGenerator:
    """One call and its job, from submission to the last frame."""

    def __init__(
        self, call: ParsedRequest, handle: EngineClient, job: SubmittedRequest, metrics: EngineMetrics
    ) -> None:
        self.call, self.handle, self.job = call, handle, job
        self.times = TokenTimes(call, metrics)
        self.metrics = metrics
        self.ends: dict[int, SequenceEnd] = {}  # the End of each stream, by index
        self.done: RequestDone | None = None  # set at the end
        self._left = len(call.choices)
        self._opened: set[int] = set()

    async def collect(self, send: Send) -> None:
        while self._left:
            for update in await self.job.news():
                self._check(update)
                if self.call.choices[update.place].reason is not None:
                    continue  # a token that was in flight when a stop string ended the choice
                if update.token is not None:
                    self.times.token(update.place, update.at)
                self._take(update)
        body = await self._made(lambda: to_json(self.call.format.whole(self.call.choices, self.summary())))
        headers = [*JSON_HEADERS, *self._headers(), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        self.finish()

    async def stream(self, send: Send) -> None:
        """Streams the answer. The response starts with the first token, so a refusal can still set the status."""
        job, format, choices, times = self.job, self.call.format, self.call.choices, self.times
        started = False
        counts = self.call.counts_always
        try:
            while self._left:
                for update in await job.news():
                    if update.token is None or update.end is not None:  # most are plain tokens and need no check
                        self._check(update)
                        if update.prompt_logprobs is not None:
                            self._take(update)
                            continue
                    choice = choices[update.place]
                    if choice.reason is not None:
                        continue  # a token that was in flight when a stop string ended the choice
                    if not started:
                        headers = [*STREAM_HEADERS, *self._headers()]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        started = True
                    data = (
                        b""
                        if update.place in self._opened
                        else await self._open(choice, counts or self.call.counts_first)
                    )
                    if update.token is not None:
                        times.token(update.place, update.at)
                    piece = self._take(update)
                    if piece is not None and (format.token_ids or not piece.is_empty):
                        extras = {"usage": self._usage()} if counts else {}
                        if not self._left and not self.call.includes_usage:
                            extras = {**extras, "metrics": self.numbers()}
                        data += format.piece(choice, piece, extras)
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            last = format.closing(self.summary()) if self.call.includes_usage else b""
            await send({"type": "http.response.body", "body": last + format.done})
        except ApiError as error:
            if not started:
                raise
            await send({"type": "http.response.body", "body": format.error(error.body) + format.done})
            self.finish("error")
            return
        self.finish()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers. Without the TTFT promise if a prompt was too long to meet it even on an idle machine."""
        if all(begin.is_promised for begin in self.job.begins.values()):
            return self.call.headers
        return [header for header in self.call.headers if header[0] != TTFT_HEADER]

    def summary(self) -> Json:
        return {"usage": self._usage(), "metrics": self.numbers()}

    def numbers(self) -> Json:
        """Where this request's time went, in milliseconds.

        With several choices, each time is the slowest choice's, except ttft_ms: it belongs to the first token of the
        request. cached_tokens and preemptions are sums.
        """
        queue, prefill, decode = self._phases()
        call, ends, begins = self.call, list(self.ends.values()), self.job.begins.values()
        predicted = [begin.predicted_ttft for begin in begins if begin.predicted_ttft is not None]
        return {
            "queue_ms": _ms(queue),
            "prefill_ms": _ms(prefill),
            "decode_ms": _ms(decode),
            "ttft_ms": _ms(None if self.times.first is None else self.times.first - call.arrival),
            "largest_gap_ms": _ms(self.times.largest_gap),
            "cached_tokens": self._cached(),
            "preemptions": sum(end.preemptions for end in ends),
            "gap_target_ms": _ms(finite(call.promise.gap)),
            "ttft_target_ms": _ms(finite(call.promise.ttft)),
            "predicted_ttft_ms": _ms(max(predicted, default=None)),
        }

    async def _open(self, choice: Choice, counts: bool) -> bytes:
        self._opened.add(choice.index)
        return await self._made(lambda: self.call.format.opening(choice, {"usage": self._usage()} if counts else {}))

    async def _made(self, work: Callable[[], bytes]) -> bytes:
        """Runs `work` in another thread if its result may be large, so that streams go on."""
        if not self.call.may_be_large:
            return work()
        return await asyncio.get_running_loop().run_in_executor(None, work)

    def _take(self, update: SequenceUpdate) -> Any:
        """Passes an update to its choice. If the choice ends before its stream (a stop string), aborts the stream."""
        choice = self.call.choices[update.place]
        if update.prompt_logprobs is not None:
            for position, found in enumerate(update.prompt_logprobs.found, start=update.prompt_logprobs.first):
                choice.prompt_logprobs[position] = found
            return None
        piece = choice.take(update)
        if update.end is not None:
            self.ends[update.place] = update.end
        if piece.reason is not None:
            self._left -= 1
            if update.end is None:
                self.handle.abort(self.job, update.place)
        return piece

    def _check(self, update: SequenceUpdate) -> None:
        """Raises if the update says that the request cannot go on."""
        if update.rejected is not None:
            if update.rejected.kind == "queue_full":
                raise ApiError(503, update.rejected.message, code="queue_full", retry_after=1)
            if update.rejected.kind == "error":
                message = "the engine could not take the request; its log says more"
                raise ApiError(503, message, code="step_failed", retry_after=1)
            raise of_request(RequestError(update.rejected.message))
        if update.lost == CLIENT_DISCONNECTED:
            raise ClientDisconnected
        if update.lost == SHUT_DOWN:
            raise ApiError(503, f"{SHUT_DOWN}; send the request again later", code="shutdown", retry_after=5)
        if update.lost is not None:
            raise ApiError(503, f"{update.lost}; send the request again", code="engine_died", retry_after=5)
        if update.end is not None and update.end.reason == "refused":
            raise _refusal(self.call, update.end.predicted_ttft)
        if update.end is not None and update.end.reason == "error":
            raise ApiError(
                503, "a step of the engine failed; send the request again", code="step_failed", retry_after=1
            )

    def _usage(self) -> Json:
        prompt = sum(self.call.prompt_tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.times.tokens,
            "total_tokens": prompt + self.times.tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached()},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.call.choices)
            },
        }

    def _cached(self) -> int:
        """Cached prompt tokens, counted once per prompt at its first choice. Its other choices share its blocks."""
        per_prompt = max(1, len(self.call.choices) // max(1, len(self.call.prompts)))
        firsts = (self.job.begins.get(index) for index in range(0, len(self.call.choices), per_prompt))
        return sum(begin.cached_tokens for begin in firsts if begin is not None)

    def _phases(self) -> tuple[float | None, float | None, float | None]:
        begins = self.job.begins
        queue = [begin.started - self.call.arrival for begin in begins.values()]
        prefill = [begin.first_token - begin.started for begin in begins.values()]
        decode = [max(0.0, self.times.last(index) - begin.first_token) for index, begin in begins.items()]
        return max(queue, default=None), max(prefill, default=None), max(decode, default=None)

    def finish(self, reason: str | None = None) -> None:
        if reason is None:
            reason = "length" if all(choice.reason == "length" for choice in self.call.choices) else "stop"
        self.done = self._summed_up(reason)
        self.metrics.finished(self.done)

    def _summed_up(self, reason: str) -> RequestDone:
        queue, prefill, decode = self._phases()
        elapsed = clock() - self.call.arrival
        return RequestDone(
            reason=reason,
            prompt_tokens=sum(self.call.prompt_tokens),
            output_tokens=self.times.tokens,
            cached_tokens=self._cached(),
            queue=elapsed if queue is None else queue,  # None: it never left the queue
            prefill=prefill,
            decode=decode,
            ttft=None if self.times.first is None else self.times.first - self.call.arrival,
            e2e=elapsed,
            largest_gap=self.times.largest_gap,
            n=len(self.call.choices),
            max_tokens=self.call.max_tokens,
        )


CLIENT_DISCONNECTED = "the client has disconnected"
SHUT_DOWN = "the server is shutting down, and did not wait for the request to finish"


def _refusal(call: ParsedRequest, predicted: float | None) -> ApiError:
    target = call.promise.promised_ttft
    if predicted is None or predicted <= target:
        message = (
            "the request was refused: beside what runs and waits, and with steps that vary as they did lately, "
            'promises to it or to others would be broken; try again later, or send it as service_tier "flex"'
        )
        return ApiError(503, message, code="deadline", retry_after=1 + random.random() * 2)
    message = (
        f"the request was refused: its first token would have come after {predicted:.3g} s, and it is promised within "
        f"{target:.3g} s; try again later, ask for more time with x-slo-ttft-ms, or send it as "
        'service_tier "flex"'
    )
    details = {"predicted_ttft_ms": _ms(predicted), "ttft_target_ms": _ms(target)}
    return ApiError(503, message, code="deadline", retry_after=predicted - target, details=details)


def finite(seconds: float) -> float | None:
    return None if seconds == math.inf else seconds


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
