"""Sends minutes of mixed traffic to a server with default options, and reports the results.

    python scripts/mixed_traffic.py [--minutes 10] [--clients 6]

Starts `weft serve` with the small model that ships with weft. Clients send requests of ten kinds, drawn at random:
chats and completions, streamed and whole, long prompts, schemas, several choices, flex requests, responses,
tokenizations, wrong requests, and streams that their client leaves. Prints the number of requests by kind and status,
the memory of both processes every minute, and how long the server takes to end after SIGTERM. Fails if a valid request
is refused or fails, or if the server does not end by itself.
"""

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

SCHEMA = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}, "shots": {"type": "integer"}}}
TEXT, CHAT, RESPONSES, TOKENS = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"
ORDER = [{"role": "user", "content": "A latte with oat milk, please."}]


def drawn(random: np.random.Generator) -> tuple[str, str, dict[str, Any]]:
    """The kind of a request, its path and its body."""
    prompt = random.integers(10, 4000, int(random.integers(5, 200))).tolist()
    tokens = int(random.integers(5, 120))
    long = random.integers(10, 4000, int(random.integers(1000, 6000))).tolist()
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("chat", CHAT, {"messages": ORDER, "max_tokens": tokens}),
        ("stream", TEXT, {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}),
        ("long prompt", TEXT, {"prompt": long, "max_tokens": 16, "stream": True}),
        ("schema", CHAT, {"messages": ORDER, "max_tokens": 64, "guided_json": {**SCHEMA, "title": str(tokens)}}),
        ("several", TEXT, {"prompt": [prompt, prompt[:5]], "n": 4, "max_tokens": tokens, "temperature": 0.8}),
        ("flex", TEXT, {"prompt": prompt, "max_tokens": tokens, "service_tier": "flex"}),
        ("response", RESPONSES, {"input": "A small espresso.", "max_output_tokens": max(16, tokens)}),
        ("tokenize", TOKENS, {"prompt": "The old house by the sea. " * tokens}),
        ("wrong", TEXT, {"prompt": prompt, "max_tokens": -1}),
        ("leaves", TEXT, {"prompt": prompt, "max_tokens": 2000, "stream": True, "ignore_eos": True}),
    ]
    return kinds[int(random.integers(len(kinds)))]


async def client(session: aiohttp.ClientSession, seed: int, until: float, found: Counter[tuple[str, int]]) -> None:
    random = np.random.default_rng(seed)
    while time.monotonic() < until:
        kind, path, body = drawn(random)
        async with session.post(path, json=body) as answer:
            if kind == "leaves":
                await answer.content.readany()
                answer.close()
            else:
                async for _ in answer.content:
                    pass
            found[kind, answer.status] += 1


def megabytes(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    resident = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(resident[1]) / 1024 if resident else 0.0


async def play(url: str, minutes: float, clients: int) -> Counter[tuple[str, int]]:
    found: Counter[tuple[str, int]] = Counter()
    until = time.monotonic() + 60 * minutes
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        async with session.get("/server_info") as answer:
            processes = (await answer.json())["processes"]
        tasks = [asyncio.create_task(client(session, seed, until, found)) for seed in range(clients)]
        while not all(task.done() for task in tasks):
            sizes = ", ".join(f"{name} {megabytes(pid):,.0f} MB" for name, pid in processes.items() if pid is not None)
            print(f"{found.total():6} requests; {sizes}", flush=True)
            await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_EXCEPTION)
        await asyncio.gather(*tasks)
        await asyncio.sleep(10)
        sizes = ", ".join(f"{name} {megabytes(pid):,.0f} MB" for name, pid in processes.items() if pid is not None)
        print(f"after 10 s without requests: {sizes}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=6)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "weft", "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    try:
        url = next(found[0].decode() for line in process.stdout if (found := re.search(rb"http://[0-9.]+:\d+", line)))
        threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()  # a full pipe would block it
        found = asyncio.run(play(url, arguments.minutes, arguments.clients))
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        code = process.wait(60)
        print(f"ended {time.monotonic() - began:.1f} s after SIGTERM, exit status {code}")
    finally:
        process.kill()
    for (kind, status), number in sorted(found.items()):
        print(f"{kind:14} {status} {number:6}")
    bad = [key for key in found if key[1] != (400 if key[0] == "wrong" else 200)]
    return 1 if bad or code else 0


if __name__ == "__main__":
    sys.exit(main())
