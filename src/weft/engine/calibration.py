"""Calibration: a few seconds of real steps on the real executor, and the cost model's coefficients that explain them.

First it grows steps in every direction until they cost too much, then it draws mixtures at random within that reach,
then it repeats them all in random order while time lasts. Then requests are served for a while (see rehearsal.py), and
their steps count as much. What is known of the cost model's error comes from steps that
the coefficients at hand were not fitted to.
"""

import enum
import hashlib
import json
import math
import os
import platform
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import BlockUpdates, Coefficients, StepPlan, StepShape
from weft.core.cost import fit, slice_pairs, slice_reach
from weft.core.host import WAKING
from weft.core.residuals import Residuals, RunStep, fit_residuals, fit_sizes
from weft.engine.executor import Executor, PendingStep, SlotSetup, StepInputs, StepResult
from weft.engine.params import SamplingParams
from weft.engine.rehearsal import ACTS, BURSTS, FULL, LONE, rehearse
from weft.errors import EngineError

if TYPE_CHECKING:
    import torch

FORMAT = 10  # of the file; another one is measured anew
STEP_SHARE = 0.1  # of the measuring time: no step is meant to take more,
MIX_SHARE = 0.02  # and no mixture: a slow device is to be measured with many of them all the same
CLIMB_SHARES = (0.18, 0.3, 0.36, 0.45)  # of the measuring time: when each of the ladders must be done
EXPLORE_SHARE = 0.65  # of the measuring time: these and the mixtures; what is left repeats
MOST_SHAPES = 96  # different ones; more would leave no time to repeat them on a slow device
FEWEST_SHAPES = 16  # with less, ten coefficients and their error are guesswork
GOOD = 0.06  # median error up to which a calibration is called good
NOISY = 0.15  # median error or spread above which the machine did something else while it was measured
FOLDS = 4  # each shape is held out once, with a quarter of the others
LADDER_CONTEXT = 256  # tokens behind the decodes of a growing batch
LADDER_SLICE = 16  # tokens of a slice behind a growing context
FEWEST = 8  # rehearsed steps of a kind, without which all kinds count for it
REHEARSAL = 1.0  # of the measuring time, added to it: steps as in service
FULL_REHEARSAL = 1.6  # the same where very full steps are rehearsed too
BURST_REHEARSAL = 0.8  # the same of bursts
PAUSES = 5  # steps after an idle time, and as many without one
PAUSE = 0.1  # seconds
NO_COST = Coefficients(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
HEATING = 0.03  # seconds that a step between two measured ones may take, where the device is kept busy


@dataclass(frozen=True)
class Calibration:
    """Coefficients, and how wrong they were on steps that they were not fitted to (but for the factors of sizes)."""

    coefficients: Coefficients
    mean: float  # of log(measured / predicted)
    spread: float  # standard deviation of the same, hiccups left out: the cost model's first margin
    error_p50: float  # of |measured / predicted - 1|
    error_p99: float
    steps: int  # measured
    largest: int  # tokens of the largest step measured
    device: str  # in words
    submit: float = 0.0  # seconds that the host takes to submit a step of decodes
    submit_prefill: float = 0.0  # and one with prefill slices
    wake: float = 0.0  # by which share steps take longer after an idle time; see HostCost
    residuals: Residuals | None = None  # how steps in service differ from the coefficients; None: not measured

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was too busy while it was measured for the figures to be relied on."""
        return self.error > NOISY

    @property
    def error(self) -> float:
        """Of the coefficients or of single steps, whichever is larger; a share."""
        return max(self.spread, self.error_p50)

    @property
    def quality(self) -> str:
        """How good it is, in words."""
        errors = f"steps are off by {self.error_p50:.1%} in the median and {self.error_p99:.1%} at the 99th percentile"
        if not self.is_noisy:
            return f"calibration is {'good' if self.error_p50 <= GOOD else 'fair'}: {errors}"
        return f"calibration is poor, the machine was busy: {errors}; it is measured anew at the next start"

    @property
    def decode_step(self) -> float:
        """Seconds of a step with one decode behind 1,000 tokens."""
        return self.coefficients.predict(StepShape(tokens=1, decodes=1, context=1000))

    def prefill_speed(self, tokens: int) -> float:
        """Tokens of a prompt in a second, by a first step of that many."""
        return tokens / max(self.coefficients.predict(self.coefficients.with_slice(StepShape(), 0, tokens)), 1e-9)


def calibrate(
    executor: Executor,
    *,
    slots: int,
    max_num_seqs: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    vocab_size: int,
    device: str,
    ahead: bool = False,
    is_filled: bool = False,
    grain: int = 1,
    wave: int = 0,
    seconds: float = 5.0,
    progress: Callable[[float], None] = lambda share: None,
) -> Calibration:
    """Measures single steps for about `seconds`, after a warm-up, and rehearses service for as long (2.4 times as long
    where steps are prepared ahead). The executor must
    be idle, and its KV cache hold nothing of worth.

    `ahead` says that the executor prepares a step while the one before runs. Then the device is kept busy all the time,
    as it is under load: the host's part of a step takes no time, and a device that has reached its power limit runs
    more slowly (an H200 by 5 to 9%). `is_filled` says that all blocks of the KV cache hold numbers, so that every row
    can read a context of its own (what rows share comes from the device's caches, as it does not in service). `grain`
    and `wave` say in which lumps it works (see `Coefficients`). `progress` is called with the share of `seconds` that
    is gone. Afterwards nothing is in flight; slots and block tables keep what was in them, which the scheduler's plans
    overwrite as they hand them out.
    """
    bounds = _Bounds(
        rows=min(max_num_seqs, slots, max(1, num_blocks // 2)),
        blocks=num_blocks,
        block_size=block_size,
        length=max_model_len,
        tokens=max_num_batched_tokens,
    )
    survey = _Survey(_Rig(executor, bounds, vocab_size, ahead, is_filled), grain, wave, seconds, progress)
    survey.explore()
    survey.repeat()
    wake = 0.0 if ahead else survey.wake()  # what prepares steps ahead is a GPU: its clock is not the host's
    survey.rig.finish()
    perform = partial(
        rehearse,
        executor,
        max_num_seqs=min(max_num_seqs, bounds.rows),
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=vocab_size,
        wave=wave,
        speed=survey.prefill_speed(),
    )
    if not ahead:
        return survey.conclude(device, perform(acts=(LONE, *ACTS), seconds=REHEARSAL * seconds), wake)
    # No lone stream: a GPU that is hardly used runs faster than one at its power limit, and the scheduler must count
    # with the latter. Residuals are of bursts too, in which the clock rises and falls. A CPU has no such residuals:
    # other work disturbs its steps more.
    served = perform(acts=(*ACTS, *FULL), seconds=FULL_REHEARSAL * seconds)
    found = survey.conclude(device, served, wake)
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
    """Where the calibration of the model in `path` is kept: one file for all that changes the times of its steps.

    The limits are part of it because what was never measured is only guessed. `max_model_len` may follow the memory
    that happens to be free, so it counts by its power of two.
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
    """What was saved; None where there is nothing, or nothing that this version can read."""
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
    """Several processes may write at once: the last one wins, nobody reads half a file."""
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


def device_name(device: "torch.device") -> str:
    """A device in words."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or device.type


def _readable_name(path: Path) -> str:
    """The model's name as people know it: the directory's, or for a download of the hub `org--name`."""
    parts = path.resolve().parts
    hub = [part.removeprefix("models--") for part in parts if part.startswith("models--")]
    return re.sub(r"[^\w.-]+", "-", hub[-1] if hub else parts[-1])[:80] or "model"


class _Bounds(NamedTuple):
    """What a step may hold."""

    rows: int
    blocks: int  # in the KV cache
    block_size: int
    length: int  # tokens of one row with its context
    tokens: int

    @property
    def slice_tokens(self) -> int:
        """Tokens of the longest slice: the blocks that decodes write to are not for slices."""
        return min(self.tokens, self.length, max(1, self.blocks - self.rows) * self.block_size)

    @property
    def context(self) -> int:
        """Tokens of the longest context that leaves room for one token; whole blocks."""
        return (self.length - 1) // self.block_size * self.block_size

    def whole(self, tokens: float) -> int:
        """A context of about that many tokens."""
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
    """What a step carries. Contexts are whole blocks, so that nobody writes behind what another one wrote."""

    decodes: tuple[int, ...] = ()  # tokens of context of each
    slices: tuple[tuple[int, int], ...] = ()  # tokens of context and of the slice itself

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(count for _, count in self.slices)

    def shape(self, wave: int = 0) -> StepShape:
        return StepShape(
            tokens=self.tokens,
            pairs=sum(slice_pairs(first, count) for first, count in self.slices),
            slices=len(self.slices),
            decodes=len(self.decodes),
            context=sum(self.decodes) + len(self.decodes),
            reach=sum(slice_reach(first, count, wave) for first, count in self.slices),
        )


class _Rig:
    """Runs mixes, one after the other. Keeps track of the KV cache, so that a row reads only blocks that were written.

    Values do not matter, only that they are numbers: a row's context is any blocks that were written, different ones
    as far as there are, because what many rows share would come from the device's caches.
    """

    def __init__(self, executor: Executor, bounds: _Bounds, vocab_size: int, ahead: bool, is_filled: bool) -> None:
        self.executor = executor
        self.bounds = bounds
        self.ahead = ahead
        self.now = 0.0  # seconds on the executor's clock: the end of the last step
        self.submits: tuple[list[float], list[float]] = ([], [])  # seconds of submitting, without and with slices
        self.heater = _Mix(slices=((0, 1),))  # what runs between two measured steps to keep the device busy
        self.heating = 0.0  # seconds that it takes
        self._in_flight: deque[PendingStep] = deque()
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(0)
        self._steps = 0
        self._homes = np.arange(bounds.rows)  # by slot, the block that its decodes write to
        self._others = np.arange(bounds.rows, bounds.blocks) if bounds.blocks > bounds.rows else self._homes
        self._next_write = self._next_read = 0
        # The executor's tables as far as they are known. Entries are block + 1, and 0 where nothing is known.
        self._tables = np.zeros((bounds.rows, -(-bounds.length // bounds.block_size)), np.int64)
        self._written = np.zeros(bounds.blocks + 1, np.int64)  # by entry: tokens, from the start of the block
        if is_filled:
            self._written[1:] = bounds.block_size
        # In service a request's blocks lie anywhere. (On an H200 their order makes no difference.)
        self._shuffled = 1 + self._random.permutation(bounds.blocks)
        self._readable = self._written_to_their_end()

    def warm_up(self) -> None:
        """Writes one block, in pieces if steps are that short, and decodes once."""
        setups = [_greedy(slot) for slot in range(self.bounds.rows)]
        end = min(self.bounds.block_size, self.bounds.length)
        for first in range(0, end, self.bounds.slice_tokens):
            self.run(_Mix(slices=((first, min(self.bounds.slice_tokens, end - first)),)), setups)
            setups = []
        self.run(_Mix(decodes=(0,)))

    def run(self, mix: _Mix, setups: Sequence[SlotSetup] = ()) -> float:
        """Seconds of a step. Where steps are prepared ahead, another one runs before and after it: while this mix is
        made ready, and while the next one is."""
        self._submit(mix, setups)
        if self.ahead:
            if len(self._in_flight) > 1:
                self._take()  # what ran before it
            self._submit(self.heater)
        result = self._take()
        return result.finished - result.started

    def alone(self, mix: _Mix) -> float:
        """Seconds of a step with nothing before or after it."""
        self.finish()
        self._submit(mix)
        result = self._take()
        return result.finished - result.started

    def finish(self) -> None:
        """Afterwards nothing is in flight."""
        while self._in_flight:
            self._take()

    def _submit(self, mix: _Mix, setups: Sequence[SlotSetup] = ()) -> None:
        first = np.array([*mix.decodes, *(first for first, _ in mix.slices)], np.int64)
        count = np.array([*(1 for _ in mix.decodes), *(count for _, count in mix.slices)], np.int64)
        decodes = len(mix.decodes)
        updates = [self._place(slot, int(first[slot]), int(count[slot]), slot < decodes) for slot in range(len(first))]
        self._steps += 1
        plan = StepPlan(
            number=self._steps,
            requests=[],
            slots=np.arange(len(first)),
            first=first,
            count=count,
            samples=np.ones(len(first), np.bool_),
            last=np.zeros(len(first), np.bool_),
            num_decodes=decodes,
            shape=mix.shape(),
            joined=[],
            new_blocks=BlockUpdates(*np.concatenate(updates, axis=1)),
            cached_tokens=0,
            preemptions=0,
            lost_tokens=0,
            reason="calibration",
        )
        tokens = self._random.integers(self._vocab_size, size=int(count[decodes:].sum()), dtype=np.int32)
        started = time.perf_counter()
        self._in_flight.append(self.executor.submit(plan, StepInputs(tokens, list(setups))))
        self.submits[plan.shape.slices > 0].append(time.perf_counter() - started)
        self._readable = self._written_to_their_end()

    def _take(self) -> StepResult:
        result = self._in_flight.popleft().result()
        self.now = result.finished
        return result

    def _place(self, slot: int, first: int, count: int, decodes: bool) -> NDArray[np.int64]:
        """Gives a row its blocks; returns the table's new entries as rows of slots, columns and blocks."""
        size, table = self.bounds.block_size, self._tables[slot]
        begin, end = first // size, -(-(first + count) // size)
        before = table[:end].copy()
        unreadable = np.flatnonzero(self._written[before[:begin]] < size)
        table[unreadable] = self._take_readable(len(unreadable))
        keeps = first % size > 0  # goes on in a block that it began
        new = end - begin - keeps
        table[begin + keeps : end] = 1 + (self._homes[slot] if decodes else self._take_writable(new))
        entries = table[begin:end]
        filled = np.minimum(first + count - np.arange(begin, end) * size, size)
        self._written[entries] = np.maximum(self._written[entries], filled)
        columns = np.flatnonzero(table[:end] != before)
        return np.stack([np.full(len(columns), slot), columns, table[columns] - 1])

    def _written_to_their_end(self) -> NDArray[np.int64]:
        """Entries of such blocks, in the order in which contexts take them."""
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
    """Which mixes are measured, and what was found: the seconds of every step, by mix."""

    def __init__(self, rig: _Rig, grain: int, wave: int, seconds: float, progress: Callable[[float], None]) -> None:
        self.rig = rig
        self.grain, self.wave = grain, wave
        self.seconds = seconds
        self.progress = progress
        self.found: dict[_Mix, list[float]] = {}
        self.median: dict[_Mix, float] = {}
        self._sizes: tuple[float, ...] = ()  # factors of steps by their tokens, known at the end
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
                return  # all that this engine can do was measured
            self._measure(mix)
        if len(self.found) < FEWEST_SHAPES:
            raise EngineError(
                f"{self.seconds:g} seconds are too short: {len(self.found)} different steps were measured, and a "
                f"calibration needs {FEWEST_SHAPES}; give it more time (weft calibrate --seconds "
                f"{math.ceil(self.seconds * 4)})"
            )

    def repeat(self) -> None:
        """All again in random order while time is left: sooner what was measured less, and cheap ones more often."""
        until = self.seconds - self.rig.heating
        while mixes := [mix for mix, median in self.median.items() if self.spent + median <= until]:
            weights = np.array([self.median[mix] ** -0.5 * len(self.found[mix]) ** -3.0 for mix in mixes])
            self._measure(mixes[self._random.choice(len(mixes), p=weights / weights.sum())])

    def prefill_speed(self) -> float:
        """Tokens of prompts in a second, by the largest slice that was measured alone."""
        alone = [
            (mix.tokens, seconds) for mix, seconds in self.median.items() if not mix.decodes and len(mix.slices) == 1
        ]
        tokens, seconds = max(alone)
        return tokens / seconds

    def wake(self) -> float:
        """By which share a step takes longer after an idle time. For a step that ends before the device is awake."""
        alone = {mix: seconds for mix, seconds in self.median.items() if not mix.decodes and seconds <= WAKING / 2}
        mix = max(alone, key=alone.__getitem__, default=min(self.median, key=self.median.__getitem__))
        busy = [self.rig.alone(mix) for _ in range(1 + PAUSES)][1:]
        paused = []
        for _ in range(PAUSES):
            time.sleep(PAUSE)
            paused.append(self.rig.alone(mix))
        return max(0.0, float(np.median(paused)) / max(float(np.median(busy)), 1e-9) - 1)

    def conclude(self, device: str, served: Sequence[RunStep], wake: float) -> Calibration:
        """Of `served` steps, as many count as there are different mixes. They also tell how much longer than in the
        survey steps take in service, lone slices, lone decodes and fuller steps each; what was measured in the survey
        is taken for so much longer."""
        shapes = [mix.shape(self.wave) for mix in self.found]
        alone = self._fit(shapes, list(self.median.values()))
        ratios: dict[_Kind, list[float]] = {kind: [] for kind in _Kind}
        for shape, seconds, _ in served:
            ratios[_Kind.of(shape)].append(seconds / alone.predict(shape))
        usual = [ratio for found in ratios.values() for ratio in found] or [1.0]
        longer = {kind: float(np.median(found if len(found) >= FEWEST else usual)) for kind, found in ratios.items()}
        factors = [longer[_Kind.of(shape)] for shape in shapes]
        chosen = [served[i] for i in self._random.permutation(len(served))[: len(shapes)].tolist()]
        shapes += [step.shape for step in chosen]
        medians = [factor * seconds for factor, seconds in zip(factors, self.median.values(), strict=True)]
        medians += [step.seconds for step in chosen]
        measured = [[factor * one for one in found] for factor, found in zip(factors, self.found.values(), strict=True)]
        measured += [[step.seconds] for step in chosen]
        # Only a GPU has waves, and sizes that do not lie on a line. All rehearsed steps tell of them, in their order.
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
        """log(measured / predicted) of every step, predicted by a fit to the shapes of the other folds."""
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
        """Measures steps that grow from `start` to `limit` while they are cheap enough; returns how far it came."""
        size = reached = start
        while size <= limit and self.rig.bounds.allow(make(size)) and self.spent < until:
            reached, seconds = size, self._measure(make(size))
            room = min(self.seconds * STEP_SHARE, until - self.spent)
            if size == limit or 2 * seconds > room:
                break
            size = min(limit, size * (4 if 4 * seconds <= room else 2))
        return reached

    def _draw(self, ranges: "_Ranges") -> _Mix | None:
        """A new mix that is not expected to take too long, or the cheapest of many; None where nothing new is left."""
        coefficients = self._fit([mix.shape(self.wave) for mix in self.median], list(self.median.values()))
        most = self.seconds * MIX_SHARE  # expected; the truth may be higher
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
        self.median[mix] = sorted(found)[(len(found) - 1) // 2]  # of two the lower: hiccups only ever take longer
        if self.rig.ahead and not mix.decodes and self.rig.heating < seconds <= HEATING:
            self.rig.heater, self.rig.heating = mix, seconds
        self.progress(min(1.0, self.spent / self.seconds))
        return seconds


class _Kind(enum.Enum):
    """Of a step: how much longer it takes in service than alone depends on it."""

    LONE_SLICE = 0
    LONE_DECODE = 1
    FULLER = 2

    @classmethod
    def of(cls, shape: StepShape) -> "_Kind":
        if shape.decodes + shape.slices > 1:
            return cls.FULLER
        return cls.LONE_SLICE if shape.slices else cls.LONE_DECODE


def _without_hiccups(errors: NDArray[np.float64]) -> tuple[float, float]:
    """Mean and standard deviation as the bulk has them; what lies outside counts as three deviations, no more."""
    middle = float(np.median(errors))
    spread = 1.4826 * float(np.median(np.abs(errors - middle)))
    kept = np.clip(errors, middle - 3 * spread, middle + 3 * spread)
    return float(kept.mean()), float(kept.std())


def _ladders(bounds: _Bounds) -> list[tuple[int, int, Callable[[int], _Mix]]]:
    """Directions to grow in, in the order of _Ranges: the first size, the last, and the step of a size."""
    behind = bounds.whole(LADDER_CONTEXT)
    short = min(LADDER_SLICE, bounds.slice_tokens)
    return [
        (1, bounds.slice_tokens, lambda size: _Mix(slices=((0, size),))),
        (1, bounds.rows, lambda size: _Mix(decodes=(behind,) * size)),
        (bounds.block_size, bounds.context, lambda size: _Mix(decodes=(bounds.whole(size),))),
        (bounds.block_size, bounds.context, lambda size: _Mix(slices=((bounds.whole(size), short),))),
    ]


class _Ranges(NamedTuple):
    """What mixes are drawn from: contexts evenly on a logarithmic scale, rows and tokens as a busy server has them."""

    bounds: _Bounds
    slice_tokens: int
    decodes: int
    context: int  # of decodes
    slice_context: int

    def draw(self, random: np.random.Generator) -> _Mix:
        kind = random.integers(8)  # up to 2: decodes, 3: one slice, 4: several slices, above: decodes and slices
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
    """A whole number from 1 to high, half of the time above a quarter of it."""
    return 1 + int((high - 1) * random.uniform() ** 2)


def _log_uniform(random: np.random.Generator, low: int, high: int) -> int:
    """A whole number from low (or high, where that is less) to high."""
    low = min(low, high)
    return min(high, int(low * math.exp(random.uniform(0, math.log((high + 1) / low)))))
