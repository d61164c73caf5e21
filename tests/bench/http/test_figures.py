"""Every figure against a server whose delays are known."""

import asyncio
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.http import virtual
from tests.bench.http.scripted import Script, ScriptedServer, scripted
from weft.bench.http.client import Client, Reply
from weft.bench.http.drive import LoadRun, drive
from weft.bench.http.figures import Goals, MeasurementWindow, caveats, figures, gaps, is_good, tpot
from weft.bench.http.load_request import LoadRequest
from weft.errors import EngineError, OptionError

NEAR = {"rel": 1e-6, "abs": 0.01}  # milliseconds


def requests(count: int, every: float = 0.0) -> list[LoadRequest]:
    return [LoadRequest(number * every, f"{number}", 5, 8) for number in range(count)]


async def measured(
    server: ScriptedServer, sent: list[LoadRequest], endpoint: str = "completions", **how: Any
) -> LoadRun:
    async with Client(server.url, None, endpoint=endpoint, timeout=20, clock=virtual.clock) as client:
        await client.discover()
        server.bodies.clear()
        return await drive(client, sent, **how)


def in_all(run: LoadRun, goals: Goals | None = None) -> dict[str, Any]:
    return figures(run, MeasurementWindow(0.0, math.inf), goals)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_every_figure_is_the_one_that_was_scripted(endpoint: str, tokens: int) -> None:
    """Ten requests, each with chunks after 80, 40, 40, 120, 40 ms."""
    delays = [0.08, 0.04, 0.04, 0.12, 0.04]

    async def run() -> LoadRun:
        async with scripted(lambda body, number: Script(delays, tokens)) as server:
            return await measured(server, requests(10, 0.03), endpoint)

    found = in_all(virtual.run(run()), Goals(ttft=100, gap=130))
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (10, 0, 50 * tokens)
    assert found["total_input_tokens"] == 50
    for kind in ("mean", "median", "p99", "max"):
        assert found[f"{kind}_ttft_ms"] == pytest.approx(80, **NEAR)
        assert found[f"{kind}_e2el_ms"] == pytest.approx(320, **NEAR)
        assert found[f"{kind}_tpot_ms"] == pytest.approx(240 / (5 * tokens - 1), **NEAR)
    assert found["mean_itl_ms"] == pytest.approx(60, **NEAR)
    assert found["max_itl_ms"] == found["max_gap_ms"] == pytest.approx(120, **NEAR)
    expected = np.array([40, 40, 120, 40] + [0] * 5 * (tokens - 1))
    assert found["mean_gap_ms"] == pytest.approx(expected.mean(), **NEAR)
    assert found["median_gap_ms"] == pytest.approx(np.median(expected), **NEAR)
    assert found["p99_gap_ms"] == pytest.approx(120, **NEAR)
    assert found["duration"] == pytest.approx(0.27 + 0.32)
    assert found["request_throughput"] == pytest.approx(10 / found["duration"])
    assert found["goodput_share"] == 1
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["goodput_output_throughput"] == pytest.approx(found["output_throughput"])
    assert found["max_lag_ms"] == pytest.approx(0, abs=0.01)


def test_a_server_that_stalls_shows_in_all_who_come_meanwhile() -> None:
    """Coordinated omission: 50 requests, one every 10 ms, and the server silent from 105 to 400 ms."""

    async def run() -> LoadRun:
        script = scripted(lambda body, number: Script([0.0]))
        async with script as server, Client(server.url, None, clock=virtual.clock) as client:
            await client.discover()
            asyncio.get_running_loop().call_later(0.105, _stall, server, 0.295)
            return await drive(client, requests(50, 0.01))

    found = virtual.run(run())
    late = {reply.number: (reply.times[0] - reply.due) * 1e3 for reply in found.replies}
    for number in range(11, 40):  # due at 110 to 390 ms
        assert late[number] == pytest.approx(400 - number * 10, **NEAR)
    assert in_all(found)["max_ttft_ms"] == pytest.approx(290, **NEAR), (
        "of the first that is due when nothing is sent any more"
    )
    assert in_all(found)["max_lag_ms"] == pytest.approx(0, abs=0.01), "it was the server, not the client"


def _stall(server: ScriptedServer, seconds: float) -> None:
    server.stalled_until = asyncio.get_running_loop().time() + seconds


