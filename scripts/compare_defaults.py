"""Compares a server with default options, as a new user runs it, with one with `--policy chunked`, on this machine.

    python scripts/compare_defaults.py [--busy N]

Both are started in turn with the small model that ships with weft. Clients in another process send simultaneous chats,
long prompts, and many requests a few at a time. For each kind of traffic it prints how many requests were refused and
the 99th percentile of the time to the first token, default over chunked. Then a burst of 64 requests is sent. 2, 6 and
10 s after it, short prompts are sent one by one. It prints their predicted time to the first token over the true one:
median, smallest and largest. `--busy N` runs N endless loops at the same time.
"""

import argparse
import asyncio
import multiprocessing
import re
import subprocess
import sys
import time
from typing import Any, NamedTuple

import aiohttp
import numpy as np

ROUNDS = 3  # rounds of each kind of traffic
PROBES = 7  # short prompts at each moment after the burst: a single one says little on a busy machine


class Traffic(NamedTuple):
    name: str
    requests: int
    at_once: int
    prompt_tokens: int
    output_tokens: int
    every: float = 0.0  # seconds between arrivals; 0: as soon as one of `at_once` is free


TRAFFIC = (
    Traffic("4 clients", 4, 4, 60, 40),
    Traffic("8 clients", 8, 8, 60, 40),
    Traffic("32 clients", 32, 32, 60, 40),
    Traffic("the README's bench", 40, 40, 100, 20, every=0.25),
    Traffic("a prompt of 4,000 tokens", 1, 1, 4000, 20),
    Traffic("a prompt of 15,000 tokens", 1, 1, 15_000, 20),
    Traffic("120 requests, 32 at once", 120, 32, 100, 30),
)


class ObservedInterference(NamedTuple):
    ttfts: list[float]
    refused: int
    predicted: list[float]  # seconds, as the server predicted


async def send(session: aiohttp.ClientSession, url: str, traffic: Traffic, seed: int) -> tuple[float | None, float]:
    """Seconds to the first token (None if the request was refused), and the predicted seconds."""
    random = np.random.default_rng(seed)
    body: dict[str, Any] = {
        "prompt": random.integers(10, 4000, traffic.prompt_tokens).tolist(),
        "max_tokens": traffic.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    began, first, predicted = time.perf_counter(), None, float("nan")
    async with session.post(url + "/v1/completions", json=body) as answer:
        async for line in answer.content:
            if answer.status == 200 and line.startswith(b"data: {") and b'"token_ids":[]' not in line:
                first = first or time.perf_counter() - began
                found = re.search(rb'"predicted_ttft_ms":\s*([0-9.]+)', line)
                predicted = float(found[1]) / 1000 if found else predicted
    return first, predicted


async def play(url: str, traffic: Traffic, seed: int) -> ObservedInterference:
    free = asyncio.Semaphore(traffic.at_once)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(number: int) -> tuple[float | None, float]:
            await asyncio.sleep(number * traffic.every)
            async with free:
                return await send(session, url, traffic, 1000 * seed + number)

        found = await asyncio.gather(*map(one, range(traffic.requests)))
    ttfts = [ttft for ttft, _ in found if ttft is not None]
    return ObservedInterference(ttfts, len(found) - len(ttfts), [predicted for _, predicted in found])


def measure(*options: str) -> dict[str, ObservedInterference]:
    process = subprocess.Popen(
        [sys.executable, "-m", "weft", "serve", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        url = next(found[0].decode() for line in process.stdout if (found := re.search(rb"http://[0-9.]+:\d+", line)))
        asyncio.run(play(url, TRAFFIC[1], 0))  # warms up
        seen = {}
        for traffic in TRAFFIC:
            runs = [asyncio.run(play(url, traffic, seed)) for seed in range(1, 1 + ROUNDS)]
            seen[traffic.name] = ObservedInterference(
                [t for run in runs for t in run.ttfts], sum(run.refused for run in runs), []
            )
        burst = asyncio.run(play(url, Traffic("a burst", 64, 64, 100, 40), 9))
        print(f"  {' '.join(options) or 'default'}: burst of 64, refused {burst.refused}", flush=True)
        ended = time.monotonic()
        for wait in (2, 6, 10):
            time.sleep(max(0.0, ended + wait - time.monotonic()))
            lone = asyncio.run(play(url, Traffic("lone", PROBES, 1, 30, 2), 20 + wait))
            ratios = np.array(lone.predicted) / np.array(lone.ttfts)
            if not np.isnan(ratios).any():
                told = f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"
                print(f"  {wait} s after it: predicted / true time {told}", flush=True)
        return seen
    finally:
        process.terminate()
        process.wait()


def loop_forever() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="endless loops beside it (default: 0)")
    loops = [multiprocessing.Process(target=loop_forever, daemon=True) for _ in range(parser.parse_args().busy)]
    for one in loops:
        one.start()
    try:
        default, chunked = measure(), measure("--policy", "chunked")
    finally:
        for one in loops:
            one.kill()
    print(f"\n{'':28} {'refused':>8} {'p99 TTFT ms':>12} {'chunked':>9} {'ratio':>6}")
    for name, seen in default.items():
        ours, theirs = (1000 * float(np.percentile(one.ttfts, 99)) for one in (seen, chunked[name]))
        print(f"{name:28} {seen.refused:8} {ours:12.0f} {theirs:9.0f} {ours / theirs:6.2f}")


if __name__ == "__main__":
    main()
