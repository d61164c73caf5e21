"""MetricsPage: a page in Prometheus' text format, and the difference of two pages of one server."""

import math
import re
from dataclasses import dataclass, field
from typing import Self

from weft.errors import EngineError

SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([^\s]+)(?:\s+-?\d+)?$")
BORDER = re.compile(r'(?:^|,)\s*le="([^"]*)"')


@dataclass
class Distribution:
    """A histogram: cumulated counts by upper border, summed over all labels."""

    counts: dict[float, float] = field(default_factory=dict)
    sum: float = 0.0
    count: float = 0.0

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def percentile(self, share: float) -> float:
        """Interpolated in its bucket, as Prometheus does. The last border if it is above all finite borders."""
        rank, below, lower = share * self.count, 0.0, 0.0
        for border in sorted(self.counts):
            counted = self.counts[border]
            if counted >= rank and counted > below:
                return lower if math.isinf(border) else lower + (border - lower) * (rank - below) / (counted - below)
            below, lower = counted, border
        return 0.0


@dataclass
class MetricsPage:
    """Samples by name, summed over all labels: a page may have several engines, models and ranks."""

    values: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)  # largest sample by name, for shares
    distributions: dict[str, Distribution] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, source: str) -> Self:
        """Raises EngineError if the text is no page of metrics."""
        page = cls()
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        for line in lines:
            match = SAMPLE.match(line)
            try:
                value = float(match[3]) if match else math.nan
            except ValueError:
                match = None
            if match is None:
                raise EngineError(f"{source} does not answer with Prometheus metrics: {line[:60]!r} is no sample")
            if not math.isnan(value):
                page._add(match[1], match[2] or "", value)
        if not lines:
            raise EngineError(f"{source} has no metrics")
        return page

    def _add(self, name: str, labels: str, value: float) -> None:
        base, _, kind = name.rpartition("_")
        if kind == "bucket" and (border := BORDER.search(labels)):
            counts = self.distributions.setdefault(base, Distribution()).counts
            counts[float(border[1])] = counts.get(float(border[1]), 0.0) + value
            return
        self.values[name] = self.values.get(name, 0.0) + value
        self.largest[name] = max(self.largest.get(name, -math.inf), value)

    def has(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in (*self.values, *self.distributions))

    def value(self, *names: str) -> float | None:
        """The first of the names that the page has. A counter may end in _total."""
        return next((self.values[name] for name in names if name in self.values), None)

    def distribution(self, *names: str) -> Distribution | None:
        for name in names:
            if found := self.distributions.get(name):
                sum_, count = self.values.get(f"{name}_sum", 0.0), self.values.get(f"{name}_count", 0.0)
                return Distribution(found.counts, sum_, count)
        return None


class Difference:
    """What happened between two pages."""

    def __init__(self, before: MetricsPage, after: MetricsPage) -> None:
        self.before, self.after = before, after

    def counted(self, *names: str) -> float | None:
        """Growth of a counter. Negative: the server was started again."""
        for name in names:
            if (after := self.after.values.get(name)) is not None:
                return after - self.before.values.get(name, 0.0)
        return None

    def distribution(self, *names: str) -> Distribution | None:
        """The values that were added; None if the page has no such histogram."""
        after = self.after.distribution(*names)
        if after is None:
            return None
        before = self.before.distribution(*names) or Distribution()
        counts = {border: count - before.counts.get(border, 0.0) for border, count in after.counts.items()}
        return Distribution(counts, after.sum - before.sum, after.count - before.count)
