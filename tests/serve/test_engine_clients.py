"""Engine clients and the choice between them, with processes that speak the protocol but compute nothing."""

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
from tests.serve.stub_engine import HOLD, INFO, Stubs
from weft.engine.engine import RequestOptions
from weft.engine.params import SamplingParams
from weft.errors import QueueFullError, RequestError
from weft.observe.metrics import ServerMetrics
from weft.serve.engines import engine_process
from weft.serve.engines.engine_client import DIED, EngineClient, EngineHealth
from weft.serve.engines.engine_connection import EngineLoad
from weft.serve.engines.engine_pool import EnginePool, LeastLoadedRouter
from weft.serve.engines.engine_process import DEATHS_WITHIN_S, MAX_DEATHS, RestartBackoff
from weft.serve.engines.engine_prompt import EnginePrompt
from weft.serve.engines.request_output_collector import RequestOutputCollector

Scenario = Callable[[EnginePool, Stubs], Coroutine[Any, Any, None]]


def prompt(token: int, n: int = 1) -> EnginePrompt:
    return EnginePrompt(np.array([token], np.int32).tobytes(), SamplingParams(n=n), RequestOptions(), "")


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
            engines = EnginePool(stubs.config, ServerMetrics("m", names), log.append)
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
        (client,) = engines.clients
        assert engines.choose() is client, "also before it is ready"
        (update,) = await client.submit([prompt(1)], 0.0).updates()
        assert update.failure == DIED
        await until(lambda: engines.health is EngineHealth.READY)
        assert engines.changed.is_set()
        assert engines.info == client.info == INFO
        assert engines.load == EngineLoad(free_blocks=10)
        first = client.pid
        assert first is not None
        held, collector = client.submit([prompt(HOLD, n=2)], 0.0), client.submit([prompt(7)], 0.0)
        (update,) = await collector.updates()
        assert (update.token, update.end and update.end.reason) == (7, "stop")
        assert client.load == EngineLoad(running=2, free_blocks=10)
        client.abort(held, 1)
        await until(lambda: client.load.running == 1)
        assert stubs.sent(first) == [f"submit [{HOLD}]", "submit [7]", "abort [1]"]
        os.kill(first, signal.SIGKILL)
        (update,) = await held.updates()
        assert (update.choice_index, update.failure) == (0, DIED)
        assert (engines.health, engines.info, engines.load) == (EngineHealth.STARTING, None, EngineLoad())
        await until(lambda: engines.health is EngineHealth.READY)
        assert client.pid != first
        client.abort(held)  # as every request does in the end, whichever process runs then
        (update,) = await client.submit([prompt(8)], 0.0).updates()
        assert update.token == 8
        assert stubs.sent(client.pid) == ["submit [8]"]

    assert play(scenario, ("0",), {}, {}) == ["the engine process died; starting another"]


def test_a_request_stays_with_the_least_loaded_engine(play: Callable[..., list[str]]) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: engines.ready == {"0", "1"})
        pids = engines.pids
        requests: list[tuple[EngineClient, RequestOutputCollector]] = []
        for n in (1, 3, 1, 1):  # what was sent counts before the engine has read it
            client = engines.choose([prompt(HOLD, n)])
            requests.append((client, client.submit([prompt(HOLD, n)], 0.0)))
        assert [client.name for client, _ in requests] == ["0", "1", "0", "0"]
        assert engines.load.sequences == 6
        client, collector = requests[1]
        client.abort(collector)
        await until(lambda: engines.load == EngineLoad(running=3, free_blocks=20))
        assert engines.choose().name == "1"
        engines.reset_cache()
        await until(lambda: all("reset" in stubs.sent(pid) for pid in pids.values()))
        assert stubs.sent(pids["1"]) == [f"submit [{HOLD}]", "abort [0, 1, 2]", "reset"]
        engines.fail_requests("over")
        for number in (0, 2, 3):
            assert {update.failure for update in await requests[number][1].updates()} == {"over"}

    assert play(scenario, ("0", "1"), {}, {}) == []


def test_one_of_two_engines_dies(play: Callable[..., list[str]]) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: engines.ready == {"0", "1"})
        first, second = engines.clients
        lost, kept = first.submit([prompt(HOLD)], 0.0), second.submit([prompt(HOLD, n=2)], 0.0)
        assert engines.choose() is first
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        (update,) = await lost.updates()
        assert update.failure == DIED
        assert (first.health, engines.health) == (EngineHealth.STARTING, EngineHealth.READY)
        assert engines.choose() is second, "though it has more to do"
        assert len(kept.open_keys) == 2
        await until(lambda: engines.ready == {"0", "1"})
        assert engines.choose() is first
        await until(lambda: second.load.running == 2)

    assert play(scenario, ("0", "1"), {}, {}, {}) == ["engine 0: the engine process died; starting another"]


