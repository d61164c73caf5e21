"""Drift: how much longer steps take than predicted, at present and in the long run."""

import math


class Drift:
    """Prediction error of one kind of step: centre and spread of log(measured / predicted).

    A hiccup is a step many times longer than predicted, because the machine did something else. It says nothing about
    the time of steps, and a smaller step would not have prevented it. So the spread is the distance from the centre
    within which two thirds of the steps lie, however far off the others are. For normal errors that is the standard
    deviation.
    """

    MEMORY = 256  # steps over which centre and spread are averaged
    PRIOR = 16  # weight of the initial spread, in steps
    PRIOR_MEAN = 4  # weight of the initial centre, in steps; small, so that a bias is not mistaken for spread
    WITHIN = 0.6827  # share of normal errors within one standard deviation
    SPREADS = 3.5  # spreads above the centre: apart from hiccups, only a few steps in ten thousand take longer
    TAIL = 2.33  # spreads above the centre: one step in a hundred takes longer, which a promise allows
    LEAST = 1e-4  # smallest spread from which the spread can still grow
    LASTING = 4096  # steps over which the lasting error is averaged
    IDLE = 2.0  # seconds without steps after which a third of the difference from the lasting error remains

    def __init__(self, mean: float, spread: float) -> None:
        self.mean = mean
        self.spread = spread
        # The error without bursts and noise of other programs. Idle times return to it.
        self._lasting_mean = mean
        self._lasting_spread = max(spread, self.LEAST)
        self._seen = 0

    @property
    def bias(self) -> float:
        """Factor by which steps take longer than predicted, on average."""
        return math.exp(self.mean)

    @property
    def margin(self) -> float:
        """Factor on a prediction such that almost no step takes longer."""
        return math.exp(self.mean + self.SPREADS * self.spread)

    @property
    def tail(self) -> float:
        """Factor on a prediction such that one step in a hundred takes longer."""
        return math.exp(self.mean + self.TAIL * self.spread)

    def observe(self, error: float) -> None:
        error -= self.mean
        self._seen = min(self._seen + 1, self.MEMORY)
        most = 2 * self.spread + 0.02
        self.mean += min(max(error, -most), most) / min(self.PRIOR_MEAN + self._seen, self.MEMORY)
        weight = 1 / min(self.PRIOR + self._seen, self.MEMORY)
        outside = abs(error) > max(self.spread, self.LEAST)
        if outside:
            self.spread = max(self.spread, self.LEAST) * math.exp(2 * weight * self.WITHIN)
        else:
            self.spread *= math.exp(-2 * weight * (1 - self.WITHIN))
        self._lasting_mean += (self.mean - self._lasting_mean) / self.LASTING
        self._lasting_spread += (self.spread - self._lasting_spread) / self.LASTING

    def rest(self, seconds: float) -> None:
        """Forgets recent errors, after `seconds` without a step."""
        kept = math.exp(-seconds / self.IDLE)
        self.mean = self._lasting_mean + kept * (self.mean - self._lasting_mean)
        if self.spread > self._lasting_spread:
            self.spread = self._lasting_spread + kept * (self.spread - self._lasting_spread)
