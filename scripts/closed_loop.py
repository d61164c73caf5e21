"""Many clients in a closed loop: each sends its next request as soon as it has its previous answer.

    python scripts/closed_loop.py --url URL [--clients 256] [--requests 768] [--gap-ms 50 --ttft-ms 20000] [--schema]

The clients are divided among several processes, so that no token waits for the client side. Prompts are random token
ids. A refused client waits for its Retry-After and asks again. Prints one JSON object: output tokens/s of all requests,
output tokens/s of requests that kept their promise (first token and 99% of the gaps in time), and percentiles of gaps
and first tokens. With --schema the first client asks for JSON, and the gaps of its stream are reported separately.
"""

import argparse
import asyncio
import json
import multiprocessing
import time
from typing import Any

import numpy as np

from weft.bench.http.client import Client, Reply
from weft.bench.http.drive import drive
from weft.bench.http.load_request import LoadRequest

LEAD = 3.0  # seconds until all processes have started
RETRY_FOR = 600.0  # seconds for which a refused request is sent again
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 400}  # longer than an answer may be


async def play(number: int, arguments: argparse.Namespace, clients: int, requests: int, start: float) -> list[Reply]:
    """Runs one process's share of the clients. Reply times count from `start`, on the clock of all processes."""
    draw = np.random.default_rng([arguments.seed, number])
    prompts = draw.integers(10, arguments.vocab, (requests, arguments.input_len)).tolist()
    requests = [LoadRequest(0.0, "", arguments.input_len, arguments.output_len, tuple(ids)) for ids in prompts]
    always: dict[str, Any] = {"return_token_ids": True}
    if arguments.schema and number == 0:
        always["guided_json"] = SCHEMA
    async with Client(arguments.url, None, always=always) as client:
        await client.discover(LoadRequest(0.0, "", 16, 2, tuple(range(10, 26))))
        await asyncio.sleep(start - time.perf_counter())
        began = time.perf_counter()
        run = await drive(client, requests, concurrency=clients, open_loop=False, retry_for=RETRY_FOR)
    for reply in run.replies:
        shift = began - start
        reply.times = [moment + shift for moment in reply.times]
        reply.due, reply.sent, reply.end = reply.due + shift, reply.sent + shift, reply.end + shift
    return run.replies


def work(number: int, arguments: argparse.Namespace, clients: int, requests: int, start: float, pipe: Any) -> None:
    pipe.send(asyncio.run(play(number, arguments, clients, requests, start)))


def shares(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


def percentiles(values: list[float]) -> dict[str, float]:
    found = np.percentile(values, [50, 99, 99.9, 100]) * 1e3 if values else [float("nan")] * 4
    return dict(zip(("p50", "p99", "p999", "longest"), (round(float(one), 2) for one in found), strict=True))


def keeps(reply: Reply, arguments: argparse.Namespace) -> bool:
    if not reply.is_complete or reply.times[0] - reply.sent > arguments.ttft_ms / 1e3:
        return False
    gaps = np.diff(reply.times)
    return not len(gaps) or bool(np.mean(gaps <= arguments.gap_ms / 1e3) >= 0.99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", required=True)
    add("--clients", type=int, default=256)
    add("--requests", type=int, default=768)
    add("--input-len", type=int, default=512)
    add("--output-len", type=int, default=256)
    add("--gap-ms", type=float, default=float("inf"), help="promised gap (default: none)")
    add("--ttft-ms", type=float, default=float("inf"), help="promised first token (default: none)")
    add("--processes", type=int, default=6)
    add("--vocab", type=int, default=30_000, help="token ids are drawn below this")
    add("--seed", type=int, default=0)
    add("--schema", action="store_true", help="the first client asks for JSON, from a process of its own")
    arguments = parser.parse_args()

    parts = shares(arguments.clients - arguments.schema, arguments.processes)
    counts = shares(arguments.requests - arguments.schema, arguments.processes)
    if arguments.schema:
        parts, counts = [1, *parts], [1, *counts]
    context = multiprocessing.get_context("spawn")
    start, pipes = time.perf_counter() + LEAD, []
    for number, (clients, requests) in enumerate(zip(parts, counts, strict=True)):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(number, arguments, clients, requests, start, theirs), daemon=True).start()
        pipes.append(ours)
    by_process = [pipe.recv() for pipe in pipes]
    constrained = by_process.pop(0) if arguments.schema else []
    replies: list[Reply] = [reply for part in by_process for reply in part]
    good = [reply for reply in replies if reply.is_complete]
    kept = [reply for reply in good if keeps(reply, arguments)]
    seconds = max(reply.end for reply in good) - min(reply.due for reply in good)
    found = {
        "requests": len(replies),
        "failed": len(replies) - len(good),
        "kept": len(kept),
        "refusals": sum(reply.retries for reply in replies),
        "seconds": round(seconds, 2),
        "tokens_per_s": round(sum(reply.output_tokens for reply in good) / seconds),
        "kept_tokens_per_s": round(sum(reply.output_tokens for reply in kept) / seconds),
        "gap_ms": percentiles([gap for reply in good for gap in np.diff(reply.times).tolist()]),
        "ttft_ms": percentiles([reply.times[0] - reply.sent for reply in good]),
        "errors": sorted({reply.error for reply in replies if reply.error}),
    }
    if arguments.schema:
        found["schema_gap_ms"] = percentiles([gap for one in constrained for gap in np.diff(one.times).tolist()])
        found["schema_errors"] = sorted({reply.error for reply in constrained if reply.error})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
