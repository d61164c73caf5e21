"""The promise of the first token in response headers: what the engine says of it, and what the client is told."""

from types import SimpleNamespace
from typing import Any

import pytest

from weft.core import Promise, Request, Source, Targets
from weft.serve.endpoints.response_generator import ResponseGenerator
from weft.serve.engines.engine_main import _prefill_done
from weft.serve.engines.request_output_collector import RequestOutputCollector
from weft.serve.requests.parsed_request import ParsedRequest, promise_headers

INFINITE = float("inf")
BY_DEFAULT = Targets(gap=0.05, ttft=2.0, gap_source=Source.DEFAULT, ttft_source=Source.DEFAULT)
BY_OPERATOR = Targets(gap=0.05, ttft=2.0)
# The scheduler sets this as the target of a prompt that even an idle machine could not read in time.
IMPOSSIBLE = INFINITE


def told(promise: Promise, ttft_target: float) -> tuple[bool, list[tuple[bytes, bytes]]]:
    """What the engine says of the promise, and the headers of the answer. `ttft_target`: the scheduler's, seconds."""
    request = Request(
        "1", 100, 8, ttft_target=ttft_target, ttft_source=promise.ttft_source, started=1.0, first_token=1.5
    )
    unused: Any = SimpleNamespace()
    sequence: Any = SimpleNamespace(request=request)
    done = _prefill_done(0, sequence)
    parsed = ParsedRequest(
        formatter=unused,
        prompts=[],
        prompt_tokens=[100],
        choices=[],
        arrival=0.0,
        max_tokens=8,
        promise=promise,
        headers=promise_headers(promise),
    )
    collector = RequestOutputCollector()
    collector.prefills_done[0] = done
    generator = ResponseGenerator(parsed, unused, collector, unused, 0.0)
    return done.has_ttft_promise, generator._headers()


@pytest.mark.parametrize(
    ("targets", "own", "has_promise", "headers"),
    [
        (Targets(), None, False, []),
        (BY_DEFAULT, None, False, []),
        (BY_DEFAULT, 3.0, True, [(b"x-slo-ttft-ms", b"3000")]),
        (BY_OPERATOR, None, True, [(b"x-slo-gap-ms", b"50"), (b"x-slo-ttft-ms", b"2000")]),
        (BY_OPERATOR, IMPOSSIBLE, False, [(b"x-slo-gap-ms", b"50")]),
    ],
    ids=["none", "default", "request", "operator", "impossible"],
)
def test_the_first_token_is_promised(
    targets: Targets, own: float | None, has_promise: bool, headers: list[tuple[bytes, bytes]]
) -> None:
    promise = targets.promise(100, ttft=None if own == IMPOSSIBLE else own)
    assert told(promise, promise.ttft if own is None else own) == (has_promise, headers)