def test_a_stopped_engine_gets_no_requests(play: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: engines.ready == {"0", "1"})
        first, second = engines.clients
        assert first.pid is not None
        os.kill(first.pid, signal.SIGSTOP)
        await until(lambda: (first.health, second.health) == (EngineHealth.SILENT, EngineHealth.READY))
        assert engines.health is EngineHealth.READY
        assert engines.choose() is second
        os.kill(first.pid, signal.SIGCONT)
        await until(lambda: engines.choose() is first)

    monkeypatch.setattr(engine_process, "CHECK_INTERVAL_S", 0.4)  # seconds between two checks; the stub beats every 0.5
    assert play(scenario, ("0", "1"), {}, {}) == []


def test_an_engine_that_differs_is_not_started_again(play: Callable[..., list[str]]) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: EngineHealth.FAILED in {client.health for client in engines.clients})
        (good,) = (client for client in engines.clients if client.health is EngineHealth.READY)
        assert engines.health is EngineHealth.READY
        assert engines.failure is None
        assert engines.info == good.info
        assert [engines.choose() for _ in range(3)] == [good] * 3
        await until(lambda: [pid for pid in engines.pids.values() if pid is not None] == [good.pid])

    (line,) = play(scenario, ("0", "1"), {"num_blocks": 10}, {"vocab_size": 50, "num_blocks": 20})
    assert "has failed and is not started again: its vocab_size is " in line
    assert {"50", "1000"} < set(line.replace(",", "").split())


def test_requests_are_checked_against_what_every_engine_can_do(play: Callable[..., list[str]]) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: engines.ready == {"0", "1"})
        info = engines.info
        assert info is not None
        assert (info.gap_target, info.min_gap_target, info.vocab_size) == (0.06, 0.02, 1000)
        assert info.max_model_len == 80, "it depends on the memory that an engine finds"

    one = {"gap_target": 0.05, "min_gap_target": 0.02, "max_model_len": 90}
    other = {"gap_target": 0.06, "min_gap_target": 0.01, "max_model_len": 80}
    assert play(scenario, ("0", "1"), one, other) == []


def test_no_engine_can_be_started(play: Callable[..., list[str]]) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: engines.health is EngineHealth.FAILED)
        assert engines.failure == "no such model", "said once"
        assert engines.info is None
        await until(engines.changed.is_set)

    log = play(scenario, ("0", "1"), {"failed": "no such model"}, {"failed": "no such model"})
    assert len(log) <= 1  # the last one ends the server, which says the reason


def test_a_full_queue_is_that_of_the_chosen_engine(play: Callable[..., list[str]]) -> None:
    async def scenario(engines: EnginePool, stubs: Stubs) -> None:
        await until(lambda: engines.ready == {"0", "1"})
        first, second = engines.clients
        first.submit([prompt(HOLD, n=6)], 0.0)  # four seats, and two may wait
        with pytest.raises(QueueFullError):
            first.check_queue()
        assert engines.choose() is second
        second.check_queue(6)
        with pytest.raises(RequestError, match="at most 4 run"):
            second.check_queue(7)

    assert play(scenario, ("0", "1"), {}, {}) == []


def test_the_least_loaded_engine_and_the_first_of_several() -> None:
    def client(name: str, *load: int) -> Any:
        return SimpleNamespace(name=name, load=EngineLoad(*load))

    clients = [client("2", 1, 1, 900, 9, 1), client("1", 3), client("3", 0, 0, 0, 0, 4)]
    assert LeastLoadedRouter().choose(clients, ()).name == "1"
    assert LeastLoadedRouter().choose([*clients, client("4", 0, 2)], ()).name == "4"


def test_restarts_are_delayed_and_end() -> None:
    restarts = RestartBackoff()
    assert [restarts.delay(now) for now in range(MAX_DEATHS)] == [0.0, 0.2, 0.4, 0.8, 1.6]
    assert restarts.delay(MAX_DEATHS) is None
    assert len(restarts) == MAX_DEATHS + 1
    assert restarts.delay(MAX_DEATHS + 1 + DEATHS_WITHIN_S) == 0.0, "old deaths do not count"
