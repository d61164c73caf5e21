"""The outside view: each situation on the metrics pages of vLLM and SGLang gives its finding and no other."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.diagnose.metrics import Traffic, pages
from weft.diagnose.facts import Yardsticks
from weft.diagnose.finding import Symptom
from weft.diagnose.metrics_page import Difference, MetricsPage
from weft.diagnose.outside import OutsideFacts, outside_facts
from weft.diagnose.outside_rules import diagnose_outside
from weft.errors import EngineError
from weft.observe.metrics import ServerMetrics

ENGINES = ("vllm", "sglang")
SITUATIONS: dict[str, tuple[dict[str, object], Symptom | None]] = {
    "healthy": ({}, None),
    "a queue before prefill": (
        {"ttft": [(0.6, 300), (6.0, 300)], "queue": [(0.1, 300), (5.5, 300)], "waiting": 40},
        Symptom.PREFILL_QUEUEING,
    ),
    "long prompts that take long themselves": (
        {"ttft": [(0.3, 500), (9.0, 40)], "lengths": [(800, 500), (3000, 40)]},
        Symptom.PREFILL_QUEUEING,
    ),
    "streams stutter, prompts are alike": ({"gaps": [(0.012, 90_000), (0.18, 4_000)]}, Symptom.DECODE_SCHEDULING),
    "streams stutter, some prompts are long": (
        {"gaps": [(0.012, 90_000), (0.4, 3_000)], "lengths": [(300, 500), (15_000, 20)]},
        Symptom.INTERFERENCE,
    ),
    "all gaps are late": ({"gaps": [(0.09, 90_000)], "running": 400}, Symptom.LARGE_BATCHES),
    "a full KV cache": ({"kv_used": 0.99, "waiting": 25, "preemptions": 60}, Symptom.KV_PRESSURE),
    "a full KV cache without preemptions": ({"kv_used": 0.97, "waiting": 25}, Symptom.KV_PRESSURE),
    "the cache's hits have gone": ({"hits": 20_000, "queries": 1_000_000}, Symptom.PREFIX_REUSE),
}


def facts(engine: str, now: dict[str, object], yardsticks: Yardsticks | None = None) -> OutsideFacts:
    before, after = (MetricsPage.parse(page, "the server") for page in pages(engine, now))
    return outside_facts(engine, before, after, 10.0, yardsticks or Yardsticks(), "the server")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SITUATIONS)
def test_a_situation_gives_its_finding_and_no_other(engine: str, name: str) -> None:
    now, expected = SITUATIONS[name]
    found = [finding.symptom for finding in diagnose_outside(facts(engine, now))]
    assert found == ([] if expected is None else [expected])


@pytest.mark.parametrize("engine", ENGINES)
def test_every_finding_has_numbers_and_a_setting_of_its_engine(engine: str) -> None:
    flags = set()
    for now, expected in SITUATIONS.values():
        for finding in diagnose_outside(facts(engine, now)):
            assert expected is not None
            assert any(character.isdigit() for line in finding.evidence for character in line)
            flags |= {word for word in finding.setting.split() if word.startswith("--")}
    assert ("--max-num-seqs" in flags) == (engine == "vllm")
    assert ("--max-running-requests" in flags) == (engine == "sglang")


def test_a_full_cache_comes_before_the_queue_that_it_causes() -> None:
    now = {"kv_used": 0.99, "waiting": 25, "ttft": [(8.0, 300)], "queue": [(7.5, 300)]}
    found = [finding.symptom for finding in diagnose_outside(facts("vllm", now))]
    assert found == [Symptom.KV_PRESSURE, Symptom.PREFILL_QUEUEING]


def test_the_fixtures_are_prometheus_text() -> None:
    for text in (Traffic().vllm(), Traffic().sglang()):
        assert len(list(text_string_to_metric_families(text))) > 8


def test_only_the_interval_counts() -> None:
    """A server that was slow an hour ago is healthy now."""
    found = facts("vllm", {})
    assert found.ttft.count == 1000
    assert found.ttft.percentile(0.5) == pytest.approx(0.175)
    assert found.hit_rate == 0.5


def test_percentiles_are_those_of_prometheus() -> None:
    page = MetricsPage.parse(
        'x_bucket{le="1.0"} 10\nx_bucket{le="2.0"} 30\nx_bucket{le="+Inf"} 40\nx_sum 60\nx_count 40\n', "x"
    )
    found = page.distribution("x")
    assert found is not None
    assert found.percentile(0.25) == 1.0
    assert found.percentile(0.5) == 1.5
    assert found.percentile(0.99) == 2.0, "the last finite border"
    assert found.mean == 1.5


def test_engines_of_a_page_are_added_and_the_fullest_cache_counts() -> None:
    text = 'vllm:a_total{engine="0"} 3\nvllm:a_total{engine="1"} 4\nvllm:kv{engine="0"} 0.2\nvllm:kv{engine="1"} 0.9\n'
    page = MetricsPage.parse(text, "x")
    assert page.value("vllm:a_total") == 7
    assert page.largest["vllm:kv"] == 0.9
    assert Difference(MetricsPage.parse("a 1", "x"), page).counted("vllm:a_total") == 7


def test_what_cannot_be_known_is_said() -> None:
    text = "\n".join(facts("sglang", {}).unknown)
    assert "host time" in text
    assert "slowly" in text
    without = [line for line in Traffic().vllm().splitlines() if "request_prompt_tokens" not in line]
    pair = [MetricsPage.parse(page, "x") for page in ("\n".join(without), pages("vllm", {})[1])]
    pair[1].distributions.pop("vllm:request_prompt_tokens")
    found = outside_facts("vllm", pair[0], pair[1], 10.0, Yardsticks(), "x")
    assert any("vllm:request_prompt_tokens" in line for line in found.unknown)


@pytest.mark.parametrize(
    ("engine", "text", "message"),
    [
        ("vllm", Traffic().sglang(), "it is sglang: write --engine sglang"),
        ("sglang", Traffic().vllm(), "it is vllm: write --engine vllm"),
        ("vllm", ServerMetrics("m").render({"0"}).decode(), "is a weft server: leave --engine vllm out"),
        ("vllm", "process_cpu_seconds_total 5\n", "is it started with its metrics on?"),
        ("vllm", "<!doctype html>\n<html></html>", "does not answer with Prometheus metrics"),
        ("vllm", '{"detail":"Not Found"}', "does not answer with Prometheus metrics"),
        ("vllm", "", "has no metrics"),
        ("vllm", "vllm:num_requests_running 3\n", "its version exports too little"),
    ],
)
def test_a_page_that_is_not_what_was_claimed(engine: str, text: str, message: str) -> None:
    def read() -> OutsideFacts:
        page = MetricsPage.parse(text, "the server")
        return outside_facts(engine, page, page, 10.0, Yardsticks(), "the server")

    with pytest.raises(EngineError, match=re.escape(message)):
        read()


def test_no_traffic_and_a_restart_are_errors() -> None:
    before, after = (MetricsPage.parse(page, "x") for page in pages("vllm", {}))
    with pytest.raises(EngineError, match="no request got a token"):
        outside_facts("vllm", after, after, 10.0, Yardsticks(), "x")
    with pytest.raises(EngineError, match="started again"):
        outside_facts("vllm", after, before, 10.0, Yardsticks(), "x")