def test_who_waits_for_a_free_place_is_late_from_when_it_was_due() -> None:
    async def run() -> LoadRun:
        async with scripted(lambda body, number: Script([0.1])) as server:
            return await measured(server, requests(4), concurrency=1)

    run_ = virtual.run(run())
    found = in_all(run_)
    assert found["max_concurrent_requests"] == 1
    assert found["max_ttft_ms"] == pytest.approx(400, **NEAR)
    assert found["max_lag_ms"] == pytest.approx(0, abs=0.01), "the client could not send, but not because it was slow"


def test_in_a_closed_loop_a_request_is_due_when_the_one_before_has_ended() -> None:
    async def run() -> LoadRun:
        async with scripted(lambda body, number: Script([0.05, 0.05])) as server:
            return await measured(server, requests(8), concurrency=2, open_loop=False)

    found = in_all(virtual.run(run()))
    assert found["max_concurrent_requests"] == 2
    assert found["max_ttft_ms"] == pytest.approx(50, **NEAR)
    assert found["duration"] == pytest.approx(0.4)


def test_errors_are_counted_and_named_and_never_dropped() -> None:
    scripts = [
        Script([0.0, 0.0]),
        Script(status=503),
        Script([0.0] * 4, cut_after=2),
        Script([0.0] * 4, error_after=1),
        Script([]),
        Script([0.0, 3.0]),
    ]

    async def run() -> LoadRun:
        script = scripted(lambda body, number: scripts[number])
        async with script as server, Client(server.url, "scripted", timeout=1, clock=virtual.clock) as client:
            return await drive(client, requests(6, 0.01))

    run_ = virtual.run(run())
    found = in_all(run_, Goals(ttft=10_000))
    assert (found["completed"], found["failed"]) == (1, 5)
    assert found["goodput_share"] == pytest.approx(1 / 6)
    told = {reply.number: reply.error for reply in run_.replies}
    assert told[1] == "503: not now"
    assert "cut" in told[2] or "Payload" in told[2]
    assert told[3] == "the engine died"
    assert told[4] == "the answer has no content"
    assert told[5] == "no answer within 1 s"
    assert sum(found["error_counts"].values()) == 5


def test_tokens_of_requests_that_kept_their_goals_are_counted_over_the_same_time() -> None:
    drawn = [_reply(0.0, 0.0, [0.1, 0.2, 0.3, 0.4], 0), _reply(0.0, 0.0, [2.0, 4.0], 0)]
    found = in_all(LoadRun(drawn, 2, 2, 4.0), Goals(ttft=500, gap=150))
    assert (found["output_throughput"], found["goodput_output_throughput"]) == (6 / 4, 4 / 4)
    assert in_all(LoadRun(drawn, 2, 2, 4.0))["goodput_output_throughput"] is None


def test_a_refused_request_is_sent_again_after_the_time_that_the_server_says() -> None:
    """The first is refused twice, the second for ever, the third without a time, the fourth not at all."""
    seen: dict[str, int] = {}

    def script(body: dict[str, Any], number: int) -> Script:
        seen[body["prompt"]] = seen.get(body["prompt"], 0) + 1
        if body["prompt"] == "0" and seen["0"] <= 2:
            return Script(status=(503, 429)[seen["0"] - 1], retry_after=("2", "0")[seen["0"] - 1])
        if body["prompt"] == "1":
            return Script(status=503, retry_after="100")
        return Script(status=503) if body["prompt"] == "2" else Script([0.25, 0.25])

    async def run() -> LoadRun:
        async with scripted(script) as server:
            return await measured(server, requests(4), retry_for=70)

    run_ = virtual.run(run())
    told = {reply.number: reply for reply in run_.replies}
    first = told[0]
    assert (first.retries, first.is_complete) == (2, True)
    assert first.retry_wait == pytest.approx(2.05)  # what the server says, and at least 0.05 s
    assert first.due == pytest.approx(2.05), "each attempt is a request of its own"
    assert first.times[0] - first.due == pytest.approx(0.25)
    assert (told[1].retries, told[1].error) == (2, "503: not now"), "after 30 and 60 s; 90 s would be too late"
    assert (told[2].retries, told[3].retries) == (0, 0)
    found = in_all(run_)
    assert (found["completed"], found["failed"], found["retries"], found["retried_requests"]) == (2, 2, 4, 2)
    assert found["max_retry_wait_ms"] == pytest.approx(60_000)
    assert found["max_ttft_ms"] == pytest.approx(250, **NEAR)


