"""Tenants: what each was served and what it holds. Who got least goes first, and none keeps more than its share."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

INPUT_WEIGHT = 1.0  # of a token that is computed
OUTPUT_WEIGHT = 2.0  # of a token that is sampled: it takes a whole step's turn, and its context is read for it
DEBT = 32_768.0  # weighted tokens: a tenant that was served more than this ahead of the others is not set back further

MEMORY = 1024  # tenants that are remembered while they are away


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's."""

    name: str
    weight: float = 1.0  # its share, relative to the others'
    service: float = 0.0  # weighted tokens, divided by the weight
    unserved_since: float = 0.0  # when it began to wait, or last got a slice
    firm: int = 0  # requests that wait or run
    batch: int = 0  # likewise, of the batch class
    seats: int = 0
    blocks: int = 0  # a block that two requests share counts for both
    waiting: Counter[tuple[bool, str]] = field(default_factory=Counter)  # prompts that wait to start: of batch, of whom

    def line_up(self, batch: bool, user: str) -> int:
        """A prompt of this user waits; returns how many did before it."""
        self.waiting[batch, user] += 1
        return self.waiting[batch, user] - 1

    def step_out(self, batch: bool, user: str) -> None:
        """It starts, or ends without having started."""
        self.waiting[batch, user] -= 1
        if not self.waiting[batch, user]:
            del self.waiting[batch, user]

    def charge(self, weighted_tokens: float) -> None:
        self.service += weighted_tokens / self.weight


class Tenants:
    """Keeps the accounts. A share is a tenant's weight among those who are there: with one there is no bound."""

    def __init__(self, seats: int, blocks: int, weights: Mapping[str, float]) -> None:
        self.seats = seats
        self.blocks = blocks
        for name, weight in weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of tenant {name!r} is {weight}; it must be a number above 0")
        self.weights = weights
        self._accounts: dict[str, Account] = {}
        self._departed: dict[str, float] = {}  # service of those who are away; the oldest is forgotten
        self._floor = 0.0  # service below which nobody starts: being away earns nothing
        self._firm_weight = 0.0  # of the tenants with firm requests
        self._weight = 0.0  # of all

    @property
    def several(self) -> bool:
        return len(self._accounts) > 1

    def enter(self, name: str, batch: bool, levels: Iterable[float], now: float = 0.0) -> Account:
        """A request of this tenant came. `levels` is how much those who wait for a prompt to be read were served."""
        account = self._accounts.get(name)
        if account is None:
            # Level with the least served of those who wait; with all, if nobody waits: nobody was kept from anything.
            level = min(levels, default=max((a.service for a in self._accounts.values()), default=0.0))
            self._floor = max(self._floor, level)
            ahead = min(self._departed.pop(name, 0.0), self._floor + DEBT)
            account = Account(name, self.weights.get(name, 1.0), max(self._floor, ahead), now)
            self._accounts[name] = account
            self._weight += account.weight
        if not batch and not account.firm:
            self._firm_weight += account.weight
        account.firm += not batch
        account.batch += batch
        return account

    def leave(self, account: Account, batch: bool) -> None:
        """A request of this tenant ended. When all have, only what it was served ahead of the others is remembered."""
        account.firm -= not batch
        account.batch -= batch
        if not batch and not account.firm:
            self._firm_weight -= account.weight
        if not account.firm and not account.batch:
            del self._accounts[account.name]
            self._weight -= account.weight
            if not self._accounts:
                self._floor = max(self._floor, account.service)
                self._departed.clear()
            elif account.service > self._floor:
                self._departed[account.name] = account.service
                if len(self._departed) > MEMORY:
                    del self._departed[next(iter(self._departed))]

    def is_over(self, account: Account, *, batch: bool, seats: int = 0, blocks: int = 0) -> bool:
        """Whether a tenant holds more than its share, or would with so much more. One request each is always fair.

        Firm requests share with firm ones only: those of the batch class give way anyway.
        """
        total = self._weight if batch else self._firm_weight
        if total <= account.weight or account.seats + seats <= 1:
            return False
        share = account.weight / total
        return account.seats + seats > share * self.seats or account.blocks + blocks > share * self.blocks
