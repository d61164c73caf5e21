"""The scheduler core: decides what each request does in each step. No tensors, no clock, no I/O, no token ids."""

from weft.core.blocks import BlockPool
from weft.core.coefficients import Coefficients
from weft.core.cost import CostModel
from weft.core.host_cost import HostCost
from weft.core.policies import Policy, chunked, monolithic, slo, slo_order
from weft.core.prefix import PrefixCache
from weft.core.promises import Promise, Source, Targets
from weft.core.request import Request, State
from weft.core.scheduler import Scheduler
from weft.core.shape import StepShape
from weft.core.step import BlockUpdates, HostTimes, Outcome, Plan, PlannedStep, StepBatch, StepRecord

__all__ = [
    "BlockPool",
    "BlockUpdates",
    "Coefficients",
    "CostModel",
    "HostCost",
    "HostTimes",
    "Outcome",
    "Plan",
    "PlannedStep",
    "Policy",
    "PrefixCache",
    "Promise",
    "Request",
    "Scheduler",
    "Source",
    "State",
    "StepBatch",
    "StepRecord",
    "StepShape",
    "Targets",
    "chunked",
    "monolithic",
    "slo",
    "slo_order",
]
