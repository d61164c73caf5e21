"""Pages of metrics as vLLM and SGLang export them, before and after an interval of traffic."""

from collections.abc import Mapping, Sequence

TTFT_BORDERS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
GAP_BORDERS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
LENGTH_BORDERS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
QUEUE_BORDERS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0)

Values = Sequence[tuple[float, int]]  # a value, and how often


class Traffic:
    """What a server did since its start. `vllm` and `sglang` write the page."""

    def __init__(
        self,
        *,
        ttft: Values = ((0.15, 1000),),
        gaps: Values = ((0.012, 100_000),),
        queue: Values = ((0.01, 1000),),
        lengths: Values = ((800, 1000),),
        running: int = 12,
        waiting: int = 0,
        kv_used: float = 0.35,
        preemptions: int = 0,
        hits: int = 500_000,
        queries: int = 1_000_000,
    ) -> None:
        self.ttft, self.gaps, self.queue, self.lengths = ttft, gaps, queue, lengths
        self.running, self.waiting, self.kv_used, self.preemptions = running, waiting, kv_used, preemptions
        self.hits, self.queries = hits, queries

    def vllm(self) -> str:
        labels = 'engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"'
        return "\n".join(
            [
                "# HELP python_gc_objects_collected_total Objects collected during gc",
                "# TYPE python_gc_objects_collected_total counter",
                'python_gc_objects_collected_total{generation="0"} 14023.0',
                *_simple("vllm:num_requests_running", "gauge", labels, self.running),
                *_simple("vllm:num_requests_waiting", "gauge", labels, self.waiting),
                *_simple("vllm:kv_cache_usage_perc", "gauge", labels, self.kv_used),
                *_simple("vllm:prefix_cache_queries_total", "counter", labels, self.queries),
                *_simple("vllm:prefix_cache_hits_total", "counter", labels, self.hits),
                *_simple("vllm:num_preemptions_total", "counter", labels, self.preemptions),
                *_simple("vllm:prompt_tokens_total", "counter", labels, self.queries),
                *_simple("vllm:generation_tokens_total", "counter", labels, sum(n for _, n in self.gaps)),
                *_histogram("vllm:time_to_first_token_seconds", labels, TTFT_BORDERS, self.ttft),
                *_histogram("vllm:inter_token_latency_seconds", labels, GAP_BORDERS, self.gaps),
                *_histogram("vllm:request_queue_time_seconds", labels, QUEUE_BORDERS, self.queue),
                *_histogram("vllm:request_prompt_tokens", labels, LENGTH_BORDERS, self.lengths),
                "",
            ]
        )

    def sglang(self) -> str:
        labels = 'engine_type="unified",model_name="Qwen/Qwen3-8B",tp_rank="0"'
        return "\n".join(
            [
                *_simple("sglang:num_running_reqs", "gauge", labels, self.running),
                *_simple("sglang:num_queue_reqs", "gauge", labels, self.waiting),
                *_simple("sglang:token_usage", "gauge", labels, self.kv_used),
                *_simple("sglang:cache_hit_rate", "gauge", labels, 0.0),
                *_simple("sglang:gen_throughput", "gauge", labels, 812.5),
                *_simple("sglang:prompt_tokens_total", "counter", labels, self.queries),
                *_simple("sglang:cached_tokens_total", "counter", labels, self.hits),
                *_simple("sglang:num_retracted_requests_total", "counter", labels, self.preemptions),
                *_histogram("sglang:time_to_first_token_seconds", labels, TTFT_BORDERS, self.ttft),
                *_histogram("sglang:inter_token_latency_seconds", labels, GAP_BORDERS, self.gaps),
                *_histogram("sglang:queue_time_seconds", labels, QUEUE_BORDERS, self.queue),
                *_histogram("sglang:prompt_tokens_histogram", labels, LENGTH_BORDERS, self.lengths),
                "",
            ]
        )


def pages(engine: str, now: Mapping[str, object]) -> tuple[str, str]:
    """The page before an interval and the page after it; `now` is how the interval differs from healthy traffic."""
    before = Traffic()
    interval = Traffic(**now)  # type: ignore[arg-type]
    after = Traffic(
        ttft=[*before.ttft, *interval.ttft],
        gaps=[*before.gaps, *interval.gaps],
        queue=[*before.queue, *interval.queue],
        lengths=[*before.lengths, *interval.lengths],
        running=interval.running,
        waiting=interval.waiting,
        kv_used=interval.kv_used,
        preemptions=before.preemptions + interval.preemptions,
        hits=before.hits + interval.hits,
        queries=before.queries + interval.queries,
    )
    before.waiting = interval.waiting  # a queue that stays
    return tuple(getattr(one, engine)() for one in (before, after))  # type: ignore[return-value]


def _simple(name: str, kind: str, labels: str, value: float) -> list[str]:
    return [f"# HELP {name} As the engine describes it.", f"# TYPE {name} {kind}", f"{name}{{{labels}}} {float(value)}"]


def _histogram(name: str, labels: str, borders: Sequence[float], values: Values) -> list[str]:
    lines = [f"# HELP {name} As the engine describes it.", f"# TYPE {name} histogram"]
    lines += [
        f'{name}_bucket{{{labels},le="{border}"}} {float(sum(n for value, n in values if value <= border))}'
        for border in map(float, borders)
    ]
    count = float(sum(n for _, n in values))
    lines.append(f'{name}_bucket{{{labels},le="+Inf"}} {count}')
    return [*lines, f"{name}_count{{{labels}}} {count}", f"{name}_sum{{{labels}}} {sum(v * n for v, n in values)}"]
