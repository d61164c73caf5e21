"""Budgets: how many prefill tokens a step may carry beside its decodes, in tokens or in seconds of predicted time."""

import math
from typing import NamedTuple, Protocol

from weft.core.cost import CostModel, StepShape
from weft.core.turnover import NONE_DECODES, Ends

IDLE_STEP = 0.25  # seconds a step may take where nobody decodes, so that a newcomer never waits behind an enormous one
LEAST_SLICE = 16  # tokens
HARMLESS = 0.95  # of the pace of prefill: what is left of it if a wish for a smaller gap is to be granted
BATCH_SHARE = 0.5  # of the tightest gap: most that a decode step may take for the batch class to be in it
BATCH_JOINS = (
    0.9  # of that: most for another batch request to start, so that it is not preempted again in the next step
)
BATCH_DELAY = 1.25  # times a step without the batch class: what one with it may take if a default gap is missed anyway
YIELDS = 0.8  # of `chunked`'s pace of prefill: a default gap target gives way where it would leave less
STARVED = 0.25  # of the same: where a promised gap leaves less, the operator is told


class StepLoad(NamedTuple):
    """What a policy may look at when the decodes of a step are settled."""

    start: float  # when the step will begin: now, or when the one in flight is predicted to end
    shape: StepShape  # of the decodes
    gap: float  # seconds; the tightest promised gap among them, infinite where there is none
    soft_gap: float = math.inf  # seconds; the tightest default gap target among them, which gives way
    ends: Ends = NONE_DECODES  # when they end
    crowded: bool = False  # whether batch requests, which are not counted here, decode beside them
    wish: float = math.inf  # seconds; the tightest gap that one of them wishes for beyond what all are promised
    free: float = math.inf  # tokens of KV memory that newcomers find
    freed: float | None = None  # tokens that come free in a second; None: not known

    @property
    def beside(self) -> "Beside":
        return Beside(self.shape.decodes, self.shape.context, self.gap, self.soft_gap)


class Beside(NamedTuple):
    """The decodes that a prefill shares its steps with."""

    decodes: int
    context: float  # tokens that they read
    gap: float  # seconds; the tightest promised gap among them
    soft_gap: float = math.inf  # seconds; the tightest default target among them

    @property
    def has_target(self) -> bool:
        return self.gap < math.inf or self.soft_gap < math.inf


class Budget(Protocol):
    """What a step has left for prefill slices."""

    reason: str

    def room(self, first: int, wanted: int) -> int:
        """Tokens that a slice behind `first` may have, at most `wanted`."""
        ...

    def take(self, first: int, count: int) -> None: ...

    def tighten(self, seconds: float) -> None:
        """The step is to end within so many seconds if it can: a first token that it brings is promised by then."""
        ...

    def limit_batch(self) -> None:
        """Only batch prompts follow: a default gap target does not give way to them."""
        ...


class Allowance(Protocol):
    """Makes the budget of each step, and can say ahead how fast prefill will get on with such budgets."""

    prefills_first: bool  # whether prefills go before decodes, which then wait
    cuts: bool  # whether a step is cut short for a first token that is due

    def budget(self, load: StepLoad) -> Budget: ...

    def step(self, cost: CostModel, beside: Beside, reach: float) -> float:
        """Seconds that a full step takes beside these decodes, with a slice that reads `reach` tokens of context."""
        ...

    def pace(self, cost: CostModel, beside: Beside, reach: float) -> float:
        """Seconds of prefill work that are done in a second beside these decodes; 0 where these fill the step."""
        ...

    def squeezed_pace(self, cost: CostModel, beside: Beside, reach: float) -> float:
        """The same with the smallest slice in every step (see TimeBudget.room); 0 where not even that keeps the gap."""
        ...

    def starves(self, load: StepLoad) -> bool:
        """Whether a promised gap leaves prompts less than STARVED of the pace that `chunked` would give them."""
        ...


