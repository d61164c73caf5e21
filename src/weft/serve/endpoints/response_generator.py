"""Runs an inference request: submits it, streams or collects the answer, and aborts it if the client disconnects."""

import asyncio
import random
from collections.abc import Callable

from starlette.types import Send

from weft.errors import RequestError
from weft.observe.engine_metrics import EngineMetrics, FinishedRequestStats
from weft.observe.metrics import ServerMetrics
from weft.observe.recording_buffer import RecordingBuffer
from weft.serve.endpoints.delivery_times import DeliveryTimes
from weft.serve.endpoints.disconnect_watcher import CLIENT_DISCONNECTED, Canceller, ClientDisconnected
from weft.serve.endpoints.token_times import TokenTimes
from weft.serve.engines.engine_client import EngineClient
from weft.serve.engines.engine_pool import EnginePool
from weft.serve.engines.messages import SequenceEnd, clock
from weft.serve.engines.request_output_collector import RequestOutputCollector, SequenceUpdate
from weft.serve.errors import ApiError, from_request_error
from weft.serve.output.choice import Choice, ChoiceDelta
from weft.serve.protocols.formatter import Json, to_json
from weft.serve.requests.parsed_request import TTFT_HEADER, ParsedRequest, finite

STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
JSON_HEADERS = [(b"content-type", b"application/json")]

# Error codes of requests that had started. With any other code the request was refused before it started, so it is not
# counted as finished.
FAILURES = ("engine_died", "step_failed", "shutdown")


async def respond(
    parsed: ParsedRequest,
    engines: EnginePool,
    metrics: ServerMetrics,
    recording: RecordingBuffer,
    watcher: Canceller,
    send: Send,
) -> "ResponseGenerator":
    """Runs a parsed request to its end on one engine. Returns its ResponseGenerator, which has the final statistics."""
    engine = engines.choose(parsed.prompts)
    engine.check_queue(sum(prompt.params.n for prompt in parsed.prompts))
    submitted = clock()
    collector = engine.submit(parsed.prompts, parsed.arrival)
    watcher.attach(collector)
    generator = ResponseGenerator(parsed, engine, collector, metrics.engines[engine.name], submitted)
    reason = "error"
    try:
        if parsed.stream:
            await generator.stream(send)
        else:
            await generator.collect(send)
    except ClientDisconnected:
        reason = "abort"
        generator.finish(reason)
        raise
    except ApiError as error:
        reason = error.code or reason
        if reason in FAILURES:
            generator.finish("error")
        raise
    finally:
        engine.abort(collector)  # the sequences that are still open
        generator.sent.record(
            recording, engine.name, collector.keys, collector.prefills_done, generator.sequence_ends, reason
        )
    return generator


