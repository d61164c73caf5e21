"""HostCost: host (CPU) time of steps.

The simulator adds it to each step. The scheduler uses it to limit screening and to reserve time for token delivery.
"""

import math
from dataclasses import dataclass, fields

# A CPU is slow at first after an idle time: its clock is low, its threads sleep, a virtual CPU is not scheduled. On two
# cores of an EPYC, steps take 40% longer for about 50 ms after 20 ms or more without a step.
IDLE_S = 0.02  # seconds without a step
WAKING_S = 0.05  # seconds of slow steps
# Tokens of a step are sent in the order of its rows, which is nearly the same from step to step. A token is late by as
# many rows as its row has moved. On an H200, reserving time for 160 rows is enough for 256 streams.
MOVED_ROWS = 160


@dataclass(frozen=True)
class HostCost:
    """Seconds of host time. Without measurements, steps cost nothing, but `visit` still limits screening."""

    step: float = 0.0  # planning and submitting a step, and all other work between two steps
    row: float = 0.0  # added per row of the step
    prefill: float = 0.0  # added to a step with prefill slices
    commit: float = 0.0  # processing a step's tokens before the first one is sent
    token: float = 0.0  # sending one token to its client; tokens are sent one after the other
    request: float = 0.0  # from when a client sends a request until the engine can receive it
    arrival: float = 0.0  # receiving a request in the engine
    visit: float = 20e-6  # one queue entry that screening visits
    wake: float = 0.0  # a share, not seconds: how much longer steps take in the first WAKING_S after an idle time

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"host cost {field.name}={value} must be a number, at least 0")
        if self.visit <= 0:
            raise ValueError("host cost visit must be above 0: it bounds how much is screened in one plan")

    def submit_seconds(self, rows: int, has_prefill: bool) -> float:
        """Seconds from when the host is free until a step is submitted."""
        return self.step + self.row * rows + (self.prefill if has_prefill else 0.0)

    def delivery_seconds(self, rows: int) -> float:
        """Seconds from the commit until the last token of a step is sent."""
        return self.token * rows

    def delivery_jitter(self, rows: int) -> float:
        """Most seconds by which a token is sent later after its step than the previous token of the stream was."""
        return self.token * min(rows, MOVED_ROWS)
