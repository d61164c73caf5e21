"""Budget policies: how much prefill a step may carry in addition to its decodes, in tokens or in predicted seconds.

A BudgetPolicy is one part of a Policy. It makes a Budget for each step, and each prefill slice spends some of it.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from weft.core.cost import CostModel
from weft.core.shape import StepShape
from weft.core.turnover import NO_DECODES, EndForecast

IDLE_STEP_S = 0.25  # seconds: limit of a step if no decode has a gap target; bounds the wait of a new request
LEAST_SLICE_TOKENS = 16  # tokens of the smallest slice
WISH_PACE_SHARE = 0.95  # a gap wish is granted if prefill keeps this share of its pace
# A decode step with flex requests may take this share of the longest step that keeps the gap targets of the others.
FLEX_SHARE = 0.5
FLEX_START_SHARE = 0.9  # of that limit, for the start of a flex request: the next step need not preempt it
FLEX_DELAY = 1.25  # times a step without flex requests: limit of a step with them if a default gap is missed anyway
DEFAULT_PACE_SHARE = 0.8  # a default gap target is relaxed until prefill has this share of the pace of `chunked`
STARVED_PACE_SHARE = 0.25  # the operator is told if a promised gap leaves less than this share of the pace of `chunked`


class StepLoad(NamedTuple):
    """What a policy knows about a step when only its decodes are chosen.

    The fields `..._max_step` are the longest step that keeps all gaps of the decodes: promised gaps, default gap
    targets, and gap wishes. Infinite: no decode has one.
    """

    start: float  # start time of the step: now, or the predicted end of the step in flight
    shape: StepShape  # the decodes alone
    promised_max_step: float  # seconds
    default_max_step: float = math.inf  # seconds; may be exceeded under load
    end_forecast: EndForecast = NO_DECODES  # when the decodes are expected to end
    has_flex_decodes: bool = False  # whether flex requests, not counted here, decode in the same step
    wished_max_step: float = math.inf  # seconds; only granted if prefill hardly slows down
    free_tokens: float = math.inf  # tokens of KV memory that new requests can use
    freed_per_second: float | None = None  # tokens of KV memory freed per second; None: unknown

    @property
    def decode_load(self) -> "DecodeLoad":
        return DecodeLoad(self.shape.decodes, self.shape.context, self.promised_max_step, self.default_max_step)


class DecodeLoad(NamedTuple):
    """The decodes that share a step with prefill slices. For `..._max_step` see `StepLoad`."""

    num_decodes: int
    context: float  # tokens of context that they read
    promised_max_step: float  # seconds
    default_max_step: float = math.inf  # seconds

    @property
    def has_target(self) -> bool:
        return self.promised_max_step < math.inf or self.default_max_step < math.inf


class Budget(Protocol):
    """Remaining budget of a step for prefill slices."""

    prefill_limit: str  # what limits the prefill tokens of the step

    def room(self, first: int, wanted: int) -> int:
        """Tokens that a slice starting at position `first` may have, at most `wanted`."""
        ...

    def spend(self, first: int, count: int) -> None:
        """Counts a planned slice of `count` tokens from position `first`."""
        ...

    def tighten(self, seconds: float, *, is_promised: bool) -> None:
        """Asks for a step of at most `seconds`, because it gives a first token that is due then, promised or not."""
        ...

    def limit_flex(self) -> None:
        """Called before the first flex prompt: a default gap target is not relaxed for flex prompts."""
        ...


class BudgetPolicy(Protocol):
    """Makes the budget of each step, and predicts the prefill pace with such budgets."""

    prefills_first: bool  # whether a step has decodes only if it has no prefills
    shortens_steps: bool  # whether a step is shortened for a first token that is due

    def budget(self, load: StepLoad) -> Budget: ...

    def step_seconds(self, cost: CostModel, decode_load: DecodeLoad, reach: float) -> float:
        """Seconds of a full step with these decodes and a slice that reads `reach` tokens of context."""
        ...

    def pace(self, cost: CostModel, decode_load: DecodeLoad, reach: float) -> float:
        """Share of the device's time that these decodes leave for prefill. 0 if they fill the step."""
        ...

    def small_slice_pace(self, cost: CostModel, decode_load: DecodeLoad, reach: float) -> float:
        """The same share if each step has only a slice of LEAST_SLICE_TOKENS. 0 if even that step is too long."""
        ...

    def starves(self, load: StepLoad) -> bool:
        """Whether a promised gap leaves prefills less than STARVED_PACE_SHARE of the pace that `chunked` would give."""
        ...


