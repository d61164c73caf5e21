"""Policies: how much prefill a step may carry, which request goes first, and which requests are refused.

- `chunked`: a fixed number of tokens per step, decodes first, in order of arrival. Other engines do this.
- `monolithic`: whole prompts, before any decode. It exists to show the problem.
- `slo`: as much prefill as keeps the step within the tightest gap target of its decodes. The prompt with the least
  slack goes first. A request is refused if its promised first token would be late.
- `slo_order`: the order and refusals of `slo` with the fixed number of tokens of `chunked`, to separate the effects.
"""

from dataclasses import dataclass

from weft.core.admission import Admission, AdmitAll, DeadlineAdmission
from weft.core.budget import BudgetPolicy, FixedBudgetPolicy, LatencyBudgetPolicy, WholePromptPolicy
from weft.core.cost import CostModel
from weft.core.host_cost import HostCost
from weft.core.order import ByArrival, BySlack, Order
from weft.core.shape import StepShape


@dataclass(frozen=True)
class Policy:
    """Three parts that decide, and the cost model that they share."""

    budget_policy: BudgetPolicy  # how much prefill a step may carry
    order: Order  # which prompt goes first
    admission: Admission  # which requests are refused, and which may start
    cost: CostModel | None = None  # None: nothing is known about the device

    @property
    def host(self) -> HostCost:
        return HostCost() if self.cost is None else self.cost.host

    def predict(self, shape: StepShape) -> float | None:
        """Predicted seconds of a step; None without a cost model."""
        return None if self.cost is None else self.cost.predict(shape)

    def observe(self, shape: StepShape, predicted: float | None, measured: float) -> None:
        """Learns from a finished step."""
        if self.cost is not None and predicted is not None:
            self.cost.observe(shape, predicted, measured)

    def note_idle(self, seconds: float) -> None:
        """The device was idle for `seconds`."""
        if self.cost is not None:
            self.cost.note_idle(seconds)

    def recompute_cost(self, tokens: int) -> float:
        """Cost to compute `tokens` tokens from the start: seconds, or tokens without a cost model."""
        return tokens if self.cost is None else self.cost.prefill_seconds(0, tokens)


def chunked(max_num_batched_tokens: int) -> Policy:
    return Policy(FixedBudgetPolicy(max_num_batched_tokens), ByArrival(), AdmitAll())


def monolithic(max_num_batched_tokens: int) -> Policy:
    return Policy(WholePromptPolicy(max_num_batched_tokens), ByArrival(), AdmitAll())


def slo(cost: CostModel, max_num_batched_tokens: int) -> Policy:
    budget_policy = LatencyBudgetPolicy(cost, max_num_batched_tokens)
    return Policy(budget_policy, BySlack(cost), DeadlineAdmission(cost, budget_policy), cost)


def slo_order(cost: CostModel, chunk: int) -> Policy:
    budget_policy = FixedBudgetPolicy(chunk)
    return Policy(budget_policy, BySlack(cost), DeadlineAdmission(cost, budget_policy), cost)
