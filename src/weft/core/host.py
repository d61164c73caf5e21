"""HostCost: what a step costs the host. The simulator charges it, and it bounds how much one plan screens."""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class HostCost:
    """Seconds of the host's own time. The defaults are those of a slow core, for where nothing was measured."""

    step: float = 0.0  # plan, submit and commit of a step, whatever it carries
    row: float = 0.0  # each row of it
    arrival: float = 0.0  # taking a request in
    visit: float = 20e-6  # one queue entry that screening looks at

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"host cost {field.name}={value} must be a number of seconds, at least 0")
        if self.visit <= 0:
            raise ValueError("host cost visit must be above 0: it bounds how much is screened in one plan")
