"""The pure heart: what every request does in every step. No tensors, no clock, no I/O, no token values."""

from weft.core.blocks import BlockPool
from weft.core.policies import Allowance, ChunkedPolicy, Policy, StepLoad
from weft.core.prefix import PrefixCache
from weft.core.request import Request, State
from weft.core.scheduler import Scheduler
from weft.core.step import BlockUpdates, Outcome, Slice, StepPlan, StepRecord

__all__ = [
    "Allowance",
    "BlockPool",
    "BlockUpdates",
    "ChunkedPolicy",
    "Outcome",
    "Policy",
    "PrefixCache",
    "Request",
    "Scheduler",
    "Slice",
    "State",
    "StepLoad",
    "StepPlan",
    "StepRecord",
]
