"""Handles of engines and the choice between them, with processes that speak the protocol but compute nothing."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.serve.running import eventually, is_alive
from tests.serve.stub_engine import FACTS, HOLD, Stubs
from weft.engine.engine import Wishes
from weft.engine.params import SamplingParams
from weft.errors import QueueFullError, RequestError
from weft.observe.metrics import ServerMetrics
from weft.serve.engines import engine_process
from weft.serve.engines.engine_client import DIED, EngineClient, EngineHealth
from weft.serve.engines.engine_connection import EngineLoad
from weft.serve.engines.engine_pool import EnginePool, LeastLoadedRouter
from weft.serve.engines.engine_process import DEATHS_WITHIN, MOST_DEATHS, RestartBackoff
from weft.serve.engines.submitted_request import EnginePrompt, SubmittedRequest

Scenario = Callable[[EnginePool, Stubs], Coroutine[Any, Any, None]]


def prompt(token: int, n: int = 1) -> EnginePrompt:
    return EnginePrompt(np.array([token], np.int32).tobytes(), SamplingParams(n=n), Wishes(), "")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a scenario with engines that have these names and scripts. Returns the log, and checks that all end."""

    def run(scenario: Scenario, names: tuple[str, ...], *scripts: dict[str, Any]) -> list[str]:
        stubs, log = Stubs(tmp_path, monkeypatch, *scripts), list[str]()

        async def whole() -> None:
            engines = EnginePool(stubs.orders, ServerMetrics("m", names), log.append)
            assert engines.health is EngineHealth.STARTING
            engines.start()
            try:
                await scenario(engines, stubs)
            finally:
                pids = [pid for pid in engines.pids.values() if pid is not None]
                await engines.close()
            for pid in pids:
                eventually(lambda pid=pid: not is_alive(pid), 5)

        asyncio.run(whole())
        return log

    return run


def test_one_engine_from_its_start_to_its_restart(play: Callable[..., list[str]]) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        (handle,) = engines.handles
        assert engines.choose() is handle, "also before it is ready"
        (update,) = await handle.submit([prompt(1)], 0.0).news()
        assert update.lost == DIED
        await until(lambda: engines.health is EngineHealth.READY)
        assert engines.changed.is_set()
        assert engines.facts == handle.facts == FACTS
        assert engines.load == EngineLoad(free_blocks=10)
        first = handle.pid
        assert first is not None
        held, job = handle.submit([prompt(HOLD, n=2)], 0.0), handle.submit([prompt(7)], 0.0)
        (update,) = await job.news()
        assert (update.token, update.end and update.end.reason) == (7, "stop")
        assert handle.load == EngineLoad(running=2, free_blocks=10)
        handle.abort(held, 1)
        await until(lambda: handle.load.running == 1)
        assert stubs.sent(first) == [f"submit [{HOLD}]", "submit [7]", "abort [1]"]
        os.kill(first, signal.SIGKILL)
        (update,) = await held.news()
        assert (update.place, update.lost) == (0, DIED)
        assert (engines.health, engines.facts, engines.load) == (EngineHealth.STARTING, None, EngineLoad())
        await until(lambda: engines.health is EngineHealth.READY)
        assert handle.pid != first
        handle.abort(held)  # as every request does in the end, whichever process runs then
        (update,) = await handle.submit([prompt(8)], 0.0).news()
        assert update.token == 8
        assert stubs.sent(handle.pid) == ["submit [8]"]

    assert play(scenario, ("0",), {}, {}) == ["the engine process died; starting another"]


def test_a_job_stays_with_the_least_loaded_engine(play: Callable[..., list[str]]) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: engines.ready == {"0", "1"})
        pids = engines.pids
        jobs: list[tuple[EngineClient, SubmittedRequest]] = []
        for n in (1, 3, 1, 1):  # what was sent counts before the engine has read it
            handle = engines.choose([prompt(HOLD, n)])
            jobs.append((handle, handle.submit([prompt(HOLD, n)], 0.0)))
        assert [handle.name for handle, _ in jobs] == ["0", "1", "0", "0"]
        assert engines.load.streams == 6
        handle, job = jobs[1]
        handle.abort(job)
        await until(lambda: engines.load == EngineLoad(running=3, free_blocks=20))
        assert engines.choose().name == "1"
        engines.reset_cache()
        await until(lambda: all("reset" in stubs.sent(pid) for pid in pids.values()))
        assert stubs.sent(pids["1"]) == [f"submit [{HOLD}]", "abort [0, 1, 2]", "reset"]
        engines.lose_jobs("over")
        for number in (0, 2, 3):
            assert {update.lost for update in await jobs[number][1].news()} == {"over"}

    assert play(scenario, ("0", "1"), {}, {}) == []


