"""What is counted of requests, and how: in the window, late, failed, interrupted, longer than asked for."""

import asyncio
import contextlib
import io
import math
from collections.abc import AsyncIterator, Callable
from html import unescape
from typing import Any

import pytest
from rich.console import Console

from tests.bench.http import virtual
from tests.bench.http.scripted import Script, scripted
from tests.bench.http.test_report import reply as reported
from tests.bench.http.test_report import told
from weft.bench.http.client import Client, Reply
from weft.bench.http.drive import LoadRun, drive
from weft.bench.http.figures import Goals, MeasurementWindow, caveats, figures, lag
from weft.bench.http.live import view
from weft.bench.http.load_request import LoadRequest
from weft.bench.http.report import html_report
from weft.errors import EngineError

NEAR = {"rel": 1e-6, "abs": 0.01}  # milliseconds


def requests(count: int, every: float = 0.0, prompt: str = "a") -> list[LoadRequest]:
    return [LoadRequest(number * every, prompt, 5, 8) for number in range(count)]


def in_all(run: LoadRun, goals: Goals | None = None) -> dict[str, Any]:
    return figures(run, MeasurementWindow(0.0, math.inf), goals)


def reply(due: float, end: float, **more: Any) -> Reply:
    return Reply(0, due, 5, **{"sent": due, "times": [end], "end": end, "output_tokens": 1, **more})


def driven(
    script: Callable[[int], Script], sent: list[LoadRequest], endpoint: str = "completions", **how: Any
) -> LoadRun:
    async def run() -> LoadRun:
        server = scripted(lambda body, number: script(number))
        async with server as found, Client(found.url, "scripted", endpoint=endpoint, clock=virtual.clock) as client:
            return await drive(client, sent, **how)

    return virtual.run(run())


def block(seconds: float) -> None:
    """Nothing else happens meanwhile, as where a client is too slow."""
    asyncio.get_running_loop().selector.now += seconds  # type: ignore[attr-defined]


def test_goodput_is_of_what_ended_in_the_window_and_never_above_the_throughput() -> None:
    """Ten requests a second are due, and five are served."""
    sent = [reply(number / 10, (number + 1) / 5) for number in range(400)]
    found = figures(LoadRun(sent, 400, 400, 80.0), MeasurementWindow.of(sent, 5, 5), Goals(tpot=50))
    assert found["request_throughput"] == pytest.approx(5, rel=0.02)
    assert found["request_goodput"] == found["request_throughput"]
    assert found["goodput_share"] == 1, "of those that were due"


def test_a_window_begins_with_its_first_moment_and_ends_before_its_last() -> None:
    sent = [reply(float(second), float(second)) for second in range(21)]
    run = LoadRun(sent, 21, 21, 21.0)
    found = figures(run, MeasurementWindow.of(sent, 5, 5))
    assert (found["completed"], found["duration"], found["request_throughput"]) == (10, 10, 1)
    found = figures(run, MeasurementWindow.of(sent, 10, 0))
    assert (found["completed"], found["request_throughput"]) == (11, 1), "nothing is left out at the end"
    assert figures(run, MeasurementWindow.of(sent, 0, 0))["completed"] == 21


