"""Latency of an otherwise idle engine: decode steps by batch size, TTFT by prompt length, and the device's limits."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.bench.engine.limits import Ceilings, decode_work, prefill_work
from weft.bench.engine.shapes import WarmEngine, clear
from weft.core import StepRecord
from weft.engine.engine import Engine
from weft.engine.params import SamplingParams
from weft.engine.sequence import Sequence
from weft.errors import EngineError

SAMPLING = SamplingParams(temperature=0.6)
DECODE_PROMPT_TOKENS = 128
WARM_UP_STEPS = 8  # decode steps that are not counted
REPEATS = 5  # measurements of a prefill; the median counts


class DecodeLatency(NamedTuple):
    """Time of a decode step: the wall time between two commits."""

    batch: int
    ms: float  # median
    p99_ms: float
    floor_ms: float  # the least time that the device's limits allow
    fraction: float  # floor / median


class PrefillLatency(NamedTuple):
    """Time of one prompt from its arrival to its first token."""

    tokens: int
    ms: float  # median
    floor_ms: float
    fraction: float


def decode_obstacle(engine: Engine, batch: int, steps: int) -> str | None:
    """Why this engine cannot decode `batch` requests at once; None if it can."""
    scheduler = engine.loop.scheduler
    # The last term is a margin: requests that finish their prefill early decode while other prompts are in prefill.
    length = DECODE_PROMPT_TOKENS + WARM_UP_STEPS + steps + min(batch, DECODE_PROMPT_TOKENS)
    room = scheduler.num_blocks // -(-length // scheduler.block_size)
    if length > engine.max_model_len:
        return f"it takes a context of {length} tokens, and the engine's is {engine.max_model_len}"
    if batch > scheduler.max_num_seqs:
        return f"the engine runs at most {scheduler.max_num_seqs} requests at once"
    return f"the KV cache holds {room} requests of {length} tokens" if batch > room else None


def prefill_obstacle(engine: Engine, tokens: int) -> str | None:
    """Why this engine cannot prefill a prompt of `tokens` tokens; None if it can."""
    if tokens >= engine.max_model_len:
        return f"the context is {engine.max_model_len} tokens, one of them for the answer"
    return None


def measure_decode(
    warm: WarmEngine, ceilings: Ceilings, batch: int, steps: int, sampling: SamplingParams = SAMPLING
) -> DecodeLatency:
    """Median over `steps` decode-only steps with `batch` requests."""
    engine = warm.engine
    try:
        sequences = open_decodes(engine, batch, sampling)
        gaps = _gaps(engine, batch, WARM_UP_STEPS + steps)[WARM_UP_STEPS:]
        context = DECODE_PROMPT_TOKENS + float(np.mean([len(sequence.output) for sequence in sequences])) - steps / 2
    finally:
        clear(engine)
    floor = decode_work(warm.config, warm.dtype.itemsize, batch, context).floor(ceilings)
    median, p99 = np.percentile(gaps, (50, 99)).tolist()
    return DecodeLatency(batch, median * 1000, p99 * 1000, floor * 1000, floor / median)


def open_decodes(engine: Engine, batch: int, sampling: SamplingParams = SAMPLING) -> list[Sequence]:
    """Adds sequences with short prompts, not yet prefilled, that decode without a token limit."""
    return [_add(engine, _prompt(engine, DECODE_PROMPT_TOKENS, seed), None, sampling) for seed in range(batch)]


def measure_prefill(
    warm: WarmEngine, ceilings: Ceilings, tokens: int, chunk: int, sampling: SamplingParams = SAMPLING
) -> PrefillLatency:
    """Median over REPEATS prompts of `tokens` tokens, after one warm-up prompt."""
    found = [_first_token(warm.engine, tokens, seed, sampling) for seed in range(1 + REPEATS)]
    median = float(np.median(found[1:]))
    floor = prefill_work(warm.config, warm.dtype.itemsize, tokens, chunk).floor(ceilings)
    return PrefillLatency(tokens, median * 1000, floor * 1000, floor / median)


def _gaps(engine: Engine, batch: int, count: int) -> NDArray[np.float64]:
    """Seconds between commits of steps with `batch` decodes and no prefill."""
    loop = engine.loop
    gaps: list[float] = []
    last: float | None = None

    def note(record: StepRecord) -> None:
        nonlocal last
        now = loop.clock()
        if record.preemptions:
            raise EngineError(f"the KV cache is too small for {batch} requests at once: choose a smaller batch")
        if record.decode_tokens != batch or record.prefill_tokens:
            last = None
            return
        if last is not None:
            gaps.append(now - last)
        last = now

    listener, loop.on_record = loop.on_record, note
    try:
        while len(gaps) < count:
            if not loop.has_work:
                raise EngineError(f"{batch} requests ended after {len(gaps)} decode steps of {count}")
            loop.step()
    finally:
        loop.on_record = listener
    return np.array(gaps)


def _first_token(engine: Engine, tokens: int, seed: int, sampling: SamplingParams) -> float:
    """Seconds from a prompt's arrival, including its validation, to its first token."""
    loop = engine.loop
    prompt = _prompt(engine, tokens, seed)
    began = loop.clock()
    sequence = _add(engine, prompt, 1, sampling)
    while loop.has_work and not sequence.output:
        loop.step()
    seconds = loop.clock() - began
    if not sequence.output:
        raise EngineError(f"a prompt of {tokens} tokens ended with {sequence.request.finish_reason} before its token")
    return seconds


def _add(engine: Engine, prompt: list[int], max_tokens: int | None, sampling: SamplingParams) -> Sequence:
    (sequence,) = engine.create_sequences(prompt, replace(sampling, max_tokens=max_tokens, ignore_eos=True))
    engine.loop.add(sequence)
    return sequence


def _prompt(engine: Engine, tokens: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, engine.vocab_size, tokens).tolist()
    return found