def test_one_of_two_engines_dies(play: Callable[..., list[str]]) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: engines.ready == {"0", "1"})
        first, second = engines.handles
        lost, kept = first.submit([prompt(HOLD)], 0.0), second.submit([prompt(HOLD, n=2)], 0.0)
        assert engines.choose() is first
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        (update,) = await lost.news()
        assert update.lost == DIED
        assert (first.health, engines.health) == (EngineHealth.STARTING, EngineHealth.READY)
        assert engines.choose() is second, "though it has more to do"
        assert len(kept.open) == 2
        await until(lambda: engines.ready == {"0", "1"})
        assert engines.choose() is first
        await until(lambda: second.load.running == 2)

    assert play(scenario, ("0", "1"), {}, {}, {}) == ["engine 0: the engine process died; starting another"]


def test_a_stopped_engine_gets_no_requests(play: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: engines.ready == {"0", "1"})
        first, second = engines.handles
        assert first.pid is not None
        os.kill(first.pid, signal.SIGSTOP)
        await until(lambda: (first.health, second.health) == (EngineHealth.SILENT, EngineHealth.READY))
        assert engines.health is EngineHealth.READY
        assert engines.choose() is second
        os.kill(first.pid, signal.SIGCONT)
        await until(lambda: engines.choose() is first)

    monkeypatch.setattr(engine_process, "LOOK", 0.4)  # seconds between two checks; the stub beats every 0.5
    assert play(scenario, ("0", "1"), {}, {}) == []


def test_an_engine_that_differs_is_given_up(play: Callable[..., list[str]]) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: EngineHealth.FATAL in {handle.health for handle in engines.handles})
        (good,) = (handle for handle in engines.handles if handle.health is EngineHealth.READY)
        assert engines.health is EngineHealth.READY
        assert engines.fatal is None
        assert engines.facts == good.facts
        assert [engines.choose() for _ in range(3)] == [good] * 3
        await until(lambda: [pid for pid in engines.pids.values() if pid is not None] == [good.pid])

    (line,) = play(scenario, ("0", "1"), {"num_blocks": 10}, {"vocab_size": 50, "num_blocks": 20})
    assert "is given up: its vocab_size is " in line
    assert {"50", "1000"} < set(line.replace(",", "").split())


def test_requests_are_checked_against_what_every_engine_can_do(play: Callable[..., list[str]]) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: engines.ready == {"0", "1"})
        facts = engines.facts
        assert facts is not None
        assert (facts.gap_target, facts.min_gap_target, facts.vocab_size) == (0.06, 0.02, 1000)
        assert facts.max_model_len == 80, "it depends on the memory that an engine finds"

    one = {"gap_target": 0.05, "min_gap_target": 0.02, "max_model_len": 90}
    other = {"gap_target": 0.06, "min_gap_target": 0.01, "max_model_len": 80}
    assert play(scenario, ("0", "1"), one, other) == []


def test_no_engine_can_be_started(play: Callable[..., list[str]]) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: engines.health is EngineHealth.FATAL)
        assert engines.fatal == "no such model", "said once"
        assert engines.facts is None
        await until(engines.changed.is_set)

    log = play(scenario, ("0", "1"), {"fatal": "no such model"}, {"fatal": "no such model"})
    assert len(log) <= 1  # the last one ends the server, which says the reason


def test_a_full_queue_is_that_of_the_chosen_engine(play: Callable[..., list[str]]) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: engines.ready == {"0", "1"})
        first, second = engines.handles
        first.submit([prompt(HOLD, n=6)], 0.0)  # four seats, and two may wait
        with pytest.raises(QueueFullError):
            first.check_queue()
        assert engines.choose() is second
        second.check_queue(6)
        with pytest.raises(RequestError, match="at most 4 run"):
            second.check_queue(7)

    assert play(scenario, ("0", "1"), {}, {}) == []


def test_the_least_loaded_engine_and_the_first_of_several() -> None:
    def handle(name: str, *load: int) -> Any:
        return SimpleNamespace(name=name, load=EngineLoad(*load))

    handles = [handle("2", 1, 1, 900, 9, 1), handle("1", 3), handle("3", 0, 0, 0, 0, 4)]
    assert LeastLoadedRouter().choose(handles, ()).name == "1"
    assert LeastLoadedRouter().choose([*handles, handle("4", 0, 2)], ()).name == "4"


def test_restarts_are_delayed_and_end() -> None:
    restarts = RestartBackoff()
    assert [restarts.delay(now) for now in range(MOST_DEATHS)] == [0.0, 0.2, 0.4, 0.8, 1.6]
    assert restarts.delay(MOST_DEATHS) is None
    assert len(restarts) == MOST_DEATHS + 1
    assert restarts.delay(MOST_DEATHS + 1 + DEATHS_WITHIN) == 0.0, "old deaths do not count"
