"""Rehearsal: serves random requests on the real loop, to measure steps as they will be in service.

Steps in service take a different time than the same steps in the survey, which runs them one by one. On a CPU, the next
step is planned at the same time on the same cores (15 to 25% longer on two cores). But the steps of a lone sequence are
alike, so that all their data is in the processor's caches (up to 20% shorter). A GPU reaches its power limit. If
prompts come in bursts, it cools down between them and is faster at the beginning of each burst.
"""

import math
from collections import abc
from typing import NamedTuple

import numpy as np

from weft.core import Scheduler, StepRecord, chunked
from weft.engine.executor import Executor
from weft.engine.hashing import root_hash
from weft.engine.loop import Loop
from weft.engine.params import SamplingParams
from weft.engine.residuals import RunStep
from weft.engine.sequence import Sequence

PROMPT_SPREAD = 1.0  # standard deviation of the logarithm of a prompt's tokens
LEAST_PROMPT = 16  # tokens of a median prompt; a phase with fewer is left out
FIRST_PROMPTS_SHARE = 1 / 3  # share of a phase that its first prompts may take
SKIPPED_STEPS = 4  # first steps of a phase, left out because the device was idle before them


class LoadPhase(NamedTuple):
    """The load of one phase of the rehearsal."""

    sequences: int  # running at once
    tokens: int  # limit of a step
    prompt: int  # median tokens; fewer on a slow device, so that all sequences start soon
    output: int = 120  # tokens at most
    low: int | None = None  # a burst of new requests comes when only this many run; None: one as each ends


LONE_SEQUENCE = LoadPhase(1, 512, 200, output=24)
PHASES = (
    LoadPhase(3, 512, 800),
    LoadPhase(8, 1024, 800),
    LoadPhase(20, 768, 500),
    LoadPhase(48, 640, 300),
    LoadPhase(96, 512, 200),
    LoadPhase(160, 768, 120),
)
FULL_STEPS = tuple(  # larger steps, as with `chunked`, of several sizes
    LoadPhase(sequences, tokens, 600)
    for sequences, tokens in ((16, 2048), (32, 1152), (48, 1664), (64, 1408), (96, 1920))
)
BURSTS = tuple(  # some hundred milliseconds of decodes, then as long of prompts
    LoadPhase(sequences, tokens, 600, output=60, low=sequences // 3)
    for sequences, tokens in ((16, 2048), (24, 768), (48, 2048))
)


def rehearse(
    executor: Executor,
    *,
    max_num_seqs: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    speed: float,
    phases: abc.Sequence[LoadPhase],
    seconds: float,
) -> list[RunStep]:
    """Serves for about `seconds`, divided among the phases, and returns the steps.

    The executor must be idle, and is idle afterwards. `speed` is its approximate number of prefill tokens per second.
    """
    random = np.random.default_rng(2)
    found: list[RunStep] = []
    # Tokens of all first prompts of a phase.
    tokens = speed * FIRST_PROMPTS_SHARE * seconds / len(phases) / np.exp(PROMPT_SPREAD**2 / 2)
    phases = [phase._replace(prompt=min(phase.prompt, int(tokens / phase.sequences))) for phase in phases]
    phases = [phase for phase in phases if phase.sequences <= max_num_seqs and phase.prompt >= LEAST_PROMPT]
    phases = phases or [LoadPhase(1, max_num_batched_tokens, LEAST_PROMPT)]
    for phase in phases:
        records: list[StepRecord] = []
        scheduler = Scheduler(
            policy=chunked(min(phase.tokens, max_num_batched_tokens)),
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=False,
            wave=executor.facts.wave,
        )
        loop = Loop(scheduler, executor, on_record=records.append)
        num_added = 0
        while not records or records[-1].finished - records[0].started < seconds / len(phases):
            is_low = phase.low is None or len(loop.sequences) <= phase.low
            while is_low and len(loop.sequences) < phase.sequences:
                loop.add(_sequence(num_added, phase, max_model_len, executor.facts.vocab_size, random))
                num_added += 1
            loop.step()
        for sequence in list(loop.sequences.values()):
            loop.abort(sequence)
        loop.discard_in_flight()
        before = -math.inf
        for record in records[SKIPPED_STEPS:]:
            found.append(RunStep(record.shape, record.finished - record.started, max(0.0, record.started - before)))
            before = record.finished
    return found


def _sequence(
    number: int, phase: LoadPhase, max_model_len: int, vocab_size: int, random: np.random.Generator
) -> Sequence:
    output = int(random.integers(1, 1 + min(phase.output, max(1, max_model_len // 4))))
    length = int(random.lognormal(np.log(phase.prompt), PROMPT_SPREAD))
    prompt = random.integers(vocab_size, size=max(1, min(length, max_model_len - output)), dtype=np.int32)
    return Sequence.create(
        f"{number:09d}",
        prompt,
        SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True),
        seed=0,
        max_tokens=output,
        eos_ids=(),
        root=root_hash(),
        hashes=[],
        arrival=0.0,
    )
