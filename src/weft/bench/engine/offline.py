"""Offline throughput: a fixed set of requests, all submitted at the start, run as fast as the engine can."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from weft.engine.params import SamplingParams
from weft.errors import EngineError, OptionError

if TYPE_CHECKING:  # `weft --help` needs the names of the workloads, and no engine
    from weft.core import StepRecord
    from weft.engine.engine import Engine

TEMPERATURE = 0.6


class OfflineRequest(NamedTuple):
    prompt: list[int]
    max_tokens: int  # exactly this many tokens are sampled


@dataclass(frozen=True)
class Offline:
    prompts: int
    input_tokens: int
    output_tokens: int
    seconds: float  # from the validation of the first request to the last token
    steps: int
    preemptions: int

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens per second."""
        return (self.input_tokens + self.output_tokens) / self.seconds


def uniform256() -> list[OfflineRequest]:
    """nano-vllm's benchmark with the same random draws: 142,827 tokens in, 133,966 out."""
    draw = random.Random(0).randint
    prompts = [[draw(0, 10_000) for _ in range(draw(100, 1024))] for _ in range(256)]
    return [OfflineRequest(prompt, draw(100, 1024)) for prompt in prompts]


WORKLOADS: dict[str, Callable[[], list[OfflineRequest]]] = {"uniform256": uniform256}


def measure(
    engine: "Engine", requests: Sequence[OfflineRequest], progress: Callable[[int], None] = lambda tokens: None
) -> Offline:
    """Runs all requests to their end. Token ids wrap at the vocabulary size. `progress` receives the sampled tokens."""
    longest = max(len(request.prompt) + request.max_tokens for request in requests)
    if longest > engine.max_model_len:
        raise OptionError(
            f"the workload needs a context of {longest} tokens, but the engine's is {engine.max_model_len}: choose "
            "another shape, or leave more memory for the KV cache (--gpu-memory-utilization)"
        )
    loop = engine.loop
    steps = preemptions = sampled = 0

    def note(record: "StepRecord") -> None:
        nonlocal steps, preemptions
        steps += 1
        preemptions += record.preemptions

    listener, loop.on_record = loop.on_record, note
    try:
        started = loop.clock()
        sequences = []
        for request in requests:
            params = SamplingParams(temperature=TEMPERATURE, max_tokens=request.max_tokens, ignore_eos=True)
            sequences += engine.create_sequences([token % engine.vocab_size for token in request.prompt], params)
        for sequence in sequences:
            loop.add(sequence)
        while loop.has_work:
            sampled += len(loop.step())
            progress(sampled)
        seconds = loop.clock() - started
    finally:
        loop.on_record = listener
    missing = sum(
        request.max_tokens - len(sequence.output) for request, sequence in zip(requests, sequences, strict=True)
    )
    if missing:
        raise EngineError(f"{missing} tokens of the workload were not sampled: a request ended before its limit")
    read = sum(len(request.prompt) for request in requests)
    return Offline(len(requests), read, sum(request.max_tokens for request in requests), seconds, steps, preemptions)
