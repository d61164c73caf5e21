"""The report of load tests: whole pages, from runs that are made up here."""

import re
import shutil
import subprocess
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.bench.http import report_charts
from weft.bench.http.client import Reply
from weft.bench.http.drive import LoadRun
from weft.bench.http.figures import DEFINITIONS, Goals, MeasurementWindow, figures
from weft.bench.http.report import html_report
from weft.bench.http.report_data import thinned

VOID = {"meta", "br", "link", "img"}
SERVER = {"queue_ms": 10.0, "prefill_ms": 60.0, "decode_ms": 200.0, "ttft_ms": 75.0}


def reply(number: int, gap: float = 0.02, *, error: str = "", server: bool = True) -> Reply:
    """Sent 2 ms late, first token after 80 ms (more for longer prompts), then ten more."""
    due = number * 0.1
    made = Reply(number, due, prompt_tokens=20 * (number + 1), sent=due + 0.002, end=due + 0.01, error=error)
    if not error:
        made.times = [due + 0.08 + number * 0.001 + gap * token for token in range(11)]
        made.output_tokens, made.end = 11, made.times[-1]
        made.server = {**SERVER, "ttft_ms": SERVER["ttft_ms"] + number} if server else None
    return made


def told(
    replies: list[Reply], goals: Goals | None = None, rate: float | str | None = 10.0, **more: Any
) -> dict[str, Any]:
    """As `weft bench serve --json FILE --save-detailed` writes it."""
    run = LoadRun(replies, len(replies), len(replies), seconds=5.0)
    names = ("number", "due", "sent", "end", "times", "prompt_tokens", "output_tokens", "cached_tokens", "server")
    return {
        "date": "20261115-185924",
        "base_url": "http://127.0.0.1:8123",
        "model_id": "a-model",
        "request_rate": rate,
        "pattern": "poisson",
        "max_concurrency": None,
        "trace": None,
        **figures(run, MeasurementWindow(0.0, 1e9), goals),
        "definitions": DEFINITIONS,
        "requests": [{**{name: getattr(r, name) for name in names}, "error": r.error or None} for r in replies],
        **more,
    }


def sample(**more: Any) -> dict[str, Any]:
    return told([reply(number, 0.02 + 0.001 * number) for number in range(50)], Goals(ttft=100.5, gap=60), **more)


