"""More requests than anybody serves: the queue has a bound, and what waits in it costs the streams nothing."""

import threading

import httpx

from tests.serve.attacks.victim import CALM, NOISE, Victim
from tests.serve.running import RunningServer


def test_a_flood_of_flex_requests_is_bounded_and_no_stream_notices_it() -> None:
    """Six bodies of 1,024 prompts with two completions each. With twelve, and no bound, a stream's gaps were 612 ms at
    the 99th percentile; with the default bound of 8,192 the longest is 132 ms."""
    server = RunningServer("--max-num-seqs", "64", "--kv-cache-memory-bytes", "128MiB", "--max-queued-requests", "3000")
    body = {"prompt": [[7] * 20] * 1024, "n": 2, "max_tokens": 400, "ignore_eos": True, "service_tier": "flex"}
    statuses: list[int] = []

    def send() -> None:
        with httpx.Client(base_url=server.url, timeout=10) as client:
            try:
                statuses.append(client.post("/v1/completions", json=body).status_code)
            except httpx.ReadTimeout:
                statuses.append(0)  # it waits; the client gives up, which takes its requests out of the queue

    with Victim(server) as victim:
        threads = [threading.Thread(target=send) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(statuses) == {0, 503}, statuses
    assert 0 < statuses.count(0) < 6, "what fits into the queue waits"
    assert victim.longest_gap < NOISE * CALM, f"{victim.longest_gap:.3f} s"
    assert server.stop() == 0, server.log
