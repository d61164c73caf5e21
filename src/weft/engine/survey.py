"""Survey: chooses the step mixes that calibration measures, and fits the cost model to the results."""

import enum
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from weft.core import Coefficients, StepShape
from weft.core.host_cost import WAKING_S
from weft.engine.calibration import Calibration
from weft.engine.cost_fit import fit
from weft.engine.mix_runner import MixRunner
from weft.engine.residuals import RunStep, fit_sizes
from weft.engine.step_mix import MixRanges, StepMix, ladders
from weft.errors import EngineError

STEP_SHARE = 0.1  # of the measuring time: intended limit of one step
MIX_SHARE = 0.02  # the same for one random mix: a slow device must also be measured with many mixes
CLIMB_SHARES = (0.18, 0.3, 0.36, 0.45)  # of the measuring time: when each ladder must be finished
EXPLORE_SHARE = 0.65  # of the measuring time: end of ladders and random mixes; the rest is repetition
MOST_SHAPES = 96  # different mixes; more would leave a slow device no time to repeat them
FEWEST_SHAPES = 16  # fewer cannot determine ten coefficients and their error
FOLDS = 4  # of the cross-validation: each shape is held out once, with a quarter of all shapes
FEWEST_SERVED_STEPS = 8  # rehearsed steps of a kind; with fewer, the median of all kinds is used
NUM_PAUSES = 5  # steps measured after an idle time, and as many without
PAUSE_SECONDS = 0.1  # seconds of idle time
NO_COST = Coefficients(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
LONGEST_HEATER_SECONDS = 0.03  # seconds: longest step that keeps the device busy between two measured steps


class Survey:
    """Chooses the mixes to measure. Owns the results: the seconds of every step, by mix."""

    def __init__(
        self, runner: MixRunner, grain: int, wave: int, seconds: float, progress: Callable[[float], None]
    ) -> None:
        self.runner = runner
        self.grain, self.wave = grain, wave
        self.seconds = seconds
        self.progress = progress
        self.found: dict[StepMix, list[float]] = {}
        self.median: dict[StepMix, float] = {}
        self._sizes: tuple[float, ...] = ()  # factors of steps by number of tokens, fitted at the end
        self._random = np.random.default_rng(1)
        runner.warm_up()
        self._started = runner.now

    @property
    def spent(self) -> float:
        return self.runner.now - self._started

    def explore(self) -> None:
        bounds = self.runner.bounds
        reach = [
            self._climb(*ladder, self.seconds * share)
            for ladder, share in zip(ladders(bounds), CLIMB_SHARES, strict=True)
        ]
        ranges = MixRanges(bounds, *reach)
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
        until = self.seconds - self.runner.heating
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
        alone = {mix: seconds for mix, seconds in self.median.items() if not mix.decodes and seconds <= WAKING_S / 2}
        mix = max(alone, key=alone.__getitem__, default=min(self.median, key=self.median.__getitem__))
        busy = [self.runner.run_alone(mix) for _ in range(1 + NUM_PAUSES)][1:]
        paused = []
        for _ in range(NUM_PAUSES):
            time.sleep(PAUSE_SECONDS)
            paused.append(self.runner.run_alone(mix))
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
        longer = {
            kind: float(np.median(found if len(found) >= FEWEST_SERVED_STEPS else usual))
            for kind, found in ratios.items()
        }
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
            submit=float(np.median(self.runner.submits[0] or [0.0])),
            submit_prefill=float(np.median(self.runner.submits[1] or [0.0])),
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

    def _climb(self, start: int, limit: int, make: Callable[[int], StepMix], until: float) -> int:
        """Measures steps that grow from `start` to `limit` while they are cheap enough. Returns the last size."""
        size = reached = start
        while size <= limit and self.runner.bounds.allow(make(size)) and self.spent < until:
            reached, seconds = size, self._measure(make(size))
            room = min(self.seconds * STEP_SHARE, until - self.spent)
            if size == limit or 2 * seconds > room:
                break
            size = min(limit, size * (4 if 4 * seconds <= room else 2))
        return reached

    def _draw(self, ranges: "MixRanges") -> StepMix | None:
        """A new random mix with an expected time below the limit, else the cheapest of many, else None."""
        coefficients = self._fit([mix.shape(self.wave) for mix in self.median], list(self.median.values()))
        most = self.seconds * MIX_SHARE  # limit of the expected time; the real time may be higher
        cheapest: tuple[float, StepMix] | None = None
        for _ in range(200):
            mix = ranges.draw(self._random)
            if not self.runner.bounds.allow(mix) or mix in self.found:
                continue
            expected = coefficients.predict(mix.shape(self.wave))
            if cheapest is None or expected < cheapest[0]:
                cheapest = expected, mix
            if expected <= most:
                return mix
        return None if cheapest is None else cheapest[1]

    def _measure(self, mix: StepMix) -> float:
        seconds = max(self.runner.run(mix), 1e-9)
        found = self.found.setdefault(mix, [])
        found.append(seconds)
        self.median[mix] = sorted(found)[(len(found) - 1) // 2]  # of two the lower: outliers are always slower
        if self.runner.prepares_ahead and not mix.decodes and self.runner.heating < seconds <= LONGEST_HEATER_SECONDS:
            self.runner.heater, self.runner.heating = mix, seconds
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
