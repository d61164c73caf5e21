"""A request as the scheduler sees it: counts, hashes and times, never token values."""

import enum
import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from weft.core.promises import CONSTRAINED_STEPS, Source
from weft.core.tenants import Account

Rank = tuple[float | str, ...]  # smaller goes first


class State(enum.Enum):
    WAITING = "waiting"  # in the queue: new, or preempted
    RUNNING = "running"  # holds a seat, a slot and blocks
    FINISHED = "finished"  # done, stopped or aborted; holds nothing


@dataclass(slots=True, eq=False)
class Request:
    """Identity is the object itself. While it runs, its counts live in `Slots`; `known` and `held` are what it queues
    with."""

    id: str
    prompt_tokens: int
    max_tokens: int  # most tokens to sample
    arrival: float = 0.0  # seconds, on the clock of `Scheduler.plan(now)`
    priority: int = 0  # lower goes first
    tenant: str = ""  # who it is for; tenants share by tokens
    precedence: int = 0  # lower goes first, among prompts of the same tenant and class
    user: str = ""  # who within the tenant: each one's prompts make room for the others'; "" is nobody
    sibling: bool = False  # another completion of the prompt that came just before
    batch: bool = False  # makes no promise and fills the slack behind everybody else
    ttft_target: float = math.inf  # seconds from arrival to the first token
    gap_target: float = math.inf  # seconds between tokens
    ttft_source: Source = Source.REQUEST  # who set the target; a default never refuses a request
    gap_source: Source = Source.REQUEST
    gap_wish: float = math.inf  # less than the target: given as far as it costs the others next to nothing
    reuse_prefix: bool = True  # False: compute every token, even where the cache has it (prompt logprobs)
    constrained: bool = False  # a grammar decides what each of its tokens may be, once the one before it is known
    hashes: list[Hashable] = field(default_factory=list)  # chained, one per full block of tokens with known values

    state: State = State.WAITING
    finish_reason: str | None = None
    slot: int = -1  # -1: none. Kept after the seat is given up while a step in flight still names it.
    known: int = 0  # tokens to compute on (re)admission: the prompt, plus what was sampled before a preemption
    held: bool = False  # queues without the mask of its next token: not to be admitted before `Scheduler.release`
    number: int = 0  # of those that were added, so many came before it or with it
    screened_by: float = math.inf  # when its first token was due as it came
    turn: int = 0  # how many prompts of the same user waited when it came
    rank: Rank = ()  # class (two numbers), precedence, then the policy's order; see `Order.rank`
    account: Account | None = None  # its tenant's, once it was added
    tag: float | None = None  # its tenant's service when it started, before its prompt was charged; None: not yet
    expected_hits: int = 0  # prompt tokens that were in the prefix cache when it was screened
    packed: bytes = b""  # what the forecast needs to know of it while it waits; see `Prefill.pack`
    blocks: list[int] = field(default_factory=list)
    named: int = 0  # of its blocks, how many were offered to the prefix cache

    started: float | None = None  # start of the first step that carried it
    first_token: float | None = None  # end of the step that sampled its first token
    finished: float | None = None
    predicted_ttft: float | None = None  # seconds, as of its arrival; None: nobody predicted
    cached_tokens: int = 0  # prompt tokens it did not have to compute at its first admission
    preemptions: int = 0
    lost_tokens: int = 0  # computed, then given up by preemption

    def __post_init__(self) -> None:
        self.known = self.prompt_tokens
        self.held = self.constrained

    @property
    def limit(self) -> int:
        """Tokens it has when it has all: prompt and the most that may be sampled."""
        return self.prompt_tokens + self.max_tokens

    @property
    def firm_gap(self) -> float:
        """Seconds that a step may take for its promised gap; infinite where none is promised."""
        return math.inf if self.gap_source is Source.DEFAULT else self.gap_target / self.steps_per_token

    @property
    def soft_gap(self) -> float:
        """The same for a gap that is aimed at and not promised."""
        return self.gap_target / self.steps_per_token if self.gap_source is Source.DEFAULT else math.inf

    @property
    def steps_per_token(self) -> int:
        return CONSTRAINED_STEPS if self.constrained else 1

    @property
    def wishes_more(self) -> bool:
        return self.gap_wish < self.gap_target

    @property
    def due(self) -> float:
        """When its first token should come."""
        return self.arrival + self.ttft_target

    @property
    def deadline(self) -> float:
        """When its first token is promised; infinite where it is not."""
        return math.inf if self.ttft_source is Source.DEFAULT else self.arrival + self.ttft_target

    @property
    def age_key(self) -> tuple[bool, int, float, str]:
        """Class, then arrival: who is smaller is senior."""
        return (self.batch, self.priority, self.arrival, self.id)
