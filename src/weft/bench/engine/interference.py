"""Interference: the effect of other requests' long prompts on streams that decode, on a real or virtual engine."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import Policy, StepRecord, chunked, monolithic
from weft.engine.engine import Engine
from weft.engine.params import SamplingParams
from weft.engine.sequence import Sequence
from weft.errors import EngineError

POLICIES = ("monolithic", "chunked", "slo")
TARGET_STEPS = 3.0  # default gap target, in decode-only steps
CHUNK_TOKENS = 2048  # token budget per step of monolithic and chunked: the default of other engines
QUIET_STEPS = 100  # decode-only steps before the long prompts come


@dataclass(frozen=True)
class Scenario:
    """Streams that decode, and the long prompts that arrive meanwhile."""

    streams: int = 32
    stream_prompt: int = 512  # tokens
    prompts: int = 2
    prompt_tokens: int = 3000
    every: float = 0.0  # seconds from one long prompt to the next


# The scenario of published figures of other engines on one GPU.
GPU_SCENARIO = Scenario(stream_prompt=256, prompts=4, prompt_tokens=16_000, every=0.5)


@dataclass(frozen=True)
class Interference:
    """Results of one run. Times are seconds; a gap is the time between two tokens of a stream."""

    policy: str
    target: float  # gap target
    quiet: NDArray[np.float64]  # gaps before the long prompts
    gaps: NDArray[np.float64]  # gaps during the prefill of the long prompts
    times: NDArray[np.float64]  # when `gaps` ended, since the first long prompt was due
    steps: int  # steps with a slice of a long prompt
    prefill: float  # from the first long prompt until the last one had its first token
    ttfts: list[float]  # of the long prompts, from when each was due

    @property
    def p999(self) -> float:
        return float(np.percentile(self.gaps, 99.9))

    @property
    def noise(self) -> float:
        """Noise of the machine: the 99.9th percentile of the quiet gaps minus their median."""
        return float(np.percentile(self.quiet, 99.9) - np.median(self.quiet))

    def within(self, factor: float) -> float:
        """The p99.9 gap divided by (`factor` times the target + the machine's noise). At most 1: within the limit."""
        return self.p999 / (factor * self.target + self.noise)


def measure(
    engine: Engine,
    policy: str,
    scenario: Scenario,
    *,
    target: float | None = None,
    seed: int = 0,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Interference:
    """Lets streams decode alone, then adds long prompts and measures until their prefill is done.

    `target` is in seconds. Its default is three times the decode-only step, which is then measured first. `progress`
    receives the prefilled tokens of the long prompts.
    """
    scheduler = engine.loop.scheduler
    own, listener, calibrated_targets = scheduler.policy, engine.loop.on_record, engine.calibrated_targets
    scheduler.policy = _policy(policy, engine)
    scene = _Scene(engine, scenario, np.random.default_rng(seed + 1))
    try:
        if target is None:
            scene.open_streams()
            target = TARGET_STEPS * float(np.median(scene.quiet_gaps()))
            scene.clear()
        if policy == "slo" and calibrated_targets is not None:
            engine.calibrated_targets = replace(
                calibrated_targets, targets=replace(calibrated_targets.targets, gap=target)
            )
        scene.open_streams()
        quiet = scene.quiet_gaps()
        measured = scene.gaps_during_prefill(progress)
        return Interference(
            policy, target, quiet, measured.gaps, measured.times, scene.steps, measured.prefill, measured.ttfts
        )
    finally:
        scene.clear()
        engine.loop.on_record = listener
        engine.calibrated_targets = calibrated_targets
        scheduler.policy = own


class _PrefillGaps(NamedTuple):
    """Results from the prefill of the long prompts."""

    gaps: NDArray[np.float64]
    times: NDArray[np.float64]
    prefill: float
    ttfts: list[float]


class _Scene:
    """The decoding streams, and the time of the last token of each."""

    def __init__(self, engine: Engine, scenario: Scenario, random: np.random.Generator) -> None:
        self.engine, self.loop, self.scenario, self.random = engine, engine.loop, scenario, random
        # The same prompts in every run, so that they are in the prefix cache.
        same = np.random.default_rng(0)
        self.prompts = same.integers(0, engine.vocab_size, (scenario.streams, scenario.stream_prompt)).tolist()
        self.last: dict[Sequence, float] = {}
        self.steps = 0
        self.prefill_tokens = 0

    def open_streams(self) -> None:
        for prompt in self.prompts:
            room = self.engine.max_model_len - self.scenario.stream_prompt
            stream = self._open(prompt, room)
            self.last[stream] = float("nan")
        while any(np.isnan(time) for time in self.last.values()):
            self._step()

    def quiet_gaps(self) -> NDArray[np.float64]:
        gaps = [gap for _ in range(QUIET_STEPS) for gap, _ in self._step()]
        return np.array(gaps)

    def gaps_during_prefill(self, progress: Callable[[int], None]) -> _PrefillGaps:
        scenario, self.loop.on_record = self.scenario, self._note
        words = self.random.integers(0, self.engine.vocab_size, (scenario.prompts, scenario.prompt_tokens)).tolist()
        began = self.loop.clock()
        prompts: list[Sequence] = []
        found: list[tuple[float, float]] = []
        while len(prompts) < len(words) or not all(stream.request.finish_reason for stream in prompts):
            while len(prompts) < len(words) and self.loop.clock() >= (due := began + len(prompts) * scenario.every):
                prompts.append(self._open(words[len(prompts)], 1))
                prompts[-1].request.arrival = due
            found += self._step()
            progress(self.prefill_tokens)
        read = self.loop.clock()
        while min(self.last.values()) <= read and self.loop.has_work:  # the gap that spans the end counts too
            found += self._step()
        wrong = [stream.request.finish_reason for stream in prompts if stream.request.finish_reason != "length"]
        if wrong or not all(stream.request.finish_reason is None for stream in self.last):
            raise EngineError("a stream ended before the long prompts were read: choose shorter prompts")
        gaps, ends = np.array(found).T
        firsts = [(stream.request.first_token or np.inf) - stream.request.arrival for stream in prompts]
        return _PrefillGaps(gaps, ends - began, read - began, firsts)

    def clear(self) -> None:
        for stream in list(self.loop.sequences.values()):
            self.loop.abort(stream)
        self.loop.discard_in_flight()
        self.last.clear()

    def _open(self, prompt: list[int], max_tokens: int) -> Sequence:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        (stream,) = self.engine.create_sequences(prompt, params)
        self.loop.add(stream)
        return stream

    def _step(self) -> list[tuple[float, float]]:
        """Runs one step of the loop. Returns (gap, time) of each token of the decoding streams."""
        events = self.loop.step()
        now = self.loop.clock()
        gaps = []
        for event in events:
            if event.sequence in self.last:
                if not np.isnan(self.last[event.sequence]):
                    gaps.append((now - self.last[event.sequence], now))
                self.last[event.sequence] = now
        return gaps

    def _note(self, record: StepRecord) -> None:
        self.steps += record.prefill_tokens > 0
        self.prefill_tokens += record.prefill_tokens


def _policy(name: str, engine: Engine) -> Policy:
    """The policy with this name. slo is the engine's current policy."""
    own = engine.loop.scheduler.policy
    if name == "slo":
        return own
    return monolithic(CHUNK_TOKENS) if name == "monolithic" else chunked(CHUNK_TOKENS)
