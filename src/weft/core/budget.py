"""Budgets: how many prefill tokens a step may carry beside its decodes, in tokens or in seconds of predicted time."""

import math
from typing import NamedTuple, Protocol

from weft.core.cost import CostModel, StepShape

IDLE_STEP = 0.25  # seconds a step may take where nobody decodes, so that a newcomer never waits behind an enormous one
LEAST_SLICE = 16  # tokens
HARMLESS = 0.95  # of the pace of prefill: what is left of it if a wish for a smaller gap is to be granted
BATCH_SHARE = 0.5  # of the tightest gap: most that a decode step may take for the batch class to be in it


class StepLoad(NamedTuple):
    """What a policy may look at when the decodes of a step are settled."""

    start: float  # when the step will begin: now, or when the one in flight is predicted to end
    shape: StepShape  # of the decodes
    gap: float  # seconds; the tightest gap target among them, infinite where there is none
    longest: int = 0  # tokens that the one of them with most to write may still write
    crowded: bool = False  # whether batch requests, which are not counted here, decode beside them
    wish: float = math.inf  # seconds; the tightest gap that one of them wishes for beyond what all are promised
    free: float = math.inf  # tokens of KV memory that newcomers find
    freed: float | None = None  # tokens that come free in a second; None: not known


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


class Allowance(Protocol):
    """Makes the budget of each step, and can say ahead how fast prefill will get on with such budgets."""

    prefills_first: bool  # whether prefills go before decodes, which then wait
    cuts: bool  # whether a step is cut short for a first token that is due

    def budget(self, load: StepLoad) -> Budget: ...

    def step(self, cost: CostModel, decodes: int, context: float, gap: float, reach: float) -> float:
        """Seconds that a full step takes beside so many decodes, with a slice that reads `reach` tokens of context."""
        ...

    def pace(self, cost: CostModel, decodes: int, context: float, gap: float, reach: float) -> float:
        """Seconds of prefill work that are done in a second beside so many decodes; 0 where these fill the step."""
        ...


class FixedTokens:
    """So many tokens a step, each decode counting as one, whatever they cost."""

    prefills_first = False
    cuts = False

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def budget(self, load: StepLoad) -> Budget:
        return TokenBudget(self.tokens - load.shape.decodes)

    def step(self, cost: CostModel, decodes: int, context: float, gap: float, reach: float) -> float:
        work = self._work(cost, decodes, reach)
        return max(least_step(cost, decodes, context, reach), _aside(cost, decodes, context, reach) + work)

    def pace(self, cost: CostModel, decodes: int, context: float, gap: float, reach: float) -> float:
        return self._work(cost, decodes, reach) / self.step(cost, decodes, context, gap, reach)

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

    def budget(self, load: StepLoad) -> Budget:
        tokens = self.tokens - load.shape.decodes
        gap = load.wish if self._is_harmless(load) else load.gap
        seconds = self.step(self.cost, 0, 0, gap, 0)
        return TimeBudget(self.cost, load.shape, seconds, tokens, gap)

    def _is_harmless(self, load: StepLoad) -> bool:
        """Whether prompts get on nearly as fast with the gap that is wished for as with the one that is promised."""
        if load.wish >= load.gap:
            return False
        decodes, context = load.shape.decodes, load.shape.context
        pace = self.pace(self.cost, decodes, context, load.gap, 0)
        return self.pace(self.cost, decodes, context, load.wish, 0) >= HARMLESS * pace

    def step(self, cost: CostModel, decodes: int, context: float, gap: float, reach: float) -> float:
        return IDLE_STEP if gap == math.inf else gap / cost.margin

    def pace(self, cost: CostModel, decodes: int, context: float, gap: float, reach: float) -> float:
        step = self.step(cost, decodes, context, gap, reach)
        least = least_step(cost, decodes, context, reach)
        if least > step:
            return 0.0
        c = cost.coefficients
        if c.wave or c.grain > 1:
            beside = StepShape(decodes, decodes=decodes, context=context)
            tokens = max(1, self.tokens - decodes)
            return min(c.efficiency(beside, int(first), tokens, step) for first in (reach / 2, reach))
        aside = _aside(cost, decodes, context, reach)
        # Where the number of tokens bounds a step, its attention grows with the prompt: a quarter of the end counts.
        work = (c.token + c.pair * reach / 4) * max(0, self.tokens - decodes)
        full = max(least, aside + work)
        return work / full if full < step else 1 - aside / step


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

    def __init__(self, cost: CostModel, shape: StepShape, seconds: float, tokens: int, gap: float) -> None:
        self.cost = cost
        self.shape = shape
        self.seconds = seconds
        self.tokens = tokens
        self.gap = gap
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
    return c.fixed + c.prefill + c.slice + (c.token + c.decode) * decodes + c.context * context + read
