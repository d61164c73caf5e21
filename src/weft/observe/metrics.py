"""Metrics of a server, for Prometheus. They live in the API process and outlive engines, so counters only grow.

One set of numbers has two views: weft's names, with buckets that resolve milliseconds; and vLLM's names, labels and
buckets, for dashboards and routers that know vLLM. A method that is called for every token does no more than a
bisection.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import count, takewhile
from typing import NamedTuple, Self

from weft.core.step import HostTimes, StepRecord
from weft.observe.exposition import CONTENT_TYPE, Histogram, Page, Samples

__all__ = ["CONTENT_TYPE", "EngineStep", "RequestDone", "ServerMetrics"]

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

# Exported as 0 from the start, so that the first refusal is an increase.
REFUSALS = ("queue_full", "deadline", "rate_limit", "concurrency", "draining", "body_too_large", "bodies_full")

MAX_ENDPOINTS = 200  # pairs of path and status; a client that sends random paths must not fill the memory


class RequestDone(NamedTuple):
    """The result of one prompt, with all its `n` completions. Times are in seconds; None: it did not get that far."""

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
    taken: int = 0  # streams that the engine process has accepted, rejected or aborted since it started

    @classmethod
    def of(cls, record: StepRecord, queued_tokens: int, taken: int) -> Self:
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
            taken,
        )


class ServerMetrics:
    """Records events and renders them when scraped. For one thread."""

    def __init__(
        self,
        model_name: str,
        block_size: int = 0,
        num_blocks: int = 0,
        enable_prefix_caching: bool = True,
        max_model_len: int = 131_072,
        gpu_memory_utilization: float | None = None,
    ) -> None:
        self.model_name = model_name
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.gpu_memory_utilization = gpu_memory_utilization

        self._engine_up = False
        self._engine_starts = 0
        self._running = self._waiting = self._queued_tokens = 0
        self._free_blocks = num_blocks

        self._decode_tokens = self._prefill_tokens = self._cached_tokens = 0
        self._preemptions = self._lost_tokens = 0
        self._step_seconds = {"decode": Histogram(FINE), "prefill": Histogram(FINE)}
        self._step_ratio = {"decode": Histogram(RATIO), "prefill": Histogram(RATIO)}
        self._step_tokens = Histogram(VLLM_STEP_TOKENS)
        self._host_seconds = {part: Histogram(HOST) for part in HostTimes._fields}
        self._starved_steps = 0

        self._ttft = Histogram(FINE, VLLM_TTFT)
        self._gap = Histogram(FINE, VLLM_GAP)
        self._ttft_kept = self._ttft_broken = self._gap_kept = self._gap_broken = 0

        self._started = 0
        self._finished = Counter[str](dict.fromkeys(VLLM_REASONS, 0))
        self._refused = Counter[str](dict.fromkeys(REFUSALS, 0))
        self._disconnects = 0
        self._responses = Counter[tuple[str, str]]()
        self._queue, self._prefill, self._decode, self._e2e = (Histogram(FINE, VLLM_LATENCY) for _ in range(4))
        self._inference = Histogram(VLLM_LATENCY)
        self._largest_gap = Histogram(FINE)
        self._time_per_token = Histogram(VLLM_GAP)
        self._lengths = _one_two_five(max_model_len)
        self._prompt_lengths, self._computed_lengths, self._output_lengths, self._max_tokens = (
            Histogram(self._lengths) for _ in range(4)
        )
        self._n = Histogram(VLLM_N)

    def first_token(self, seconds: float, target: float | None) -> None:
        """Records a completion's first token. Every token is recorded once, here or in `gap`, streamed or not."""
        self._ttft.add(seconds)
        if target is not None:
            if seconds <= target:
                self._ttft_kept += 1
            else:
                self._ttft_broken += 1

    def gap(self, seconds: float, target: float | None) -> None:
        """Records a later token, `seconds` after the previous one."""
        self._gap.add(seconds)
        if target is not None:
            if seconds <= target:
                self._gap_kept += 1
            else:
                self._gap_broken += 1

    def started(self) -> None:
        """Records an accepted request. `finished` is called for each of them, however it ends."""
        self._started += 1

    def finished(self, done: RequestDone) -> None:
        self._finished[done.reason] += 1
        self._queue.add(done.queue)
        self._e2e.add(done.e2e)
        if done.prefill is not None:
            self._prefill.add(done.prefill)
            self._inference.add(done.prefill + (done.decode or 0.0))
        if done.decode is not None:
            self._decode.add(done.decode)
            later = done.output_tokens - done.n  # tokens with a gap before them, in `n` parallel streams
            self._time_per_token.add(done.decode * done.n / later if later > 0 else 0.0)
        if done.largest_gap is not None:
            self._largest_gap.add(done.largest_gap)
        self._prompt_lengths.add(done.prompt_tokens)
        self._computed_lengths.add(done.prompt_tokens - done.cached_tokens)
        self._output_lengths.add(done.output_tokens)
        self._n.add(done.n)
        if done.max_tokens is not None:
            self._max_tokens.add(done.max_tokens)

    def refused(self, reason: str) -> None:
        """Records a refused request. REFUSALS lists the reasons."""
        self._refused[reason] += 1

    def disconnected(self) -> None:
        """Records a client that left before its answer was complete."""
        self._disconnects += 1

    def responded(self, path: str, status: int) -> None:
        """Records a response. `path` is the route's path, not the text that the client sent."""
        key = path, str(status)
        if key not in self._responses and len(self._responses) >= MAX_ENDPOINTS:
            key = "other", str(status)
        self._responses[key] += 1

    def step(self, step: EngineStep) -> None:
        if not step.decode_tokens and not step.prefill_tokens:  # no step ran: reports only the load of the engine
            self.load(step.running, step.waiting, step.queued_tokens, step.free_blocks)
            return
        kind = "prefill" if step.prefill_tokens else "decode"
        seconds = step.finished - step.started
        self._step_seconds[kind].add(seconds)
        if step.predicted:
            self._step_ratio[kind].add(seconds / step.predicted)
        self._step_tokens.add(step.decode_tokens + step.prefill_tokens)
        for part, taken in zip(HostTimes._fields, step.host, strict=True):
            self._host_seconds[part].add(taken)
        self._starved_steps += step.starved
        self._decode_tokens += step.decode_tokens
        self._prefill_tokens += step.prefill_tokens
        self._cached_tokens += step.cached_tokens
        self._preemptions += step.preemptions
        self._lost_tokens += step.lost_tokens
        self.load(step.running, step.waiting, step.queued_tokens, step.free_blocks)

    @property
    def starved_steps(self) -> int:
        """Steps in which the promised gap left prefills less than a quarter of the pace of policy `chunked`."""
        return self._starved_steps

    def load(self, running: int, waiting: int, queued_tokens: int, free_blocks: int) -> None:
        """Sets the load of the engine. Steps report it; this is for changes between steps, such as the last abort."""
        self._running, self._waiting = running, waiting
        self._queued_tokens, self._free_blocks = queued_tokens, free_blocks

    def engine_started(self, block_size: int, num_blocks: int) -> None:
        """Records that an engine is ready, the first one or a later one."""
        self._engine_up = True
        self._engine_starts += 1
        self.block_size, self.num_blocks = block_size, num_blocks
        self.load(0, 0, 0, num_blocks)

    def engine_lost(self) -> None:
        self._engine_up = False
        self.load(0, 0, 0, self.num_blocks)

    def render(self) -> bytes:
        return self._own() + self._vllm()

    def _own(self) -> bytes:
        page = Page()
        page.gauge("weft_engine_up", "Whether the engine process is there and ready.", int(self._engine_up))
        page.counter("weft_engine_restarts_total", "Engines started after the first.", max(0, self._engine_starts - 1))
        page.gauge("weft_requests_running", "Requests that have a seat in the engine.", self._running)
        page.gauge("weft_requests_waiting", "Requests that wait for one.", self._waiting)
        page.gauge("weft_queued_tokens", "Prompt tokens of those that wait.", self._queued_tokens)
        page.gauge("weft_kv_blocks", "Blocks of the KV cache.", self.num_blocks)
        page.gauge("weft_kv_blocks_free", "Blocks that nobody holds, though they may be cached.", self._free_blocks)

        page.counter("weft_requests_started_total", "Requests accepted.", self._started)
        page.counter("weft_requests_finished_total", "Requests that ended, by reason.", _by("reason", self._finished))
        page.counter("weft_requests_refused_total", "Requests turned away, by reason.", _by("reason", self._refused))
        page.counter("weft_client_disconnects_total", "Clients that left before the end.", self._disconnects)
        page.counter(
            "weft_http_responses_total",
            "HTTP responses by path and status code.",
            [({"path": path, "status": status}, number) for (path, status), number in self._responses.items()],
        )
        page.counter(
            "weft_promises_total",
            "Promised times to the first token and between tokens, kept and broken.",
            [
                ({"promise": "ttft", "result": "kept"}, self._ttft_kept),
                ({"promise": "ttft", "result": "broken"}, self._ttft_broken),
                ({"promise": "gap", "result": "kept"}, self._gap_kept),
                ({"promise": "gap", "result": "broken"}, self._gap_broken),
            ],
        )
        page.histogram("weft_ttft_seconds", "From a request's arrival to its first token.", FINE, self._ttft)
        page.histogram("weft_gap_seconds", "Between one token of a stream and the next.", FINE, self._gap)
        page.histogram("weft_largest_gap_seconds", "The largest gap of a request.", FINE, self._largest_gap)
        page.histogram("weft_request_seconds", "From a request's arrival to its end.", FINE, self._e2e)
        page.histogram("weft_queue_seconds", "From a request's arrival to its first step.", FINE, self._queue)
        page.histogram("weft_prefill_seconds", "From a request's first step to its first token.", FINE, self._prefill)
        page.histogram("weft_decode_seconds", "From a request's first token to its last.", FINE, self._decode)

        page.counter(
            "weft_tokens_total",
            "Tokens computed, by phase. What was lost to preemption counts again.",
            _by("phase", {"prefill": self._prefill_tokens, "decode": self._decode_tokens}),
        )
        page.counter("weft_cached_tokens_total", "Tokens found in the prefix cache.", self._cached_tokens)
        page.counter("weft_generated_tokens_total", "Tokens that came out.", self._generated)
        page.counter("weft_preemptions_total", "Requests that lost their seat.", self._preemptions)
        page.counter("weft_lost_tokens_total", "Tokens that these had computed.", self._lost_tokens)
        page.histogram(
            "weft_step_seconds",
            "Duration of a step, by kind: decodes only, or with prefill.",
            FINE,
            [({"kind": kind}, histogram) for kind, histogram in self._step_seconds.items()],
        )
        page.histogram(
            "weft_step_measured_over_predicted",
            "Duration of a step over its prediction, by kind.",
            RATIO,
            [({"kind": kind}, histogram) for kind, histogram in self._step_ratio.items()],
        )
        page.histogram(
            "weft_host_seconds",
            "What a step took the host, by part; most of it while the device ran the step before.",
            HOST,
            [({"part": part}, histogram) for part, histogram in self._host_seconds.items()],
        )
        page.counter(
            "weft_starved_steps_total",
            "Steps in which the promised gap left prompts less than a quarter of the pace that --policy chunked gives.",
            self._starved_steps,
        )
        return page.encode()

    def _vllm(self) -> bytes:
        page = Page({"model_name": self.model_name, "engine": "0"})
        prompts = self._prefill_tokens + self._cached_tokens
        used = 1 - self._free_blocks / self.num_blocks if self.num_blocks else 0.0
        page.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", self._running)
        page.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", self._waiting)
        page.gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of requests waiting, by reason; what waits here waits for room.",
            _by("reason", {"capacity": self._waiting, "deferred": 0}),
        )
        page.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", used)
        page.gauge("vllm:gpu_cache_usage_perc", "The same under its older name.", used)
        page.counter(
            "vllm:prefix_cache_queries_total",
            "Prefix cache queries, in terms of number of queried tokens.",
            prompts if self.enable_prefix_caching else 0,
        )
        page.counter(
            "vllm:prefix_cache_hits_total",
            "Prefix cache hits, in terms of number of cached tokens.",
            self._cached_tokens,
        )
        page.counter("vllm:num_preemptions_total", "Cumulative number of preemptions.", self._preemptions)
        page.counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.", prompts)
        page.counter("vllm:prompt_tokens_cached_total", "Number of prompt tokens found cached.", self._cached_tokens)
        page.counter(
            "vllm:prompt_tokens_by_source_total",
            "Number of prompt tokens by source.",
            _by(
                "source",
                {
                    "local_compute": self._prefill_tokens,
                    "local_cache_hit": self._cached_tokens,
                    "external_kv_transfer": 0,
                },
            ),
        )
        page.counter("vllm:generation_tokens_total", "Number of generation tokens processed.", self._generated)
        page.counter(
            "vllm:request_success_total",
            "Count of processed requests, by the reason they finished.",
            _by("finished_reason", {**self._finished, "repetition": 0}),
        )
        for name, about, view, histogram in (
            ("iteration_tokens_total", "Number of tokens per engine step.", VLLM_STEP_TOKENS, self._step_tokens),
            ("request_prompt_tokens", "Prompt tokens of a request.", self._lengths, self._prompt_lengths),
            (
                "request_prefill_kv_computed_tokens",
                "Prompt tokens of a request that were not cached.",
                self._lengths,
                self._computed_lengths,
            ),
            ("request_generation_tokens", "Generated tokens of a request.", self._lengths, self._output_lengths),
            (
                "request_max_num_generation_tokens",
                "Most generated tokens of a request.",
                self._lengths,
                self._output_lengths,
            ),
            ("request_params_n", "The n request parameter.", VLLM_N, self._n),
            ("request_params_max_tokens", "The max_tokens request parameter.", self._lengths, self._max_tokens),
            ("time_to_first_token_seconds", "Time to first token in seconds.", VLLM_TTFT, self._ttft),
            ("inter_token_latency_seconds", "Inter-token latency in seconds.", VLLM_GAP, self._gap),
            ("time_per_output_token_seconds", "The same under its older name.", VLLM_GAP, self._gap),
            (
                "request_time_per_output_token_seconds",
                "Mean time per output token of a request in seconds.",
                VLLM_GAP,
                self._time_per_token,
            ),
            ("e2e_request_latency_seconds", "End to end request latency in seconds.", VLLM_LATENCY, self._e2e),
            ("request_queue_time_seconds", "Time a request spent WAITING.", VLLM_LATENCY, self._queue),
            ("request_inference_time_seconds", "Time a request spent RUNNING.", VLLM_LATENCY, self._inference),
            ("request_prefill_time_seconds", "Time a request spent in PREFILL.", VLLM_LATENCY, self._prefill),
            ("request_decode_time_seconds", "Time a request spent in DECODE.", VLLM_LATENCY, self._decode),
        ):
            page.histogram(f"vllm:{name}", about, view, histogram)
        info = {
            "block_size": str(self.block_size),
            "num_gpu_blocks": str(self.num_blocks),
            "enable_prefix_caching": str(self.enable_prefix_caching),
            "cache_dtype": "auto",
            "gpu_memory_utilization": str(self.gpu_memory_utilization),
            "num_cpu_blocks": "None",
            "sliding_window": "None",
            "swap_space": "0",
        }
        page.gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig.", [(info, 1)])
        return page.encode()

    @property
    def _generated(self) -> int:
        return self._ttft.count + self._gap.count


def _by(label: str, numbers: Mapping[str, float]) -> Samples:
    return [({label: value}, number) for value, number in numbers.items()]


def _one_two_five(largest: int) -> tuple[int, ...]:
    grid = (digit * 10**power for power in count() for digit in (1, 2, 5))
    return tuple(takewhile(lambda border: border <= largest, grid))
