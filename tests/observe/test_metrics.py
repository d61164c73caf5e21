"""What a scrape shows: both views of the same numbers, read by Prometheus' own parser."""

import math
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from weft.core.step import StepRecord
from weft.observe import engine_metrics as module
from weft.observe.engine_metrics import EngineMetrics, EngineStep, FinishedRequestStats
from weft.observe.exposition import Histogram, Page
from weft.observe.metrics import CONTENT_TYPE, MAX_ENDPOINTS, ServerMetrics

OWN = {"engine": "0"}
VLLM = {"model_name": "m", "engine": "0"}
OF_SERVER = {"requests_started", "requests_refused", "client_disconnects", "http_responses"}  # the rest: of an engine
DONE = FinishedRequestStats(
    reason="stop",
    prompt_tokens=100,
    output_tokens=11,
    cached_tokens=64,
    queue=0.25,
    prefill=0.5,
    decode=1.0,
    ttft=0.75,
    e2e=1.8,
    largest_gap=0.2,
    max_tokens=50,
)
STEP = EngineStep(
    started=10.0,
    finished=10.03,
    predicted=0.02,
    decode_tokens=7,
    prefill_tokens=0,
    cached_tokens=0,
    preemptions=0,
    lost_tokens=0,
    running=7,
    waiting=2,
    queued_tokens=900,
    free_blocks=25,
)


class Scrape:
    """The samples of a page, by name and labels."""

    def __init__(self, page: bytes) -> None:
        self.families = list(text_string_to_metric_families(page.decode()))
        self.samples = list(self._samples())

    def _samples(self) -> Iterator[Sample]:
        for family in self.families:
            yield from family.samples

    def value(self, name: str, **labels: str) -> float:
        (found,) = [sample.value for sample in self.samples if sample.name == name and sample.labels == labels]
        return found

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        return {
            float(sample.labels["le"]): sample.value
            for sample in self.samples
            if sample.name == f"{name}_bucket" and {**labels, "le": sample.labels["le"]} == sample.labels
        }


def scraped(metrics: ServerMetrics, ready: Iterable[str] = ("0",)) -> Scrape:
    return Scrape(metrics.render(set(ready)))


@pytest.fixture
def metrics() -> ServerMetrics:
    metrics = ServerMetrics("m", gpu_memory_utilization=0.9)
    metrics.engines["0"].record_start(block_size=16, num_blocks=100)
    return metrics


@pytest.fixture
def engine(metrics: ServerMetrics) -> EngineMetrics:
    return metrics.engines["0"]


