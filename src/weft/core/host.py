"""HostCost: what steps cost the host. The simulator charges it; it bounds screening and leaves room for delivery."""

import math
from dataclasses import dataclass, fields

# A processor that had nothing to do runs slowly at first: its clock is low, its threads sleep, a virtual one is not
# scheduled. On two cores of an EPYC: 40% for about 50 ms, after 20 ms or more without a step.
IDLE = 0.02  # seconds
WAKING = 0.05  # seconds
# Tokens of a step are handed out in the order of its rows, which is nearly the same from step to step: a token comes
# late by as many places as its row has moved. On an H200, room for 160 places is enough for 256 streams.
MOVED_ROWS = 160


@dataclass(frozen=True)
class HostCost:
    """Seconds of the host's own time. Where nothing was measured, steps cost nothing and screening is bounded all the
    same."""

    step: float = 0.0  # planning and submitting a step, and all else between two steps
    row: float = 0.0  # more for each row of it
    prefill: float = 0.0  # more for a step with prefill slices
    commit: float = 0.0  # taking a step's tokens in, before the first is handed out
    token: float = 0.0  # handing one token to its client, one after the other
    request: float = 0.0  # from when a client sends a request until the engine could have it
    arrival: float = 0.0  # taking a request in
    visit: float = 20e-6  # one queue entry that screening looks at
    wake: float = 0.0  # no seconds, but by which share steps take longer in the first WAKING seconds after idle times

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"host cost {field.name}={value} must be a number, at least 0")
        if self.visit <= 0:
            raise ValueError("host cost visit must be above 0: it bounds how much is screened in one plan")

    def before(self, rows: int, has_prefill: bool) -> float:
        """From when the host is free until a step is submitted."""
        return self.step + self.row * rows + (self.prefill if has_prefill else 0.0)

    def delivery(self, rows: int) -> float:
        """Until the last of a step's tokens is with its client, after the commit."""
        return self.token * rows

    def delivery_jitter(self, rows: int) -> float:
        """By how much a token may come later within its step than the stream's token before came within its own."""
        return self.token * min(rows, MOVED_ROWS)
