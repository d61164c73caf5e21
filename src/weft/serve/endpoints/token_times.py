"""TokenTimes: when the tokens of one request arrived, and the latency metrics."""

from weft.observe.engine_metrics import EngineMetrics
from weft.serve.requests.parsed_request import ParsedRequest, finite


class TokenTimes:
    """Token times of one request, in seconds; updates the latency metrics."""

    def __init__(self, parsed: ParsedRequest, metrics: EngineMetrics) -> None:
        self.parsed, self.metrics = parsed, metrics
        self.first: float | None = None
        self.largest_gap = 0.0
        self.tokens = 0
        self._last: list[float] = [0.0] * len(parsed.choices)
        self._ttft, self._gap = finite(parsed.promise.promised_ttft), finite(parsed.promise.promised_gap)

    def last(self, index: int) -> float:
        """When a choice got its latest token."""
        return self._last[index]

    def record_token(self, index: int, now: float) -> None:
        """Records a token. Runs for every token."""
        self.tokens += 1
        last = self._last[index]
        self._last[index] = now
        if last:
            gap = now - last
            if gap > self.largest_gap:
                self.largest_gap = gap
            self.metrics.record_gap(gap, self._gap)
        else:
            if self.first is None:
                self.first = now
            self.metrics.record_first_token(now - self.parsed.arrival, self._ttft)