class Page(HTMLParser):
    """Checks that tags are closed in order; keeps the text outside of styles and scripts, and attributes of SVG."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.values: list[str] = []
        self.words: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._see(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._see(tag, attrs)

    def _see(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [value or "" for _, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def page(*runs: tuple[str, dict[str, Any]]) -> Page:
    text = html_report(runs, "A load test")
    read = Page(text)
    for shown in (read.text, *read.values):
        assert not re.search(r"\b(nan|none|inf|null)\b", shown.replace("fill: none", ""), re.IGNORECASE)
    assert not re.search(r"""(src|href)=["']?(?!["']?#)|url\((?!#)|@import""", text)  # the file needs nothing else
    assert len(read.ids) == len(set(read.ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', text)) <= set(read.ids)
    return read


@cache
def sample_page() -> Page:
    return page(("one", sample()))


def test_the_figures_of_a_run_are_in_its_report() -> None:
    found = sample()
    read = sample_page()
    for name in ("request_throughput", "output_throughput", "p99_ttft_ms", "p99.9_gap_ms", "max_e2el_ms"):
        assert f"{found[name]:,.2f}" in read.text
    for text in ("http://127.0.0.1:8123", "a-model", "2026-11-15 18:59:24 UTC", "10 requests/s, poisson", "42.0%"):
        assert text in read.text
    for name in ("ttft", "gap", "tpot", "e2el", "lag"):
        assert DEFINITIONS[name] in read.text
    assert "gap goal 60 ms" in read.text
    assert "TTFT goal 100.5 ms" in read.text


def test_every_chart_names_its_axes() -> None:
    read = sample_page()
    assert read.tags.count("figure") == 6  # three distributions, prompts, gaps, and where the time went
    for text in ("TTFT, ms", "gap, ms", "E2E, ms", "share of gaps", "prompt, tokens", "time since the run began, s"):
        assert text in read.words
    assert {"0", "0.5", "0.9", "0.99", "0.999"} <= set(read.words)  # the tail is spread out
    assert "Runs compared" not in read.text


def test_the_difference_between_client_and_server_is_told() -> None:
    """80 ms at the client and 75 at the server, 2 of them lag."""
    read = sample_page()
    assert "TTFT is 5.00 ms longer than the server's (median of 50 requests)" in read.text
    assert "lag before sending (median 2.00 ms)" in read.text
    assert "reading (median 3.00 ms)" in read.text
    assert "the 40 slowest of 50 requests" in read.text
    bar = next(word for word in read.words if word.startswith("client's lag before sending: "))
    numbers = [float(number) for number in re.findall(r": ([\d.]+) ms", bar)]
    assert numbers == pytest.approx([2, 10, 60, 54, 3])  # number 49 is the slowest; all parts make up its TTFT


def test_other_servers_have_no_times_of_their_own() -> None:
    read = page(("other", told([reply(number, server=False) for number in range(5)])))
    assert "Where the time to the first token went" not in read.text
    assert read.tags.count("figure") == 5


def test_text_from_a_run_is_escaped() -> None:
    bad = "<script>alert('x')</script> & \"more\""
    found = told([reply(0), reply(1, error=bad), reply(2, error=bad)], model_id=bad, base_url=bad, pattern=bad)
    found["definitions"] = {"ttft": bad}
    text = html_report([(bad, found), (f"{bad} @ 2", {**found, "trace": bad})], bad)
    assert text.count("<script>") == 1  # the report's own
    read = Page(text)
    assert bad in read.words
    assert "2" in read.words[read.words.index("Errors") :]


def test_what_was_otherwise_than_asked_for_is_in_the_report() -> None:
    read = page(("one", sample(left_out_too_long=7, ignore_eos=False, completed_without_usage=3)))
    assert "one: 7 requests were left out" in read.text
    assert "one: the server refused ignore_eos" in read.text
    assert "one: the server told no usage for 3 of 50 requests" in read.text
    assert read.words[read.words.index("left out, too long") + 1] == "7"
    assert "refused" not in page(("one", sample(ignore_eos=True))).text


def test_a_trace_is_told_with_the_rate_that_it_came_to() -> None:
    found = sample(rate=None, pattern=None, trace="azure.csv", rate_scale=0.5)
    assert "trace azure.csv x 0.5, 10.00 requests/s" in page(("one", found)).text


def test_a_run_without_requests_says_how_to_have_them() -> None:
    found = sample()
    del found["requests"]
    read = page(("short", found))
    assert "short: charts of single requests are left out" in read.text
    assert "--save-detailed" in read.text
    assert "figure" not in read.tags
    assert "--save-detailed" not in page(("whole", sample())).text


def test_figures_of_a_part_of_the_requests_say_so() -> None:
    assert "the table counts 30 of 50 requests" in page(("part", sample(num_prompts=30))).text


@pytest.mark.parametrize("replies", [[], [reply(0, error="503: no"), reply(1, error="503: no")]])
def test_a_run_in_which_nothing_completed_says_so(replies: list[Reply]) -> None:
    found = told(replies, Goals(ttft=100), rate="inf")
    read = page(("empty", found))
    assert "empty: no request completed" in read.text
    assert "all at once" in read.text
    assert "figure" not in read.tags
    assert "no request completed" in page(("empty", found), ("empty too", found)).text
    assert page(("empty", found), ("full", sample())).tags.count("figure") == 8


def test_no_runs_at_all() -> None:
    assert "There are no runs to report" in page().text


def test_a_single_request_of_a_single_token() -> None:
    only = reply(0)
    only.times, only.output_tokens = only.times[:1], 1
    read = page(("one", told([only])))
    assert "gap distribution" not in read.text
    assert "Gaps over time" not in read.text


def test_tokens_that_come_together_are_at_the_edge() -> None:
    together = reply(0)
    together.output_tokens = 33
    assert "left edge: " in page(("one", told([together]))).text


def test_runs_are_compared() -> None:
    runs = [(f"{name} @ {rate}", sample(rate=rate)) for name in ("weft", "other") for rate in (2.0, 4.0)]
    runs.append(("no rate", sample(rate="inf")))
    read = page(*runs)
    for text in ("TTFT by run", "gap by run", "Goodput against rate", "Share of requests that kept all goals"):
        assert text in read.text
    for number, (label, _) in enumerate(runs):
        assert read.values.count(f"key r{number}") >= 5  # the table's head and each section's legend
        assert any(label in word for word in read.words)
    assert sum("-join-" in name for name in read.ids) == 2 * len(runs) + 2 * 2  # of the latter, one a name
    assert sum(" at 4 requests/s" in word for word in read.words) == 4


def test_runs_at_the_same_rate_have_no_chart_of_rates() -> None:
    read = page(("a", sample()), ("b", sample()))
    assert "TTFT by run" in read.text
    assert "Goodput against rate" not in read.text


def test_thinning_keeps_the_largest() -> None:
    times = np.arange(50_000.0)
    gaps = np.random.default_rng(0).exponential(20.0, len(times))
    gaps[[0, 777, 49_999]] = 900.0, 1000.0, 800.0
    kept_times, kept = thinned(times, gaps, 20_000)
    assert len(kept) == len(set(kept_times.tolist())) == 20_000
    assert np.all(np.diff(kept_times) > 0)
    np.testing.assert_array_equal(np.sort(kept)[-10_000:], np.sort(gaps)[-10_000:])
    np.testing.assert_array_equal(gaps[kept_times.astype(int)], kept)
    assert thinned(times, gaps, 50_000)[1] is gaps
    assert thinned(times, gaps, 1)[1].tolist() == [1000.0]


def points(read: Page) -> list[int]:
    """The number of points of each path that shows points."""
    return [value.count("z") for value in read.values if re.match(r"M ([\d.]+ [\d.]+)\s+L \1\s+z", value)]


def test_a_chart_has_at_most_so_many_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_charts, "MOST_POINTS", 100)
    read = page(("a", sample()), ("b", sample()))
    assert "1,000 gaps, thinned out to 100; the largest are kept" in read.text
    assert points(read) == [50, 50, 50, 50]  # prompts and gaps, of two runs
    small = told([reply(0)])
    assert points(page(("a", sample()), ("b", small))) == [
        50,
        1,
        98,
        1,
    ]  # in all few enough requests, and too many gaps


def test_a_browser_shows_it(tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("there is no chromium here")
    file, picture = tmp_path / "report.html", tmp_path / "report.png"
    file.write_text(html_report([("a @ 2", sample(rate=2.0)), ("b @ 4", sample(rate=4.0))], "A load test"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={picture}", "--window-size=1200,3000"]
    subprocess.run([browser, *options, file.as_uri()], check=True, timeout=120, cwd=tmp_path, capture_output=True)
    assert picture.stat().st_size > 10_000
