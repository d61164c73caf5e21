"""Long measurements say how long they will take, and what they lack, before they begin."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.bench.http.rate_search import highest_rate, middle_rates
from weft.cli import main
from weft.cli.estimate import in_words

NOWHERE = "http://127.0.0.1:1"  # no server can be here
VARIANTS = ("--variant", f"a: {NOWHERE}", "--variant", f"b: {NOWHERE}")
COMMAND = ("--variant", "c: no-such-command --port {port}")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("ab", *VARIANTS, "--repeats", "3", "--request-rate", "2", "--num-prompts", "60"),
            "about 3 min: 6 runs of 30 s; a slow server takes longer",
        ),
        (
            ("ab", *VARIANTS, *COMMAND, "--repeats", "3", "--request-rate", "4"),  # 100 requests
            "about 5 min: 9 runs of 25 s, and 3 starts of servers; a slow server takes longer",
        ),
        (
            ("ab", *VARIANTS, "--repeats", "1"),
            "2 runs; each takes as long as the server needs, as no --request-rate is given",
        ),
        (
            ("sweep", *VARIANTS, "--rates", "1", "2", "--num-prompts", "10", "--out", "{folder}/out.jsonl"),
            "about 30 s: at most 4 runs of 5 s to 10 s; a slow server takes longer",
        ),
        (
            ("sweep", *VARIANTS, "--find", "1:4", "--goodput", "ttft:100", "--out", "{folder}/out.jsonl"),
            "about 12 min: at most 12 runs of 60 s; a slow server takes longer",
        ),
        (("interference", "--url", NOWHERE, "--runs", "10"), "about 2 min: 10 runs against the server; a slow one"),
        (
            (
                *("fidelity", "--url", NOWHERE, "--repeats", "3"),
                *("--workload", "poisson:rate=2,prompt=uniform:10:20,output=uniform:2:6,duration=90"),
            ),
            "about 4 min: 3 served runs of 90 s; a large model takes longer to start",
        ),
        (
            ("fidelity", "--url", NOWHERE, "--repeats", "2", "--trace", "{folder}/trace.csv", "--rate-scale", "2"),
            "about 60 s: 2 served runs of 30 s; a large model takes longer to start",
        ),
    ],
)
def test_benchmarks_begin_with_an_estimate(
    arguments: tuple[str, ...], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["2023-11-16 18:00:00.0,10,5", "2023-11-16 18:01:00.0,10,5"]
    (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""]))
    main(["bench", *(one.format(folder=tmp_path, port="{port}") for one in arguments)])
    assert capsys.readouterr().err.splitlines()[0].startswith(f"weft: {line}")


def test_the_sweep_of_policies_begins_with_an_estimate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(*given: Any, **options: Any) -> int:
        return 0

    monkeypatch.setattr("weft.sim.sweep_run.load_material", ended)
    monkeypatch.setattr("weft.sim.sweep.sweep", ended)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    command = ["sweep", "--traces", str(tmp_path), "--out", str(tmp_path / "out"), "--jobs", "2", "--no-progress"]
    assert main(command) == 0
    assert capsys.readouterr().err.startswith("weft: about 3.0 h: with 2 processes, less where ")
    assert main([*command, "--only", "azure/exact"]) == 0
    assert capsys.readouterr().err.startswith("weft: about 51 min: ")


@pytest.mark.parametrize(
    ("seconds", "words"), [(1, "1 s"), (99.4, "99 s"), (100, "2 min"), (5399, "90 min"), (5400, "1.5 h")]
)
def test_times_are_told_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


@pytest.mark.parametrize(("low", "high"), [(0.5, 16.0), (1.0, 1.05), (1.0, 2.0)])
def test_a_search_takes_no_more_runs_than_were_told(low: float, high: float) -> None:
    for limit in (low, (low * high) ** 0.5, high * 0.999):
        tried: list[float] = []

        def holds(rate: float, limit: float = limit, tried: list[float] = tried) -> bool:
            tried.append(rate)
            return rate <= limit

        highest_rate(low, high, holds)
        assert len(tried) <= 2 + len(middle_rates(low, high))


@pytest.mark.parametrize(
    ("command", "option"),
    [(("interference",), "--chart"), (("ab", *VARIANTS), "--chart"), (("ab", *VARIANTS), "--html")],
)
def test_a_library_for_charts_that_is_missing_is_noticed_first(
    command: tuple[str, ...],
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", *command, option, str(tmp_path / "chart.svg")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "weft: a chart needs matplotlib, which is not installed: pip install 'weft[charts]'\n"
