"""Processes that die, clients that leave, and an orderly end."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.serve.running import RunningServer, eventually, is_alive
from tests.strength import is_long

SMALL = ("--policy", "chunked", "--max-num-seqs", "128", "--kv-cache-memory-bytes", "128MiB")
ENDLESS = {"prompt": "Once upon a time", "max_tokens": 16000, "ignore_eos": True, "stream": True}


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """A parameter is the time that streams have at its end."""
    server = RunningServer(*SMALL, "--shutdown-timeout", getattr(request, "param", "2"))
    pid = server.engine_pid
    yield server
    server.kill()
    if pid is not None:
        eventually(lambda: not is_alive(pid), 5)


async def open_streams(url: str, count: int, begun: asyncio.Semaphore, **wish: object) -> list[list[str]]:
    """Reads `count` streams to their end, each a list of data lines; `begun` is released by each first token."""

    async def read(client: httpx.AsyncClient) -> list[str]:
        lines: list[str] = []
        async with client.stream("POST", "/v1/completions", json={**ENDLESS, **wish}) as answer:
            try:
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        if not lines:
                            begun.release()
                        lines.append(line[6:])
            except httpx.RemoteProtocolError:
                lines.append("cut off")
        return lines

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        return await asyncio.gather(*(read(client) for _ in range(count)))


def test_engine_killed_with_open_streams(own: RunningServer) -> None:
    """Each stream gets an error frame within two seconds, and service is back without a new API process."""
    first = own.engine_pid
    assert first is not None

    async def scenario() -> tuple[list[list[str]], float]:
        begun = asyncio.Semaphore(0)
        streams = asyncio.create_task(open_streams(own.url, 64, begun))
        for _ in range(64):
            await begun.acquire()
        os.kill(first, signal.SIGKILL)
        killed = time.monotonic()
        found = await streams
        return found, time.monotonic() - killed

    streams, seconds = asyncio.run(scenario())
    assert seconds < 2
    for lines in streams:
        assert json.loads(lines[-2])["error"]["code"] == "engine_died"
        assert lines[-1] == "[DONE]"
    assert own.http.get("/health").status_code == 503
    eventually(lambda: own.http.get("/health").status_code == 200, 60)
    second = own.engine_pid
    assert second not in (None, first)
    assert not is_alive(first)
    assert own.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2}).status_code == 200
    assert own.of_engine("weft_engine_restarts_total") == 1
    assert own.stop() == 0
    eventually(lambda: not is_alive(second), 5)


def test_engine_ends_with_the_api_process(own: RunningServer) -> None:
    engine = own.engine_pid
    assert engine is not None
    own.process.kill()
    eventually(lambda: not is_alive(engine), 5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_clean_end(own: RunningServer, number: int) -> None:
    engine = own.engine_pid
    assert own.stop(number) == 0, own.log
    assert engine is not None
    eventually(lambda: not is_alive(engine), 5)
    assert "Traceback" not in own.log


def test_running_streams_finish_and_new_work_is_refused(own: RunningServer) -> None:
    """After a signal: not ready, refusals with a status, and what runs gets its time."""

    async def scenario() -> tuple[list[list[str]], int, httpx.Response]:
        begun = asyncio.Semaphore(0)
        streams = asyncio.create_task(open_streams(own.url, 1, begun, max_tokens=60))
        await begun.acquire()
        own.process.send_signal(signal.SIGTERM)
        async with httpx.AsyncClient(base_url=own.url) as client:
            while (ready := await client.get("/ready")).status_code == 200:
                await asyncio.sleep(0.01)
            refused = await client.post("/v1/completions", json={"prompt": "x"})
        return await streams, ready.status_code, refused

    streams, ready, refused = asyncio.run(scenario())
    assert streams[0][-1] == "[DONE]"
    assert '"finish_reason":"length"' in streams[0][-2]
    assert ready == 503
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert "retry-after" in refused.headers
    assert own.process.wait(10) == 0


@pytest.mark.parametrize("own", ["0.5"], indirect=True)
def test_streams_that_take_too_long_to_finish_are_told(own: RunningServer) -> None:
    async def scenario() -> list[list[str]]:
        begun = asyncio.Semaphore(0)
        streams = asyncio.create_task(open_streams(own.url, 2, begun))
        for _ in range(2):
            await begun.acquire()
        own.process.send_signal(signal.SIGTERM)
        return await streams

    for lines in asyncio.run(scenario()):
        error = json.loads(lines[-2])["error"]
        assert "the server is shutting down" in error["message"]
        assert error["code"] == "shutdown"
    assert own.process.wait(10) == 0


def test_second_signal_ends_at_once(own: RunningServer) -> None:
    engine = own.engine_pid
    assert engine is not None

    def read() -> None:
        with contextlib.suppress(httpx.HTTPError):  # it is cut off, or told so if there is time
            own.http.post("/v1/completions", json={**ENDLESS, "stream": False})

    thread = threading.Thread(target=read)
    thread.start()
    eventually(lambda: httpx.get(f"{own.url}/load").json()["server_load"] == 1, 10)
    own.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert own.process.poll() is None
    own.process.send_signal(signal.SIGINT)
    own.process.wait(1.5)
    thread.join(5)
    eventually(lambda: not is_alive(engine), 5)


def test_clients_that_leave_cost_nothing(server: RunningServer) -> None:
    """Clients disconnect at random moments, while their prompts are read and before: all blocks are free again."""
    rng = random.Random(0)

    async def leave(client: httpx.AsyncClient) -> None:
        words = " ".join(rng.choice(["sea", "house", "old", "ship"]) for _ in range(rng.choice([5, 150, 1500])))
        body = {
            "prompt": words,
            "max_tokens": 500,
            "ignore_eos": True,
            "stream": rng.random() < 0.5,
            "n": rng.choice([1, 2]),
        }
        try:
            async with asyncio.timeout(rng.uniform(0.0, 1.5)):
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        pass
        except TimeoutError:
            pass

    async def scenario() -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            for _ in range(4 if is_long() else 2):
                await asyncio.gather(*(leave(client) for _ in range(50)))

    before = server.metric("weft_client_disconnects_total")
    asyncio.run(scenario())
    server.wait_until_idle()
    assert server.metric("weft_client_disconnects_total") > before
    assert server.get("/load")["server_load"] == 0


def test_a_wrong_model_is_said_at_once(tmp_path: object) -> None:
    with pytest.raises(RuntimeError, match=r"config\.json"):
        RunningServer(str(tmp_path))


def test_a_request_that_comes_while_the_engine_dies_is_told(own: RunningServer) -> None:
    """Its body was half read when the engine died: it must not wait for an answer from the grave."""
    host, port = own.url.removeprefix("http://").split(":")
    body = b'{"prompt": "x", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    connections = [socket.create_connection((host, int(port)), timeout=60) for _ in range(20)]
    for connection in connections:
        connection.sendall(head + body[:5])
    time.sleep(0.2)
    assert own.engine_pid is not None
    os.kill(own.engine_pid, signal.SIGKILL)
    for connection in connections:
        connection.sendall(body[5:])
        time.sleep(0.01)
    answers = [connection.recv(65536) for connection in connections]
    assert all(answer.startswith((b"HTTP/1.1 503", b"HTTP/1.1 200")) for answer in answers)
    for connection in connections:
        connection.close()
    eventually(lambda: httpx.get(f"{own.url}/load").json()["server_load"] == 0, 10)


def test_a_signal_to_all_processes_lets_streams_finish(own: RunningServer) -> None:
    """As process managers do, which signal the engine process as well."""
    engine = own.engine_pid
    assert engine is not None

    async def scenario() -> list[list[str]]:
        begun = asyncio.Semaphore(0)
        streams = asyncio.create_task(open_streams(own.url, 1, begun, max_tokens=40))
        await begun.acquire()
        os.kill(engine, signal.SIGTERM)
        own.process.send_signal(signal.SIGTERM)
        return await streams

    (lines,) = asyncio.run(scenario())
    assert '"finish_reason":"length"' in lines[-2]
    assert own.process.wait(10) == 0
