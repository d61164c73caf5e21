"""Tenants: what each was served and what it holds. Who got least goes first, and none keeps more than its share."""

from collections.abc import Mapping
from dataclasses import dataclass

INPUT_WEIGHT = 1.0  # of a token that is computed
OUTPUT_WEIGHT = 2.0  # of a token that is sampled: it takes a whole step's turn, and its context is read for it


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's."""

    name: str
    weight: float = 1.0  # its share, relative to the others'
    service: float = 0.0  # weighted tokens, divided by the weight
    present: int = 0  # requests that wait or run
    seats: int = 0
    blocks: int = 0  # a block that two requests share counts for both

    def charge(self, weighted_tokens: float) -> None:
        self.service += weighted_tokens / self.weight


class Tenants:
    """Keeps the accounts. A share is a tenant's weight among those present: with one tenant there is no bound."""

    def __init__(self, seats: int, blocks: int, weights: Mapping[str, float]) -> None:
        self.seats = seats
        self.blocks = blocks
        self.weights = weights
        self._accounts: dict[str, Account] = {}
        self._present: set[Account] = set()
        self._floor = 0.0  # service below which nobody starts: being away earns nothing

    @property
    def several(self) -> bool:
        return len(self._present) > 1

    def enter(self, name: str) -> Account:
        """A request of this tenant came."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name, self.weights.get(name, 1.0))
        if not account.present:
            self._raise_floor()
            account.service = max(account.service, self._floor)
            self._present.add(account)
        account.present += 1
        return account

    def leave(self, account: Account) -> None:
        """A request of this tenant ended."""
        account.present -= 1
        if account.present:
            return
        self._raise_floor()
        self._present.discard(account)
        if not self._present:
            self._floor = max(self._floor, account.service)
        # Accounts at the floor carry no memory worth keeping.
        self._accounts = {a.name: a for a in self._accounts.values() if a.present or a.service > self._floor}

    def is_over(self, account: Account, *, seats: int = 0, blocks: int = 0) -> bool:
        """Whether a tenant holds more than its share, or would with so much more. One request each is always fair."""
        if not self.several or account.seats + seats <= 1:
            return False
        share = account.weight / sum(other.weight for other in self._present)
        return account.seats + seats > share * self.seats or account.blocks + blocks > share * self.blocks

    def _raise_floor(self) -> None:
        if self._present:
            self._floor = max(self._floor, min(account.service for account in self._present))
