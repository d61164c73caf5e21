"""EngineMetrics: what one engine and its requests did. It lives in the API process and outlives the engine's processes.

A method that is called for every token does no more than a bisection.
"""

from collections import Counter
from itertools import count, takewhile
from typing import NamedTuple, Self

from weft.core.step import HostTimes, StepRecord
from weft.observe.exposition import Histogram

# Buckets of weft's view, in seconds.
FINE = (
    *(0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 20.0, 30.0, 60.0),
)
HOST = (*(0.00005, 0.0001, 0.0002, 0.0005), *FINE[2:])  # host work of a step is quicker
RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 5.0, 10.0)

# vLLM's buckets and labels (vllm/v1/metrics/loggers.py).
VLLM_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
VLLM_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
VLLM_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
VLLM_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
VLLM_N = (1, 2, 5, 10, 20)
VLLM_REASONS = ("stop", "length", "abort", "error")


class FinishedRequestStats(NamedTuple):
    """The result of one HTTP request, with all its prompts and completions. Times are in seconds; None: not reached."""

    reason: str  # "stop", "length", "abort" or "error"
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # of the prompt
    queue: float  # from arrival to the first step with this request
    prefill: float | None  # from there to the first token
    decode: float | None  # from there to the last
    ttft: float | None
    e2e: float
    largest_gap: float | None
    n: int = 1
    max_tokens: int | None = None


class EngineStep(NamedTuple):
    """What metrics need of a step: most of its StepRecord, and the queue."""

    started: float
    finished: float
    predicted: float | None
    decode_tokens: int
    prefill_tokens: int
    cached_tokens: int
    preemptions: int
    lost_tokens: int
    running: int
    waiting: int
    queued_tokens: int
    free_blocks: int
    host: HostTimes = HostTimes()
    starved: bool = False
    num_handled: int = 0  # sequences that the engine process has accepted, rejected or aborted since it started

    @classmethod
    def of(cls, record: StepRecord, queued_tokens: int, num_handled: int) -> Self:
        return cls(
            record.started,
            record.finished,
            record.predicted,
            record.decode_tokens,
            record.prefill_tokens,
            record.cached_tokens,
            record.preemptions,
            record.lost_tokens,
            record.running,
            record.waiting,
            queued_tokens,
            record.free_blocks,
            record.host,
            record.starved,
            num_handled,
        )