def test_a_server_that_is_too_busy_for_a_first_request_is_measured_all_the_same() -> None:
    async def run(script: Script) -> LoadRun:
        async with scripted(lambda body, number: script if body["prompt"] == "Hello" else Script([0.1])) as server:
            return await measured(server, requests(2))

    assert len(virtual.run(run(Script(status=503, retry_after="1"))).replies) == 2
    with pytest.raises(EngineError, match="does not answer a first request"):
        virtual.run(run(Script(status=503)))


def test_nothing_is_sent_again_after_the_duration_or_unasked() -> None:
    async def run(**how: Any) -> LoadRun:
        script = scripted(lambda body, number: Script(status=503, retry_after="2"))
        async with script as server, Client(server.url, "scripted", timeout=20, clock=virtual.clock) as client:
            return await drive(client, requests(1), **how)

    assert virtual.run(run()).replies[0].retries == 0
    assert virtual.run(run(retry_for=100, duration=5.0)).replies[0].retries == 2


def test_first_content_may_be_a_thought_or_a_tool_call() -> None:
    deltas = [
        {"role": "assistant"},
        {"reasoning_content": "hm"},
        {"tool_calls": [{}]},
        {"content": "a"},
        {"content": ""},
    ]

    async def run() -> LoadRun:
        async with scripted(lambda body, number: Script([0.02] * 5, delta=lambda index: deltas[index])) as server:
            return await measured(server, requests(1), "chat")

    (reply,) = virtual.run(run()).replies
    assert len(reply.times) == 3
    assert reply.times[0] - reply.due == pytest.approx(0.04)


def test_servers_have_their_ways() -> None:
    """No [DONE], an error that is none, numbers that are none, and a message that ends long after the answer."""
    scripts = [
        Script([0.1, 0.1], says_done=False),
        Script([0.1, 0.1], beside={"error": None}),
        Script([0.1, 0.1], beside={"metrics": "none", "usage": {"completion_tokens": "2", "prompt_tokens": None}}),
        Script([0.1, 0.1], lingers=1.0),
    ]

    async def run() -> LoadRun:
        script = scripted(lambda body, number: scripts[number])
        async with script as server, Client(server.url, "scripted", clock=virtual.clock) as client:
            return await drive(client, requests(4, 0.01))

    found = in_all(virtual.run(run()))
    assert (found["completed"], found["failed"]) == (4, 0), found["error_counts"]
    assert found["max_e2el_ms"] == pytest.approx(200, **NEAR)
    assert found["max_tpot_ms"] == pytest.approx(100, **NEAR)


def test_a_server_that_knows_less_is_asked_for_less() -> None:
    async def run() -> tuple[LoadRun, list[dict[str, Any]]]:
        async with scripted(lambda body, number: Script([0.0, 0.01], tells_usage=False)) as server:
            server.refused_fields = {"ignore_eos", "stream_options"}
            return await measured(server, requests(2)), server.bodies

    run_, bodies = virtual.run(run())
    assert all(not {"ignore_eos", "stream_options"} & body.keys() for body in bodies)
    assert [reply.output_tokens for reply in run_.replies] == [2, 2]
    found = in_all(run_)
    assert found["completed_without_usage"] == 2
    assert "no usage for 2 of 2 requests" in " ".join(caveats(found))


@pytest.mark.parametrize(
    ("refused", "asked", "ignoring"),
    [
        (set(), {"ignore_eos", "stream_options"}, True),
        ({"ignore_eos"}, {"stream_options"}, False),
        ({"stream_options"}, {"ignore_eos"}, True),
    ],
)
def test_only_what_a_server_refuses_is_given_up(refused: set[str], asked: set[str], ignoring: bool) -> None:
    async def run() -> tuple[bool, dict[str, Any]]:
        async with scripted(lambda body, number: Script()) as server, Client(server.url, None) as client:
            server.refused_fields = refused
            await client.discover()
            return client.asks_to_ignore_eos, server.bodies[-1]

    told, body = virtual.run(run())
    assert told == ignoring
    assert {"ignore_eos", "stream_options"} & body.keys() == asked


def test_what_was_otherwise_than_asked_for_is_said_and_all_else_is_not() -> None:
    run = LoadRun([_reply(0.0, 0.0, [1.0], 0)], 1, 1, 1.0, left_out=3)
    assert caveats({**in_all(run), "ignore_eos": False}) == [
        "3 requests were left out, as they are longer than the model's context",
        "the server refused ignore_eos: answers may be shorter than asked for",
    ]
    run.left_out = 0
    assert caveats({**in_all(run), "ignore_eos": True}) == caveats({}) == []


