"""Requests that are small to send and much work for the process that hands out everybody's tokens."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.attacks.victim import CALM, NOISE, Victim
from tests.serve.running import RunningServer


@pytest.fixture(scope="module")
def small_steps() -> Iterator[RunningServer]:
    """Its steps are short, so that what a stream notices is not somebody's prompt."""
    options = (
        "--policy",
        "chunked",
        "--max-num-batched-tokens",
        "128",
        "--max-num-seqs",
        "64",
        "--kv-cache-memory-bytes",
        "256MiB",
    )
    server = RunningServer(*options)
    yield server
    assert server.stop() == 0, server.log


STOPS = [f"{number:03d}" + "ab" * 498 for number in range(64)]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "n": 128, "max_tokens": 1, "stop": STOPS},
        {"prompt": ["a"] * 1024, "n": 2, "max_tokens": 1, "stop": STOPS},
    ],
    ids=["128 completions", "1,024 prompts"],
)
def test_stop_strings_for_many_completions(server: RunningServer, body: dict[str, Any]) -> None:
    with Victim(server) as victim:
        answer = server.post("/v1/completions", body, timeout=120)
    assert answer.status_code == 200
    assert victim.longest_gap < NOISE * CALM, f"{victim.longest_gap:.3f} s"


DESCRIBED = {"prompt": [7] * 4000, "max_tokens": 1, "echo": True, "logprobs": 20, "prompt_logprobs": 20}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_long_prompt(small_steps: RunningServer, stream: bool) -> None:
    with Victim(small_steps) as victim:
        answer = small_steps.post("/v1/completions", {**DESCRIBED, "n": 8, "stream": stream}, timeout=120)
    assert answer.status_code == 200
    assert len(answer.content) > 20_000_000
    assert victim.longest_gap < NOISE * CALM, f"{victim.longest_gap:.3f} s"


def test_more_log_probabilities_than_anybody_reads_are_refused(server: RunningServer) -> None:
    for body in ({**DESCRIBED, "n": 32}, {**DESCRIBED, "prompt": [[7] * 4000] * 32}):
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 400
        assert "1000000" in answer.json()["error"]["message"]


def test_texts_that_no_model_reads_are_not_tokenized(server: RunningServer) -> None:
    """7.8 MB took 1.5 GB of memory, in one of the two threads that all texts share."""
    with Victim(server) as victim:
        answer = server.post("/tokenize", {"prompt": "ab " * 2_600_000})
        assert answer.status_code == 400
        assert "1000000" in answer.json()["error"]["message"]
        assert server.post("/tokenize", {"prompt": "ab " * 330_000}, timeout=60).json()["count"] > 300_000
    assert victim.longest_gap < NOISE * CALM, f"{victim.longest_gap:.3f} s"


def test_many_embeddings_at_once(server: RunningServer) -> None:
    """Their answer has 100,000 numbers and more; it is put together beside the event loop, one vector at a time."""
    with Victim(server) as victim:
        answer = server.post("/v1/embeddings", {"input": ["a b c"] * 1024}, timeout=120)
    assert answer.status_code == 200
    assert len(answer.json()["data"]) == 1024
    assert len(answer.content) > 2_000_000
    assert victim.longest_gap < NOISE * CALM, f"{victim.longest_gap:.3f} s"