class ResponseGenerator:
    """The answer to one request: reads the updates of its sequences, and sends chunks or one body."""

    def __init__(
        self,
        parsed: ParsedRequest,
        engine: EngineClient,
        collector: RequestOutputCollector,
        metrics: EngineMetrics,
        submitted: float,
    ) -> None:
        """`submitted`: when it was sent to the engine."""
        self.parsed, self.engine, self.collector = parsed, engine, collector
        self.times, self.sent = TokenTimes(parsed, metrics), DeliveryTimes(parsed, submitted)
        self.metrics = metrics
        self.sequence_ends: dict[int, SequenceEnd] = {}  # by choice index
        self.stats: FinishedRequestStats | None = None  # set at the end
        self._remaining_choices = len(parsed.choices)
        self._opened: set[int] = set()  # indices of choices whose first chunk was sent

    async def collect(self, send: Send) -> None:
        while self._remaining_choices:
            for update in await self.collector.updates():
                self._check(update)
                if self.parsed.choices[update.choice_index].finish_reason is not None:
                    continue  # a token that was in flight when a stop string ended the choice
                if update.token is not None:
                    self.times.record_token(update.choice_index, update.at)
                    self.sent.tokens[update.choice_index] += 1
                self._apply_update(update)
        body = await self._build_offloaded(
            lambda: to_json(self.parsed.formatter.full_response(self.parsed.choices, self.final_fields()))
        )
        headers = [*JSON_HEADERS, *self._headers(), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        self.sent.note_answer()
        self.finish()

    async def stream(self, send: Send) -> None:
        """Streams the answer. The response starts with the first token, so a refusal can still set the status."""
        collector, formatter, choices, times = self.collector, self.parsed.formatter, self.parsed.choices, self.times
        started, sent, note_sent = False, self.sent, self.sent.note_sent
        shows_usage = self.parsed.usage_in_every_chunk
        try:
            while self._remaining_choices:
                for update in await collector.updates():
                    if update.token is None or update.end is not None:  # most are plain tokens and need no check
                        self._check(update)
                        if update.prompt_logprobs is not None:
                            self._apply_update(update)
                            continue
                    choice = choices[update.choice_index]
                    if choice.finish_reason is not None:
                        continue  # a token that was in flight when a stop string ended the choice
                    if not started:
                        headers = [*STREAM_HEADERS, *self._headers()]
                        await send({"type": "http.response.start", "status": 200, "headers": headers})
                        started = True
                    data = (
                        b""
                        if update.choice_index in self._opened
                        else await self._open_choice(choice, shows_usage or self.parsed.usage_in_first_chunk)
                    )
                    if update.token is not None:
                        times.record_token(update.choice_index, update.at)
                        sent.tokens[update.choice_index] += 1
                    delta = self._apply_update(update)
                    if delta is not None and (formatter.token_ids or not delta.is_empty):
                        extras = {"usage": self._usage()} if shows_usage else {}
                        if not self._remaining_choices and not self.parsed.usage_in_last_chunk:
                            extras = {**extras, "metrics": self.request_metrics()}
                        data += formatter.chunk(choice, delta, extras)
                    if data:
                        began = clock()
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                        if update.token is not None:
                            note_sent(update.choice_index, update.at, began)
            last = formatter.last_chunk(self.final_fields()) if self.parsed.usage_in_last_chunk else b""
            await send({"type": "http.response.body", "body": last + formatter.done})
        except ApiError as error:
            if not started:
                raise
            await send({"type": "http.response.body", "body": formatter.error_chunk(error.body) + formatter.done})
            self.finish("error")
            return
        self.finish()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers. Without the TTFT promise if a prompt was too long to meet it even on an idle machine."""
        if all(done.has_ttft_promise for done in self.collector.prefills_done.values()):
            return self.parsed.headers
        return [header for header in self.parsed.headers if header[0] != TTFT_HEADER]

    def final_fields(self) -> Json:
        return {"usage": self._usage(), "metrics": self.request_metrics()}

    def request_metrics(self) -> Json:
        """Where this request's time went, in milliseconds.

        With several choices, each time is the slowest choice's, except ttft_ms: it belongs to the first token of the
        request. cached_tokens and preemptions are sums.
        """
        queue, prefill, decode = self._phases()
        parsed, prefills = self.parsed, self.collector.prefills_done.values()
        predicted = [done.predicted_ttft for done in prefills if done.predicted_ttft is not None]
        return {
            "queue_ms": _ms(queue),
            "prefill_ms": _ms(prefill),
            "decode_ms": _ms(decode),
            "ttft_ms": _ms(None if self.times.first is None else self.times.first - parsed.arrival),
            "largest_gap_ms": _ms(self.times.largest_gap),
            "cached_tokens": self._cached_tokens(),
            "preemptions": sum(end.preemptions for end in self.sequence_ends.values()),
            "gap_target_ms": _ms(finite(parsed.promise.gap)),
            "ttft_target_ms": _ms(finite(parsed.promise.ttft)),
            "predicted_ttft_ms": _ms(max(predicted, default=None)),
        }

    async def _open_choice(self, choice: Choice, shows_usage: bool) -> bytes:
        self._opened.add(choice.index)
        return await self._build_offloaded(
            lambda: self.parsed.formatter.first_chunk(choice, {"usage": self._usage()} if shows_usage else {})
        )

    async def _build_offloaded(self, build: Callable[[], bytes]) -> bytes:
        """Runs `build` in another thread if its result may be large, so that streams go on."""
        if not self.parsed.may_be_large:
            return build()
        return await asyncio.get_running_loop().run_in_executor(None, build)

    def _apply_update(self, update: SequenceUpdate) -> ChoiceDelta | None:
        """Passes an update to its choice. If a stop string ends the choice, aborts the sequence in the engine.

        Returns what the update adds to the choice; None for prompt log probabilities.
        """
        choice = self.parsed.choices[update.choice_index]
        if update.prompt_logprobs is not None:
            for position, found in enumerate(update.prompt_logprobs.found, start=update.prompt_logprobs.first):
                choice.prompt_logprobs[position] = found
            return None
        delta = choice.append(update)
        if update.end is not None:
            self.sequence_ends[update.choice_index] = update.end
        if delta.finish_reason is not None:
            self._remaining_choices -= 1
            if update.end is None:
                self.engine.abort(self.collector, update.choice_index)
        return delta

    def _check(self, update: SequenceUpdate) -> None:
        """Raises if the update says that the request cannot go on."""
        if update.rejected is not None:
            if update.rejected.kind == "queue_full":
                raise ApiError(503, update.rejected.message, code="queue_full", retry_after=1)
            if update.rejected.kind == "error":
                message = "the engine could not take the request; its log says more"
                raise ApiError(503, message, code="step_failed", retry_after=1)
            raise from_request_error(RequestError(update.rejected.message))
        if update.failure == CLIENT_DISCONNECTED:
            raise ClientDisconnected
        if update.failure == SHUT_DOWN:
            raise ApiError(503, f"{SHUT_DOWN}; send the request again later", code="shutdown", retry_after=5)
        if update.failure is not None:
            raise ApiError(503, f"{update.failure}; send the request again", code="engine_died", retry_after=5)
        if update.end is not None and update.end.reason in ("refused", "error"):
            self.sequence_ends[update.choice_index] = update.end  # for the recording
        if update.end is not None and update.end.reason == "refused":
            raise _refusal(self.parsed, update.end.predicted_ttft)
        if update.end is not None and update.end.reason == "error":
            raise ApiError(
                503, "a step of the engine failed; send the request again", code="step_failed", retry_after=1
            )

    def _usage(self) -> Json:
        prompt = sum(self.parsed.prompt_tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.times.tokens,
            "total_tokens": prompt + self.times.tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens()},
            "completion_tokens_details": {
                "reasoning_tokens": sum(choice.reasoning_tokens for choice in self.parsed.choices)
            },
        }

    def _cached_tokens(self) -> int:
        """Cached prompt tokens, counted once per prompt at its first choice. Its other choices share its blocks."""
        per_prompt = max(1, len(self.parsed.choices) // max(1, len(self.parsed.prompts)))
        prefills = (self.collector.prefills_done.get(index) for index in range(0, len(self.parsed.choices), per_prompt))
        return sum(done.cached_tokens for done in prefills if done is not None)

    def _phases(self) -> tuple[float | None, float | None, float | None]:
        """Seconds in the queue, in prefill and in decode. Each is the slowest choice's; None: no choice got so far."""
        prefills = self.collector.prefills_done
        queue = [done.started - self.parsed.arrival for done in prefills.values()]
        prefill = [done.first_token - done.started for done in prefills.values()]
        decode = [max(0.0, self.times.last(index) - done.first_token) for index, done in prefills.items()]
        return max(queue, default=None), max(prefill, default=None), max(decode, default=None)

    def finish(self, reason: str | None = None) -> None:
        """Adds the request to the metrics. `reason` is why it ended; None: as its choices ended."""
        if reason is None:
            reason = "length" if all(choice.finish_reason == "length" for choice in self.parsed.choices) else "stop"
        self.stats = self._stats(reason)
        self.metrics.record_finished(self.stats)

    def _stats(self, reason: str) -> FinishedRequestStats:
        queue, prefill, decode = self._phases()
        elapsed = clock() - self.parsed.arrival
        return FinishedRequestStats(
            reason=reason,
            prompt_tokens=sum(self.parsed.prompt_tokens),
            output_tokens=self.times.tokens,
            cached_tokens=self._cached_tokens(),
            queue=elapsed if queue is None else queue,  # None: it never left the queue
            prefill=prefill,
            decode=decode,
            ttft=None if self.times.first is None else self.times.first - self.parsed.arrival,
            e2e=elapsed,
            largest_gap=self.times.largest_gap,
            n=len(self.parsed.choices),
            max_tokens=self.parsed.max_tokens,
        )


SHUT_DOWN = "the server is shutting down, and did not wait for the request to finish"


def _refusal(parsed: ParsedRequest, predicted: float | None) -> ApiError:
    target = parsed.promise.promised_ttft
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


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