def test_the_rate_that_was_achieved_is_the_one_of_sending() -> None:
    sent = [_reply(number / 10, number / 2, [9.0], 0) for number in range(5)]
    assert in_all(LoadRun(sent, 5, 5, 9.0))["achieved_request_rate"] == pytest.approx(2)
    assert in_all(LoadRun(sent[:1], 1, 1, 9.0))["achieved_request_rate"] is None


def test_what_is_wrong_with_a_server_is_said_at_once() -> None:
    async def run(url: str, model: str | None) -> None:
        async with Client(url, model) as client:
            await client.discover()

    async def unknown() -> None:
        async with scripted(lambda body, number: Script()) as server:
            await run(server.url, "other")

    with pytest.raises(EngineError, match="no server answers at"):
        virtual.run(run("http://127.0.0.1:9", None))
    with pytest.raises(EngineError, match="no model 'other'; it has scripted"):
        virtual.run(unknown())


def test_an_interrupted_run_keeps_what_is_known() -> None:
    async def run() -> LoadRun:
        known = LoadRun()
        script = scripted(lambda body, number: Script([0.0 if number < 4 else 30.0]))
        async with script as server, Client(server.url, None, clock=virtual.clock) as client:
            await client.discover()
            task = asyncio.create_task(drive(client, requests(5), run=known))
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.wait([task])
        return known

    found = in_all(virtual.run(run()))
    assert found["was_interrupted"]
    assert (found["completed"], found["failed"], found["unfinished"]) == (3, 0, 2)


replies = st.builds(
    lambda due, late, times, extra: _reply(due, due + late, sorted(due + late + time for time in times), extra),
    st.floats(0, 10),
    st.floats(0, 1),
    st.lists(st.floats(0, 5), max_size=20),
    st.integers(0, 5),
)


def _reply(due: float, sent: float, times: list[float], extra: int) -> Reply:
    return Reply(0, due, 7, sent, times, (times or [sent])[-1], len(times) + extra)


@given(st.lists(replies, max_size=20), st.floats(1, 5000))
def test_figures_of_anything_add_up(drawn: list[Reply], goal: float) -> None:
    found = figures(
        LoadRun(drawn, len(drawn), len(drawn), 20.0), MeasurementWindow(0.0, math.inf), Goals(ttft=goal, gap=goal)
    )
    done = [reply for reply in drawn if reply.times]
    assert found["completed"] + found["failed"] == len(drawn)
    assert found["total_output_tokens"] == sum(reply.output_tokens for reply in done)
    assert sum(len(gaps(reply)) for reply in done) == sum(reply.output_tokens - 1 for reply in done)
    for name in ("ttft", "gap", "itl", "tpot", "e2el", "lag"):
        row = [found[f"{kind}_{name}_ms"] for kind in ("p50", "p90", "p95", "p99", "p99.9", "max")]
        assert row == [None] * 6 or all(a <= b + 1e-9 for a, b in pairwise(row))
    assert found["goodput_share"] * len(drawn) == pytest.approx(
        sum(is_good(reply, Goals(goal, gap=goal)) for reply in drawn)
    )


def test_a_goal_for_gaps_is_kept_by_99_of_100() -> None:
    times = np.cumsum([0.0] + [0.01] * 99 + [0.5]).tolist()
    reply = _reply(0.0, 0.0, times, 0)
    assert is_good(reply, Goals(gap=20))
    assert not is_good(_reply(0.0, 0.0, [*times, times[-1] + 0.5], 0), Goals(gap=20))
    assert tpot(reply) == pytest.approx((0.99 + 0.5) / 100)


def test_warm_up_and_cool_down_are_left_out() -> None:
    drawn = [_reply(float(second), float(second), [second + 1.0], 0) for second in range(10)]
    run = LoadRun(drawn, 10, 10, 10.0)
    found = figures(run, MeasurementWindow.of(drawn, 2, 3))
    assert found["completed"] == 4  # due after 2 to 5 seconds; 6 is the first of those left out
    assert found["request_throughput"] == pytest.approx(1), "ended after 2, 3, 4 and 5, within four seconds"
    with pytest.raises(OptionError, match="leave nothing"):
        MeasurementWindow.of(drawn, 5, 5)


def test_a_goal_that_is_none_is_refused() -> None:
    assert Goals.parse(["ttft:1000", "gap:100"]) == Goals(ttft=1000, gap=100)
    for wrong in ("ttft", "ttft:", "ttft:x", "speed:3", "gap:-1", "gap:nan"):
        with pytest.raises(OptionError, match="is no goal"):
            Goals.parse([wrong])
