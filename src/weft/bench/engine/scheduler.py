"""Cost of the scheduler: plan, commit and all other work of the loop in a step, with a device that takes no time."""

import random
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from weft.core import CostModel, Outcome, Policy, Request, Scheduler, Source, chunked, slo
from weft.engine.garbage_collection import GarbageCollection
from weft.engine.hashing import prompt_hashes, root_hash
from weft.engine.loop import Loop
from weft.engine.params import SamplingParams
from weft.engine.sequence import SchedulingParams, Sequence
from weft.engine.simulated import SimulatedExecutor, VirtualClock
from weft.sim.profiles import load_profile

BLOCK_SIZE = 16
DEFAULT_STEPS = 2000
PROFILE = load_profile("h200-llama-3-8b")


class Cost(NamedTuple):
    """CPU time of the scheduler and the loop, in microseconds."""

    policy: str
    running: int
    us_per_step: float
    us_per_request: float


class Burst(NamedTuple):
    """New requests that arrive at once next to running sequences, in virtual time."""

    newcomers: int
    running: int
    longest_plan_ms: float  # CPU time, while the new requests are screened
    screened_s: float  # virtual time until all are screened
    refused: int


def measure(
    running: int,
    policy: str = "chunked",
    steps: int = DEFAULT_STEPS,
    progress: Callable[[int], None] = lambda done: None,
) -> Cost:
    """Mean over steps with `running` requests of staggered lengths. A request that finishes is replaced by a new one.

    CPU time is measured, so that neither the progress bar nor other processes count. Prefix caching is on, every step
    writes a StepRecord, and every request gets its output. Creating new requests (prompts and hashes) is not counted;
    admitting and prefilling them is.
    """
    rng = random.Random(0)
    records: list[object] = []
    scheduler = Scheduler(
        policy=_policy(policy, max(8192, 2 * running)),
        num_blocks=80 * running,
        block_size=BLOCK_SIZE,
        max_num_seqs=running,
        wave=PROFILE.coefficients.wave,
    )
    loop = Loop(scheduler, SimulatedExecutor(VirtualClock()), clock=lambda: 0.0, on_record=records.append)
    numbers = iter(range(10**9))
    for _ in range(running):
        loop.add(_sequence(rng, next(numbers), stagger=True))
    while scheduler.num_waiting:
        loop.step()
    spent = 0.0
    for step in range(steps):
        started = time.thread_time()
        events = loop.step()
        spent += time.thread_time() - started
        for event in events:
            if event.finish_reason is not None:
                loop.add(_sequence(rng, next(numbers), stagger=False))
        progress(step + 1)
    return Cost(policy, running, spent / steps * 1e6, spent / steps / running * 1e6)


def measure_burst(newcomers: int = 1000, running: int = 256) -> Burst:
    """The effect of a burst on planning under `slo`, on the profile of an H200. The targets are gaps of 25 ms and a
    TTFT of 1 s, so that most of the new requests are refused.

    A first burst, which is not counted, is the warm-up. Garbage collection is limited as in a server.
    """
    garbage_collection = GarbageCollection()
    scheduler = Scheduler(
        policy=_policy("slo", PROFILE.max_num_batched_tokens),
        num_blocks=PROFILE.kv_tokens // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_seqs=PROFILE.max_num_seqs,
        wave=PROFILE.coefficients.wave,
    )
    clock = _Clock(scheduler)
    for number in range(running):
        scheduler.add(_request(f"running {number:04d}", 0.0, output=50_000, ttft=3600.0))
    while scheduler.num_waiting:
        clock.step()
    garbage_collection.freeze()
    try:
        for name in ("first", "second"):
            clock.longest, began, refused = 0.0, clock.now, clock.refused
            for number in range(newcomers):
                scheduler.add(_request(f"{name} {number:04d}", began, output=200, ttft=1.0))
            clock.step()
            while scheduler.num_unscreened:
                clock.step()
            screened = clock.now - began
            longest, refused = clock.longest, clock.refused - refused
            while len(scheduler.running) > running or scheduler.num_waiting:
                clock.step()
    finally:
        garbage_collection.thaw()
    return Burst(newcomers, running, longest * 1e3, screened, refused)


class _Clock:
    """A virtual clock: steps take their predicted time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.longest = 0.0  # CPU seconds of the longest plan
        self.refused = 0  # requests

    def step(self) -> None:
        started = time.thread_time()
        plan = self.scheduler.plan(self.now)
        self.longest = max(self.longest, time.thread_time() - started)
        self.refused += len(plan.refused)
        if plan.batch is not None:
            step = self.scheduler.steps_in_flight[-1]
            ended = self.now + (step.predicted or 0.0)
            done = [(step.requests[row], "length") for row in np.flatnonzero(plan.may_be_last).tolist()]
            self.scheduler.commit(plan.batch, Outcome(finished=done), self.now, ended)
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


def bare_loop(running: int, steps: int = DEFAULT_STEPS) -> float:
    """Microseconds per request and step of a loop that only writes into lists: the speed of Python on this machine.

    Speeds differ between machines, and over time on one machine. Ratios to this value do not.
    """
    tokens, counts = list(range(running)), [0] * running
    started = time.thread_time()
    for _ in range(steps):
        for slot, token in enumerate(tokens):
            counts[slot] += 1
            tokens[slot] = token + 1
    return (time.thread_time() - started) / steps / running * 1e6


def _sequence(rng: random.Random, number: int, stagger: bool) -> Sequence:
    prompt = np.array([rng.randrange(2, 1000) for _ in range(rng.randint(100, 600))], np.int32)
    tokens = rng.randint(1 if stagger else 100, 600)
    root = root_hash()
    return Sequence.create(
        f"{number:09d}",
        prompt,
        SamplingParams(max_tokens=tokens),
        seed=0,
        max_tokens=tokens,
        eos_ids=(0,),
        root=root,
        hashes=prompt_hashes(root, prompt, BLOCK_SIZE),
        arrival=0.0,
        scheduling=SchedulingParams(ttft_target=3600.0, gap_target=3600.0),
    )
