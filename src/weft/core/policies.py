"""Policies: how many prefill tokens a step may carry, who gets them, and who is better refused.

- `ChunkedPolicy`: a fixed number of tokens a step, decodes first. What other engines do.
- `MonolithicPolicy`: whole prompts, before anything else. It exists to show the problem.
- `SloPolicy`: as many prefill tokens as keep the step within the tightest promise of those who decode beside them.
"""

import math
from typing import NamedTuple, Protocol

from weft.core.cost import CostModel, StepShape, with_slice
from weft.core.request import Request

IDLE_STEP = 0.25  # seconds a step may take where nobody decodes, so that a newcomer never waits behind an enormous one

Rank = tuple[float, ...]  # smaller goes first


class StepLoad(NamedTuple):
    """What a policy may look at when the decodes of a step are settled."""

    now: float
    shape: StepShape  # of the decodes
    gap: float  # seconds; the tightest gap target among them, infinite where there is none


class Budget(Protocol):
    """What a step has left for prefill slices."""

    reason: str

    def room(self, first: int, wanted: int) -> int:
        """Tokens that a slice behind `first` may have, at most `wanted`."""
        ...

    def take(self, first: int, count: int) -> None: ...


class Policy(Protocol):
    prefills_first: bool  # whether prefills go before decodes, which then wait

    def budget(self, load: StepLoad) -> Budget: ...

    def rank(self, request: Request) -> Rank:
        """Order among prefills that wait."""
        ...

    def running_rank(self, request: Request) -> Rank:
        """Order of a prefill under way, among its like and those that wait."""
        ...

    def may_join(self, request: Request, after: StepShape, gap: float) -> bool:
        """Whether a prefill may start, given the decode step that it will later be part of."""
        ...

    def predict(self, shape: StepShape) -> float | None:
        """Seconds that a step will take; None where nothing is known of it."""
        ...

    def observe(self, predicted: float | None, measured: float) -> None:
        """Learns from a step that is done."""
        ...


class TokenBudget:
    """A number of tokens, whatever they cost."""

    reason = "token budget"

    def __init__(self, tokens: int) -> None:
        self.tokens = max(0, tokens)

    def room(self, first: int, wanted: int) -> int:
        return min(self.tokens, wanted)

    def take(self, first: int, count: int) -> None:
        self.tokens -= count


class WholePrompts:
    """Prompts are taken whole, as many as the budget holds, or one if it is larger."""

    reason = "whole prompts"

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.empty = True

    def room(self, first: int, wanted: int) -> int:
        return wanted if self.empty or wanted <= self.tokens else 0

    def take(self, first: int, count: int) -> None:
        self.tokens -= count
        self.empty = False


class TimeBudget:
    """Seconds of predicted time for the whole step."""

    def __init__(self, cost: CostModel, shape: StepShape, seconds: float, tokens: int, reason: str) -> None:
        self.cost = cost
        self.shape = shape
        self.seconds = seconds
        self.tokens = tokens
        self.reason = reason

    def room(self, first: int, wanted: int) -> int:
        most = min(wanted, self.tokens)
        return self.cost.coefficients.largest_slice(self.shape, first, most, self.seconds) if most > 0 else 0

    def take(self, first: int, count: int) -> None:
        self.shape = with_slice(self.shape, first, count)
        self.tokens -= count


class ChunkedPolicy:
    """Stall-free batching with a fixed budget: every decode counts as one token, prefills share what is left."""

    prefills_first = False

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.tokens = max_num_batched_tokens

    def budget(self, load: StepLoad) -> Budget:
        return TokenBudget(self.tokens - load.shape.decodes)

    def rank(self, request: Request) -> Rank:
        return (1, request.priority, request.arrival)

    def running_rank(self, request: Request) -> Rank:
        return (0, request.priority, request.arrival)

    def may_join(self, request: Request, after: StepShape, gap: float) -> bool:
        return True

    def predict(self, shape: StepShape) -> float | None:
        return None

    def observe(self, predicted: float | None, measured: float) -> None:
        pass


class MonolithicPolicy(ChunkedPolicy):
    prefills_first = True

    def budget(self, load: StepLoad) -> Budget:
        return WholePrompts(self.tokens)


class SloPolicy:
    """Keeps promises: prefill gets what the tightest gap target leaves, the prompt with the least slack goes first.

    With `chunk`, the number of tokens is fixed instead, and only order and refusal are kept: for comparison.
    """

    prefills_first = False

    def __init__(self, cost: CostModel, max_num_batched_tokens: int, chunk: int | None = None) -> None:
        self.cost = cost
        self.tokens = max_num_batched_tokens
        self.chunk = chunk

    def budget(self, load: StepLoad) -> Budget:
        if self.chunk is not None:
            return TokenBudget(self.chunk - load.shape.decodes)
        tokens = self.tokens - load.shape.decodes
        if load.gap == math.inf:
            return TimeBudget(self.cost, load.shape, IDLE_STEP, tokens, "nobody decodes")
        return TimeBudget(self.cost, load.shape, load.gap / self.cost.margin, tokens, "gap target")

    def rank(self, request: Request) -> Rank:
        work = self.cost.coefficients.prefill_seconds(0, request.known)
        return (request.batch, request.priority, request.due - work, request.arrival)

    running_rank = rank

    def may_join(self, request: Request, after: StepShape, gap: float) -> bool:
        return self.cost.predict(after) * self.cost.margin <= gap

    def predict(self, shape: StepShape) -> float | None:
        return self.cost.predict(shape)

    def observe(self, predicted: float | None, measured: float) -> None:
        if predicted is not None:
            self.cost.observe(predicted, measured)
