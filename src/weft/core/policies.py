"""Policies: how many prefill tokens a step may carry, who gets them, and who is better refused.

- `ChunkedPolicy`: a fixed number of tokens a step, decodes first. What other engines do.
- `MonolithicPolicy`: whole prompts, before anything else. It exists to show the problem.
- `SloPolicy`: as many prefill tokens as keep the step within the tightest promise of those who decode beside them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from weft.core.cost import CostModel, StepShape, with_slice
from weft.core.request import Request

IDLE_STEP = 0.25  # seconds a step may take where nobody decodes, so that a newcomer never waits behind an enormous one

LEAST_SLICE = 16  # tokens
MEMORY = 30.0  # seconds over which the load is averaged
MOST_LOAD = 0.85  # more than this is not believed
Rank = tuple[float, ...]  # smaller goes first


class Prefill(NamedTuple):
    """A prompt, or what is left of one."""

    request: Request
    first: int  # tokens that are computed or cached
    left: int  # tokens to compute


class StepLoad(NamedTuple):
    """What a policy may look at when the decodes of a step are settled."""

    start: float  # when the step will begin: now, or when the one in flight is predicted to end
    shape: StepShape  # of the decodes
    gap: float  # seconds; the tightest gap target among them, infinite where there is none


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


class Policy(Protocol):
    prefills_first: bool  # whether prefills go before decodes, which then wait

    def budget(self, load: StepLoad) -> Budget: ...

    def rank(self, request: Request) -> Rank:
        """Order among prefills, those under way and those that wait; it does not change while a request queues."""
        ...

    def overtakes(self, newcomer: Request, started: Request) -> bool:
        """Whether a request that waits may go before a prefill that is under way."""
        ...

    def screen(self, newcomer: Request, prefills: Callable[[], list[Prefill]], load: StepLoad) -> bool:
        """Whether a newcomer, which is among the `prefills` (in order), should be kept; False refuses it."""
        ...

    def is_hopeless(self, prefill: Prefill, load: StepLoad) -> bool:
        """Whether a request that has not started could not keep its promise even if it were the next."""
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

    def tighten(self, seconds: float) -> None:
        pass


class WholePrompts(TokenBudget):
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

    def __init__(self, cost: CostModel, shape: StepShape, seconds: float, tokens: int, idle: bool) -> None:
        self.cost = cost
        self.shape = shape
        self.seconds = seconds
        self.tokens = tokens
        self.idle = idle
        self.reason = "no gap target" if idle else "gap target"

    def room(self, first: int, wanted: int) -> int:
        most = min(wanted, self.tokens)
        if most <= 0:
            return 0
        fitting = self.cost.coefficients.largest_slice(self.shape, first, most, self.seconds)
        if self.idle and not self.shape.slices:  # however slow the machine, somebody must get on
            return max(fitting, min(most, LEAST_SLICE))
        return fitting

    def take(self, first: int, count: int) -> None:
        self.shape = with_slice(self.shape, first, count)
        self.tokens -= count

    def tighten(self, seconds: float) -> None:
        self.seconds = min(self.seconds, seconds / self.cost.margin)
        if self.idle:  # such a step may be long, but a first token is not to wait for others' prompts
            self.seconds = min(self.seconds, 2 * self.cost.predict(self.shape))


class ChunkedPolicy:
    """Stall-free batching with a fixed budget: every decode counts as one token, prefills share what is left."""

    prefills_first = False

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.tokens = max_num_batched_tokens

    def budget(self, load: StepLoad) -> Budget:
        return TokenBudget(self.tokens - load.shape.decodes)

    def rank(self, request: Request) -> Rank:
        return (request.priority, request.arrival)

    def overtakes(self, newcomer: Request, started: Request) -> bool:
        return False

    def screen(self, newcomer: Request, prefills: Callable[[], list[Prefill]], load: StepLoad) -> bool:
        return True

    def is_hopeless(self, prefill: Prefill, load: StepLoad) -> bool:
        return False

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
        self._accepted = 0.0
        self._accepted_at = 0.0

    def budget(self, load: StepLoad) -> Budget:
        if self.chunk is not None:
            return TokenBudget(self.chunk - load.shape.decodes)
        tokens = self.tokens - load.shape.decodes
        return TimeBudget(self.cost, load.shape, self._limit(load.gap), tokens, idle=load.gap == math.inf)

    def rank(self, request: Request) -> Rank:
        work = self.cost.coefficients.prefill_seconds(0, request.known)
        return (request.batch, request.priority, request.due - work, request.arrival)

    def overtakes(self, newcomer: Request, started: Request) -> bool:
        return newcomer.rank < started.rank

    def screen(self, newcomer: Request, prefills: Callable[[], list[Prefill]], load: StepLoad) -> bool:
        """Walks the queue as it would be served if nothing else arrived, and asks who would come too late.

        Each prefill runs at the pace that decodes leave it; when it is done it decodes itself and slows the next ones.
        None of those who decode is assumed to end, so the walk errs on the late side.
        """
        if newcomer.batch or newcomer.due == math.inf:
            return True  # it goes last and is promised nothing
        clock = load.start
        decodes, context, gap = load.shape.decodes, float(load.shape.context), load.gap
        busy = min(self._busy(clock), MOST_LOAD)
        work = 0.0
        reached = False
        for request, first, count in prefills():
            step = self._step(decodes, context, gap)
            pace = self._pace(decodes, context, gap)
            if pace <= 0:
                return False
            seconds = self.cost.coefficients.prefill_seconds(first, count) * self.bias / pace
            clock += seconds
            context += first + count + decodes * seconds / step  # those who decode write a token a step
            decodes, gap = decodes + 1, min(gap, request.gap_target)
            end = clock + step  # a first token comes at the end of a step, whatever else that step carries
            if end > request.due and self.chunk is None:
                # The step will be cut short for it (see Budget.tighten), which costs the others one step more.
                clock += self._least(decodes, context)
                end = clock
            spare = 0.0
            if request is newcomer:
                reached = True
                request.predicted_ttft = end - request.arrival
                # While it is read others will come with less slack and go before it: as in a queue with priorities,
                # its own work takes 1 / (1 - load) times as long.
                spare = seconds * busy / (1 - busy)
                work = seconds
            if reached and not request.batch and end + spare > request.due:
                return False
        self._accepted += work / MEMORY
        return True

    def _busy(self, now: float) -> float:
        """Seconds of prefill work that were accepted in a second, of late."""
        self._accepted *= math.exp((self._accepted_at - now) / MEMORY)
        self._accepted_at = now
        return self._accepted

    def is_hopeless(self, prefill: Prefill, load: StepLoad) -> bool:
        request, first, count = prefill
        if request.due == math.inf:
            return False
        pace = self._pace(load.shape.decodes, load.shape.context, load.gap)
        seconds = self.cost.coefficients.prefill_seconds(first, count) * self.bias
        return pace <= 0 or load.start + seconds / pace > request.due

    def _limit(self, gap: float) -> float:
        """Seconds that a step may be predicted to take."""
        return IDLE_STEP if gap == math.inf else gap / self.cost.margin

    def _aside(self, decodes: int, context: float) -> float:
        """Seconds of a step with a prefill in it that are not the prefill's."""
        c = self.cost.coefficients
        return c.fixed + c.slice + (c.token + c.decode) * decodes + c.context * context

    def _least(self, decodes: int, context: float) -> float:
        """Seconds of a step with next to no prefill in it."""
        c = self.cost.coefficients
        return self._aside(decodes, context) + max(0.0, c.weights - c.token * decodes)

    def _step(self, decodes: int, context: float, gap: float) -> float:
        """Seconds that a full step takes beside so many decodes."""
        if self.chunk is None:
            return self._limit(gap)
        c = self.cost.coefficients
        work = c.token * max(0, self.chunk - decodes)
        return max(self._least(decodes, context), self._aside(decodes, context) + work)

    def _pace(self, decodes: int, context: float, gap: float) -> float:
        """Seconds of prefill work that are done in a second beside so many decodes; 0 where these fill the step."""
        c = self.cost.coefficients
        aside, step = self._aside(decodes, context), self._step(decodes, context, gap)
        if self.chunk is not None:
            return c.token * max(0, self.chunk - decodes) / step
        return 1 - aside / step if self._least(decodes, context) <= step else 0.0

    @property
    def bias(self) -> float:
        """By how much steps take longer than predicted, on average."""
        return math.exp(self.cost.mean)

    def may_join(self, request: Request, after: StepShape, gap: float) -> bool:
        return self.cost.predict(after) * self.cost.margin <= gap

    def predict(self, shape: StepShape) -> float | None:
        return self.cost.predict(shape)

    def observe(self, predicted: float | None, measured: float) -> None:
        if predicted is not None:
            self.cost.observe(predicted, measured)
