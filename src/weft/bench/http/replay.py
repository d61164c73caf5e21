"""Replay: sends a trace to a weft server as token ids, and returns the clients' times in the simulator's format."""

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.bench.http.client import REFUSED, Client, Reply
from weft.bench.http.drive import LoadRun
from weft.bench.http.figures import gaps, lag
from weft.bench.http.live import live_view
from weft.bench.http.load_request import LoadRequest
from weft.bench.http.processes import ClientProcesses, client_processes
from weft.errors import EngineError
from weft.sim.fidelity import Probe, Served
from weft.sim.simulator import Played
from weft.sim.traces import MOONCAKE_BLOCK, Arrival, Trace

WARM_UP_QUANTILES = (0.25, 0.5, 0.75, 1.0)  # of prompt lengths: one warm-up request of each before the run
WARM_TOKENS = 8  # output tokens of each warm-up request
PROBES, PROBE_TOKENS = 16, 500  # requests, sent one by one, that measure a request's time outside the engine
# Concurrent streams, and tokens of each, that measure the time to deliver one token.
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 32, 16, 64
# Streams one by one, with PAUSE_S seconds of idle time before each.
LONE_STREAMS, LONE_PROMPT, LONE_TOKENS, PAUSE_S = 8, 128, 48, 0.3
ANSWER_TIMEOUT_S = 3600.0  # for one answer: an overloaded policy that refuses nothing takes long


def token_prompts(trace: Trace, vocab_size: int, words: int) -> tuple[Trace, list[tuple[int, ...]]]:
    """Warm-up requests, and prompts of random token ids: first for the trace, then for the warm-up.

    `words` is a seed of the ids. Prompts share exactly the prefixes that the simulator treats as cached: whole blocks
    with equal `prefix_ids` at equal indices.
    """
    lengths = np.quantile([arrival.prompt_tokens for arrival in trace.arrivals], WARM_UP_QUANTILES).astype(int).tolist()
    warm = Trace("warm-up", tuple(Arrival(0.0, length, WARM_TOKENS) for length in lengths))
    arrivals = (*trace.arrivals, *warm.arrivals)
    return warm, [_ids(arrival, number, vocab_size, words) for number, arrival in enumerate(arrivals)]


