"""A request as the scheduler sees it: counts, hashes and times, never token values."""

import enum
import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from weft.core.promises import CONSTRAINED_STEPS, Source
from weft.core.tenants import Account

Rank = tuple[float | str, ...]  # the smallest rank goes first


class State(enum.Enum):
    WAITING = "waiting"  # in the queue: new, or preempted
    RUNNING = "running"  # holds a seat, a slot and blocks
    FINISHED = "finished"  # done, stopped, aborted or refused; holds no seat and no blocks


@dataclass(slots=True, eq=False)
class Request:
    """One request, compared by object identity.

    While it runs, its counters live in `Slots`. `known` and `held` are the values that it has in the queue.
    """

    id: str
    prompt_tokens: int
    max_tokens: int  # upper bound of sampled tokens
    arrival: float = 0.0  # seconds, on the clock of `Scheduler.plan(now)`
    priority: int = 0  # lower goes first
    tenant: str = ""  # tenant that it belongs to; tenants share the server by tokens
    precedence: int = 0  # lower goes first, among prompts of the same tenant and class
    user: str = ""  # user within the tenant: later prompts of a user wait for other users' prompts; "": no user
    sibling: bool = False  # another completion of the same prompt as the request added just before
    batch: bool = False  # batch class: has no promise and runs only in time that other requests leave
    ttft_target: float = math.inf  # seconds from arrival to the first token
    gap_target: float = math.inf  # seconds between tokens
    ttft_source: Source = Source.REQUEST  # origin of the target; a default target never causes a refusal
    gap_source: Source = Source.REQUEST
    gap_wish: float = math.inf  # seconds, below the target; granted if it costs other requests next to nothing
    reuse_prefix: bool = True  # False: compute every token, even if it is cached (for prompt logprobs)
    constrained: bool = False  # a grammar masks each token; the mask needs the token before
    hashes: list[Hashable] = field(default_factory=list)  # chained, one per full block of tokens with known values

    state: State = State.WAITING
    finish_reason: str | None = None
    slot: int = -1  # -1: none. Kept without a seat as long as a step in flight uses it.
    known: int = 0  # tokens to compute on (re)admission: the prompt plus tokens sampled before a preemption
    held: bool = False  # waits for the mask of its next token; not admitted before `Scheduler.release`
    number: int = 0  # order of arrival, from 1
    screened_by: float = math.inf  # due time of the first token at arrival; orders screening
    ahead: int = 0  # number of prompts of the same user that waited when it arrived
    rank: Rank = ()  # class (two numbers), precedence, then the policy's order; see `Order.rank`
    tenant_account: Account | None = None  # set by `Scheduler.add`; read it as `account`
    # The tenant's service when the request first started, before its prompt was charged; None: not started yet.
    service_at_start: float | None = None
    expected_hits: int = 0  # prompt tokens found in the prefix cache at screening
    packed: bytes = b""  # its row of the forecast while it waits; see `PendingPrefill.pack`
    blocks: list[int] = field(default_factory=list)
    named: int = 0  # how many of its blocks were offered to the prefix cache

    started: float | None = None  # start of its first step
    first_token: float | None = None  # end of the step that sampled its first token
    finished: float | None = None
    predicted_ttft: float | None = None  # seconds from arrival, predicted at screening or refusal; None: not predicted
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache before any preemption
    preemptions: int = 0
    lost_tokens: int = 0  # computed or cached tokens that preemptions discarded

    def __post_init__(self) -> None:
        self.known = self.prompt_tokens
        self.held = self.constrained

    @property
    def account(self) -> Account:
        """The account of its tenant."""
        assert self.tenant_account is not None, "only requests that were added have an account"
        return self.tenant_account

    def note_times(self, started: float, finished: float, *, samples: bool) -> None:
        """Notes a step with one of its prefill slices."""
        if self.started is None:
            self.started = started
        if samples and self.first_token is None:
            self.first_token = finished

    @property
    def limit(self) -> int:
        """Most tokens that it can reach: prompt plus max_tokens."""
        return self.prompt_tokens + self.max_tokens

    @property
    def firm_gap(self) -> float:
        """Longest step, in seconds, that keeps its promised gap. Infinite if no gap is promised."""
        return math.inf if self.gap_source is Source.DEFAULT else self.gap_target / self.steps_per_token

    @property
    def soft_gap(self) -> float:
        """Longest step, in seconds, that keeps its default gap target (not promised). Infinite if it has none."""
        return self.gap_target / self.steps_per_token if self.gap_source is Source.DEFAULT else math.inf

    @property
    def steps_per_token(self) -> int:
        return CONSTRAINED_STEPS if self.constrained else 1

    @property
    def wishes_more(self) -> bool:
        return self.gap_wish < self.gap_target

    @property
    def due(self) -> float:
        """Time at which its first token should come, promised or not."""
        return self.arrival + self.ttft_target

    @property
    def deadline(self) -> float:
        """Time at which its first token is promised. Infinite if it is not promised."""
        return math.inf if self.ttft_source is Source.DEFAULT else self.arrival + self.ttft_target

    @property
    def has_promise(self) -> bool:
        return self.firm_gap < math.inf or self.deadline < math.inf

    @property
    def class_key(self) -> tuple[bool, int]:
        """Its class: a smaller key goes first."""
        return self.batch, self.priority

    @property
    def age_key(self) -> tuple[bool, int, float, str]:
        """Class, then arrival. A smaller key is more senior."""
        return (self.batch, self.priority, self.arrival, self.id)
