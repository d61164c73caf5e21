"""Stored conversations that are large, and background responses that no client waits for, beside a stream."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.serve.attacks.test_connection import megabytes
from tests.serve.attacks.victim import CALM, NOISE, Victim
from tests.serve.running import RunningServer
from weft.serve.endpoints.responses_api.responses_endpoints import MAX_STREAMED

RESPONSES = "/v1/responses"
# The model is not shown thoughts again, so that these have no tokens.
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "y" * 1000}]}
HELLO = {"role": "user", "content": "Hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "minLength": 50000}}, "required": ["a"]}
LONG = {
    "input": "Tell me everything.",
    "background": True,
    "max_output_tokens": 15000,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
}


def test_a_conversation_of_megabytes(server: RunningServer) -> None:
    """It is read, joined and listed in other threads, and at most as large as a body may be."""
    body: dict[str, Any] = {"input": [THOUGHT] * 3500 + [HELLO], "max_output_tokens": 1}
    with Victim(server) as victim:
        first = server.post(RESPONSES, body).json()["id"]
        second = server.post(RESPONSES, {**body, "previous_response_id": first})
        assert second.status_code == 200
        items = server.http.get(f"{RESPONSES}/{first}/input_items?limit=100")
        assert len(items.json()["data"]) == 100
        third = server.post(RESPONSES, {**body, "previous_response_id": second.json()["id"]})
        assert third.status_code == 200
        fourth = server.post(RESPONSES, {**body, "previous_response_id": third.json()["id"]})
        assert fourth.status_code == 400
        assert "--max-body-mb" in fourth.json()["error"]["message"]
    assert victim.longest_gap < NOISE * CALM, f"{victim.longest_gap:.3f} s"


def test_the_store_takes_bounded_memory(server: RunningServer) -> None:
    body: dict[str, Any] = {"input": [THOUGHT] * 7000 + [HELLO], "max_output_tokens": 1}
    ids = [server.post(RESPONSES, body).json()["id"] for _ in range(25)]
    before = megabytes(server.process.pid)
    ids += [server.post(RESPONSES, body).json()["id"] for _ in range(10)]
    assert megabytes(server.process.pid) - before < 60, "ten conversations of 7.5 MB took the place of ten others"
    found = [server.http.get(f"{RESPONSES}/{id}").status_code for id in ids]
    assert found == sorted(found, reverse=True), "the oldest go first"
    assert (found[0], found[-1]) == (404, 200)
    for id in ids:
        server.http.delete(f"{RESPONSES}/{id}")


@pytest.mark.parametrize("stream", [False, True])
def test_what_waits_in_the_background_is_bounded(server: RunningServer, stream: bool) -> None:
    """In number where it is streamed, and in bytes of its input."""
    body = {**LONG, "stream": stream, "input": [HELLO] if stream else [THOUGHT] * 7000 + [HELLO]}
    ids: list[str] = []
    refused = ""
    for _ in range(MAX_STREAMED + 1):
        if stream:
            with server.http.stream("POST", RESPONSES, json=body) as answer:
                lines = answer.iter_lines()
                found = "".join(next(lines) for _ in range(2)) if answer.status_code == 200 else answer.read().decode()
        else:
            answer = server.post(RESPONSES, body)
            found = answer.text
        if answer.status_code != 200:
            refused = found
            break
        ids.append(found.partition('"id":"')[2].partition('"')[0])
    assert answer.status_code == 503
    assert "queue_full" in refused
    assert "background" in refused
    assert len(ids) == MAX_STREAMED if stream else 10 < len(ids) < 20
    for id in ids:
        assert server.http.delete(f"{RESPONSES}/{id}").status_code == 200
    assert server.get("/load")["server_load"] == 0
    server.wait_until_idle()


def test_a_burst_does_not_pass_the_bounds(server: RunningServer) -> None:
    """Requests that are checked at the same time see each other."""

    async def scenario() -> list[str | None]:
        async def ask(client: httpx.AsyncClient) -> str | None:
            async with client.stream("POST", RESPONSES, json={**LONG, "stream": True}) as answer:
                assert answer.status_code in (200, 503)
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        return line.partition('"id":"')[2].partition('"')[0]
            return None

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(ask(client) for _ in range(MAX_STREAMED + 20)))

    ids = [id for id in asyncio.run(scenario()) if id is not None]
    assert len(ids) == MAX_STREAMED == server.get("/load")["server_load"]
    for id in ids:
        assert server.http.delete(f"{RESPONSES}/{id}").status_code == 200
    server.wait_until_idle()
