"""Tenants: the service that each tenant has received, and the seats and blocks that it has."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

INPUT_WEIGHT = 1.0  # weight of a prompt token that is computed
OUTPUT_WEIGHT = 2.0  # weight of a sampled token: it costs a row of a step, which reads the whole context
MOST_LEAD = 32_768.0  # weighted tokens: the part of a tenant's lead in service over the others that counts against it
MOST_DEPARTED = 1024  # absent tenants whose lead is remembered


@dataclass(slots=True, eq=False)
class Account:
    """What one tenant has received, and what it has now."""

    name: str
    weight: float = 1.0  # relative share
    service: float = 0.0  # weighted tokens received, divided by `weight`
    unserved_since: float = 0.0  # time of its last slice, or when it began to wait
    num_standard: int = 0  # waiting and running requests that are not flex
    num_flex: int = 0  # waiting and running flex requests
    seats: int = 0
    blocks: int = 0  # a block that two requests share counts for both
    waiting: Counter[tuple[bool, str]] = field(default_factory=Counter)  # waiting prompts by (flex, user)

    def count_prompt(self, flex: bool, user: str, sibling: bool) -> int:
        """Counts a new waiting prompt of a user. Returns the number of other prompts of this user that wait.

        A sibling is no prompt of its own. Prompts without a user are not counted.
        """
        if not user:
            return 0
        if not sibling:
            self.waiting[flex, user] += 1
        return max(0, self.waiting[flex, user] - 1)

    def uncount_prompt(self, flex: bool, user: str, sibling: bool) -> None:
        """Removes a waiting prompt, which has started, or ended without a start."""
        if not user or sibling:
            return
        self.waiting[flex, user] -= 1
        if not self.waiting[flex, user]:
            del self.waiting[flex, user]

    def charge(self, weighted_tokens: float) -> None:
        """Adds tokens to the service that the tenant has received."""
        self.service += weighted_tokens / self.weight


class Tenants:
    """The accounts of all active tenants.

    A tenant's share is its weight over the sum of the active tenants' weights. A single tenant has no bound.
    """

    def __init__(self, seats: int, blocks: int, weights: Mapping[str, float]) -> None:
        self.seats = seats
        self.blocks = blocks
        for name, weight in weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of tenant {name!r} is {weight}; it must be a number above 0")
        self.weights = weights
        self._accounts: dict[str, Account] = {}
        self._departed: dict[str, float] = {}  # service of absent tenants; the oldest entry is dropped
        self._floor = 0.0  # lowest service of a new account: an absent tenant earns no credit
        self._standard_weight = 0.0  # sum over tenants with standard (not flex) requests
        self._weight = 0.0  # sum over all active tenants

    @property
    def has_several(self) -> bool:
        return len(self._accounts) > 1

    def enter(self, name: str, flex: bool, levels: Iterable[float], now: float = 0.0) -> Account:
        """Counts a new request of a tenant. `levels` is the service of each tenant with prompts to compute."""
        account = self._accounts.get(name)
        if account is None:
            # A returning tenant starts at the lowest service among waiting tenants. If none waits, it starts at the
            # highest service of all: it missed nothing.
            level = min(levels, default=max((a.service for a in self._accounts.values()), default=0.0))
            self._floor = max(self._floor, level)
            before = min(self._departed.pop(name, 0.0), self._floor + MOST_LEAD)
            account = Account(name, self.weights.get(name, 1.0), max(self._floor, before), now)
            self._accounts[name] = account
            self._weight += account.weight
        if not flex and not account.num_standard:
            self._standard_weight += account.weight
        account.num_standard += not flex
        account.num_flex += flex
        return account

    def leave(self, account: Account, flex: bool) -> None:
        """Counts a finished request. After a tenant's last one, only its lead in service over others is remembered."""
        account.num_standard -= not flex
        account.num_flex -= flex
        if not flex and not account.num_standard:
            self._standard_weight -= account.weight
        if not account.num_standard and not account.num_flex:
            del self._accounts[account.name]
            self._weight -= account.weight
            if not self._accounts:
                self._floor = max(self._floor, account.service)
                self._departed.clear()
            elif account.service > self._floor:
                self._departed[account.name] = account.service
                if len(self._departed) > MOST_DEPARTED:
                    del self._departed[next(iter(self._departed))]

    def is_over(self, account: Account, *, flex: bool, seats: int = 0, blocks: int = 0) -> bool:
        """Whether a tenant holds more than its share, with `seats` and `blocks` added. One request is always allowed.

        The shares of standard requests leave out tenants that have only flex requests, because these can be preempted.
        """
        total = self._weight if flex else self._standard_weight
        if total <= account.weight or account.seats + seats <= 1:
            return False
        share = account.weight / total
        return account.seats + seats > share * self.seats or account.blocks + blocks > share * self.blocks
