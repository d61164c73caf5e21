"""Two engine processes behind one server: requests are spread, and the death of one costs the other nothing."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.running import RunningServer, eventually, is_alive

TEXT = "/v1/completions"
TOKENS = 300
NAMES = ("0", "1")


class TwoEngines(RunningServer):
    command = (str(Path(__file__).with_name("two_engines.py")),)

    @property
    def pids(self) -> dict[str, int]:
        found: dict[str, int] = self.get("/server_info")["processes"]["engines"]
        return found

    def of_both(self, name: str) -> list[float]:
        return [self.of_engine(name, engine) for engine in NAMES]


@pytest.fixture(scope="module")
def own() -> Iterator[TwoEngines]:
    """For both tests. The second, in which an engine dies, ends it."""
    server = TwoEngines()
    eventually(lambda: server.of_both("weft_engine_up") == [1, 1], 60)
    yield server
    server.kill()


def wish(number: int, **more: Any) -> dict[str, Any]:
    prompt = f"Chapter {number}. It was"
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **more}


async def read(client: httpx.AsyncClient, number: int, begun: asyncio.Event) -> list[str]:
    """The data lines of one stream."""
    lines = []
    async with client.stream("POST", TEXT, json=wish(number, stream=True)) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                begun.set()
                lines.append(line[6:])
    return lines


def test_what_a_server_with_two_engines_shows(own: TwoEngines) -> None:
    info = own.get("/server_info")
    assert info["processes"]["engine"] == own.pids["0"]
    assert info["engine"]["max_num_seqs"] == 16
    both = sum(own.of_both("weft_kv_blocks_free"))
    load = own.get("/load")
    assert load == {"server_load": 0, "running": 0, "waiting": 0, "queued_tokens": 0, "free_blocks": both, "sent": 0}
    for path in ("/metrics", "/v1/models", "/reset_prefix_cache"):
        method = "POST" if path == "/reset_prefix_cache" else "GET"
        assert own.http.request(method, path).status_code == 200


def test_the_death_of_one_engine_costs_the_other_nothing(own: TwoEngines) -> None:
    assert "Traceback" not in own.log
    pids = own.pids
    assert len(set(pids.values())) == 2

    async def scenario() -> list[list[str]]:
        async with httpx.AsyncClient(base_url=own.url, timeout=120) as client:
            streams = []
            for number in range(6):
                begun = asyncio.Event()
                streams.append(asyncio.create_task(read(client, number, begun)))
                await begun.wait()  # so that the load that the next one meets is known
            assert own.of_both("weft_requests_running") == [3, 3]
            os.kill(pids["0"], signal.SIGKILL)
            await asyncio.gather(*streams[::2])  # engine 0 got the first stream, and then every second one
            assert own.of_both("weft_engine_up") == [0, 1]
            assert own.of_both("weft_requests_running") == [0, 3]
            assert own.http.get("/health").status_code == own.http.get("/ready").status_code == 200
            assert own.post(TEXT, wish(9, max_tokens=5)).status_code == 200
            return await asyncio.gather(*streams)

    streams = asyncio.run(scenario())
    for number, lines in enumerate(streams):
        assert lines[-1] == "[DONE]"
        if number % 2 == 0:
            assert json.loads(lines[-2])["error"]["code"] == "engine_died"
        else:
            chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
            assert chunks[-1]["finish_reason"] == "length"
            whole = own.post(TEXT, wish(number)).json()
            assert whole["usage"]["completion_tokens"] == TOKENS
            assert "".join(chunk["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert "weft: engine 0: the engine process died; starting another\n" in own.lines

    eventually(lambda: own.of_both("weft_engine_up") == [1, 1], 60)
    assert own.of_both("weft_engine_restarts_total") == [1, 0]
    before = own.of_both("weft_generated_tokens_total")
    assert own.post(TEXT, wish(0, max_tokens=5)).status_code == 200
    assert own.of_both("weft_generated_tokens_total") == [before[0] + 5, before[1]]
    pids = own.pids
    assert own.stop() == 0, own.log
    for pid in pids.values():
        eventually(lambda pid=pid: not is_alive(pid), 5)
