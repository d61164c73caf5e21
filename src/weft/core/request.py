"""Request: one completion of one prompt, as the scheduler sees it. It has counts, hashes and times, no token ids."""

import enum
import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from weft.core.promises import CONSTRAINED_STEPS, Source
from weft.core.tenants import Account

OrderKey = tuple[float | str, ...]  # the smallest goes first


class State(enum.Enum):
    WAITING = "waiting"  # in the queue: new, or preempted
    RUNNING = "running"  # has a seat, a slot and blocks
    FINISHED = "finished"  # done, stopped, aborted or refused; has no seat and no blocks


@dataclass(slots=True, eq=False)
class Request:
    """One request, compared by object identity.

    `num_tokens` and `awaits_mask` are valid only while it waits. While it runs, `Slots` has the current values.
    """

    id: str
    prompt_tokens: int
    max_tokens: int  # upper bound of sampled tokens
    arrival: float = 0.0  # seconds, on the clock of `Scheduler.plan(now)`
    priority: int = 0  # lower goes first
    tenant: str = ""  # tenant that it belongs to; tenants share the server by tokens
    precedence: int = 0  # lower goes first, among prompts of the same tenant and class
    user: str = ""  # user within the tenant: later prompts of a user wait for other users' prompts; "": no user
    sibling: bool = False  # another completion of the same prompt as the request that was added just before
    flex: bool = False  # flex class: has no promise and runs only in time that standard (not flex) requests leave
    ttft_target: float = math.inf  # seconds from arrival to the first token, promised or not (see `ttft_source`)
    gap_target: float = math.inf  # seconds between tokens, promised or not (see `gap_source`)
    ttft_source: Source = Source.REQUEST  # origin of the target; a default target never causes a refusal
    gap_source: Source = Source.REQUEST
    gap_wish: float = math.inf  # seconds between tokens, below the target; see WISH_PACE_SHARE
    reuse_prefix: bool = True  # False: compute every token, even if it is cached (for prompt logprobs)
    constrained: bool = False  # a grammar masks each token; the mask needs the token before
    hashes: list[Hashable] = field(default_factory=list)  # chained, one per full block of tokens with known ids

    state: State = State.WAITING
    finish_reason: str | None = None
    slot: int = -1  # -1: none. The slot outlives the seat while a step in flight uses it.
    num_tokens: int = 0  # prompt and output: tokens to compute when it starts (output only after a preemption)
    awaits_mask: bool = False  # the mask of its next token is not ready; it cannot start before `Scheduler.release`
    arrival_index: int = 0  # order of arrival, from 1
    due_at_arrival: float = math.inf  # `due` at arrival, before any target is dropped; orders screening
    user_prompts_ahead: int = 0  # number of prompts of the same user that waited when it arrived
    order_key: OrderKey = ()  # class (two numbers), precedence, then the policy's order; see `Order.key`
    tenant_account: Account | None = None  # set by `Scheduler.add`; read it as `account`
    # The tenant's service when the request first started, before its prompt was charged; None: not started yet.
    service_at_start: float | None = None
    expected_cached_tokens: int = 0  # prompt tokens that screening found in the prefix cache
    forecast_row: bytes = b""  # its row of the forecast as bytes, while it waits; see `PendingPrefill.pack`
    blocks: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0  # its blocks up to here were inserted into the prefix cache

    started: float | None = None  # start of its first step
    first_token: float | None = None  # end of the step that sampled its first token
    finished: float | None = None
    predicted_ttft: float | None = None  # seconds from arrival, predicted at screening or refusal; None: not predicted
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache before any preemption
    preemptions: int = 0
    lost_tokens: int = 0  # computed or cached tokens that preemptions discarded

    def __post_init__(self) -> None:
        self.num_tokens = self.prompt_tokens
        self.awaits_mask = self.constrained

    @property
    def account(self) -> Account:
        """The account of its tenant."""
        assert self.tenant_account is not None, "only requests that were added have an account"
        return self.tenant_account

    def note_times(self, started: float, finished: float, *, is_sampled: bool) -> None:
        """Records the times of a step with one of its prefill slices."""
        if self.started is None:
            self.started = started
        if is_sampled and self.first_token is None:
            self.first_token = finished

    @property
    def limit(self) -> int:
        """Most tokens that it can reach: prompt plus max_tokens."""
        return self.prompt_tokens + self.max_tokens

    @property
    def promised_max_step(self) -> float:
        """Longest step, in seconds, that keeps its promised gap. Infinite if no gap is promised."""
        return math.inf if self.gap_source is Source.DEFAULT else self.gap_target / self.steps_per_token

    @property
    def default_max_step(self) -> float:
        """Longest step, in seconds, that keeps its default gap target (not promised). Infinite if it has none."""
        return self.gap_target / self.steps_per_token if self.gap_source is Source.DEFAULT else math.inf

    @property
    def steps_per_token(self) -> int:
        """Steps from one token to the next."""
        return CONSTRAINED_STEPS if self.constrained else 1

    @property
    def has_gap_wish(self) -> bool:
        """Whether it wishes for a smaller gap than its target."""
        return self.gap_wish < self.gap_target

    @property
    def due(self) -> float:
        """Time at which its first token should come, promised or by default."""
        return self.arrival + self.ttft_target

    @property
    def promised_due(self) -> float:
        """Time at which its first token is promised. Infinite if it is not promised."""
        return math.inf if self.ttft_source is Source.DEFAULT else self.arrival + self.ttft_target

    @property
    def has_promise(self) -> bool:
        return self.promised_max_step < math.inf or self.promised_due < math.inf

    @property
    def class_key(self) -> tuple[bool, int]:
        """Its class: a smaller key goes first. Equal to the first two fields of `order_key`."""
        return self.flex, self.priority

    @property
    def age_key(self) -> tuple[bool, int, float, str]:
        """Class, then arrival. A smaller key is more senior."""
        return (self.flex, self.priority, self.arrival, self.id)
