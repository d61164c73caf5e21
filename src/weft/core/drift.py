"""Drift: how much longer steps take than predicted, at present and in the long run."""

import math


class Drift:
    """Prediction error of one kind of step: centre and spread of log(measured / predicted).

    A hiccup is a step many times longer than predicted, because the machine did something else. It says nothing about
    the time of steps, and a smaller step would not have prevented it. So the spread is the distance from the centre
    within which two thirds of the steps lie, however far off the others are. For normal errors that is the standard
    deviation.
    """

    RECENT_STEPS = 256  # steps over which the recent centre and spread are averaged
    PRIOR_STEPS = 16  # weight of the initial spread, in steps
    PRIOR_MEAN_STEPS = 4  # weight of the initial centre, in steps; small, so that a bias is not mistaken for spread
    WITHIN = 0.6827  # share of normal errors within one standard deviation
    MARGIN_SPREADS = 3.5  # spreads above the centre: apart from hiccups, only a few steps in ten thousand take longer
    P99_SPREADS = 2.33  # spreads above the centre: one step in a hundred takes longer, which a promise allows
    SMALLEST_SPREAD = 1e-4  # smallest spread; the spread grows by factors, so it must not become 0
    LASTING_STEPS = 4096  # steps over which the lasting centre and spread are averaged
    IDLE_DECAY_S = 2.0  # idle seconds after which a third of the distance to the lasting error remains

    def __init__(self, mean: float, spread: float) -> None:
        self.mean = mean
        self.spread = spread
        # Averages over so many steps that bursts and noise of other programs hardly change them. In idle times, the
        # recent centre and spread return to them.
        self._lasting_mean = mean
        self._lasting_spread = max(spread, self.SMALLEST_SPREAD)
        self._seen = 0

    @property
    def bias(self) -> float:
        """Factor by which steps take longer than predicted, on average."""
        return math.exp(self.mean)

    @property
    def margin(self) -> float:
        """Factor on a prediction such that almost no step takes longer."""
        return math.exp(self.mean + self.MARGIN_SPREADS * self.spread)

    @property
    def p99_factor(self) -> float:
        """Factor on a prediction such that one step in a hundred takes longer."""
        return math.exp(self.mean + self.P99_SPREADS * self.spread)

    def observe(self, error: float) -> None:
        """Learns from the log(measured / predicted) of one step."""
        error -= self.mean
        self._seen = min(self._seen + 1, self.RECENT_STEPS)
        most = 2 * self.spread + 0.02
        self.mean += min(max(error, -most), most) / min(self.PRIOR_MEAN_STEPS + self._seen, self.RECENT_STEPS)
        weight = 1 / min(self.PRIOR_STEPS + self._seen, self.RECENT_STEPS)
        outside = abs(error) > max(self.spread, self.SMALLEST_SPREAD)
        if outside:
            self.spread = max(self.spread, self.SMALLEST_SPREAD) * math.exp(2 * weight * self.WITHIN)
        else:
            self.spread *= math.exp(-2 * weight * (1 - self.WITHIN))
        self._lasting_mean += (self.mean - self._lasting_mean) / self.LASTING_STEPS
        self._lasting_spread += (self.spread - self._lasting_spread) / self.LASTING_STEPS

    def note_idle(self, seconds: float) -> None:
        """Moves the recent error towards the lasting one, after `seconds` without a step."""
        remaining = math.exp(-seconds / self.IDLE_DECAY_S)
        self.mean = self._lasting_mean + remaining * (self.mean - self._lasting_mean)
        if self.spread > self._lasting_spread:
            self.spread = self._lasting_spread + remaining * (self.spread - self._lasting_spread)
