"""Calibration: runs real steps on the real executor for a few seconds and fits the cost model's coefficients to them.

The survey has three phases. It grows steps in every direction until they cost too much. It draws random mixes within
that range. It repeats all of them in random order until the time is over. Then requests are served for a while (see
rehearsal.py), and their steps count as much as the survey's. The error of the cost model is estimated on steps that
were held out from the fit.
"""

import enum
import hashlib
import json
import math
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import BlockUpdates, Coefficients, StepBatch, StepShape
from weft.core.host import WAKING
from weft.core.shape import step_shape
from weft.engine.cost_fit import fit
from weft.engine.executor import Executor, PendingStep, SlotSetup, StepInputs, StepResult
from weft.engine.params import SamplingParams
from weft.engine.rehearsal import ACTS, BURSTS, FULL, LONE, rehearse
from weft.engine.residuals import Residuals, RunStep, fit_residuals, fit_sizes
from weft.errors import EngineError

FORMAT = 10  # version of the file; another version is measured again
STEP_SHARE = 0.1  # of the measuring time: intended limit of one step
MIX_SHARE = 0.02  # the same for one random mix: a slow device must also be measured with many mixes
CLIMB_SHARES = (0.18, 0.3, 0.36, 0.45)  # of the measuring time: when each ladder must be finished
EXPLORE_SHARE = 0.65  # of the measuring time: end of ladders and random mixes; the rest is repetition
MOST_SHAPES = 96  # different mixes; more would leave a slow device no time to repeat them
FEWEST_SHAPES = 16  # fewer cannot determine ten coefficients and their error
GOOD = 0.06  # largest median error of a calibration that is called good
NOISY = 0.15  # median error or spread above this: the machine was busy during the measurement
FOLDS = 4  # of the cross-validation: each shape is held out once, with a quarter of all shapes
LADDER_CONTEXT = 256  # tokens of context of each decode of a growing batch
LADDER_SLICE = 16  # tokens of a slice after a growing context
FEWEST = 8  # rehearsed steps of a kind; with fewer, the median of all kinds is used
REHEARSAL = 1.0  # time of the rehearsal, as a share of the measuring time, added to it
FULL_REHEARSAL = 1.6  # the same, if very full steps are rehearsed too
BURST_REHEARSAL = 0.8  # the same, for bursts
PAUSES = 5  # steps measured after an idle time, and as many without
PAUSE = 0.1  # seconds of idle time
NO_COST = Coefficients(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
HEATING = 0.03  # seconds: longest step that keeps the device busy between two measured steps


@dataclass(frozen=True)
class Calibration:
    """Coefficients, and their error on held-out steps. (The factors of sizes are fitted to all rehearsed steps.)"""

    coefficients: Coefficients
    mean: float  # of log(measured / predicted)
    spread: float  # standard deviation of the same, with outliers clipped: the cost model's first margin
    error_p50: float  # of |measured / predicted - 1|
    error_p99: float
    steps: int  # measured
    largest: int  # tokens of the largest step measured
    device: str  # name
    submit: float = 0.0  # seconds that the host takes to submit a step of decodes
    submit_prefill: float = 0.0  # the same for a step with prefill slices
    wake: float = 0.0  # extra share of time that steps take after an idle time; see HostCost
    residuals: Residuals | None = None  # how steps in service differ from the prediction; None: not measured

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was too busy during the measurement for a reliable result."""
        return self.error > NOISY

    @property
    def error(self) -> float:
        """The larger of spread and median error; a share."""
        return max(self.spread, self.error_p50)

    @property
    def quality(self) -> str:
        """A sentence about the quality, for people."""
        errors = f"steps are off by {self.error_p50:.1%} in the median and {self.error_p99:.1%} at the 99th percentile"
        if not self.is_noisy:
            return f"calibration is {'good' if self.error_p50 <= GOOD else 'fair'}: {errors}"
        return f"calibration is poor, the machine was busy: {errors}; it is measured anew at the next start"

    @property
    def decode_step(self) -> float:
        """Seconds of a step with one decode of 1,000 tokens of context."""
        return self.coefficients.predict(StepShape(tokens=1, decodes=1, context=1000))

    def prefill_speed(self, tokens: int) -> float:
        """Prefill tokens per second, in a step with the first `tokens` tokens of a prompt."""
        return tokens / max(self.coefficients.predict(self.coefficients.with_slice(StepShape(), 0, tokens)), 1e-9)


def calibrate(
    executor: Executor,
    *,
    max_num_seqs: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    seconds: float = 5.0,
    progress: Callable[[float], None] = lambda share: None,
) -> Calibration:
    """Measures single steps for about `seconds`, after a warm-up, then rehearses service for as long (if the executor
    prepares steps ahead, for 2.4 times as long). The executor must be idle, and its KV cache is overwritten.

    An executor that prepares a step while the previous step runs (`ahead`, a GPU) is kept busy all the time, as under
    load: the host's part of a step takes no time, and a device at its power limit is slower (an H200 by 5 to 9%).
    Its KV cache is filled before, so that each row can read a different context. (Shared blocks would come from the
    device's caches, which is not so in service.) `progress` is called with the share of `seconds` that has passed. On
    return nothing is in flight. Slots and block tables keep old entries; batches overwrite them when they assign them.
    """
    facts = executor.facts
    if facts.ahead:
        executor.fill()  # takes a GPU less than a second
    bounds = _Bounds(
        rows=min(max_num_seqs, max(1, num_blocks // 2)),
        blocks=num_blocks,
        block_size=block_size,
        length=max_model_len,
        tokens=max_num_batched_tokens,
    )
    rig = _Rig(executor, bounds, facts.vocab_size, facts.ahead, is_filled=facts.ahead)
    survey = _Survey(rig, facts.grain, facts.wave, seconds, progress)
    survey.explore()
    survey.repeat()
    wake = 0.0 if facts.ahead else survey.wake()  # with `ahead` the device is a GPU, and its clock is not the host's
    survey.rig.finish()
    perform = partial(
        rehearse,
        executor,
        max_num_seqs=min(max_num_seqs, bounds.rows),
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        speed=survey.prefill_speed(),
    )
    if not facts.ahead:
        return survey.conclude(facts.device, perform(acts=(LONE, *ACTS), seconds=REHEARSAL * seconds), wake)
    # Without the lone stream: a lightly used GPU is faster than one at its power limit, and the scheduler must expect
    # the latter. Residuals also use bursts, in which the GPU's clock rises and falls. A CPU gets no residuals: other
    # work disturbs its steps more.
    served = perform(acts=(*ACTS, *FULL), seconds=FULL_REHEARSAL * seconds)
    found = survey.conclude(facts.device, served, wake)
    bursts = perform(acts=BURSTS, seconds=BURST_REHEARSAL * seconds)
    return replace(found, residuals=fit_residuals(found.coefficients, [*served, *bursts]))


def calibration_file(
    path: Path,
    *,
    dtype: str,
    device: str,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> Path:
    """Path of the calibration of the model in `path`. Its name has a hash of everything that changes step times.

    The limits are part of the hash, because the cost of unmeasured steps is only a guess. `max_model_len` may depend on
    the memory that is free at the moment, so only its power of two counts.
    """
    import torch

    from weft import __version__

    config = (path / "config.json").read_bytes()
    key = [
        hashlib.sha256(config).hexdigest(),
        dtype.removeprefix("torch."),
        device,
        torch.__version__,
        torch.get_num_threads(),
        torch.backends.mkldnn.enabled,
        os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        __version__,
        _installed("triton"),
        _installed("flashinfer-python"),
        block_size,
        max_num_seqs,
        max_num_batched_tokens,
        max_model_len.bit_length(),
    ]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return Path(home) / "weft" / "calibration" / f"{_readable_name(path)}-{digest}.json"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def load_calibration(file: Path) -> Calibration | None:
    """Returns the saved calibration, or None if there is none that this version can read."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            return None
        coefficients = Coefficients(**data["coefficients"])
        residuals = None if data["residuals"] is None else Residuals(**data["residuals"])
        found = Calibration(**{**data, "coefficients": coefficients, "residuals": residuals})
        numbers = (found.mean, found.spread, found.error_p50, found.error_p99, found.steps, found.largest)
        good = all(math.isfinite(number) for number in numbers) and found.spread >= 0 and isinstance(found.device, str)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return found if good else None


def save_calibration(file: Path, calibration: Calibration) -> None:
    """Saves a calibration. Several processes may write at once: the last one wins, and no reader sees half a file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=file.stem, delete=False) as draft:
            json.dump({"format": FORMAT, **asdict(calibration)}, draft, indent=1)
        os.replace(draft.name, file)
    except OSError as error:
        raise EngineError(
            f"the calibration cannot be saved as {file}: {error.strerror}; point XDG_CACHE_HOME to a folder that weft "
            "may write to"
        ) from None


def _readable_name(path: Path) -> str:
    """The model's name for people: `org--name` for a download from the hub, else the directory's name."""
    parts = path.resolve().parts
    hub = [part.removeprefix("models--") for part in parts if part.startswith("models--")]
    return re.sub(r"[^\w.-]+", "-", hub[-1] if hub else parts[-1])[:80] or "model"


class _Bounds(NamedTuple):
    """Limits of a step."""

    rows: int
    blocks: int  # of the KV cache
    block_size: int
    length: int  # tokens of one row, with its context
    tokens: int

    @property
    def slice_tokens(self) -> int:
        """Tokens of the longest slice. Slices may not use the blocks that decodes write to."""
        return min(self.tokens, self.length, max(1, self.blocks - self.rows) * self.block_size)

    @property
    def context(self) -> int:
        """Tokens of the longest context, in whole blocks, that leaves room for one more token."""
        return (self.length - 1) // self.block_size * self.block_size

    def whole(self, tokens: float) -> int:
        """A context of about `tokens` tokens, in whole blocks."""
        return min(int(tokens) // self.block_size * self.block_size, self.context)

    def allow(self, mix: "_Mix") -> bool:
        ends = [context + 1 for context in mix.decodes] + [first + count for first, count in mix.slices]
        written = sum(-(-count // self.block_size) for _, count in mix.slices)
        return (
            0 < len(ends) <= self.rows
            and mix.tokens <= self.tokens
            and max(ends) <= self.length
            and written <= max(1, self.blocks - self.rows)
            and sum(-(-end // self.block_size) for end in ends) <= self.blocks
        )


class _Mix(NamedTuple):
    """The rows of a step. Contexts are whole blocks (not in the warm-up), so that no row writes to another's block."""

    decodes: tuple[int, ...] = ()  # tokens of context of each decode
    slices: tuple[tuple[int, int], ...] = ()  # tokens of context and tokens of the slice

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(count for _, count in self.slices)

    def shape(self, wave: int = 0) -> StepShape:
        return step_shape(np.array(self.decodes, np.int64), self.slices, wave)


class _Rig:
    """Runs mixes, one after the other. Tracks which blocks were written, so that a row reads no others.

    The values do not matter, but they must be numbers. So a row's context is any written blocks. Rows read different
    blocks as long as there are enough, because shared blocks would come from the device's caches.
    """

    def __init__(self, executor: Executor, bounds: _Bounds, vocab_size: int, ahead: bool, is_filled: bool) -> None:
        self.executor = executor
        self.bounds = bounds
        self.ahead = ahead
        self.now = 0.0  # end of the last step, in seconds on the executor's clock
        self.submits: tuple[list[float], list[float]] = ([], [])  # seconds per submit, of steps without and with slices
        self.heater = _Mix(slices=((0, 1),))  # runs between two measured steps to keep the device busy
        self.heating = 0.0  # seconds of the heater step
        self._in_flight: deque[PendingStep] = deque()
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)
        self._steps = 0
        self._homes = np.arange(bounds.rows)  # by slot: the block that its decodes write to
        self._others = np.arange(bounds.rows, bounds.blocks) if bounds.blocks > bounds.rows else self._homes
        self._next_write = self._next_read = 0
        # The known part of the executor's block tables. An entry is block + 1, or 0 if unknown.
        self._tables = np.zeros((bounds.rows, -(-bounds.length // bounds.block_size)), np.int64)
        self._written = np.zeros(bounds.blocks + 1, np.int64)  # by entry: tokens written, from the start of the block
        if is_filled:
            self._written[1:] = bounds.block_size
        # In service, a request's blocks are anywhere in the pool. (On an H200 the order makes no difference.)
        self._shuffled = 1 + self._random.permutation(bounds.blocks)
        self._readable = self._written_to_their_end()

    def warm_up(self) -> None:
        """Writes one block, in several steps if steps are shorter than a block, then decodes once."""
        setups = [_greedy(slot) for slot in range(self.bounds.rows)]
        end = min(self.bounds.block_size, self.bounds.length)
        for first in range(0, end, self.bounds.slice_tokens):
            self.run(_Mix(slices=((first, min(self.bounds.slice_tokens, end - first)),)), setups)
            setups = []
        self.run(_Mix(decodes=(0,)))

    def run(self, mix: _Mix, setups: Sequence[SlotSetup] = ()) -> float:
        """Runs a step and returns its seconds. With `ahead`, a heater step runs before it and another after it, while
        this mix and the next one are prepared."""
        self._submit(mix, setups)
        if self.ahead:
            if len(self._in_flight) > 1:
                self._take()  # the heater step before it
            self._submit(self.heater)
        result = self._take()
        return result.finished - result.started

    def alone(self, mix: _Mix) -> float:
        """Seconds of a step with no other step in flight."""
        self.finish()
        self._submit(mix)
        result = self._take()
        return result.finished - result.started

    def finish(self) -> None:
        """Waits for all steps in flight."""
        while self._in_flight:
            self._take()

    def _submit(self, mix: _Mix, setups: Sequence[SlotSetup] = ()) -> None:
        first = np.array([*mix.decodes, *(first for first, _ in mix.slices)], np.int64)
        count = np.array([*(1 for _ in mix.decodes), *(count for _, count in mix.slices)], np.int64)
        decodes = len(mix.decodes)
        updates = [self._place(slot, int(first[slot]), int(count[slot]), slot < decodes) for slot in range(len(first))]
        self._steps += 1
        batch = StepBatch(
            number=self._steps,
            slots=np.arange(len(first)),
            first=first,
            count=count,
            samples=np.ones(len(first), np.bool_),
            num_decodes=decodes,
            shape=mix.shape(),
            new_blocks=BlockUpdates(*np.concatenate(updates, axis=1)),
        )
        tokens = self._random.integers(self._vocab_size, size=int(count[decodes:].sum()), dtype=np.int32)
        started = time.perf_counter()
        self._in_flight.append(self.executor.submit(batch, StepInputs(tokens, list(setups))))
        self.submits[batch.shape.slices > 0].append(time.perf_counter() - started)
        self._readable = self._written_to_their_end()

    def _take(self) -> StepResult:
        result = self._in_flight.popleft().result()
        self.now = result.finished
        return result

    def _place(self, slot: int, first: int, count: int, decodes: bool) -> NDArray[np.int64]:
        """Assigns blocks to a row. Returns the new block table entries, as rows of slots, columns and blocks."""
        size, table = self.bounds.block_size, self._tables[slot]
        begin, end = first // size, -(-(first + count) // size)
        before = table[:end].copy()
        unreadable = np.flatnonzero(self._written[before[:begin]] < size)
        table[unreadable] = self._take_readable(len(unreadable))
        keeps = first % size > 0  # continues in a block that it began
        new = end - begin - keeps
        table[begin + keeps : end] = 1 + (self._homes[slot] if decodes else self._take_writable(new))
        entries = table[begin:end]
        filled = np.minimum(first + count - np.arange(begin, end) * size, size)
        self._written[entries] = np.maximum(self._written[entries], filled)
        columns = np.flatnonzero(table[:end] != before)
        return np.stack([np.full(len(columns), slot), columns, table[columns] - 1])

    def _written_to_their_end(self) -> NDArray[np.int64]:
        """Entries of full blocks, in the order in which contexts take them."""
        found: NDArray[np.int64] = self._shuffled[self._written[self._shuffled] == self.bounds.block_size]
        return found

    def _take_readable(self, count: int) -> NDArray[np.int64]:
        taken = (self._next_read + np.arange(count)) % max(1, len(self._readable))
        self._next_read += count
        return self._readable[taken]

    def _take_writable(self, count: int) -> NDArray[np.int64]:
        taken = (self._next_write + np.arange(count)) % len(self._others)
        self._next_write += count
        return self._others[taken]


def _greedy(slot: int) -> SlotSetup:
    nothing = np.empty(0, np.int32)
    return SlotSetup(slot, SamplingParams(temperature=0.0), 0, nothing, nothing, ())


class _Survey:
    """Chooses the mixes to measure. Owns the results: the seconds of every step, by mix."""

    def __init__(self, rig: _Rig, grain: int, wave: int, seconds: float, progress: Callable[[float], None]) -> None:
        self.rig = rig
        self.grain, self.wave = grain, wave
        self.seconds = seconds
        self.progress = progress
        self.found: dict[_Mix, list[float]] = {}
        self.median: dict[_Mix, float] = {}
        self._sizes: tuple[float, ...] = ()  # factors of steps by number of tokens, fitted at the end
        self._random = np.random.default_rng(1)
        rig.warm_up()
        self._started = rig.now

    @property
    def spent(self) -> float:
        return self.rig.now - self._started

    def explore(self) -> None:
        bounds = self.rig.bounds
        reach = [
            self._climb(*ladder, self.seconds * share)
            for ladder, share in zip(_ladders(bounds), CLIMB_SHARES, strict=True)
        ]
        ranges = _Ranges(bounds, *reach)
        while self.spent < self.seconds * EXPLORE_SHARE and len(self.found) < MOST_SHAPES:
            mix = self._draw(ranges)
            if mix is None:
                return  # every mix that this engine can run was measured
            self._measure(mix)
        if len(self.found) < FEWEST_SHAPES:
            raise EngineError(
                f"{self.seconds:g} seconds are too short: {len(self.found)} different steps were measured, and a "
                f"calibration needs {FEWEST_SHAPES}; give it more time (weft calibrate --seconds "
                f"{math.ceil(self.seconds * 4)})"
            )

    def repeat(self) -> None:
        """Repeats mixes in random order while time is left. Prefers mixes measured less often, and cheap ones."""
        until = self.seconds - self.rig.heating
        while mixes := [mix for mix, median in self.median.items() if self.spent + median <= until]:
            weights = np.array([self.median[mix] ** -0.5 * len(self.found[mix]) ** -3.0 for mix in mixes])
            self._measure(mixes[self._random.choice(len(mixes), p=weights / weights.sum())])

    def prefill_speed(self) -> float:
        """Prefill tokens per second of the largest slice that was measured alone."""
        alone = [
            (mix.tokens, seconds) for mix, seconds in self.median.items() if not mix.decodes and len(mix.slices) == 1
        ]
        tokens, seconds = max(alone)
        return tokens / seconds

    def wake(self) -> float:
        """Extra share of time of a step after an idle time. Measured on a step that ends before the device is awake."""
        alone = {mix: seconds for mix, seconds in self.median.items() if not mix.decodes and seconds <= WAKING / 2}
        mix = max(alone, key=alone.__getitem__, default=min(self.median, key=self.median.__getitem__))
        busy = [self.rig.alone(mix) for _ in range(1 + PAUSES)][1:]
        paused = []
        for _ in range(PAUSES):
            time.sleep(PAUSE)
            paused.append(self.rig.alone(mix))
        return max(0.0, float(np.median(paused)) / max(float(np.median(busy)), 1e-9) - 1)

    def conclude(self, device: str, served: Sequence[RunStep], wake: float) -> Calibration:
        """Fits the coefficients to the survey and to as many of the `served` steps as there are different mixes.

        Before the fit, survey times are scaled to service: by the median ratio of served to predicted time, for each of
        lone slices, lone decodes and fuller steps."""
        shapes = [mix.shape(self.wave) for mix in self.found]
        alone = self._fit(shapes, list(self.median.values()))
        ratios: dict[StepKind, list[float]] = {kind: [] for kind in StepKind}
        for shape, seconds, _ in served:
            ratios[StepKind.of(shape)].append(seconds / alone.predict(shape))
        usual = [ratio for found in ratios.values() for ratio in found] or [1.0]
        longer = {kind: float(np.median(found if len(found) >= FEWEST else usual)) for kind, found in ratios.items()}
        factors = [longer[StepKind.of(shape)] for shape in shapes]
        chosen = [served[i] for i in self._random.permutation(len(served))[: len(shapes)].tolist()]
        shapes += [step.shape for step in chosen]
        medians = [factor * seconds for factor, seconds in zip(factors, self.median.values(), strict=True)]
        medians += [step.seconds for step in chosen]
        measured = [[factor * one for one in found] for factor, found in zip(factors, self.found.values(), strict=True)]
        measured += [[step.seconds] for step in chosen]
        # Only a GPU has waves, and sizes that are not on a line. Their fit uses all rehearsed steps, in order.
        self._sizes = fit_sizes(self._fit(shapes, medians), served) if self.wave and self.grain > 1 else ()
        errors = self._held_out_errors(shapes, medians, measured)
        mean, spread = _without_hiccups(errors)
        relative = np.abs(np.expm1(errors))
        return Calibration(
            coefficients=self._fit(shapes, medians),
            mean=mean,
            spread=spread,
            error_p50=float(np.quantile(relative, 0.5)),
            error_p99=float(np.quantile(relative, 0.99)),
            steps=sum(map(len, measured)),
            largest=max(shape.tokens for shape in shapes),
            device=device,
            submit=float(np.median(self.rig.submits[0] or [0.0])),
            submit_prefill=float(np.median(self.rig.submits[1] or [0.0])),
            wake=wake,
        )

    def _fit(self, shapes: list[StepShape], medians: list[float]) -> Coefficients:
        factors = replace(NO_COST, grain=self.grain, sizes=self._sizes)
        plain = [seconds / factors.size_factor(shape) for shape, seconds in zip(shapes, medians, strict=True)]
        return replace(fit(shapes, plain, self.grain, self.wave), sizes=self._sizes)

    def _held_out_errors(
        self, shapes: list[StepShape], medians: list[float], measured: list[list[float]]
    ) -> NDArray[np.float64]:
        """log(measured / predicted) of every step, predicted by a fit to the shapes of the other folds only."""
        fold = self._random.permutation(len(shapes)) % FOLDS
        errors: list[float] = []
        for held_out in range(min(FOLDS, len(shapes))):
            known = np.flatnonzero(fold != held_out).tolist()
            coefficients = self._fit([shapes[i] for i in known], [medians[i] for i in known])
            for i in np.flatnonzero(fold == held_out).tolist():
                predicted = max(coefficients.predict(shapes[i]), 1e-9)
                errors += [math.log(seconds / predicted) for seconds in measured[i]]
        return np.array(errors)

    def _climb(self, start: int, limit: int, make: Callable[[int], _Mix], until: float) -> int:
        """Measures steps that grow from `start` to `limit` while they are cheap enough. Returns the last size."""
        size = reached = start
        while size <= limit and self.rig.bounds.allow(make(size)) and self.spent < until:
            reached, seconds = size, self._measure(make(size))
            room = min(self.seconds * STEP_SHARE, until - self.spent)
            if size == limit or 2 * seconds > room:
                break
            size = min(limit, size * (4 if 4 * seconds <= room else 2))
        return reached

    def _draw(self, ranges: "_Ranges") -> _Mix | None:
        """A new random mix with an expected time below the limit, else the cheapest of many, else None."""
        coefficients = self._fit([mix.shape(self.wave) for mix in self.median], list(self.median.values()))
        most = self.seconds * MIX_SHARE  # limit of the expected time; the real time may be higher
        cheapest: tuple[float, _Mix] | None = None
        for _ in range(200):
            mix = ranges.draw(self._random)
            if not self.rig.bounds.allow(mix) or mix in self.found:
                continue
            expected = coefficients.predict(mix.shape(self.wave))
            if cheapest is None or expected < cheapest[0]:
                cheapest = expected, mix
            if expected <= most:
                return mix
        return None if cheapest is None else cheapest[1]

    def _measure(self, mix: _Mix) -> float:
        seconds = max(self.rig.run(mix), 1e-9)
        found = self.found.setdefault(mix, [])
        found.append(seconds)
        self.median[mix] = sorted(found)[(len(found) - 1) // 2]  # of two the lower: outliers are always slower
        if self.rig.ahead and not mix.decodes and self.rig.heating < seconds <= HEATING:
            self.rig.heater, self.rig.heating = mix, seconds
        self.progress(min(1.0, self.spent / self.seconds))
        return seconds


class StepKind(enum.Enum):
    """Kind of a step. It decides how much longer a step takes in service than in the survey."""

    LONE_SLICE = 0
    LONE_DECODE = 1
    FULLER = 2

    @classmethod
    def of(cls, shape: StepShape) -> "StepKind":
        if shape.decodes + shape.slices > 1:
            return cls.FULLER
        return cls.LONE_SLICE if shape.slices else cls.LONE_DECODE


def _without_hiccups(errors: NDArray[np.float64]) -> tuple[float, float]:
    """Robust mean and standard deviation: outliers are clipped to three deviations from the median."""
    middle = float(np.median(errors))
    spread = 1.4826 * float(np.median(np.abs(errors - middle)))
    kept = np.clip(errors, middle - 3 * spread, middle + 3 * spread)
    return float(kept.mean()), float(kept.std())


def _ladders(bounds: _Bounds) -> list[tuple[int, int, Callable[[int], _Mix]]]:
    """Directions to grow in, in the order of _Ranges: first size, last size, and the mix of a size."""
    behind = bounds.whole(LADDER_CONTEXT)
    short = min(LADDER_SLICE, bounds.slice_tokens)
    return [
        (1, bounds.slice_tokens, lambda size: _Mix(slices=((0, size),))),
        (1, bounds.rows, lambda size: _Mix(decodes=(behind,) * size)),
        (bounds.block_size, bounds.context, lambda size: _Mix(decodes=(bounds.whole(size),))),
        (bounds.block_size, bounds.context, lambda size: _Mix(slices=((bounds.whole(size), short),))),
    ]


class _Ranges(NamedTuple):
    """Ranges of random mixes: contexts uniform on a logarithmic scale, rows and tokens like on a busy server."""

    bounds: _Bounds
    slice_tokens: int
    decodes: int
    context: int  # of decodes
    slice_context: int

    def draw(self, random: np.random.Generator) -> _Mix:
        kind = random.integers(8)  # 0 to 2: decodes, 3: one slice, 4: several slices, 5 to 7: decodes and slices
        decodes: tuple[int, ...] = ()
        slices: tuple[tuple[int, int], ...] = ()
        if kind not in (3, 4):
            typical = _log_uniform(random, 32, self.context)
            spread = random.uniform(0.5, 1.5, _mostly_large(random, self.decodes))
            decodes = tuple(self.bounds.whole(share * typical) for share in spread)
        if kind > 2:
            number = 1 + (_log_uniform(random, 1, 8) if kind == 4 else int(kind == 7))
            behind = [self.bounds.whole(_log_uniform(random, 8, self.slice_context)) for _ in range(number)]
            slices = tuple((first, _mostly_large(random, self.slice_tokens)) for first in behind)
        return _Mix(decodes, slices)


def _mostly_large(random: np.random.Generator, high: int) -> int:
    """A random whole number from 1 to high; half of the draws are above a quarter of high."""
    return 1 + int((high - 1) * random.uniform() ** 2)


def _log_uniform(random: np.random.Generator, low: int, high: int) -> int:
    """A random whole number from min(low, high) to high, uniform on a logarithmic scale."""
    low = min(low, high)
    return min(high, int(low * math.exp(random.uniform(0, math.log((high + 1) / low)))))
