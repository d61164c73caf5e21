"""StepShares: divides the device time of a step between its decodes and each of its prefill slices."""

import math
from collections import deque
from typing import NamedTuple

from weft.core.coefficients import Coefficients
from weft.core.shape import StepShape, decodes_alone
from weft.observe.frames import EngineFrame, StepFrame

USUAL = 1.25  # a step takes up to this many times as long as steps of its kind; what is beyond that is excess
REMEMBERED = 1025  # steps of a kind whose median counts
BUCKETS_PER_DOUBLING = 4  # of the number of decodes


class DividedStep(NamedTuple):
    """Seconds of a step on the device. They add up to its time."""

    decodes: float
    slices: tuple[float, ...]  # in the order of StepFrame.slices
    excess: float  # beyond what such a step takes


class Median:
    """The median of the last REMEMBERED values."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=REMEMBERED)
        self._median: float | None = None

    def note(self, value: float) -> None:
        self._values.append(value)
        self._median = None

    @property
    def value(self) -> float | None:
        if self._median is None and self._values:
            self._median = sorted(self._values)[len(self._values) // 2]
        return self._median


class StepShares:
    """Learns from the steps that it is shown with `note`, and divides steps.

    With the coefficients of a profile, a step is divided in proportion to the predicted time of its parts. The reading
    of the weights belongs to the decodes, if there are any: the step would have taken place for them alone. Without a
    profile, the decodes get the measured median of steps with about as many decodes and no slice, and the slices the
    rest, by tokens.
    """

    def __init__(self, coefficients: Coefficients | None = None) -> None:
        self._coefficients = coefficients
        self._ratios = Median(), Median()  # measured over predicted, of steps without and with slices
        self._decode_steps: dict[int, Median] = {}  # by bucket of the number of decodes; seconds
        self._nearest: dict[int, Median | None] = {}  # by bucket

    def note(self, frame: StepFrame) -> None:
        measured = frame.finished - frame.started
        if self._coefficients is not None:
            predicted = self._coefficients.predict(frame.step_shape)
            if predicted > 0 and measured > 0:
                self._ratios[bool(frame.slices)].note(measured / predicted)
        elif not frame.slices:
            bucket = _bucket(frame.step_shape.decodes)
            if bucket not in self._decode_steps:
                self._decode_steps[bucket] = Median()
                self._nearest.clear()
            self._decode_steps[bucket].note(measured)

    def predict(self, frame: StepFrame) -> float | None:
        """Seconds that the step takes by the profile. None: there is no profile."""
        return None if self._coefficients is None else self._coefficients.predict(frame.step_shape)

    def divide(self, frame: StepFrame, seconds: float) -> DividedStep:
        """Divides `seconds`, the time of the step."""
        shape = frame.step_shape
        if self._coefficients is not None:
            return self._divide_by_prediction(self._coefficients, frame, shape, seconds)
        alone = self._decodes_alone(shape.decodes)
        if not frame.slices:
            excess = 0.0 if alone is None else max(0.0, seconds - USUAL * alone)
            return DividedStep(seconds - excess, (), excess)
        tokens = [count for _, _, count, _ in frame.slices]
        if alone is None:
            alone = seconds * shape.decodes / max(1, shape.decodes + sum(tokens))
        decodes = min(alone, seconds)
        return DividedStep(decodes, _in_proportion(seconds - decodes, tokens), 0.0)

    def _divide_by_prediction(
        self, coefficients: Coefficients, frame: StepFrame, shape: StepShape, seconds: float
    ) -> DividedStep:
        predicted = coefficients.predict(shape)
        ratio = self._ratios[bool(frame.slices)].value or 1.0
        excess = max(0.0, seconds - USUAL * ratio * predicted)
        rest = seconds - excess
        if not frame.slices:
            return DividedStep(rest, (), excess)
        base_shape = decodes_alone(shape.decodes, shape.context)
        base = coefficients.predict(base_shape) if shape.decodes else 0.0
        decodes = rest * min(1.0, base / predicted) if predicted > 0 else 0.0
        alone = coefficients.predict(base_shape)
        added = [
            coefficients.predict(coefficients.with_slice(base_shape, first, count)) - alone
            for _, first, count, _ in frame.slices
        ]
        if min(added) <= 0:
            added = [float(count) for _, _, count, _ in frame.slices]
        return DividedStep(decodes, _in_proportion(rest - decodes, added), excess)

    def _decodes_alone(self, decodes: int) -> float | None:
        """Seconds of a step with about so many decodes and no slice. None: no such step was noted."""
        if decodes == 0:
            return 0.0
        bucket = _bucket(decodes)
        if bucket not in self._nearest:
            known = min(self._decode_steps, key=lambda other: abs(other - bucket), default=None)
            self._nearest[bucket] = None if known is None else self._decode_steps[known]
        nearest = self._nearest[bucket]
        return None if nearest is None else nearest.value


def coefficients_of(info: EngineFrame | None) -> Coefficients | None:
    """The coefficients of the engine's profile. None: it has none, or another version of weft wrote it."""
    if info is None or info.profile is None:
        return None
    try:
        return Coefficients(**info.profile["coefficients"])
    except (KeyError, TypeError, ValueError):
        return None


def _bucket(decodes: int) -> int:
    return round(BUCKETS_PER_DOUBLING * math.log2(max(1, decodes)))


def _in_proportion(seconds: float, weights: list[float] | list[int]) -> tuple[float, ...]:
    total = sum(weights)
    if total <= 0:
        return tuple(seconds / len(weights) for _ in weights)
    return tuple(seconds * weight / total for weight in weights)
