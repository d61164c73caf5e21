"""OutsideFacts: what the metrics of a vLLM or SGLang server say about an interval, and what they cannot say."""

from dataclasses import dataclass

from weft.diagnose.facts import Yardsticks
from weft.diagnose.metrics_page import Difference, Distribution, MetricsPage
from weft.errors import EngineError


@dataclass(frozen=True)
class MetricNames:
    """The names of one engine's metrics, newest first where versions differ. An empty tuple: it has none."""

    prefix: str
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    kv_used: tuple[str, ...]
    ttft: tuple[str, ...]
    gap: tuple[str, ...]
    queue: tuple[str, ...]
    prefill: tuple[str, ...]
    prompt_lengths: tuple[str, ...]
    prompt_tokens: tuple[str, ...]
    preemptions: tuple[str, ...]
    queries: tuple[str, ...]
    hits: tuple[str, ...]
    hit_rate: tuple[str, ...]


ENGINES = {
    "vllm": MetricNames(
        prefix="vllm:",
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        kv_used=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ttft=("vllm:time_to_first_token_seconds",),
        gap=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        queue=("vllm:request_queue_time_seconds",),
        prefill=("vllm:request_prefill_time_seconds",),
        prompt_lengths=("vllm:request_prompt_tokens",),
        prompt_tokens=("vllm:prompt_tokens_total",),
        preemptions=("vllm:num_preemptions_total",),
        queries=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        hits=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        hit_rate=(),
    ),
    "sglang": MetricNames(
        prefix="sglang:",
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        kv_used=("sglang:token_usage",),
        ttft=("sglang:time_to_first_token_seconds",),
        gap=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        queue=("sglang:queue_time_seconds",),
        prefill=(),
        prompt_lengths=("sglang:prompt_tokens_histogram",),
        prompt_tokens=("sglang:prompt_tokens_total",),
        preemptions=("sglang:num_retracted_requests_total",),
        queries=("sglang:prompt_tokens_total",),
        hits=("sglang:cached_tokens_total",),
        hit_rate=("sglang:cache_hit_rate",),
    ),
}

# What no metrics page of these engines has.
UNKNOWN = (
    "which requests delayed others: metrics have no requests, so that phase interference is a guess from the lengths",
    "whether the device idles and the host is the limit: host time of steps is not exported",
    "whether clients read slowly: times end in the server",
    "promises of single requests: first tokens and gaps are compared with the targets given here",
    "where the prompts of a session differ: only the rate of cache hits is exported",
)


@dataclass(frozen=True)
class OutsideFacts:
    """Times in seconds. None: the page does not have it."""

    engine: str
    seconds: float  # between the two readings
    running: float
    waiting: float  # the smaller of the two readings: a queue that stays
    kv_used: float | None  # share, the larger of the two readings
    ttft: Distribution
    gap: Distribution
    queue: Distribution | None
    prefill: Distribution | None
    prompt_lengths: Distribution | None
    preemptions: float | None
    prefill_tokens: float | None  # prompt tokens that were computed or cached
    hit_rate: float | None  # of the interval
    earlier_hit_rate: float | None  # since the server's start, until the interval
    gap_target: float
    ttft_target: float  # for the mean prompt
    unknown: tuple[str, ...]  # what could not be known


def outside_facts(
    engine: str, before: MetricsPage, after: MetricsPage, seconds: float, yardsticks: Yardsticks, source: str
) -> OutsideFacts:
    """Raises EngineError if the pages are another engine's, or if there was no traffic between them."""
    names = ENGINES[engine]
    for page in (before, after):
        check_engine(engine, page, source)
    difference = Difference(before, after)
    ttft, gap = difference.distribution(*names.ttft), difference.distribution(*names.gap)
    if ttft is None or gap is None:
        raise EngineError(f"{source} has no {(names.gap if ttft else names.ttft)[0]}: its version exports too little")
    if ttft.count < 0 or gap.count < 0:
        raise EngineError(f"{source} was started again between the two readings: read it again")
    if not ttft.count and not gap.count:
        raise EngineError(f"no request got a token from {source} in {seconds:g} s: send requests, or raise --seconds")
    queries, hits = difference.counted(*names.queries), difference.counted(*names.hits)
    old_queries, old_hits = before.value(*names.queries), before.value(*names.hits)
    lengths = difference.distribution(*names.prompt_lengths)
    mean_length = lengths.mean if lengths is not None and lengths.count else 0.0
    kv_used = [page.largest[name] for page in (before, after) for name in names.kv_used[:2] if name in page.largest]
    gauge = after.value(*names.hit_rate)
    missing = [
        f"{what}: the page does not have {of[0]}"
        for what, of, found in (
            ("KV cache use", names.kv_used, kv_used),
            ("time in the queue", names.queue, difference.distribution(*names.queue)),
            ("lengths of prompts", names.prompt_lengths, lengths),
            ("preemptions", names.preemptions, difference.counted(*names.preemptions) is not None),
        )
        if not found
    ]
    return OutsideFacts(
        engine=engine,
        seconds=seconds,
        running=after.value(*names.running) or 0.0,
        waiting=min(page.value(*names.waiting) or 0.0 for page in (before, after)),
        kv_used=max(kv_used, default=None),
        ttft=ttft,
        gap=gap,
        queue=difference.distribution(*names.queue),
        prefill=difference.distribution(*names.prefill),
        prompt_lengths=lengths if mean_length else None,
        preemptions=difference.counted(*names.preemptions),
        prefill_tokens=difference.counted(*names.prompt_tokens),
        hit_rate=hits / queries if queries and hits is not None else gauge,
        earlier_hit_rate=old_hits / old_queries if old_queries and old_hits is not None else None,
        gap_target=yardsticks.gap,
        ttft_target=yardsticks.ttft + yardsticks.ttft_per_1k * mean_length / 1000,
        unknown=(*UNKNOWN, *missing),
    )


def check_engine(engine: str, page: MetricsPage, source: str) -> None:
    """Raises EngineError if the page is not one of the engine."""
    if page.has("weft_"):  # weft exports vLLM's names as well
        raise EngineError(f"{source} is a weft server: leave --engine {engine} out")
    if page.has(ENGINES[engine].prefix):
        return
    other = next((name for name, one in ENGINES.items() if page.has(one.prefix)), None)
    hint = f"it is {other}: write --engine {other}" if other else "is it started with its metrics on?"
    raise EngineError(f"{source} has no metrics of {engine} ({ENGINES[engine].prefix}...): {hint}")
