"""OpenTelemetry traces by the GenAI conventions: one span per request, with child spans for queue, prefill and decode.

A request is reported once, when it has ended. Spans get their times afterwards, so that nothing is recorded while
tokens flow. A thread of the SDK sends them. OpenTelemetry is optional (`weft[otel]`) and imported only if it is used.
"""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Optional
from urllib.parse import urlsplit

from weft.errors import OptionError
from weft.observe.engine_metrics import FinishedRequestStats

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

# Spans per export. Encoding them holds the GIL, for which the event loop waits: 3 ms, and 24 ms for the SDK's default
# of 512.
SPANS_PER_EXPORT = 64

Attributes = dict[str, str | int | float | list[str]]


class RequestSpan(NamedTuple):
    """What a trace reports about a request. Times are in seconds."""

    stats: FinishedRequestStats
    arrival: float  # on the tracer's clock
    operation: str  # "chat" or "text_completion"
    model: str  # name that the client sent
    response_model: str
    response_id: str
    request_id: str = ""  # of the header x-request-id
    temperature: float | None = None
    top_p: float | None = None
    gap_target: float | None = None
    ttft_target: float | None = None
    error: str | None = None  # class of the error
    traceparent: str | None = None  # the client's W3C headers
    tracestate: str | None = None


class Tracer:
    """Sends traces to a collector. For one thread. `request` does not wait for the network."""

    def __init__(self, provider: "TracerProvider", clock: Callable[[], float] = time.perf_counter) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("weft")
        self._clock = clock

    @staticmethod
    def make(
        endpoint: str | None, service: str = "weft", clock: Callable[[], float] = time.perf_counter
    ) -> Optional["Tracer"]:
        """A tracer for a collector at an OTLP/HTTP address such as http://localhost:4318; None without an endpoint."""
        if endpoint is None:
            return None
        address = _traces_address(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise OptionError(f"traces need OpenTelemetry ({error}): pip install 'weft[otel]'") from None
        provider = TracerProvider(resource=Resource.create({"service.name": service}), shutdown_on_exit=False)
        processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=address), max_export_batch_size=SPANS_PER_EXPORT)
        provider.add_span_processor(processor)
        return Tracer(provider, clock)

    def request(self, request: RequestSpan) -> None:
        """Reports a request. To be called when the request has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        stats, arrival = request.stats, request.arrival
        # Both are read for each request, because the wall clock is adjusted now and then.
        wall, now = time.time_ns(), self._clock()

        def epoch(moment: float) -> int:
            return wall - round((now - moment) * 1e9)

        span = self._tracer.start_span(
            f"{request.operation} {request.model}",
            context=_parent(request),
            kind=SpanKind.SERVER,
            attributes=_attributes(request),
            start_time=epoch(arrival),
        )
        if stats.reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        inside, start = set_span_in_context(span), arrival
        for name, seconds in (("queue", stats.queue), ("prefill", stats.prefill), ("decode", stats.decode)):
            if seconds is None:
                break
            phase = self._tracer.start_span(name, context=inside, start_time=epoch(start))
            start += seconds
            phase.end(epoch(start))
        span.end(epoch(arrival + stats.e2e))

    def close(self, timeout: float = 5.0) -> None:
        """Sends remaining spans for at most `timeout` seconds: a dead collector must not keep a server alive."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(timeout)


def _traces_address(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise OptionError(f"the endpoint of traces is {endpoint!r}, but must be like http://localhost:4318")
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def _parent(request: RequestSpan) -> "Context":
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers = {"traceparent": request.traceparent, "tracestate": request.tracestate}
    return TraceContextTextMapPropagator().extract({name: value for name, value in headers.items() if value})


def _attributes(request: RequestSpan) -> Attributes:
    stats = request.stats
    attributes: dict[str, str | int | float | list[str] | None] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "weft",
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": stats.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.choice.count": stats.n if stats.n != 1 else None,
        "gen_ai.response.id": request.response_id,
        "gen_ai.response.model": request.response_model,
        "gen_ai.response.finish_reasons": [stats.reason],
        "gen_ai.usage.input_tokens": stats.prompt_tokens,
        "gen_ai.usage.output_tokens": stats.output_tokens,
        "error.type": (request.error or "_OTHER") if stats.reason == "error" else None,
        "weft.request_id": request.request_id or None,
        "weft.cached_tokens": stats.cached_tokens,
        "weft.ttft": stats.ttft,
        "weft.largest_gap": stats.largest_gap,
        "weft.ttft_target": request.ttft_target,
        "weft.gap_target": request.gap_target,
    }
    return {name: value for name, value in attributes.items() if value is not None}