class FixedTokens:
    """So many tokens a step, each decode counting as one, whatever they cost."""

    prefills_first = False
    cuts = False

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def budget(self, load: StepLoad) -> Budget:
        return TokenBudget(self.tokens - load.shape.decodes)

    def step(self, cost: CostModel, beside: Beside, reach: float) -> float:
        work = self._work(cost, beside.decodes, reach)
        least = least_step(cost, beside.decodes, beside.context, reach)
        return max(least, _aside(cost, beside.decodes, beside.context, reach) + work)

    def pace(self, cost: CostModel, beside: Beside, reach: float) -> float:
        return self._work(cost, beside.decodes, reach) / self.step(cost, beside, reach)

    def squeezed_pace(self, cost: CostModel, beside: Beside, reach: float) -> float:
        return 0.0

    def starves(self, load: StepLoad) -> bool:
        return False

    def _work(self, cost: CostModel, decodes: int, reach: float) -> float:
        """Seconds of prefill in a step; of attention's waves, what they take half-way through the prompt."""
        c = cost.coefficients
        return (c.token + c.wave_pair * reach / 2) * max(0, self.tokens - decodes)


class WholePrompts(FixedTokens):
    """Whole prompts before anything else, as many as the tokens hold, or one if it is larger."""

    prefills_first = True

    def budget(self, load: StepLoad) -> Budget:
        return PromptBudget(self.tokens)


class UpToTheGap:
    """As much as the tightest gap target leaves; `tokens` bounds the step as well."""

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
        # Where a default target gives way, what it gives way to is the gap.
        gap = min(beside.gap, seconds * self.cost.margin) if beside.has_target else math.inf
        return TimeBudget(
            self.cost, load.shape, seconds, self.tokens - load.shape.decodes, gap, self._batch_step(beside, load.shape)
        )

    def _batch_step(self, beside: Beside, shape: StepShape) -> float:
        """Seconds that a step with batch prompts may take: the default gap, or a little more than the decodes alone."""
        if beside.soft_gap == math.inf:
            return math.inf
        return max(self._within(self.cost, beside.soft_gap, beside.decodes), BATCH_DELAY * self.cost.predict(shape))

    def _within(self, cost: CostModel, gap: float, decodes: int) -> float:
        """Seconds that a step may be predicted to take for its tokens to reach clients within `gap`."""
        # Tokens are handed out one after the other, so a gap can be longer than the step.
        return max(gap - cost.host.delivery_jitter(decodes), gap / 2) / cost.margin

    def _is_harmless(self, load: StepLoad) -> bool:
        """Whether prompts get on nearly as fast with the gap that is wished for as with the one that is promised."""
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
        """The step in which prompts get on at YIELDS of the pace that `chunked` would give them."""
        aside = _aside(cost, beside.decodes, beside.context, 0)
        chunked = self._chunked.step(cost, beside, 0)
        return min(chunked, aside / (1 - YIELDS * (1 - aside / chunked)))

    def starves(self, load: StepLoad) -> bool:
        if not load.shape.decodes or load.gap == math.inf:
            return False
        beside = load.beside._replace(soft_gap=math.inf)
        return self.pace(self.cost, beside, 0) < STARVED * self._chunked.pace(self.cost, beside, 0)

    def pace(self, cost: CostModel, beside: Beside, reach: float) -> float:
        decodes, context = beside.decodes, beside.context
        step = self.step(cost, beside, reach)
        least = least_step(cost, decodes, context, reach)
        if least > step:
            return 0.0
        c = cost.coefficients
        if c.wave or c.grain > 1:
            tokens = max(1, self.tokens - decodes)
            return min(c.efficiency(decodes, context, int(first), tokens, step) for first in (reach / 2, reach))
        aside = _aside(cost, decodes, context, reach)
        # Where the number of tokens bounds a step, its attention grows with the prompt: a quarter of the end counts.
        work = (c.token + c.pair * reach / 4) * max(0, self.tokens - decodes)
        full = max(least, aside + work)
        return work / full if full < step else 1 - aside / step

    def squeezed_pace(self, cost: CostModel, beside: Beside, reach: float) -> float:
        c = cost.coefficients
        shape = StepShape(beside.decodes, decodes=beside.decodes, context=beside.context)
        step = c.predict(c.with_slice(shape, max(0, int(reach) - LEAST_SLICE), LEAST_SLICE))
        if step * cost.bias > min(beside.gap, self.step(cost, beside, reach) * cost.margin):
            return 0.0
        return LEAST_SLICE * c.token / step


