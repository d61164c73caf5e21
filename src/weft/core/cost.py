"""CostModel: how long a step takes, how many tokens fit into a time, and how fast prompts are prefilled."""

import math
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.coefficients import Coefficients
from weft.core.drift import Drift
from weft.core.host_cost import HostCost
from weft.core.refit import Refit
from weft.core.shape import StepShape

MOST_SPREAD = 0.15  # limit of the spread that a calibration states; the real spread is learnt in some hundred steps

Array = NDArray[np.float64]


class Errors(NamedTuple):
    """Percentiles of the prediction error of steps: |measured / predicted - 1|."""

    p50: float
    p99: float


class CostModel:
    """The current coefficients and their errors, separately for steps with and without prefill.

    With `refit`, the coefficients are also learnt from served steps. They change only within `observe`.
    """

    REPORTED = 1024  # last steps that `errors` covers
    STALE = 2  # steps after a change that may be planned with old coefficients: one in flight, one to spare

    def __init__(
        self,
        coefficients: Coefficients,
        mean: float = 0.0,
        spread: float = 0.05,
        refit: bool = True,
        host: HostCost | None = None,
    ) -> None:
        self.coefficients = coefficients
        self.host = host or HostCost()
        self.prefill = Drift(mean, spread)
        self.decode = Drift(mean, spread)
        self._refit = Refit(coefficients) if refit else None
        self._stale = 0
        self._errors: deque[float] = deque(maxlen=self.REPORTED)

    @property
    def bias(self) -> float:
        return self.prefill.bias

    @property
    def margin(self) -> float:
        return self.prefill.margin

    def predict(self, shape: StepShape) -> float:
        """Seconds of a step."""
        return self.coefficients.predict(shape)

    def p99_seconds(self, shape: StepShape) -> float:
        """Seconds that only one decode step in a hundred exceeds. A promise allows that."""
        return self.coefficients.predict(shape) * self.decode.p99_factor

    def with_slice(self, shape: StepShape, first: int, count: int) -> StepShape:
        """The shape with one more prefill slice."""
        return self.coefficients.with_slice(shape, first, count)

    def best_slice(self, shape: StepShape, first: int, most: int, limit: float) -> int:
        """Tokens of a prefill from `first` (up to `most`) that keep a step of `shape` within `limit` seconds.

        A slice that ends at a full wave or grain is preferred if that gives more tokens per second.
        """
        return self.coefficients.best_slice(shape, first, most, limit)

    def prefill_seconds(self, first: int, count: int) -> float:
        """Seconds that `count` tokens from position `first` add to steps bound by arithmetic."""
        return self.coefficients.prefill_seconds(first, count)

    def prompt_seconds(self, first: Array, remaining: Array) -> Array:
        """Seconds to prefill `remaining` tokens from `first`, by prompt."""
        return self.coefficients.prompt_seconds(first, remaining)

    def overhead(self, decodes: int, context: float, reach: float) -> float:
        """Seconds of a step with a prefill that are not prefill work."""
        return self.coefficients.overhead(decodes, context, reach)

    def least_step(self, decodes: int, context: float, reach: float) -> float:
        """Seconds of a step with these decodes and almost no prefill."""
        return self.coefficients.least_step(decodes, context, reach)

    def slice_work(self, tokens: int, reach: float) -> float:
        """Seconds of prefill work in a slice of a prompt with `reach` tokens."""
        return self.coefficients.slice_work(tokens, reach)

    def pace(self, decodes: int, context: float, reach: float, tokens: int, limit: float) -> float:
        """Share of the device's time left for prefill, in steps of at most `limit` seconds with these decodes."""
        return self.coefficients.pace(decodes, context, reach, tokens, limit)

    def small_slice_pace(self, shape: StepShape, first: int, tokens: int) -> tuple[float, float]:
        """Pace with a small slice in each step, and the seconds of such a step."""
        seconds = self.coefficients.predict(self.coefficients.with_slice(shape, first, tokens))
        return self.coefficients.small_slice_work(tokens) / seconds, seconds

    def most_small_slice_pace(self, tokens: int) -> float:
        """Bound of `small_slice_pace`, fast to compute."""
        return self.coefficients.most_small_slice_pace(tokens)

    def observe(self, shape: StepShape, predicted: float, measured: float) -> None:
        """Learns from one step."""
        if predicted <= 0 or measured <= 0:
            return
        self._errors.append(abs(measured / predicted - 1))  # error of the plan, even if it used old coefficients
        if self._stale:
            self._stale -= 1
            predicted = self.coefficients.predict(shape) or predicted
        (self.prefill if shape.slices else self.decode).observe(math.log(measured / predicted))
        if self._refit is not None:
            better = self._refit.observe(shape, measured)
            if better is not None:
                self.coefficients = better
                spread = math.sqrt(self._refit.variance)
                self.prefill, self.decode = Drift(self._refit.mean, spread), Drift(self._refit.mean, spread)
                self._stale = self.STALE

    def note_idle(self, seconds: float) -> None:
        """The device was idle for `seconds`."""
        self.prefill.note_idle(seconds)
        self.decode.note_idle(seconds)

    def errors(self) -> Errors | None:
        """Errors of the last REPORTED steps; None if no step was observed."""
        if not self._errors:
            return None
        p50, p99 = np.percentile(self._errors, (50, 99)).tolist()
        return Errors(p50, p99)
