"""Metrics of a server, for Prometheus: the numbers of each engine, and of what comes before an engine is chosen.

One set of numbers has two views: weft's names, with buckets that resolve milliseconds; and vLLM's names, labels and
buckets, for dashboards and routers that know vLLM. In both, what belongs to an engine has the label "engine".
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from weft.observe.engine_metrics import (
    FINE,
    HOST,
    RATIO,
    VLLM_GAP,
    VLLM_LATENCY,
    VLLM_N,
    VLLM_STEP_TOKENS,
    VLLM_TTFT,
    EngineMetrics,
)
from weft.observe.exposition import CONTENT_TYPE, Histogram, Labels, Page, Samples

__all__ = ["CONTENT_TYPE", "REFUSALS", "ServerMetrics"]

# Exported as 0 from the start, so that the first refusal is an increase.
REFUSALS = ("queue_full", "deadline", "rate_limit", "concurrency", "draining", "body_too_large", "bodies_full")

MAX_ENDPOINTS = 200  # pairs of path and status; a client that sends random paths must not fill the memory

Series = Histogram | Iterable[tuple[Labels, Histogram]]  # one histogram, or one per set of labels


class EnginesPage:
    """A metrics page of several engines under construction. Every sample has the label of its engine."""

    def __init__(self, engines: Mapping[str, EngineMetrics], common: Labels | None = None) -> None:
        self._engines = engines
        self._page = Page(common)

    def counter(self, name: str, about: str, samples: Callable[[EngineMetrics], Samples]) -> None:
        self._page.counter(name, about, self._samples(samples))

    def gauge(self, name: str, about: str, samples: Callable[[EngineMetrics], Samples]) -> None:
        self._page.gauge(name, about, self._samples(samples))

    def histogram(
        self, name: str, about: str, view: Sequence[float], series: Callable[[EngineMetrics], Series]
    ) -> None:
        self._page.histogram(name, about, view, self._series(series))

    def encode(self) -> bytes:
        return self._page.encode()

    def _samples(self, samples: Callable[[EngineMetrics], Samples]) -> Iterator[tuple[Labels, float]]:
        for name, engine in self._engines.items():
            found = samples(engine)
            for labels, value in [({}, found)] if isinstance(found, int | float) else found:
                yield {"engine": name, **labels}, value

    def _series(self, series: Callable[[EngineMetrics], Series]) -> Iterator[tuple[Labels, Histogram]]:
        for name, engine in self._engines.items():
            found = series(engine)
            for labels, histogram in [({}, found)] if isinstance(found, Histogram) else found:
                yield {"engine": name, **labels}, histogram


class ServerMetrics:
    """Records events and renders them when scraped. For one thread."""

    def __init__(
        self,
        model_name: str,
        engines: Iterable[str] = ("0",),
        enable_prefix_caching: bool = True,
        max_model_len: int = 131_072,
        gpu_memory_utilization: float | None = None,
    ) -> None:
        self.model_name = model_name
        self.engines = {name: EngineMetrics(max_model_len) for name in engines}
        self.enable_prefix_caching = enable_prefix_caching
        self.gpu_memory_utilization = gpu_memory_utilization
        self._started = 0
        self._refused = Counter[str](dict.fromkeys(REFUSALS, 0))
        self._disconnects = 0
        self._responses = Counter[tuple[str, str]]()

    @property
    def starved_steps(self) -> int:
        """Steps in which the promised gap left prefills less than a quarter of the pace of policy `chunked`."""
        return sum(engine.starved_steps for engine in self.engines.values())

    def record_accepted(self) -> None:
        """Records an accepted request. `EngineMetrics.record_finished` is called when it ends, unless it is refused."""
        self._started += 1

    def record_refused(self, reason: str) -> None:
        """Records a refused request. REFUSALS lists the reasons."""
        self._refused[reason] += 1

    def record_disconnect(self) -> None:
        """Records a client that left before its answer was complete."""
        self._disconnects += 1

    def record_response(self, path: str, status: int) -> None:
        """Records a response. `path` is the route's path, not the text that the client sent."""
        key = path, str(status)
        if key not in self._responses and len(self._responses) >= MAX_ENDPOINTS:
            key = "other", str(status)
        self._responses[key] += 1

    def render(self, ready: Collection[str]) -> bytes:
        """The page. `ready` has the names of the engines that are ready."""
        return self._of_server(ready) + self._of_engines() + self._of_vllm()

    def _of_server(self, ready: Collection[str]) -> bytes:
        page = Page()
        page.gauge(
            "weft_engine_up",
            "Whether the engine process is there, ready and responds.",
            [({"engine": name}, int(name in ready)) for name in self.engines],
        )
        page.counter("weft_requests_started_total", "Requests accepted.", self._started)
        page.counter("weft_requests_refused_total", "Requests turned away, by reason.", _by("reason", self._refused))
        page.counter("weft_client_disconnects_total", "Clients that left before the end.", self._disconnects)
        page.counter(
            "weft_http_responses_total",
            "HTTP responses by path and status code.",
            [({"path": path, "status": status}, number) for (path, status), number in self._responses.items()],
        )
        return page.encode()

    def _of_engines(self) -> bytes:
        page = EnginesPage(self.engines)
        page.counter("weft_engine_restarts_total", "Engine processes started after the first.", lambda e: e.restarts)
        page.gauge("weft_requests_running", "Requests that have a seat in the engine.", lambda e: e.running)
        page.gauge("weft_requests_waiting", "Requests that wait for one.", lambda e: e.waiting)
        page.gauge("weft_queued_tokens", "Prompt tokens of those that wait.", lambda e: e.queued_tokens)
        page.gauge("weft_kv_blocks", "Blocks of the KV cache.", lambda e: e.num_blocks)
        page.gauge("weft_kv_blocks_free", "Blocks that no request holds; they may be cached.", lambda e: e.free_blocks)

        page.counter(
            "weft_requests_finished_total", "Requests that ended, by reason.", lambda e: _by("reason", e.reasons)
        )
        page.counter(
            "weft_promises_total",
            "Promised times to the first token and between tokens, kept and broken.",
            lambda e: [
                ({"promise": "ttft", "result": "kept"}, e.ttft_kept),
                ({"promise": "ttft", "result": "broken"}, e.ttft_broken),
                ({"promise": "gap", "result": "kept"}, e.gap_kept),
                ({"promise": "gap", "result": "broken"}, e.gap_broken),
            ],
        )
        page.histogram("weft_ttft_seconds", "From a request's arrival to its first token.", FINE, lambda e: e.ttft)
        page.histogram("weft_gap_seconds", "Between one token of a stream and the next.", FINE, lambda e: e.gaps)
        page.histogram("weft_largest_gap_seconds", "The largest gap of a request.", FINE, lambda e: e.largest_gap)
        page.histogram("weft_request_seconds", "From a request's arrival to its end.", FINE, lambda e: e.e2e)
        page.histogram("weft_queue_seconds", "From a request's arrival to its first step.", FINE, lambda e: e.queue)
        page.histogram(
            "weft_prefill_seconds", "From a request's first step to its first token.", FINE, lambda e: e.prefill
        )
        page.histogram("weft_decode_seconds", "From a request's first token to its last.", FINE, lambda e: e.decode)

        page.counter(
            "weft_tokens_total",
            "Tokens computed, by phase. What was lost to preemption counts again.",
            lambda e: _by("phase", {"prefill": e.prefill_tokens, "decode": e.decode_tokens}),
        )
        page.counter("weft_cached_tokens_total", "Tokens found in the prefix cache.", lambda e: e.cached_tokens)
        page.counter("weft_generated_tokens_total", "Tokens that came out.", lambda e: e.generated)
        page.counter("weft_preemptions_total", "Requests that lost their seat.", lambda e: e.preemptions)
        page.counter("weft_lost_tokens_total", "Tokens that these had computed.", lambda e: e.lost_tokens)
        page.histogram(
            "weft_step_seconds",
            "Duration of a step, by kind: decodes only, or with prefill.",
            FINE,
            lambda e: _series("kind", e.step_seconds),
        )
        page.histogram(
            "weft_step_measured_over_predicted",
            "Duration of a step over its prediction, by kind.",
            RATIO,
            lambda e: _series("kind", e.step_ratio),
        )
        page.histogram(
            "weft_host_seconds",
            "What a step took the host, by part; most of it while the device ran the step before.",
            HOST,
            lambda e: _series("part", e.host_seconds),
        )
        page.counter(
            "weft_starved_steps_total",
            "Steps in which the promised gap left prompts less than a quarter of the pace that --policy chunked gives.",
            lambda e: e.starved_steps,
        )
        return page.encode()

    def _of_vllm(self) -> bytes:
        page = EnginesPage(self.engines, {"model_name": self.model_name})

        def used(engine: EngineMetrics) -> float:
            return 1 - engine.free_blocks / engine.num_blocks if engine.num_blocks else 0.0

        def prompts(engine: EngineMetrics) -> int:
            return engine.prefill_tokens + engine.cached_tokens

        page.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", lambda e: e.running)
        page.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", lambda e: e.waiting)
        page.gauge(
            "vllm:num_requests_waiting_by_reason",
            "Number of requests waiting, by reason; what waits here waits for room.",
            lambda e: _by("reason", {"capacity": e.waiting, "deferred": 0}),
        )
        page.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", used)
        page.gauge("vllm:gpu_cache_usage_perc", "The same under its older name.", used)
        page.counter(
            "vllm:prefix_cache_queries_total",
            "Prefix cache queries, in terms of number of queried tokens.",
            prompts if self.enable_prefix_caching else lambda e: 0,
        )
        page.counter(
            "vllm:prefix_cache_hits_total",
            "Prefix cache hits, in terms of number of cached tokens.",
            lambda e: e.cached_tokens,
        )
        page.counter("vllm:num_preemptions_total", "Cumulative number of preemptions.", lambda e: e.preemptions)
        page.counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.", prompts)
        page.counter(
            "vllm:prompt_tokens_cached_total", "Number of prompt tokens found cached.", lambda e: e.cached_tokens
        )
        page.counter(
            "vllm:prompt_tokens_by_source_total",
            "Number of prompt tokens by source.",
            lambda e: _by(
                "source",
                {"local_compute": e.prefill_tokens, "local_cache_hit": e.cached_tokens, "external_kv_transfer": 0},
            ),
        )
        page.counter("vllm:generation_tokens_total", "Number of generation tokens processed.", lambda e: e.generated)
        page.counter(
            "vllm:request_success_total",
            "Count of processed requests, by the reason they finished.",
            lambda e: _by("finished_reason", {**e.reasons, "repetition": 0}),
        )
        for name, about, view, series in VLLM_HISTOGRAMS:
            page.histogram(f"vllm:{name}", about, view, series)
        lengths = next(iter(self.engines.values())).lengths
        for name, about, series in VLLM_LENGTHS:
            page.histogram(f"vllm:{name}", about, lengths, series)
        page.gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig.", self._cache_config)
        return page.encode()

    def _cache_config(self, engine: EngineMetrics) -> Samples:
        info = {
            "block_size": str(engine.block_size),
            "num_gpu_blocks": str(engine.num_blocks),
            "enable_prefix_caching": str(self.enable_prefix_caching),
            "cache_dtype": "auto",
            "gpu_memory_utilization": str(self.gpu_memory_utilization),
            "num_cpu_blocks": "None",
            "sliding_window": "None",
            "swap_space": "0",
        }
        return [(info, 1)]