def test_an_idle_server_shows_every_metric(metrics: ServerMetrics) -> None:
    scrape = scraped(metrics)
    names = [family.name for family in scrape.families]
    assert len(names) == len(set(names))
    assert all(family.documentation and family.type != "unknown" for family in scrape.families)
    expected = """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries prefix_cache_hits
    num_preemptions prompt_tokens generation_tokens iteration_tokens_total request_success request_prompt_tokens
    request_generation_tokens request_params_n request_params_max_tokens time_to_first_token_seconds
    inter_token_latency_seconds request_time_per_output_token_seconds e2e_request_latency_seconds
    request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
    num_requests_waiting_by_reason prompt_tokens_cached prompt_tokens_by_source
    cache_config_info request_prefill_kv_computed_tokens request_max_num_generation_tokens
    time_per_output_token_seconds gpu_cache_usage_perc"""
    assert {name.removeprefix("vllm:") for name in names if name.startswith("vllm:")} == set(expected.split())
    of_server = {f"weft_{name}" for name in OF_SERVER}
    for family in scrape.families:
        labels = {} if family.name in of_server else VLLM if family.name.startswith("vllm:") else OWN
        assert family.name[:5] in ("vllm:", "weft_")
        for sample in family.samples:
            assert labels.items() <= sample.labels.items()
            assert ("engine" in sample.labels) == ("engine" in labels)
    assert scrape.value("vllm:request_success_total", **VLLM, finished_reason="error") == 0
    assert scrape.value("weft_requests_refused_total", reason="queue_full") == 0
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_both_views_are_exact(metrics: ServerMetrics, engine: EngineMetrics) -> None:
    seconds = [0.0004, 0.0005, 0.0011, 0.01, 0.0101, 0.04, 0.05, 0.74, 100.0]
    for value in seconds:
        engine.record_gap(value, None)
        engine.record_first_token(2 * value, None)
    scrape = scraped(metrics)
    for name, labels, view, factor in (
        ("weft_gap_seconds", OWN, module.FINE, 1),
        ("vllm:inter_token_latency_seconds", VLLM, module.VLLM_GAP, 1),
        ("weft_ttft_seconds", OWN, module.FINE, 2),
        ("vllm:time_to_first_token_seconds", VLLM, module.VLLM_TTFT, 2),
    ):
        counts = {border: sum(factor * value <= border for value in seconds) for border in (*view, math.inf)}
        assert scrape.buckets(name, **labels) == counts
        assert scrape.value(f"{name}_count", **labels) == len(seconds)
        assert scrape.value(f"{name}_sum", **labels) == pytest.approx(factor * sum(seconds))
    assert scrape.value("vllm:generation_tokens_total", **VLLM) == 2 * len(seconds)
    assert scrape.value("weft_generated_tokens_total", **OWN) == 2 * len(seconds)


BORDERS = st.lists(st.floats(0, 1e5, allow_subnormal=False), min_size=1, max_size=8, unique=True).map(sorted)


@given(st.lists(BORDERS, min_size=1, max_size=3), st.lists(st.floats(-1, 1e6)))
def test_a_folded_histogram_counts_as_one_of_its_own(views: list[list[float]], values: list[float]) -> None:
    histogram = Histogram(*views)
    for value in values + [border for view in views for border in view]:
        histogram.add(value)
    for view in views:
        own = Histogram(view)
        for value in values + [border for other in views for border in other]:
            own.add(value)
        folded = histogram.fold(view)
        assert folded == own.fold(view)
        assert folded == sorted(folded)
        assert folded[-1] == own.count == sum(own.counts)


def test_a_histogram_never_loses_what_it_has() -> None:
    histogram = Histogram([1.0])
    histogram.add(-5.0)  # a clock that lies
    assert histogram.sum == 0.0
    assert histogram.fold([1.0]) == [1, 1]


def test_it_writes_what_prometheus_client_writes() -> None:
    borders = (0.0005, 0.25, 1, 20.0, 131072, 200_000, 1_000_000, 5_000_000)
    labels = {"engine": "0", "model_name": 'a "b" \\ c\nd', "zone": "ü"}
    registry = CollectorRegistry()
    theirs = TheirHistogram("vllm:x", "About x.", labels, registry=registry, buckets=borders)
    ours, page = Histogram(borders), Page(labels)
    for value in (0.1, 0.25, 3.5, 1e7):
        theirs.labels(**labels).observe(value)
        ours.add(value)
    page.histogram("vllm:x", "About x.", borders, ours)
    expected = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    written = page.encode().decode().splitlines()
    assert [line.rpartition(" ")[0] for line in written] == [line.rpartition(" ")[0] for line in expected]
    for line, their in zip(written, expected, strict=True):
        if not line.startswith("#"):
            assert float(line.rpartition(" ")[2]) == float(their.rpartition(" ")[2])


def test_labels_survive_odd_names() -> None:
    name = 'weights\\"of\n{the}, "week"'
    metrics = ServerMetrics(name)
    metrics.record_response('/v1/"x"\\', 404)
    scrape = scraped(metrics)
    assert scrape.value("vllm:num_requests_running", model_name=name, engine="0") == 0
    assert scrape.value("weft_http_responses_total", path='/v1/"x"\\', status="404") == 1


