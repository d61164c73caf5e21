"""Budgets: how much prefill a step may carry besides its decodes, in tokens or in seconds of predicted time."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from weft.core.cost import CostModel
from weft.core.shape import StepShape
from weft.core.turnover import NONE_DECODES, EndForecast

IDLE_STEP = 0.25  # seconds that a step may take if no decode has a gap target; bounds the wait of a new request
LEAST_SLICE = 16  # tokens of the smallest slice
HARMLESS = 0.95  # share of the prefill pace that must remain if a wish for a smaller gap is granted
BATCH_SHARE = 0.5  # share of the tightest gap that a decode step with batch requests may take
BATCH_JOINS = (
    0.9  # share of that limit at which another batch request may start, so that it is not preempted in the next step
)
BATCH_DELAY = 1.25  # times a step without batch requests: limit of a step with them if a default gap is missed anyway
YIELDS = 0.8  # share of `chunked`'s prefill pace; a default gap target that leaves less is relaxed
STARVED = 0.25  # share of `chunked`'s prefill pace; the operator is told if a promised gap leaves less


class StepLoad(NamedTuple):
    """State of a step after its decodes are chosen: the input of a policy."""

    start: float  # start time of the step: now, or the predicted end of the step in flight
    shape: StepShape  # the decodes alone
    gap: float  # seconds; tightest promised gap of the decodes, infinite if there is none
    soft_gap: float = math.inf  # seconds; tightest default gap target of the decodes, which may be relaxed
    ends: EndForecast = NONE_DECODES  # when the decodes end
    crowded: bool = False  # whether batch requests, not counted here, decode in the same step
    wish: float = math.inf  # seconds; tightest gap wish of the decodes, below what all are promised
    free: float = math.inf  # tokens of KV memory that new requests can use
    freed: float | None = None  # tokens of KV memory freed per second; None: unknown

    @property
    def beside(self) -> "Beside":
        return Beside(self.shape.decodes, self.shape.context, self.gap, self.soft_gap)


class Beside(NamedTuple):
    """The decodes that share steps with a prefill."""

    decodes: int
    context: float  # tokens of context that they read
    gap: float  # seconds; tightest promised gap
    soft_gap: float = math.inf  # seconds; tightest default gap target

    @property
    def has_target(self) -> bool:
        return self.gap < math.inf or self.soft_gap < math.inf


class Budget(Protocol):
    """Remaining budget of a step for prefill slices."""

    reason: str

    def room(self, first: int, wanted: int) -> int:
        """Tokens that a slice starting at position `first` may have, at most `wanted`."""
        ...

    def take(self, first: int, count: int) -> None: ...

    def tighten(self, seconds: float, *, is_promised: bool) -> None:
        """Asks for the step to end within `seconds`: it gives a first token that is due then, promised or not."""
        ...

    def limit_batch(self) -> None:
        """Called before the first batch prompt: a default gap target is not relaxed for batch prompts."""
        ...


class Allowance(Protocol):
    """Makes the budget of each step, and predicts the prefill pace with such budgets."""

    prefills_first: bool  # whether prefills go first and decodes wait
    cuts: bool  # whether a step is cut short for a first token that is due

    def budget(self, load: StepLoad) -> Budget: ...

    def step(self, cost: CostModel, beside: Beside, reach: float) -> float:
        """Seconds of a full step with these decodes and a slice that reads `reach` tokens of context."""
        ...

    def pace(self, cost: CostModel, beside: Beside, reach: float) -> float:
        """Seconds of prefill work done in a second besides these decodes. 0 if the decodes fill the step."""
        ...

    def squeezed_pace(self, cost: CostModel, beside: Beside, reach: float) -> float:
        """Pace with the smallest slice in every step (see TimeBudget.room). 0 if even that misses the gap."""
        ...

    def starves(self, load: StepLoad) -> bool:
        """Whether a promised gap leaves prefills less than STARVED of the pace that `chunked` would give."""
        ...


class FixedTokens:
    """A fixed number of tokens per step, whatever they cost. Each decode counts as one token."""

    prefills_first = False
    cuts = False

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def budget(self, load: StepLoad) -> Budget:
        return TokenBudget(self.tokens - load.shape.decodes)

    def step(self, cost: CostModel, beside: Beside, reach: float) -> float:
        work = self._work(cost, beside.decodes, reach)
        least = cost.least_step(beside.decodes, beside.context, reach)
        return max(least, cost.overhead(beside.decodes, beside.context, reach) + work)

    def pace(self, cost: CostModel, beside: Beside, reach: float) -> float:
        return self._work(cost, beside.decodes, reach) / self.step(cost, beside, reach)

    def squeezed_pace(self, cost: CostModel, beside: Beside, reach: float) -> float:
        return 0.0

    def starves(self, load: StepLoad) -> bool:
        return False

    def _work(self, cost: CostModel, decodes: int, reach: float) -> float:
        return cost.slice_work(self.tokens - decodes, reach)


class WholePrompts(FixedTokens):
    """Whole prompts, before any decode. As many as fit into the tokens, or a single larger one."""

    prefills_first = True

    def budget(self, load: StepLoad) -> Budget:
        return PromptBudget(self.tokens)


class UpToTheGap:
    """As much prefill as the tightest gap target leaves. `tokens` limits the step as well."""

    prefills_first = False
    cuts = True

    def __init__(self, cost: CostModel, tokens: int) -> None:
        self.cost = cost
        self.tokens = tokens
        self._chunked = FixedTokens(tokens)

    def budget(self, load: StepLoad) -> Budget:
        beside = load.beside
        if self._is_harmless(load):
            beside = beside._replace(gap=min(beside.gap, load.wish))
        seconds = self.step(self.cost, beside, 0)
        # If a default target is relaxed, the relaxed step time replaces it as the gap.
        gap = min(beside.gap, seconds * self.cost.margin) if beside.has_target else math.inf
        return TimeBudget(
            self.cost,
            load.shape,
            seconds,
            self.tokens - load.shape.decodes,
            gap,
            self._batch_step(beside, load.shape),
            partial(self._yielding_step, self.cost, beside),
        )

    def _batch_step(self, beside: Beside, shape: StepShape) -> float:
        """Seconds that a step with batch prompts may take: the default gap, or BATCH_DELAY times the decodes alone."""
        if beside.soft_gap == math.inf:
            return math.inf
        return max(self._within(self.cost, beside.soft_gap, beside.decodes), BATCH_DELAY * self.cost.predict(shape))

    def _within(self, cost: CostModel, gap: float, decodes: int) -> float:
        """Longest predicted step, in seconds, with which tokens still reach clients within `gap`."""
        # Tokens are sent to clients one after the other, so a gap can be longer than the step.
        return max(gap - cost.host.delivery_jitter(decodes), gap / 2) / cost.margin

    def _is_harmless(self, load: StepLoad) -> bool:
        """Whether prefills are nearly as fast with the gap wish as with the gap target."""
        if load.wish >= min(load.gap, load.soft_gap):
            return False
        pace = self.pace(self.cost, load.beside, 0)
        return self.pace(self.cost, load.beside._replace(gap=load.wish), 0) >= HARMLESS * pace

    def step(self, cost: CostModel, beside: Beside, reach: float) -> float:
        if not beside.has_target:
            return IDLE_STEP
        seconds = self._within(cost, beside.gap, beside.decodes)
        if beside.soft_gap < beside.gap:
            soft = self._within(cost, beside.soft_gap, beside.decodes)
            seconds = min(seconds, max(soft, self._yielding_step(cost, beside)))
        return seconds

    def _yielding_step(self, cost: CostModel, beside: Beside) -> float:
        """Seconds of the step in which prefills reach YIELDS of the pace that `chunked` would give."""
        overhead = cost.overhead(beside.decodes, beside.context, 0)
        chunked = self._chunked.step(cost, beside, 0)
        return min(chunked, overhead / (1 - YIELDS * (1 - overhead / chunked)))

    def starves(self, load: StepLoad) -> bool:
        if not load.shape.decodes or load.gap == math.inf:
            return False
        beside = load.beside._replace(soft_gap=math.inf)
        return self.pace(self.cost, beside, 0) < STARVED * self._chunked.pace(self.cost, beside, 0)

    def pace(self, cost: CostModel, beside: Beside, reach: float) -> float:
        step = self.step(cost, beside, reach)
        return cost.pace(beside.decodes, beside.context, reach, self.tokens - beside.decodes, step)

    def squeezed_pace(self, cost: CostModel, beside: Beside, reach: float) -> float:
        shape = StepShape(beside.decodes, decodes=beside.decodes, context=beside.context)
        pace, seconds = cost.small_slice_pace(shape, max(0, int(reach) - LEAST_SLICE), LEAST_SLICE)
        if seconds * cost.bias > min(beside.gap, self.step(cost, beside, reach) * cost.margin):
            return 0.0
        return pace


class TokenBudget:
    """A number of tokens, whatever they cost."""

    reason = "token budget"

    def __init__(self, tokens: int) -> None:
        self.tokens = max(0, tokens)

    def room(self, first: int, wanted: int) -> int:
        return min(self.tokens, wanted)

    def take(self, first: int, count: int) -> None:
        self.tokens -= count

    def tighten(self, seconds: float, *, is_promised: bool) -> None:
        pass

    def limit_batch(self) -> None:
        pass


class PromptBudget(TokenBudget):
    """Whole prompts only: as many as fit into the tokens, or a single larger one."""

    reason = "whole prompts"

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.empty = True

    def room(self, first: int, wanted: int) -> int:
        return wanted if self.empty or wanted <= self.tokens else 0

    def take(self, first: int, count: int) -> None:
        super().take(first, count)
        self.empty = False


class TimeBudget:
    """Seconds of predicted time for the whole step. `idle` means that no decode in it has a gap target."""

    def __init__(
        self,
        cost: CostModel,
        shape: StepShape,
        seconds: float,
        tokens: int,
        gap: float,
        batch_seconds: float = math.inf,
        yielding: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`yielding` returns the seconds to which default targets may shorten the step. Few steps need to know."""
        self.cost = cost
        self.shape = shape
        self.seconds = seconds
        self.tokens = tokens
        self.gap = gap
        self.batch_seconds = batch_seconds
        self.yielding = yielding
        self.idle = gap == math.inf
        self.reason = "no gap target" if self.idle else "gap target"

    def room(self, first: int, wanted: int) -> int:
        most = min(wanted, self.tokens)
        if most <= 0:
            return 0
        fitting = self.cost.best_slice(self.shape, first, most, self.seconds)
        least = min(most, LEAST_SLICE)
        if fitting < least and not self.shape.slices and self._may_squeeze(first, least):
            return least
        return fitting

    def _may_squeeze(self, first: int, count: int) -> bool:
        """Whether the smallest slice may run although it does not fit, so that prefills always progress.

        On an idle step it always may, however slow the machine. Otherwise the step must meet the gap without the margin
        for noise.
        """
        squeezed = self.cost.with_slice(self.shape, first, count)
        return self.idle or self.cost.predict(squeezed) * self.cost.bias <= self.gap

    def take(self, first: int, count: int) -> None:
        self.shape = self.cost.with_slice(self.shape, first, count)
        self.tokens -= count

    def tighten(self, seconds: float, *, is_promised: bool) -> None:
        limit = seconds / self.cost.margin
        if not is_promised:
            # If many first tokens are late, one in each step would be all that is read, and all would be later still.
            limit = max(limit, self.yielding())
        self.seconds = min(self.seconds, limit)
        if self.idle:  # such a step may be long, but a first token must not wait for other prompts
            self.seconds = min(self.seconds, 2 * self.cost.predict(self.shape))

    def limit_batch(self) -> None:
        self.seconds = min(self.seconds, self.batch_seconds)
        self.gap = min(self.gap, self.batch_seconds * self.cost.margin)
