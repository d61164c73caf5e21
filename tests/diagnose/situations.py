"""Situations: traffic on a simulated server that has one problem."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import msgspec
import numpy as np

from tests.smooth import SMOOTH
from weft.core import HostCost, Targets
from weft.core.promises import Source
from weft.observe.frames import LagFrame, LateChunk
from weft.observe.recording import Recording
from weft.sim.profiles import Profile
from weft.sim.record import record_policy
from weft.sim.simulator import Truth
from weft.sim.traces import Arrival, Trace

HOST = HostCost(step=0.0004, commit=2e-5, token=5e-6, request=0.0005)
DEVICE = replace(SMOOTH, host=HOST, max_num_batched_tokens=2048)
GOALS = Targets(gap=0.05, ttft=1.0, ttft_per_1k=0.25, gap_source=Source.DEFAULT, ttft_source=Source.DEFAULT)


def record(
    policy: str, arrivals: Iterable[Arrival], device: Profile = DEVICE, targets: Targets = GOALS, bias: float = 0.0
) -> Recording:
    trace = Trace("situation", tuple(sorted(arrivals, key=lambda arrival: arrival.time)))
    return record_policy(policy, trace, device, targets, Truth(device.coefficients, bias=bias)).recording


def chats(rate: float, seconds: float, prompt: int = 300, output: int = 150, seed: int = 0) -> list[Arrival]:
    """Random arrivals; lengths between half and one and a half times the given ones."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    prompts, outputs = (rng.integers(mean // 2, mean * 3 // 2, len(times)) for mean in (prompt, output))
    rows = zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [Arrival(*row) for row in rows]


def healthy() -> Recording:
    return record("slo", chats(5, 10))


def prefill_queueing() -> Recording:
    """More prompt tokens than the device can read, all of one kind."""
    return record("chunked:2048", chats(14, 10, prompt=4000, output=20))


def decode_scheduling() -> Recording:
    """Every prompt stops all streams for its whole length."""
    return record("monolithic", chats(6, 12, prompt=3000, output=120))


def interference() -> Recording:
    """Chats, and a document of 30,000 tokens from time to time."""
    documents = [Arrival(2.0 + 4 * number, 30_000, 50) for number in range(3)]
    return record("chunked:8192", [*chats(8, 14), *documents])


def kv_pressure() -> Recording:
    """Long answers in a cache that holds few of them."""
    return record("chunked:2048", chats(12, 10, prompt=400, output=600), replace(DEVICE, kv_tokens=16_000))


SHORT = replace(GOALS, ttft=0.09, ttft_per_1k=0.0)  # enough for a prompt whose beginning is cached


def sessions(prefix: Callable[[int, int, int], int], count: int = 40) -> list[Arrival]:
    """Sessions of five turns, eight seconds apart. `prefix` names a block from the session, the turn and the index."""
    return [
        Arrival(
            8.0 * turn + 0.2 * session, 512 * size, 30, tuple(prefix(session, turn, block) for block in range(size))
        )
        for session in range(count)
        for turn in range(5)
        for size in (6 + turn,)
    ]


def prefix_reuse() -> Recording:
    """Turns repeat long prompts, in a cache that has overwritten them when the next turn comes."""
    arrivals = sessions(lambda session, turn, block: 1000 * session + block)
    return record("chunked:2048", arrivals, replace(DEVICE, kv_tokens=48_000), SHORT)


def broken_prefixes() -> Recording:
    """Every turn changes something in the second block of its session, such as the time of day."""
    arrivals = sessions(lambda session, turn, block: 1000 * session + (100 * turn if block else 0) + block)
    return record("chunked:2048", arrivals, DEVICE, SHORT)


def host_bound() -> Recording:
    slow = HostCost(step=0.03, row=2e-4, commit=1e-3, token=5e-6)
    return record("slo", chats(5, 10), replace(DEVICE, host=slow), replace(GOALS, gap=0.02))


def large_batches() -> Recording:
    """More streams at once than the gap target allows."""
    return record("chunked:2048", chats(150, 4, prompt=40, output=400), targets=replace(GOALS, gap=0.009))


def impossible_target() -> Recording:
    return record("slo", chats(2, 10), targets=replace(GOALS, gap=0.004))


def slow_clients() -> Recording:
    """Three clients whose sockets take half a second for a chunk."""
    return _late_chunks(waited=0.5)


def api_process() -> Recording:
    """The event loop of the API process stands still while tokens come."""
    found = _late_chunks(waited=0.0)
    found.lags.append(LagFrame(2.0, 0.5))
    return found


def _late_chunks(waited: float) -> Recording:
    found = healthy()
    (run,) = found.runs
    for key in (3, 4, 5):
        request = run.requests[key]
        assert request.first_token is not None
        chunks = [
            LateChunk(index, sent - 0.5, sent, waited, sent - 0.505)
            for index in range(5, 25)
            for sent in [request.first_token + 0.5 * index]
        ]
        run.requests[key] = msgspec.structs.replace(request, late_chunks=chunks)
    return found


def few_seats() -> Recording:
    return record("chunked:2048", chats(12, 10, output=200), replace(DEVICE, max_num_seqs=6))