def test_promises_are_kept_or_broken(metrics: ServerMetrics, engine: EngineMetrics) -> None:
    for seconds, target in ((0.02, 0.02), (0.021, 0.02), (9.0, None), (0.01, 0.02)):
        engine.record_gap(seconds, target)
    for seconds, target in ((1.0, 2.0), (3.0, 2.0), (3.0, None)):
        engine.record_first_token(seconds, target)
    scrape = scraped(metrics)
    found = [
        scrape.value("weft_promises_total", **OWN, promise=p, result=r)
        for p in ("gap", "ttft")
        for r in ("kept", "broken")
    ]
    assert found == [2, 1, 1, 1]


def test_a_finished_request(metrics: ServerMetrics, engine: EngineMetrics) -> None:
    metrics.record_accepted()
    engine.record_finished(DONE)
    scrape = scraped(metrics)
    assert scrape.value("weft_requests_started_total") == 1
    assert scrape.value("weft_requests_finished_total", **OWN, reason="stop") == 1
    assert scrape.value("vllm:request_success_total", **VLLM, finished_reason="stop") == 1
    sums = {
        "request_prompt_tokens": 100,
        "request_prefill_kv_computed_tokens": 36,
        "request_generation_tokens": 11,
        "request_params_n": 1,
        "request_params_max_tokens": 50,
        "request_time_per_output_token_seconds": 0.1,
        "e2e_request_latency_seconds": 1.8,
        "request_queue_time_seconds": 0.25,
        "request_inference_time_seconds": 1.5,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 1.0,
    }
    for name, expected in sums.items():
        assert scrape.value(f"vllm:{name}_sum", **VLLM) == pytest.approx(expected), name
        assert scrape.value(f"vllm:{name}_count", **VLLM) == 1, name
    for name, expected in {"request": 1.8, "queue": 0.25, "prefill": 0.5, "decode": 1.0, "largest_gap": 0.2}.items():
        assert scrape.value(f"weft_{name}_seconds_sum", **OWN) == pytest.approx(expected)
        assert scrape.buckets(f"weft_{name}_seconds", **OWN)[0.2] == (name == "largest_gap")


def test_a_request_that_never_started_has_no_phases(metrics: ServerMetrics, engine: EngineMetrics) -> None:
    engine.record_finished(FinishedRequestStats("abort", 100, 0, 0, 3.0, None, None, None, 3.0, None))
    scrape = scraped(metrics)
    counts = {
        name: scrape.value(f"weft_{name}_seconds_count", **OWN)
        for name in ("queue", "prefill", "decode", "largest_gap")
    }
    assert counts == {"queue": 1, "prefill": 0, "decode": 0, "largest_gap": 0}
    assert scrape.value("vllm:request_inference_time_seconds_count", **VLLM) == 0
    assert scrape.value("vllm:request_params_max_tokens_count", **VLLM) == 0


def test_completions_side_by_side_share_their_time(metrics: ServerMetrics, engine: EngineMetrics) -> None:
    engine.record_finished(DONE._replace(n=4, output_tokens=44))
    engine.record_finished(DONE._replace(output_tokens=1, decode=0.0))  # vLLM counts it as zero
    scrape = scraped(metrics)
    name = "vllm:request_time_per_output_token_seconds"
    assert scrape.value(f"{name}_sum", **VLLM) == pytest.approx(0.1)
    assert scrape.value(f"{name}_count", **VLLM) == 2


