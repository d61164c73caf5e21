"""Policies: how much prefill a step may carry, who goes first, and who is better refused.

- `chunked`: a fixed number of tokens a step, decodes first, in order of arrival. What other engines do.
- `monolithic`: whole prompts, before anything else. It exists to show the problem.
- `slo`: as much prefill as keeps the step within the tightest gap target of the decodes beside it, the prompt with the
  least slack first, and no request admitted whose promised first token would be late.
- `slo_order`: `slo`'s order and refusals with `chunked`'s fixed number of tokens, to see which part of it does what.
"""

from dataclasses import dataclass

from weft.core.admission import Admission, AdmitAll, DeadlineAdmission
from weft.core.budget import Allowance, FixedTokens, UpToTheGap, WholePrompts
from weft.core.cost import CostModel, StepShape
from weft.core.host import HostCost
from weft.core.queue import ByArrival, BySlack, Order


@dataclass(frozen=True)
class Policy:
    allowance: Allowance
    order: Order
    admission: Admission
    cost: CostModel | None = None  # None: nothing is known of the device

    @property
    def host(self) -> HostCost:
        return HostCost() if self.cost is None else self.cost.host

    def predict(self, shape: StepShape) -> float | None:
        """Seconds that a step will take."""
        return None if self.cost is None else self.cost.predict(shape)

    def observe(self, shape: StepShape, predicted: float | None, measured: float) -> None:
        """Learns from a step that is done."""
        if self.cost is not None and predicted is not None:
            self.cost.observe(shape, predicted, measured)

    def rest(self, seconds: float) -> None:
        """The device was idle for so long."""
        if self.cost is not None:
            self.cost.rest(seconds)

    def work(self, tokens: int) -> float:
        """What it would cost to compute so many tokens from the start, in seconds where those are known."""
        return tokens if self.cost is None else self.cost.coefficients.prefill_seconds(0, tokens)


def chunked(max_num_batched_tokens: int) -> Policy:
    return Policy(FixedTokens(max_num_batched_tokens), ByArrival(), AdmitAll())


def monolithic(max_num_batched_tokens: int) -> Policy:
    return Policy(WholePrompts(max_num_batched_tokens), ByArrival(), AdmitAll())


def slo(cost: CostModel, max_num_batched_tokens: int) -> Policy:
    allowance = UpToTheGap(cost, max_num_batched_tokens)
    return Policy(allowance, BySlack(cost), DeadlineAdmission(cost, allowance), cost)


def slo_order(cost: CostModel, chunk: int) -> Policy:
    allowance = FixedTokens(chunk)
    return Policy(allowance, BySlack(cost), DeadlineAdmission(cost, allowance), cost)
