"""One key beside another: many clients of one take no more than their share, and none can clear the other's cache."""

import asyncio
import time
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.serve.running import RunningServer, store_calibration

MANY, ONE = "key-of-many", "key-of-one"
CLIENTS = 60
SECONDS = 15.0


class Seen(NamedTuple):
    statuses: list[int]
    ttfts: list[float]


async def ask(client: httpx.AsyncClient, key: str, seen: Seen) -> None:
    body = {"prompt": [7] * 100, "max_tokens": 32, "ignore_eos": True, "stream": True, "return_token_ids": True}
    began = time.perf_counter()
    headers = {"authorization": f"Bearer {key}"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        seen.statuses.append(answer.status_code)
        first = True
        async for line in answer.aiter_lines():
            if first and line.startswith("data: {") and answer.status_code == 200:
                seen.ttfts.append(time.perf_counter() - began)
                first = False
    if answer.status_code != 200:
        await asyncio.sleep(0.2)


async def both(url: str) -> tuple[Seen, Seen]:
    many, one = Seen([], []), Seen([], [])
    until = time.monotonic() + SECONDS

    async def loop(key: str, seen: Seen, delay: float) -> None:
        await asyncio.sleep(delay)
        while time.monotonic() < until:
            await ask(client, key, seen)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(loop(MANY, many, 0.0) for _ in range(CLIENTS)), loop(ONE, one, 2.0))
    return many, one


def test_sixty_clients_of_one_key_refuse_none_of_another(tmp_path: Path) -> None:
    options = ("--max-num-seqs", "64", "--kv-cache-memory-bytes", "128MiB")
    store_calibration(tmp_path, *options)
    targets = ("--gap-target-ms", "500", "--ttft-target-ms", "4000", "--ttft-target-per-1k-ms", "0")
    keys = ("--api-key", MANY, "--api-key", ONE)
    server = RunningServer(*options, *targets, *keys, XDG_CACHE_HOME=str(tmp_path))
    try:
        many, one = asyncio.run(both(server.url))
    finally:
        server.kill()
    assert len(one.statuses) >= 3
    assert set(one.statuses) == {200}, f"{one.statuses.count(503)} of {len(one.statuses)} refused"
    assert sorted(one.ttfts)[len(one.ttfts) // 2] < 4.0
    assert many.statuses.count(200) >= CLIENTS, "the many are served as well"


WORDS = "The quick brown fox jumps over the lazy dog and runs away from the old house by the sea. " * 4


def cached(server: RunningServer, key: str, **more: object) -> int:
    """Tokens of the prompt that were found in the cache."""
    body = {"prompt": WORDS, "max_tokens": 1, **more}
    answer = server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def reset(server: RunningServer, key: str) -> None:
    answer = server.http.post("/reset_prefix_cache", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200


@pytest.mark.parametrize("shared", [False, True])
def test_a_reset_of_the_cache_is_for_the_key_that_asks(shared: bool) -> None:
    options = ("--policy", "chunked", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "64MiB")
    server = RunningServer(
        *options, "--api-key", MANY, "--api-key", ONE, *(("--share-prefix-cache",) if shared else ())
    )
    try:
        salts: list[dict[str, object]] = [{}, {"cache_salt": "mine"}, {"cache_salt": "1/"}]
        for salt in salts:
            assert cached(server, MANY, **salt) == 0
            assert (cached(server, ONE, **salt) > 0) == shared
        for _ in range(2):
            reset(server, MANY)
            for salt in salts:
                assert cached(server, MANY, **salt) == 0
                assert cached(server, MANY, **salt) > 0
                assert cached(server, ONE, **salt) > 0
    finally:
        server.kill()