def test_steps(metrics: ServerMetrics, engine: EngineMetrics) -> None:
    engine.record_step(STEP)
    engine.record_step(
        STEP._replace(
            finished=10.5, prefill_tokens=300, cached_tokens=160, preemptions=1, lost_tokens=40, predicted=None
        )
    )
    scrape = scraped(metrics)
    assert scrape.value("weft_tokens_total", **OWN, phase="prefill") == 300
    assert scrape.value("weft_tokens_total", **OWN, phase="decode") == 14
    assert scrape.value("weft_cached_tokens_total", **OWN) == 160
    assert scrape.value("vllm:prefix_cache_hits_total", **VLLM) == 160
    assert scrape.value("vllm:prefix_cache_queries_total", **VLLM) == 460
    assert scrape.value("vllm:prompt_tokens_total", **VLLM) == 460
    assert scrape.value("vllm:num_preemptions_total", **VLLM) == scrape.value("weft_preemptions_total", **OWN) == 1
    assert scrape.value("weft_lost_tokens_total", **OWN) == 40
    assert scrape.value("weft_step_seconds_sum", **OWN, kind="decode") == pytest.approx(0.03)
    assert scrape.value("weft_step_seconds_sum", **OWN, kind="prefill") == pytest.approx(0.5)
    assert scrape.value("weft_step_measured_over_predicted_sum", **OWN, kind="decode") == pytest.approx(1.5)
    assert scrape.value("weft_step_measured_over_predicted_count", **OWN, kind="prefill") == 0  # nobody predicted
    tokens = scrape.buckets("vllm:iteration_tokens_total", **VLLM)
    assert (tokens[1], tokens[8], tokens[256], tokens[512]) == (0, 1, 1, 2)
    assert scrape.value("vllm:num_requests_running", **VLLM) == scrape.value("weft_requests_running", **OWN) == 7
    assert scrape.value("vllm:num_requests_waiting", **VLLM) == scrape.value("weft_requests_waiting", **OWN) == 2
    assert scrape.value("vllm:kv_cache_usage_perc", **VLLM) == 0.75
    assert scrape.value("weft_kv_blocks_free", **OWN) == 25
    assert scrape.value("weft_queued_tokens", **OWN) == 900
    engine.set_load(0, 0, 0, 100)  # the last ones left between steps
    assert scraped(metrics).value("vllm:kv_cache_usage_perc", **VLLM) == 0


def test_a_step_comes_from_its_record() -> None:
    record = StepRecord(1, 10.0, 10.03, 0.02, "", 7, 0, 0, 0, 0, 3, 7, 2, 25)
    assert EngineStep.of(record, queued_tokens=900, num_handled=0) == STEP


def test_counters_outlive_the_engine(metrics: ServerMetrics, engine: EngineMetrics) -> None:
    def counters() -> dict[str, float]:
        return {
            f"{sample.name}{sample.labels}": sample.value
            for family in scraped(metrics).families
            if family.type in ("counter", "histogram")
            for sample in family.samples
        }

    engine.record_step(STEP._replace(started=1000.0, finished=1000.1))
    before = counters()
    engine.record_death()
    lost = scraped(metrics)
    assert lost.value("weft_requests_running", **OWN) == lost.value("weft_queued_tokens", **OWN) == 0
    engine.record_start(block_size=16, num_blocks=50)
    engine.record_step(STEP._replace(started=0.1, finished=0.0))  # its clock may start over, or lie
    after = counters()
    assert all(after[name] >= value for name, value in before.items())
    scrape = scraped(metrics)
    assert scrape.value("weft_engine_restarts_total", **OWN) == 1
    assert scrape.value("weft_kv_blocks", **OWN) == 50
    info = {"block_size": "16", "num_gpu_blocks": "50", "enable_prefix_caching": "True", "cache_dtype": "auto"}
    info |= {"gpu_memory_utilization": "0.9", "num_cpu_blocks": "None", "sliding_window": "None", "swap_space": "0"}
    assert scrape.value("vllm:cache_config_info", **VLLM, **info) == 1


def test_who_was_turned_away_or_left(metrics: ServerMetrics) -> None:
    metrics.record_refused("deadline")
    metrics.record_refused("deadline")
    metrics.record_refused("moon")
    metrics.record_disconnect()
    scrape = scraped(metrics)
    assert scrape.value("weft_requests_refused_total", reason="deadline") == 2
    assert scrape.value("weft_requests_refused_total", reason="moon") == 1
    assert scrape.value("weft_client_disconnects_total") == 1


