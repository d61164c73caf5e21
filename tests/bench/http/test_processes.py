"""Requests of one run that are sent by several processes."""

import asyncio
import os

import pytest

from tests.bench.http.scripted import Script, beside
from weft.bench.http.client import Client
from weft.bench.http.drive import LoadRun
from weft.bench.http.load_request import LoadRequest
from weft.bench.http.processes import ClientProcesses
from weft.errors import EngineError


def test_processes_share_a_run_and_count_from_one_start() -> None:
    requests = [LoadRequest(number * 0.02, f"prompt {number}", 2, 3) for number in range(20)]

    async def measure(url: str) -> tuple[LoadRun, LoadRun]:
        runs = LoadRun(), LoadRun()
        async with Client(url, None, always={"extra": 7}) as client:
            await client.discover()
            async with ClientProcesses(client, 3) as clients:
                for run in runs:  # the processes serve one run after the other
                    await clients.drive(requests, run)
        return runs

    with beside(lambda body, number: Script([0.0] * 3)) as server:
        runs = asyncio.run(measure(server.url))
    for run in runs:
        assert sorted(reply.number for reply in run.replies) == list(range(20))
        assert run.sent == run.planned == 20
        for reply in run.replies:
            assert not reply.error
            assert reply.due == requests[reply.number].at
            assert reply.due - 1e-3 <= reply.sent <= reply.times[0] <= reply.end
    sent = [body["prompt"] for body in server.bodies[1:]]
    assert sorted(sent) == sorted(2 * [request.prompt for request in requests]), "each request was sent once a run"
    assert all(body["extra"] == 7 for body in server.bodies)


def test_a_process_that_dies_is_told() -> None:
    async def measure(url: str) -> None:
        async with Client(url, None) as client:
            await client.discover()
            async with ClientProcesses(client, 2) as clients:
                os.kill(clients.pids[0], 9)
                await clients.drive([LoadRequest(0.0, "a", 1, 1), LoadRequest(0.1, "b", 1, 1)], LoadRun())

    with beside(lambda body, number: Script()) as server, pytest.raises(EngineError, match="has died"):
        asyncio.run(measure(server.url))
