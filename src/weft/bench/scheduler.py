"""What the scheduler costs: plan, commit and all that the loop does for a step, with a device that takes no time."""

import random
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from weft.core import CostModel, Outcome, Policy, Request, Scheduler, Source, chunked, slo
from weft.engine.collector import Collector
from weft.engine.hashing import prompt_hashes, root_hash
from weft.engine.host import InstantExecutor
from weft.engine.loop import Loop
from weft.engine.params import SamplingParams
from weft.engine.stream import Standing, Stream
from weft.sim.profiles import load_profile

BLOCK = 16
STEPS = 2000
PROFILE = load_profile("h200-llama-3-8b")


class Cost(NamedTuple):
    policy: str
    running: int
    us_per_step: float
    us_per_request: float


class Burst(NamedTuple):
    """Newcomers that come at once beside running streams, in virtual time."""

    newcomers: int
    running: int
    longest_plan_ms: float  # of processor time, while they are screened
    screened_s: float  # of virtual time until all were
    refused: int


def measure(
    running: int, policy: str = "chunked", steps: int = STEPS, progress: Callable[[int], None] = lambda done: None
) -> Cost:
    """Mean over steps with `running` requests of staggered lengths; one that finishes is replaced by an arrival.

    It is processor time, so that neither the progress bar nor what else the machine does is counted.
    Prefix caching is on, every step leaves its StepRecord, and every request gets its output. Making the arrivals
    (their prompts and hashes) is not counted; admitting and prefilling them is.
    """
    rng = random.Random(0)
    records: list[object] = []
    scheduler = Scheduler(
        policy=_policy(policy, max(8192, 2 * running)),
        num_blocks=80 * running,
        block_size=BLOCK,
        max_num_seqs=running,
        wave=PROFILE.coefficients.wave,
    )
    loop = Loop(scheduler, InstantExecutor(), clock=lambda: 0.0, on_record=records.append)
    numbers = iter(range(10**9))
    for _ in range(running):
        loop.add(_stream(rng, next(numbers), stagger=True))
    while scheduler.num_waiting:
        loop.step()
    spent = 0.0
    for step in range(steps):
        started = time.thread_time()
        events = loop.step()
        spent += time.thread_time() - started
        for event in events:
            if event.finish_reason is not None:
                loop.add(_stream(rng, next(numbers), stagger=False))
        progress(step + 1)
    return Cost(policy, running, spent / steps * 1e6, spent / steps / running * 1e6)


def measure_burst(newcomers: int = 1000, running: int = 256) -> Burst:
    """What a burst does to planning under `slo`, on the profile of an H200: gaps of 25 ms and first tokens within 1 s
    are promised, so that most of the newcomers are refused.

    A first burst, which is not counted, warms everything up. The collector is kept out of it, as in a server.
    """
    collector = Collector()
    scheduler = Scheduler(
        policy=_policy("slo", PROFILE.max_num_batched_tokens),
        num_blocks=PROFILE.kv_tokens // BLOCK,
        block_size=BLOCK,
        max_num_seqs=PROFILE.max_num_seqs,
        wave=PROFILE.coefficients.wave,
    )
    clock = _Clock(scheduler)
    for number in range(running):
        scheduler.add(_request(f"running {number:04d}", 0.0, output=50_000, ttft=3600.0))
    while scheduler.num_waiting:
        clock.step()
    collector.freeze()
    try:
        for name in ("first", "second"):
            clock.longest, began, refused = 0.0, clock.now, len(scheduler.refused)
            for number in range(newcomers):
                scheduler.add(_request(f"{name} {number:04d}", began, output=200, ttft=1.0))
            clock.step()
            while scheduler.num_unscreened:
                clock.step()
            screened = clock.now - began
            longest, refused = clock.longest, len(scheduler.refused) - refused
            while len(scheduler.running) > running or scheduler.num_waiting:
                clock.step()
    finally:
        collector.thaw()
    return Burst(newcomers, running, longest * 1e3, screened, refused)


class _Clock:
    """Steps take what they are predicted to."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.longest = 0.0  # seconds of processor time of a plan

    def step(self) -> None:
        started = time.thread_time()
        plan = self.scheduler.plan(self.now)
        self.longest = max(self.longest, time.thread_time() - started)
        if plan is not None:
            ended = self.now + (plan.predicted or 0.0)
            done = [(plan.requests[row], "length") for row in np.flatnonzero(plan.last).tolist()]
            self.scheduler.commit(plan, Outcome(finished=done), self.now, ended)
            self.now = ended


def _request(name: str, arrival: float, output: int, ttft: float) -> Request:
    return Request(
        name,
        prompt_tokens=200,
        max_tokens=output,
        arrival=arrival,
        ttft_target=ttft,
        gap_target=0.025,
        ttft_source=Source.OPERATOR,
        gap_source=Source.OPERATOR,
    )


def _policy(name: str, tokens: int) -> Policy:
    return chunked(tokens) if name == "chunked" else slo(CostModel(PROFILE.coefficients), tokens)


def bare_loop(running: int, steps: int = STEPS) -> float:
    """Microseconds per request and step of a loop that only writes into arrays: what this machine's Python costs.

    Clocks of different machines, and of one machine at different times, differ; ratios to this do not.
    """
    tokens, counts = list(range(running)), [0] * running
    started = time.thread_time()
    for _ in range(steps):
        for slot, token in enumerate(tokens):
            counts[slot] += 1
            tokens[slot] = token + 1
    return (time.thread_time() - started) / steps / running * 1e6


def _stream(rng: random.Random, number: int, stagger: bool) -> Stream:
    prompt = np.array([rng.randrange(2, 1000) for _ in range(rng.randint(100, 600))], np.int32)
    tokens = rng.randint(1 if stagger else 100, 600)
    root = root_hash()
    return Stream.open(
        f"{number:09d}",
        prompt,
        SamplingParams(max_tokens=tokens),
        seed=0,
        max_tokens=tokens,
        eos_ids=(0,),
        root=root,
        hashes=prompt_hashes(root, prompt, BLOCK),
        arrival=0.0,
        standing=Standing(ttft_target=3600.0, gap_target=3600.0),
    )