class EngineMetrics:
    """Records events of one engine. Counters only grow, also over restarts. For one thread."""

    def __init__(self, max_model_len: int = 131_072) -> None:
        self.starts = 0  # processes that became ready
        self.block_size = self.num_blocks = 0
        self.running = self.waiting = self.queued_tokens = self.free_blocks = 0

        self.decode_tokens = self.prefill_tokens = self.cached_tokens = 0
        self.preemptions = self.lost_tokens = 0
        self.step_seconds = {"decode": Histogram(FINE), "prefill": Histogram(FINE)}
        self.step_ratio = {"decode": Histogram(RATIO), "prefill": Histogram(RATIO)}
        self.step_tokens = Histogram(VLLM_STEP_TOKENS)
        self.host_seconds = {part: Histogram(HOST) for part in HostTimes._fields}
        self.starved_steps = 0  # the promised gap left prefills less than a quarter of the pace of policy `chunked`

        self.ttft = Histogram(FINE, VLLM_TTFT)
        self.gaps = Histogram(FINE, VLLM_GAP)
        self.ttft_kept = self.ttft_broken = self.gap_kept = self.gap_broken = 0

        self.reasons = Counter[str](dict.fromkeys(VLLM_REASONS, 0))  # finished requests
        self.queue, self.prefill, self.decode, self.e2e = (Histogram(FINE, VLLM_LATENCY) for _ in range(4))
        self.inference = Histogram(VLLM_LATENCY)
        self.largest_gap = Histogram(FINE)
        self.time_per_token = Histogram(VLLM_GAP)
        self.lengths = _one_two_five(max_model_len)  # buckets
        self.prompt_lengths, self.computed_lengths, self.output_lengths, self.max_tokens = (
            Histogram(self.lengths) for _ in range(4)
        )
        self.n = Histogram(VLLM_N)

    def record_first_token(self, seconds: float, target: float | None) -> None:
        """Records a completion's first token. Every token is recorded here or in `record_gap`, streamed or not."""
        self.ttft.add(seconds)
        if target is not None:
            if seconds <= target:
                self.ttft_kept += 1
            else:
                self.ttft_broken += 1

    def record_gap(self, seconds: float, target: float | None) -> None:
        """Records a later token, `seconds` after the previous one."""
        self.gaps.add(seconds)
        if target is not None:
            if seconds <= target:
                self.gap_kept += 1
            else:
                self.gap_broken += 1

    def record_finished(self, stats: FinishedRequestStats) -> None:
        self.reasons[stats.reason] += 1
        self.queue.add(stats.queue)
        self.e2e.add(stats.e2e)
        if stats.prefill is not None:
            self.prefill.add(stats.prefill)
            self.inference.add(stats.prefill + (stats.decode or 0.0))
        if stats.decode is not None:
            self.decode.add(stats.decode)
            later = stats.output_tokens - stats.n  # tokens with a gap before them, in `n` parallel sequences
            self.time_per_token.add(stats.decode * stats.n / later if later > 0 else 0.0)
        if stats.largest_gap is not None:
            self.largest_gap.add(stats.largest_gap)
        self.prompt_lengths.add(stats.prompt_tokens)
        self.computed_lengths.add(stats.prompt_tokens - stats.cached_tokens)
        self.output_lengths.add(stats.output_tokens)
        self.n.add(stats.n)
        if stats.max_tokens is not None:
            self.max_tokens.add(stats.max_tokens)

    def record_step(self, step: EngineStep) -> None:
        if not step.decode_tokens and not step.prefill_tokens:  # no step ran: reports only the load of the engine
            self.set_load(step.running, step.waiting, step.queued_tokens, step.free_blocks)
            return
        kind = "prefill" if step.prefill_tokens else "decode"
        seconds = step.finished - step.started
        self.step_seconds[kind].add(seconds)
        if step.predicted:
            self.step_ratio[kind].add(seconds / step.predicted)
        self.step_tokens.add(step.decode_tokens + step.prefill_tokens)
        for part, part_seconds in zip(HostTimes._fields, step.host, strict=True):
            self.host_seconds[part].add(part_seconds)
        self.starved_steps += step.starved
        self.decode_tokens += step.decode_tokens
        self.prefill_tokens += step.prefill_tokens
        self.cached_tokens += step.cached_tokens
        self.preemptions += step.preemptions
        self.lost_tokens += step.lost_tokens
        self.set_load(step.running, step.waiting, step.queued_tokens, step.free_blocks)

    def set_load(self, running: int, waiting: int, queued_tokens: int, free_blocks: int) -> None:
        """Sets the load of the engine. Steps report it; this is for changes between steps, such as the last abort."""
        self.running, self.waiting = running, waiting
        self.queued_tokens, self.free_blocks = queued_tokens, free_blocks

    def record_start(self, block_size: int, num_blocks: int) -> None:
        """Records that a process of the engine is ready, the first one or a later one."""
        self.starts += 1
        self.block_size, self.num_blocks = block_size, num_blocks
        self.set_load(0, 0, 0, num_blocks)

    def record_death(self) -> None:
        """Records that the engine's process has ended."""
        self.set_load(0, 0, 0, self.num_blocks)

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    @property
    def generated(self) -> int:
        """Tokens that came out."""
        return self.ttft.count + self.gaps.count


def _one_two_five(largest: int) -> tuple[int, ...]:
    grid = (digit * 10**power for power in count() for digit in (1, 2, 5))
    return tuple(takewhile(lambda border: border <= largest, grid))