def _ids(arrival: Arrival, number: int, vocab_size: int, words: int) -> tuple[int, ...]:
    whole = arrival.prefix_ids[: arrival.prompt_tokens // MOONCAKE_BLOCK]
    parts = [_drawn([words, 1, abs(name)], MOONCAKE_BLOCK, vocab_size) for name in whole]
    parts.append(_drawn([words, 0, number], arrival.prompt_tokens - MOONCAKE_BLOCK * len(whole), vocab_size))
    return tuple(np.concatenate(parts).tolist())


def _drawn(seed: Sequence[int], count: int, vocab_size: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(vocab_size, size=count)


async def replay(
    url: str,
    trace: Trace,
    *,
    vocab_size: int,
    words: int,
    key: str | None = None,
    show: bool = False,
) -> Served:
    """Warms the server up, sends all requests when they are due, and waits for all answers."""
    warm, prompts = token_prompts(trace, vocab_size, words)
    arrivals = (*trace.arrivals, *warm.arrivals)
    requests = [
        LoadRequest(one.time, "", len(ids), one.output_tokens, ids) for one, ids in zip(arrivals, prompts, strict=True)
    ]
    requests, first = requests[: len(trace.arrivals)], requests[len(trace.arrivals) :]
    # With token ids every token is a separate frame, even if its text is empty or part of a character.
    async with Client(url, None, key=key, timeout=ANSWER_TIMEOUT_S, always={"return_token_ids": True}) as client:
        await client.discover(first[0])
        for number, request in enumerate(first[1:]):
            reply = await client.send(request, number, client.clock(), 0.0)
            if not reply.is_complete and reply.status not in REFUSED:
                raise EngineError(f"{url} fails at a request that was to warm it up: {reply.error}")
        if not client.asks_to_ignore_eos:
            raise EngineError(f"{url} refuses ignore_eos, so answers would not have the trace's lengths")
        async with ClientProcesses(client, client_processes()) as clients:
            overhead = await _overhead(client, vocab_size, words)
            token, probes = await _probe(clients, vocab_size, words)
            run = LoadRun()
            async with live_view(run, show):
                with _without_collections():
                    await clients.drive(requests, run)
    return replace(served_of(trace, run.replies), request=overhead, token=token, probes=probes)


async def _overhead(client: Client, vocab_size: int, words: int) -> float:
    """Median seconds of a TTFT outside the engine, on an otherwise idle server."""
    found = []
    for number in range(PROBES):
        ids = tuple(_drawn([words, 2, number], PROBE_TOKENS, vocab_size).tolist())
        reply = await client.send(LoadRequest(0.0, "", len(ids), 2, ids), number, client.clock(), 0.0)
        if reply.times and reply.server is not None:
            inside = _server(reply, "queue_ms") + _server(reply, "prefill_ms")
            found.append(reply.times[0] - reply.sent - inside / 1e3)
    return max(0.0, float(np.median(found))) if found else 0.0


async def _probe(clients: ClientProcesses, vocab_size: int, words: int) -> tuple[float | None, tuple[Probe, ...]]:
    """Sends lone streams, then concurrent ones.

    Returns the seconds between two tokens of one step at their clients (the server sends tokens one by one; None if the
    steps cannot be told apart), and a Probe of each kind.
    """
    lone, many = LoadRun(), LoadRun()
    for request in _streams(LONE_STREAMS, LONE_PROMPT, LONE_TOKENS, PAUSE_S, vocab_size, words):
        await clients.drive([request], lone)
    await clients.drive(_streams(STREAMS, STREAM_PROMPT, STREAM_TOKENS, 0.0, vocab_size, words), many)
    kinds = ((1, LONE_PROMPT, LONE_TOKENS, lone.replies), (STREAMS, STREAM_PROMPT, STREAM_TOKENS, many.replies))
    probes = []
    for streams, prompt, tokens, found in kinds:
        replies = [reply for reply in found if reply.is_complete]
        if replies:
            due = [reply.times[0] - reply.due for reply in replies]  # as in the run: the client's lag counts
            ttft, gap = float(np.median(due)), float(np.median(np.concatenate([*map(gaps, replies)])))
            probes.append(Probe(streams, prompt, tokens, ttft, gap))
    return between_tokens([reply.times for reply in many.replies if reply.is_complete]), tuple(probes)


def _streams(count: int, prompt: int, tokens: int, due: float, vocab_size: int, words: int) -> list[LoadRequest]:
    prompts = [tuple(_drawn([words, 3, prompt, number], prompt, vocab_size).tolist()) for number in range(count)]
    return [LoadRequest(due, "", len(ids), tokens, ids) for ids in prompts]


def between_tokens(times: Sequence[Sequence[float]]) -> float | None:
    """Median seconds between two tokens of one step, from the token times of each stream."""
    if len(times) < 2:
        return None
    begun, ended = max(one[0] for one in times), min(one[-1] for one in times)
    arrivals = np.sort([time for one in times for time in one if begun < time < ended])
    step = (ended - begun) * len(times) / max(1, len(arrivals))
    steps = np.split(arrivals, np.flatnonzero(np.diff(arrivals) > step / 2) + 1)
    found = [(one[-1] - one[0]) / (len(one) - 1) for one in steps if len(one) == len(times)]
    return float(np.median(found)) if found else None


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keeps the garbage collector from scanning all prompts during the measurement."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def served_of(trace: Trace, replies: Sequence[Reply]) -> Served:
    """The replies to a trace as a `Served`. The `number` of a reply is the request's index in the trace."""
    by_number = {reply.number: reply for reply in replies}
    answers = [by_number[number] for number in range(len(trace.arrivals))]
    told = [reply for reply in answers if reply.times and reply.server is not None]
    inside = np.array([_server(reply, "ttft_ms") for reply in told]) / 1e3
    seen = np.array([reply.times[0] - reply.sent for reply in told])
    failed = [reply.error for reply in answers if not reply.is_complete and reply.status not in REFUSED]
    return Served(
        _played(trace, answers), inside, seen - inside, np.array([lag(reply) for reply in told]), dict(Counter(failed))
    )


def _played(trace: Trace, answers: Sequence[Reply]) -> Played:
    between = [gaps(reply) if reply.times else np.empty(0) for reply in answers]
    cached = sum(reply.cached_tokens or 0 for reply in answers)
    return Played(
        span=trace.span,
        ended=max((reply.end for reply in answers), default=0.0),
        arrival=np.array([reply.due for reply in answers]),
        prompt_tokens=np.array([arrival.prompt_tokens for arrival in trace.arrivals]),
        output_tokens=np.array([reply.output_tokens for reply in answers]),
        ttft=_array(answers, lambda reply: reply.times[0] - reply.due if reply.times else math.inf),
        finished=_array(answers, lambda reply: reply.times[-1] if reply.is_complete else math.inf),
        refused=np.array([reply.status in REFUSED for reply in answers]),
        promised=np.ones(len(answers), np.bool_),  # a client cannot know which requests had no target
        gap_owner=np.repeat(np.arange(len(answers)), [len(one) for one in between]),
        gaps=np.concatenate([np.empty(0), *between]),
        steps=0,  # a client cannot see steps
        prefill_tokens=sum(reply.prompt_tokens for reply in answers if reply.is_complete) - cached,
        cached_tokens=cached,
        preemptions=int(sum(_server(reply, "preemptions") for reply in answers)),
    )


def _array(answers: Sequence[Reply], value: Callable[[Reply], float]) -> NDArray[np.float64]:
    return np.array([value(reply) for reply in answers], np.float64)


def _server(reply: Reply, name: str) -> float:
    """A number from the metrics that the server reports; 0 if it is missing."""
    return float((reply.server or {}).get(name) or 0.0)


async def server_info(url: str, key: str | None = None) -> dict[str, Any]:
    """The /server_info of a weft server."""
    async with Client(url, None, key=key) as client:
        found = await client.get("/server_info")
    if not isinstance(found, dict) or not isinstance(found.get("engine"), dict):
        raise EngineError(f"{url} is no weft server that is ready: it has no /server_info")
    return found