class FixedBudgetPolicy:
    """A fixed number of tokens per step, whatever they cost. Each decode counts as one token."""

    prefills_first = False
    shortens_steps = False

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def budget(self, load: StepLoad) -> Budget:
        return TokenBudget(self.tokens - load.shape.decodes)

    def step_seconds(self, cost: CostModel, decode_load: DecodeLoad, reach: float) -> float:
        work = self._work(cost, decode_load.num_decodes, reach)
        least = cost.least_step(decode_load.num_decodes, decode_load.context, reach)
        return max(least, cost.overhead(decode_load.num_decodes, decode_load.context, reach) + work)

    def pace(self, cost: CostModel, decode_load: DecodeLoad, reach: float) -> float:
        return self._work(cost, decode_load.num_decodes, reach) / self.step_seconds(cost, decode_load, reach)

    def small_slice_pace(self, cost: CostModel, decode_load: DecodeLoad, reach: float) -> float:
        return 0.0

    def starves(self, load: StepLoad) -> bool:
        return False

    def _work(self, cost: CostModel, decodes: int, reach: float) -> float:
        return cost.slice_work(self.tokens - decodes, reach)


class WholePromptPolicy(FixedBudgetPolicy):
    """Whole prompts, before any decode. As many as fit into the tokens, or a single larger one."""

    prefills_first = True

    def budget(self, load: StepLoad) -> Budget:
        return PromptBudget(self.tokens)


class LatencyBudgetPolicy:
    """As much prefill as the tightest gap target leaves time for. `tokens` limits the step as well."""

    prefills_first = False
    shortens_steps = True

    def __init__(self, cost: CostModel, tokens: int) -> None:
        self.cost = cost
        self.tokens = tokens
        self._chunked = FixedBudgetPolicy(tokens)

    def budget(self, load: StepLoad) -> Budget:
        decodes = load.decode_load
        if self._grants_wish(load):
            decodes = decodes._replace(promised_max_step=min(decodes.promised_max_step, load.wished_max_step))
        seconds = self.step_seconds(self.cost, decodes, 0)
        # If a default target is relaxed, the relaxed step time replaces it as the limit.
        max_step = min(decodes.promised_max_step, seconds * self.cost.margin) if decodes.has_target else math.inf
        return TimeBudget(
            self.cost,
            load.shape,
            seconds,
            self.tokens - load.shape.decodes,
            max_step,
            self._flex_step(decodes, load.shape),
            partial(self._relaxed_step, self.cost, decodes),
        )

    def _flex_step(self, decode_load: DecodeLoad, shape: StepShape) -> float:
        """Seconds that a step with flex prompts may take: the default gap, or FLEX_DELAY times the decodes alone."""
        if decode_load.default_max_step == math.inf:
            return math.inf
        default = self._planned_step(self.cost, decode_load.default_max_step, decode_load.num_decodes)
        return max(default, FLEX_DELAY * self.cost.predict(shape))

    def _planned_step(self, cost: CostModel, max_step: float, decodes: int) -> float:
        """Longest predicted step, in seconds, with which gaps are still as short as a step of `max_step` promises.

        Tokens are sent to clients one after the other, so a gap can be longer than the step.
        """
        return max(max_step - cost.host.delivery_jitter(decodes), max_step / 2) / cost.margin

    def _grants_wish(self, load: StepLoad) -> bool:
        """Whether prefills are nearly as fast with the gap wish as with the gap target."""
        if load.wished_max_step >= min(load.promised_max_step, load.default_max_step):
            return False
        pace = self.pace(self.cost, load.decode_load, 0)
        wished = load.decode_load._replace(promised_max_step=load.wished_max_step)
        return self.pace(self.cost, wished, 0) >= WISH_PACE_SHARE * pace

    def step_seconds(self, cost: CostModel, decode_load: DecodeLoad, reach: float) -> float:
        if not decode_load.has_target:
            return IDLE_STEP_S
        seconds = self._planned_step(cost, decode_load.promised_max_step, decode_load.num_decodes)
        if decode_load.default_max_step < decode_load.promised_max_step:
            default = self._planned_step(cost, decode_load.default_max_step, decode_load.num_decodes)
            seconds = min(seconds, max(default, self._relaxed_step(cost, decode_load)))
        return seconds

    def _relaxed_step(self, cost: CostModel, decode_load: DecodeLoad) -> float:
        """Seconds of the step in which prefill reaches DEFAULT_PACE_SHARE of the pace that `chunked` would give."""
        overhead = cost.overhead(decode_load.num_decodes, decode_load.context, 0)
        chunked = self._chunked.step_seconds(cost, decode_load, 0)
        return min(chunked, overhead / (1 - DEFAULT_PACE_SHARE * (1 - overhead / chunked)))

    def starves(self, load: StepLoad) -> bool:
        if not load.shape.decodes or load.promised_max_step == math.inf:
            return False
        decodes = load.decode_load._replace(default_max_step=math.inf)
        return self.pace(self.cost, decodes, 0) < STARVED_PACE_SHARE * self._chunked.pace(self.cost, decodes, 0)

    def pace(self, cost: CostModel, decode_load: DecodeLoad, reach: float) -> float:
        step, decodes = self.step_seconds(cost, decode_load, reach), decode_load.num_decodes
        return cost.pace(decodes, decode_load.context, reach, self.tokens - decodes, step)

    def small_slice_pace(self, cost: CostModel, decode_load: DecodeLoad, reach: float) -> float:
        shape = StepShape(decode_load.num_decodes, decodes=decode_load.num_decodes, context=decode_load.context)
        pace, seconds = cost.small_slice_pace(shape, max(0, int(reach) - LEAST_SLICE_TOKENS), LEAST_SLICE_TOKENS)
        most = min(decode_load.promised_max_step, self.step_seconds(cost, decode_load, reach) * cost.margin)
        return 0.0 if seconds * cost.bias > most else pace