@contextlib.asynccontextmanager
async def saying(status: int, body: bytes) -> AsyncIterator[str]:
    """A server that says the same to everything."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
        writer.write(head + body)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


NONSENSE = [b'"Service momentan\xe9ment indisponible"', b'{"error": "\xff"}', b"\xff", b"[" * 100_000]


@pytest.mark.parametrize("body", NONSENSE)
@pytest.mark.parametrize("status", [200, 503])
def test_a_body_that_cannot_be_read_fails_its_request_alone(status: int, body: bytes) -> None:
    async def run() -> LoadRun:
        async with saying(status, b"data: " * (status == 200) + body) as url, Client(url, "x") as client:
            return await drive(client, requests(3))

    run_ = virtual.run(run())
    found = in_all(run_)
    assert (found["num_prompts"], found["failed"], found["unfinished"]) == (3, 3, 0)
    assert all(reply.error.startswith("503: " if status == 503 else "an event that is none") for reply in run_.replies)


@pytest.mark.parametrize("body", NONSENSE)
def test_a_body_that_cannot_be_read_is_no_document_no_model_and_no_count(body: bytes) -> None:
    async def run(status: int) -> None:
        async with saying(status, body) as url, Client(url, "x") as client:
            assert await client.get("/stats") is None
            with pytest.raises(EngineError, match="/v1/models"):
                await client.discover()
            with pytest.raises(EngineError, match=r"counting tokens|tells no usage"):
                await client.count(["a"])

    virtual.run(run(200))
    virtual.run(run(503))


def test_whatever_goes_wrong_with_a_request_it_is_counted() -> None:
    sent = requests(3)
    sent[1] = LoadRequest(0.0, "\ud800", 5, 8)  # half a character, which no body can hold
    run = driven(lambda number: Script(), sent, concurrency=1)
    found = in_all(run)
    assert (found["num_prompts"], found["completed"], found["failed"]) == (3, 2, 1)
    (error,) = found["error_counts"]
    assert error.startswith("UnicodeEncodeError: ")
    assert "\n" not in error


def test_a_client_that_is_too_slow_lags_though_there_are_places() -> None:
    async def run() -> LoadRun:
        server = scripted(lambda body, number: Script([0.001]))
        async with server as found, Client(found.url, "scripted", clock=virtual.clock) as client:
            asyncio.get_running_loop().call_later(0.11, block, 0.3)
            return await drive(client, requests(30, 0.02), concurrency=1000)

    found = in_all(virtual.run(run()))
    assert found["max_lag_ms"] == pytest.approx(290, abs=1), "one was due after 120 ms, and sent after 410"


@pytest.mark.parametrize("open_loop", [True, False])
def test_a_client_that_wakes_up_late_lags_from_when_a_place_became_free(open_loop: bool) -> None:
    def progress() -> None:
        asyncio.get_running_loop().call_soon(block, 0.3)  # before whoever waits for the place gets its turn

    run = driven(lambda number: Script([0.1]), requests(4), concurrency=1, open_loop=open_loop, progress=progress)
    late = [lag(reply) * 1e3 for reply in run.replies]
    assert late == pytest.approx([0, 300, 300, 300], **NEAR)
    if not open_loop:
        ends = [reply.end for reply in run.replies]
        assert [reply.due for reply in run.replies] == pytest.approx([0.0, *ends[:-1]])


def test_waiting_for_a_place_is_no_lag_anywhere() -> None:
    """80 ms after it was due the first token is there; the place was free after 50, and it was sent after 52."""
    made = reported(0)
    made.free, made.sent, made.server = 0.05, 0.052, {"queue_ms": 1.0, "prefill_ms": 9.0, "ttft_ms": 12.0}
    shown = Console(width=200, record=True, file=io.StringIO())
    shown.print(view(LoadRun([made], 1, 1, 1.0), 1.0))
    assert "client lag p50 2.0 ms" in " ".join(shown.export_text().split())
    found = told([made])
    found["requests"][0]["free"] = made.free
    text = unescape(html_report([("one", found)], "x"))
    assert "waiting for --max-concurrency (median 50.00 ms), of the client's lag before sending (median 2." in text
    parts = ("waiting for --max-concurrency: 50.00", "client's lag before sending: 2.00", "and client: 16.00")
    assert all(part in text for part in parts)


def test_who_waits_for_a_place_when_a_run_is_interrupted_is_counted() -> None:
    """One at once, a second each: of ten that are due in the first second two are answered."""

    async def run() -> LoadRun:
        known, server = LoadRun(), scripted(lambda body, number: Script([1.0]))
        async with server as found, Client(found.url, "scripted", clock=virtual.clock) as client:
            task = asyncio.create_task(
                drive(client, [*requests(10, 0.1), LoadRequest(9.0, "a", 5, 8)], concurrency=1, run=known)
            )
            await asyncio.sleep(2.5)
            task.cancel()
            await asyncio.wait([task])
        return known

    found = in_all(virtual.run(run()), Goals(ttft=1500))
    assert (found["num_prompts"], found["completed"], found["unfinished"]) == (2, 2, 8)
    assert found["goodput_share"] == pytest.approx(1 / 10)
    assert "8 requests had no answer yet when the run was interrupted" in " ".join(caveats(found))


def test_who_was_due_while_the_client_was_slow_is_counted_when_interrupted() -> None:
    async def run() -> LoadRun:
        known, server = LoadRun(), scripted(lambda body, number: Script([5.0]))
        async with server as found, Client(found.url, "scripted", clock=virtual.clock) as client:
            task = asyncio.create_task(drive(client, requests(10, 0.1), run=known, duration=0.75))
            await asyncio.sleep(0.25)
            block(1.0)
            task.cancel()
            await asyncio.wait([task])
        return known

    known = virtual.run(run())
    assert sorted(known.unanswered) == list(range(8)), "due until 0.7 s; later ones would not have been sent"


def test_errors_of_different_status_are_different() -> None:
    texts = ["503: busy 1.5", "503: busy 7", "429: busy 3", "after 5 chunks", "after 7 chunks"]
    run = LoadRun([reply(0.0, 1.0, error=text) for text in texts], 5, 5, 1.0)
    assert in_all(run)["error_counts"] == {"503: busy 1.5": 2, "after 5 chunks": 2, "429: busy 3": 1}


def test_a_token_without_text_is_an_answer() -> None:
    empty = Script([0.05], delta=lambda index: {"content": ""})
    run = driven(lambda number: empty, requests(1), "chat")
    assert (run.replies[0].error, run.replies[0].output_tokens) == ("", 1)
    assert run.replies[0].times == pytest.approx([0.05])
    silent = Script([0.05], tells_usage=False, delta=lambda index: {"content": ""})
    assert driven(lambda number: silent, requests(1), "chat").replies[0].error == "the answer has no content"


def test_other_lengths_than_those_asked_for_are_told() -> None:
    found = in_all(driven(lambda number: Script([0.0] * (8 if number else 5)), requests(4)))
    assert (found["requested_input_tokens"], found["total_input_tokens"]) == (20, 20)
    assert (found["requested_output_tokens"], found["total_output_tokens"]) == (32, 29)
    assert caveats(found) == [
        "answers have 29 tokens in all, not the 32 that were asked for: those of 1 of 4 requests differ"
    ]
    longer = [LoadRequest(0.0, "a", tokens, 8) for tokens in (5, 6)]
    found = in_all(driven(lambda number: Script([0.0] * 8), longer))
    assert caveats(found) == [
        "prompts have 10 tokens in all, not the 11 that were asked for: those of 1 of 2 requests differ"
    ]
    assert caveats(in_all(driven(lambda number: Script([0.0] * 8), requests(4)))) == []


def test_one_token_of_many_is_not_worth_telling_and_chunks_are_no_tokens() -> None:
    sent = [reply(0.0, 1.0, output_tokens=100 - number, asked_input=5, asked_output=100) for number in (0, 1)]
    assert caveats(in_all(LoadRun(sent, 2, 2, 1.0))) == []
    found = in_all(driven(lambda number: Script([0.0], tokens=8, tells_usage=False), requests(2)))
    assert not any("asked for" in caveat for caveat in caveats(found))


def test_tokens_from_any_servers_cache_are_summed() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
    found = in_all(driven(lambda number: Script([0.0], beside={"usage": usage} if number else {}), requests(3)))
    assert found["total_cached_tokens"] == 8
    assert "total_cached_tokens" not in in_all(driven(lambda number: Script(), requests(3)))