# Name, description, buckets, and where an engine's numbers are.
VLLM_HISTOGRAMS: tuple[tuple[str, str, Sequence[float], Callable[[EngineMetrics], Histogram]], ...] = (
    ("iteration_tokens_total", "Number of tokens per engine step.", VLLM_STEP_TOKENS, lambda e: e.step_tokens),
    ("request_params_n", "The n request parameter.", VLLM_N, lambda e: e.n),
    ("time_to_first_token_seconds", "Time to first token in seconds.", VLLM_TTFT, lambda e: e.ttft),
    ("inter_token_latency_seconds", "Inter-token latency in seconds.", VLLM_GAP, lambda e: e.gaps),
    ("time_per_output_token_seconds", "The same under its older name.", VLLM_GAP, lambda e: e.gaps),
    (
        "request_time_per_output_token_seconds",
        "Mean time per output token of a request in seconds.",
        VLLM_GAP,
        lambda e: e.time_per_token,
    ),
    ("e2e_request_latency_seconds", "End to end request latency in seconds.", VLLM_LATENCY, lambda e: e.e2e),
    ("request_queue_time_seconds", "Time a request spent WAITING.", VLLM_LATENCY, lambda e: e.queue),
    ("request_inference_time_seconds", "Time a request spent RUNNING.", VLLM_LATENCY, lambda e: e.inference),
    ("request_prefill_time_seconds", "Time a request spent in PREFILL.", VLLM_LATENCY, lambda e: e.prefill),
    ("request_decode_time_seconds", "Time a request spent in DECODE.", VLLM_LATENCY, lambda e: e.decode),
)
# The same for lengths in tokens. Their buckets depend on the model.
VLLM_LENGTHS: tuple[tuple[str, str, Callable[[EngineMetrics], Histogram]], ...] = (
    ("request_prompt_tokens", "Prompt tokens of a request.", lambda e: e.prompt_lengths),
    (
        "request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that were not cached.",
        lambda e: e.computed_lengths,
    ),
    ("request_generation_tokens", "Generated tokens of a request.", lambda e: e.output_lengths),
    ("request_max_num_generation_tokens", "Most generated tokens of a request.", lambda e: e.output_lengths),
    ("request_params_max_tokens", "The max_tokens request parameter.", lambda e: e.max_tokens),
)


def _by(label: str, numbers: Mapping[str, float]) -> Samples:
    return [({label: value}, number) for value, number in numbers.items()]


def _series(label: str, histograms: Mapping[str, Histogram]) -> Series:
    return [({label: value}, histogram) for value, histogram in histograms.items()]
