"""Spans as a collector gets them."""

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from weft.errors import OptionError
from weft.observe.engine_metrics import FinishedRequestStats
from weft.observe.tracing import RequestSpan, Tracer

DONE = FinishedRequestStats("stop", 100, 20, 64, 0.25, 0.5, 1.0, 0.75, 1.8, 0.2, max_tokens=50)
SPAN = RequestSpan(
    DONE, 5.0, "chat", "m", "m-full", "chatcmpl-1", "1", temperature=0.5, top_p=0.9, gap_target=0.05, ttft_target=2.0
)


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import sys; from weft.observe.tracing import Tracer; assert Tracer.make(None, 'weft') is None; "
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("endpoint", ["localhost:4318", "", "grpc://localhost:4317", "http://"])
def test_an_endpoint_must_be_an_address(endpoint: str) -> None:
    with pytest.raises(OptionError, match="must be like http://localhost:4318"):
        Tracer.make(endpoint, "weft")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("", ".sdk", ".sdk.trace", ".exporter.otlp.proto.http.trace_exporter"):
        monkeypatch.setitem(sys.modules, f"opentelemetry{name}", None)
    with pytest.raises(OptionError, match=r"pip install 'weft\[otel\]'"):
        Tracer.make("http://localhost:4318", "weft")


def otel(name: str) -> Any:
    """A module of OpenTelemetry; without it the test is skipped."""
    return pytest.importorskip(f"opentelemetry.{name}", reason="OpenTelemetry is optional: pip install 'weft[otel]'")


def spans(request: RequestSpan, now: float = 7.0) -> dict[str, Any]:
    """The spans of one request by name, reported at `now`."""
    exporter = otel("sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = otel("sdk.trace").TracerProvider()
    provider.add_span_processor(otel("sdk.trace.export").SimpleSpanProcessor(exporter))
    Tracer(provider, clock=lambda: now).request(request)
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_and_its_phases() -> None:
    before = time.time_ns()
    found = spans(SPAN)
    after = time.time_ns()
    assert set(found) == {"chat m", "queue", "prefill", "decode"}
    root = found["chat m"]
    assert root.kind is otel("trace").SpanKind.SERVER
    assert root.parent is None
    assert root.status.status_code is otel("trace").StatusCode.UNSET
    assert before - 2e9 <= root.start_time <= after - 2e9  # it arrived two seconds ago
    since = {
        name: ((span.start_time - root.start_time) / 1e9, (span.end_time - root.start_time) / 1e9)
        for name, span in found.items()
    }
    assert since["chat m"] == (0.0, 1.8)
    assert since["queue"] == (0.0, 0.25)
    assert since["prefill"] == (0.25, 0.75)
    assert since["decode"] == (0.75, 1.75)
    for name in ("queue", "prefill", "decode"):
        assert found[name].parent.span_id == root.context.span_id
        assert found[name].context.trace_id == root.context.trace_id


def test_attributes_follow_the_genai_conventions() -> None:
    assert dict(spans(SPAN)["chat m"].attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "weft",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "m-full",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 20,
        "weft.request_id": "1",
        "weft.cached_tokens": 64,
        "weft.ttft": 0.75,
        "weft.largest_gap": 0.2,
        "weft.ttft_target": 2.0,
        "weft.gap_target": 0.05,
    }


def test_one_that_failed_in_the_queue() -> None:
    done = DONE._replace(reason="error", output_tokens=0, prefill=None, decode=None, ttft=None, largest_gap=None, n=3)
    found = spans(SPAN._replace(stats=done, operation="text_completion", error="EngineError"))
    assert set(found) == {"text_completion m", "queue"}
    root = found["text_completion m"]
    assert root.status.status_code is otel("trace").StatusCode.ERROR
    assert root.attributes["error.type"] == "EngineError"
    assert root.attributes["gen_ai.request.choice.count"] == 3
    assert "weft.ttft" not in root.attributes


def test_a_client_s_trace_goes_on() -> None:
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    root = spans(SPAN._replace(traceparent=parent, tracestate="vendor=1"))["chat m"]
    assert f"{root.context.trace_id:x}" == "a" * 32
    assert f"{root.parent.span_id:x}" == "b" * 16
    assert root.context.trace_state["vendor"] == "1"
    unsampled = parent[:-1] + "0"
    assert spans(SPAN._replace(traceparent=unsampled)) == {}


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{'b' * 16}-01"])
def test_a_broken_header_starts_a_new_trace(header: str) -> None:
    assert spans(SPAN._replace(traceparent=header))["chat m"].parent is None


def test_spans_arrive_at_the_collector() -> None:
    wire = otel("proto.collector.trace.v1.trace_service_pb2")
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        tracer = Tracer.make(f"http://127.0.0.1:{server.server_port}/", "looms")
        assert tracer is not None
        tracer.request(SPAN)
        tracer.close()
    finally:
        server.shutdown()
        server.server_close()
    ((path, body),) = received
    assert path == "/v1/traces"
    (resource,) = wire.ExportTraceServiceRequest.FromString(body).resource_spans
    assert ("service.name", "looms") in {(pair.key, pair.value.string_value) for pair in resource.resource.attributes}
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["chat m", "decode", "prefill", "queue"]


def test_a_collector_that_never_answers_keeps_nobody() -> None:
    otel("exporter.otlp.proto.http.trace_exporter")
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # listens, and is never served
    try:
        tracer = Tracer.make(f"http://127.0.0.1:{server.server_port}/v1/traces", "weft")
        assert tracer is not None
        began = time.perf_counter()
        for _ in range(100):
            tracer.request(SPAN)
        tracer.close(timeout=0.2)
        assert time.perf_counter() - began < 3.0
    finally:
        server.server_close()