class TokenBudget:
    """A number of tokens, whatever they cost."""

    prefill_limit = "token budget"

    def __init__(self, tokens: int) -> None:
        self.tokens = max(0, tokens)

    def room(self, first: int, wanted: int) -> int:
        return min(self.tokens, wanted)

    def spend(self, first: int, count: int) -> None:
        self.tokens -= count

    def tighten(self, seconds: float, *, is_promised: bool) -> None:
        pass

    def limit_flex(self) -> None:
        pass


class PromptBudget(TokenBudget):
    """Whole prompts only: as many as fit into the tokens, or a single larger one."""

    prefill_limit = "whole prompts"

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.is_empty = True

    def room(self, first: int, wanted: int) -> int:
        return wanted if self.is_empty or wanted <= self.tokens else 0

    def spend(self, first: int, count: int) -> None:
        super().spend(first, count)
        self.is_empty = False


class TimeBudget:
    """Seconds of predicted time for the whole step."""

    def __init__(
        self,
        cost: CostModel,
        shape: StepShape,
        seconds: float,
        tokens: int,
        max_step: float,
        flex_seconds: float = math.inf,
        relaxed_step: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """A step may take `max_step` seconds without the margin for noise, and `flex_seconds` with flex prompts.

        `relaxed_step` computes how short a default target may make the step. A function, because few steps need it.
        """
        self.cost = cost
        self.shape = shape
        self.seconds = seconds
        self.tokens = tokens
        self.max_step = max_step
        self.flex_seconds = flex_seconds
        self.relaxed_step = relaxed_step
        self.has_no_target = max_step == math.inf  # no decode of the step has a gap target
        self.prefill_limit = "no gap target" if self.has_no_target else "gap target"

    def room(self, first: int, wanted: int) -> int:
        most = min(wanted, self.tokens)
        if most <= 0:
            return 0
        fitting = self.cost.best_slice(self.shape, first, most, self.seconds)
        least = min(most, LEAST_SLICE_TOKENS)
        if fitting < least and not self.shape.slices and self._may_exceed(first, least):
            return least
        return fitting

    def _may_exceed(self, first: int, count: int) -> bool:
        """Whether the smallest slice may run although it does not fit, so that prefills always progress.

        If no decode has a gap target, it always may, however slow the machine is. Otherwise the step must be short
        enough without the margin for noise.
        """
        least = self.cost.with_slice(self.shape, first, count)
        return self.has_no_target or self.cost.predict(least) * self.cost.bias <= self.max_step

    def spend(self, first: int, count: int) -> None:
        self.shape = self.cost.with_slice(self.shape, first, count)
        self.tokens -= count

    def tighten(self, seconds: float, *, is_promised: bool) -> None:
        limit = seconds / self.cost.margin
        if not is_promised:
            # If many first tokens are late, short steps for each would slow all prompts down.
            limit = max(limit, self.relaxed_step())
        self.seconds = min(self.seconds, limit)
        if self.has_no_target:  # such a step may be long, but a first token must not wait for other prompts
            self.seconds = min(self.seconds, 2 * self.cost.predict(self.shape))

    def limit_flex(self) -> None:
        self.seconds = min(self.seconds, self.flex_seconds)
        self.max_step = min(self.max_step, self.flex_seconds * self.cost.margin)
