"""What the scheduler costs: plan, commit and all that the loop does for a step, with a device that takes no time."""

import random
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from weft.core import Scheduler, StepPlan, chunked
from weft.engine.executor import StepInputs, StepMasks, StepResult
from weft.engine.hashing import prompt_hashes, root_hash
from weft.engine.loop import Loop
from weft.engine.params import SamplingParams
from weft.engine.stream import Stream

BLOCK = 16
STEPS = 2000


class Cost(NamedTuple):
    running: int
    us_per_step: float
    us_per_request: float


class _Instant:
    """An executor whose steps are over before they begin."""

    class Pending(NamedTuple):
        outcome: StepResult

        def result(self) -> StepResult:
            return self.outcome

    def submit(self, plan: StepPlan, inputs: StepInputs, masks: StepMasks | None = None) -> Pending:
        return self.Pending(StepResult([1] * int(plan.samples.sum()), 0.0, 0.0))

    def close(self) -> None:
        pass


def measure(running: int, steps: int = STEPS, progress: Callable[[int], None] = lambda done: None) -> Cost:
    """Mean over steps with `running` requests of staggered lengths; one that finishes is replaced by an arrival.

    It is processor time, so that neither the progress bar nor what else the machine does is counted.
    Prefix caching is on, every step leaves its StepRecord, and every request gets its output. Making the arrivals
    (their prompts and hashes) is not counted; admitting and prefilling them is.
    """
    rng = random.Random(0)
    records: list[object] = []
    scheduler = Scheduler(
        policy=chunked(max(8192, 2 * running)), num_blocks=80 * running, block_size=BLOCK, max_num_seqs=running
    )
    loop = Loop(scheduler, _Instant(), on_record=records.append)
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
    return Cost(running, spent / steps * 1e6, spent / steps / running * 1e6)


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
        arrival=float(number),
    )
