"""What streams notice of long prompts, against a server that freezes for each of them."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.http import virtual
from tests.bench.http.scripted import Script, ScriptedServer, beside, scripted
from weft.bench.http.client import Client
from weft.bench.http.interference import ObservedInterference, interfere
from weft.bench.http.load_request import LoadRequest
from weft.cli import main
from weft.errors import EngineError

STREAMS = [LoadRequest(0.0, "stream", 5, 1000)] * 3
PROMPTS = [LoadRequest(0.0, "long", 5, 1), LoadRequest(1.0, "long", 5, 1)]


def measured(length: int = 1000, starts: Sequence[list[float]] = ([], [], [])) -> ObservedInterference:
    """Streams with a token every 20 ms; a long prompt takes 300 ms, in which nobody gets anything.

    `starts` are the delays of each stream's first tokens, where these come otherwise.
    """

    async def run() -> ObservedInterference:
        server: ScriptedServer

        def script(body: dict[str, Any], number: int) -> Script:
            if body["prompt"] == "long":
                server.stalled_until = asyncio.get_running_loop().time() + 0.3
                return Script([0.3])
            return Script([*starts[number], *[0.02] * length])

        async with scripted(script) as server, Client(server.url, "scripted", clock=virtual.clock) as client:
            return await interfere(client, STREAMS, PROMPTS, quiet=1.0)

    return virtual.run(run())


def test_gaps_are_told_before_during_and_after() -> None:
    seen = measured()
    assert seen.ttfts == pytest.approx([0.3, 0.3])
    assert seen.read == pytest.approx(1.3)
    for quiet in (seen.before, seen.after):
        assert len(quiet) == pytest.approx(150, abs=6)
        assert np.median(quiet) == pytest.approx(0.02)
    assert seen.before.max() == pytest.approx(0.02)
    assert (seen.during > 0.25).sum() == 6, "each stream freezes twice"
    assert seen.during.max() <= 0.32 + 1e-9
    assert seen.times.max() <= 1.3 + 0.02 + 1e-9


def test_gaps_while_streams_still_begin_are_not_counted() -> None:
    """The third stream begins after 700 ms; around that time the others get a token every 200 ms."""
    seen = measured(starts=([0.2] * 4, [0.2] * 4, [0.7]))
    assert seen.before.max() == pytest.approx(0.02)
    assert len(seen.before) == pytest.approx(140, abs=8)
    assert (seen.during > 0.1).sum() == 6, "they are not among those of the reading either"


def test_a_stream_that_ends_too_soon_is_no_witness() -> None:
    with pytest.raises(EngineError, match="ended before the long prompts were read"):
        measured(length=80)


ROW = {
    *("where", "policy", "target_ms", "quiet_gap_ms", "gap_ms", "after_gap_ms"),
    *("steps_with_prefill", "read_in_s", "ttft_ms"),
}


def seen(gap: float) -> ObservedInterference:
    """Quiet gaps of 10 ms without noise, and `gap` seconds while the long prompts are read."""
    quiet = np.full(100, 0.01)
    return ObservedInterference(quiet, np.full(50, gap), quiet, np.linspace(0, 1, 50), 1.0, [0.5, 1.0])


@pytest.fixture
def url() -> Iterator[str]:
    """A server for which a word is a token."""
    with beside(lambda body, number: Script()) as server:
        server.count = lambda text: len(text.split())
        yield server.url


def interfering(monkeypatch: pytest.MonkeyPatch, outcomes: list[Any]) -> list[str]:
    """Puts outcomes in the place of runs, which take seconds; the long prompts that were to be sent."""
    sent: list[str] = []

    async def interfere(
        client: Client, streams: Sequence[LoadRequest], prompts: Sequence[LoadRequest]
    ) -> ObservedInterference:
        sent.extend(request.prompt for request in prompts)
        outcome = outcomes[len(sent) // len(prompts) - 1]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr("weft.bench.http.interference.interfere", interfere)
    return sent


def test_a_server_is_measured_several_times_and_the_median_counts(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "runs.json"
    sent = interfering(monkeypatch, [seen(0.02), seen(0.06), seen(0.03)])
    options = ["--runs", "3", "--gap-target-ms", "20", "--prompt-tokens", "50", "--json", str(file)]
    assert main(["bench", "interference", "--url", url, *options]) == 0
    assert len(sent) == len({prompt[:20] for prompt in sent}) == 6, "nothing of a run is in the server's cache already"
    rows = json.loads(file.read_text())
    assert [row["gap_ms"]["p999"] for row in rows] == pytest.approx([20, 60, 30])
    assert all(row.keys() == ROW and row["target_ms"] == 20 for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines if "during" in line] == [
        ["1", "during", "20.0"],
        ["2", "during", "60.0"],
        ["3", "during", "30.0"],
        ["median", "during", "30.0"],
    ]
    assert lines[-1].endswith("is 1.15, median of 3 runs (0.77, 2.31, 1.15): NOT within 1")


def test_a_server_is_shown_the_key(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str | None] = []

    async def interfere(
        client: Client, streams: Sequence[LoadRequest], prompts: Sequence[LoadRequest]
    ) -> ObservedInterference:
        shown.append(client._headers.get("authorization"))
        return seen(0.02)

    monkeypatch.setattr("weft.bench.http.interference.interfere", interfere)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    command = ["bench", "interference", "--url", url, "--runs", "1"]
    assert main(command) == main([*command, "--api-key", "mine"]) == 0
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert main(command) == main([*command, "--api-key", "mine"]) == 0
    assert shown == [None, "Bearer mine", "Bearer theirs", "Bearer mine"]
    assert main(["bench", "interference", "--api-key", "mine"]) == 2
    assert "--api-key is for a server" in capsys.readouterr().err


def test_rows_of_a_server_are_like_those_of_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    assert main(["bench", "interference", "--simulated-only", "--no-progress", "--json", str(file)]) == 0
    assert all(row.keys() == ROW for row in json.loads(file.read_text()))


def test_without_a_target_nothing_is_judged_and_runs_before_an_interrupt_are_kept(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "runs.json"
    interfering(monkeypatch, [seen(0.02), KeyboardInterrupt()])
    assert main(["bench", "interference", "--url", url, "--json", str(file)]) == 130
    (row,) = json.loads(file.read_text())
    assert row["target_ms"] is None
    told = capsys.readouterr()
    assert "targets" not in told.out
    assert told.err.splitlines()[-1] == "weft: interrupted, after 1 of 5 runs"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "h200-llama-3-8b"], "--profile says nothing of a server"),
        (["--shape", "llama-3-8b"], "--shape says nothing of a server"),
        (["--simulated-only"], "--simulated-only says nothing of a server"),
        (["--chart", "x.svg"], "--chart says nothing of a server"),
        (["--runs", "0"], "--runs 0 must be at least 1"),
        (["--prompt-tokens", "0"], "--prompt-tokens 0 must be at least 1"),
        (["--gap-target-ms", "0"], "--gap-target-ms=0.0 must be"),
        (["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: there is no folder"),
    ],
)
def test_what_makes_no_sense_with_a_server_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "interference", "--url", "http://127.0.0.1:9", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) == 1