def test_paths_at_random_do_not_pile_up(metrics: ServerMetrics) -> None:
    for number in range(3 * MAX_ENDPOINTS):
        metrics.record_response(f"/{number}", 404)
        metrics.record_response("/v1/models", 200)
    scrape = scraped(metrics)
    found = [sample for sample in scrape.samples if sample.name == "weft_http_responses_total"]
    assert len(found) == MAX_ENDPOINTS + 1
    assert sum(sample.value for sample in found) == 6 * MAX_ENDPOINTS
    assert scrape.value("weft_http_responses_total", path="/v1/models", status="200") == 3 * MAX_ENDPOINTS


def test_lengths_go_as_far_as_the_model() -> None:
    scrape = scraped(ServerMetrics("m", max_model_len=3000))
    borders = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, math.inf]
    assert list(scrape.buckets("vllm:request_prompt_tokens", **VLLM)) == borders


def test_without_a_prefix_cache_nobody_asks_it() -> None:
    metrics = ServerMetrics("m", enable_prefix_caching=False)
    metrics.engines["0"].record_step(STEP._replace(prefill_tokens=10))
    scrape = scraped(metrics)
    assert scrape.value("vllm:prefix_cache_queries_total", **VLLM) == 0
    assert scrape.value("vllm:prompt_tokens_total", **VLLM) == 10


@pytest.mark.parametrize("view", [module.FINE, module.RATIO, module.VLLM_TTFT, module.VLLM_GAP, module.VLLM_LATENCY])
def test_borders_ascend(view: tuple[float, ...]) -> None:
    assert list(view) == sorted(set(view))


def test_labels_of_vllm(metrics: ServerMetrics, engine: EngineMetrics) -> None:
    engine.record_step(STEP._replace(prefill_tokens=40, cached_tokens=60))
    scrape = scraped(metrics)
    assert scrape.value("vllm:num_requests_waiting_by_reason", **VLLM, reason="capacity") == 2
    assert scrape.value("vllm:num_requests_waiting_by_reason", **VLLM, reason="deferred") == 0
    assert scrape.value("vllm:prompt_tokens_by_source_total", **VLLM, source="local_compute") == 40
    assert scrape.value("vllm:prompt_tokens_by_source_total", **VLLM, source="local_cache_hit") == 60
    assert scrape.value("vllm:prompt_tokens_cached_total", **VLLM) == 60
    assert scrape.value("vllm:request_success_total", **VLLM, finished_reason="repetition") == 0


def test_each_engine_has_its_own_samples() -> None:
    metrics = ServerMetrics("m", engines=("0", "1"))
    for name, blocks in (("0", 100), ("1", 50)):
        metrics.engines[name].record_start(16, blocks)
    metrics.engines["1"].record_step(STEP)
    metrics.engines["1"].record_gap(0.02, 0.01)
    metrics.engines["0"].record_finished(DONE)
    scrape = scraped(metrics, ready=["1"])
    other, vllm = {"engine": "1"}, {**VLLM, "engine": "1"}
    assert [scrape.value("weft_engine_up", **labels) for labels in (OWN, other)] == [0, 1]
    assert [scrape.value("weft_kv_blocks_free", **labels) for labels in (OWN, other)] == [100, 25]
    assert [scrape.value("weft_step_seconds_count", kind="decode", **labels) for labels in (OWN, other)] == [0, 1]
    assert [scrape.value("weft_promises_total", promise="gap", result="broken", **o) for o in (OWN, other)] == [0, 1]
    assert [scrape.value("vllm:num_requests_running", **labels) for labels in (VLLM, vllm)] == [0, 7]
    assert [scrape.value("vllm:request_success_total", finished_reason="stop", **o) for o in (VLLM, vllm)] == [1, 0]
    names = [family.name for family in scrape.families]
    assert len(names) == len(set(names)), "one head for the samples of all engines"