class TokenBudget:
    """A number of tokens, whatever they cost."""

    reason = "token budget"

    def __init__(self, tokens: int) -> None:
        self.tokens = max(0, tokens)

    def room(self, first: int, wanted: int) -> int:
        return min(self.tokens, wanted)

    def take(self, first: int, count: int) -> None:
        self.tokens -= count

    def tighten(self, seconds: float) -> None:
        pass

    def limit_batch(self) -> None:
        pass


class PromptBudget(TokenBudget):
    """Prompts are taken whole, as many as the budget holds, or one if it is larger."""

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
    """Seconds of predicted time for the whole step; `idle` where nobody beside the prefills is promised a gap."""

    def __init__(
        self,
        cost: CostModel,
        shape: StepShape,
        seconds: float,
        tokens: int,
        gap: float,
        batch_seconds: float = math.inf,
    ) -> None:
        self.cost = cost
        self.shape = shape
        self.seconds = seconds
        self.tokens = tokens
        self.gap = gap
        self.batch_seconds = batch_seconds
        self.idle = gap == math.inf
        self.reason = "no gap target" if self.idle else "gap target"

    def room(self, first: int, wanted: int) -> int:
        most = min(wanted, self.tokens)
        if most <= 0:
            return 0
        fitting = self.cost.coefficients.best_slice(self.shape, first, most, self.seconds)
        least = min(most, LEAST_SLICE)
        if fitting < least and not self.shape.slices and self._may_squeeze(first, least):
            return least
        return fitting

    def _may_squeeze(self, first: int, count: int) -> bool:
        """Somebody must get on: however slow the machine, and where the target is met without the margin for noise."""
        squeezed = self.cost.coefficients.with_slice(self.shape, first, count)
        return self.idle or self.cost.predict(squeezed) * self.cost.bias <= self.gap

    def take(self, first: int, count: int) -> None:
        self.shape = self.cost.coefficients.with_slice(self.shape, first, count)
        self.tokens -= count

    def tighten(self, seconds: float) -> None:
        self.seconds = min(self.seconds, seconds / self.cost.margin)
        if self.idle:  # such a step may be long, but a first token is not to wait for others' prompts
            self.seconds = min(self.seconds, 2 * self.cost.predict(self.shape))

    def limit_batch(self) -> None:
        self.seconds = min(self.seconds, self.batch_seconds)
        self.gap = min(self.gap, self.batch_seconds * self.cost.margin)


def least_step(cost: CostModel, decodes: int, context: float, reach: float) -> float:
    """Seconds of a step with next to no prefill in it."""
    c = cost.coefficients
    if c.wave or c.grain > 1:
        beside = StepShape(decodes, decodes=decodes, context=context)
        return c.predict(c.with_slice(beside, max(0, int(reach) - 1), 1))
    return _aside(cost, decodes, context, reach) + max(0.0, c.weights - c.token * decodes)


def _aside(cost: CostModel, decodes: int, context: float, reach: float) -> float:
    """Seconds of a step with a prefill in it that are not the prefill's. Where there are waves, half of one counts."""
    c = cost.coefficients
    read = c.reach * reach * (0.5 if c.wave else 1.0)
    return c.fixed + c.prefill + c.slice + c.token * decodes + c.rows(decodes) + c.context * context + read
