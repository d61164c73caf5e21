"""ResponseStore: finished responses in memory, for a limited time. Only the API key that created one can read it.

Everything is stored as JSON text, so that its bytes can be counted and the garbage collector has nothing to scan.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MOST_RESPONSES = 4096
MOST_BYTES = 128 << 20
MOST_EACH = 16 << 20  # bytes; the largest response that is stored
TIME_TO_LIVE = 24 * 3600.0  # seconds
OVERHEAD = 1024  # bytes that a response takes in addition to its texts


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the conversation before it."""

    id: str
    body: bytes  # JSON that a client retrieves
    input: bytes  # JSON list of items: everything before the output, including previous responses
    output: bytes  # JSON list of items without log probabilities, for a following response to continue
    is_background: bool = False
    events: tuple[bytes, ...] = ()  # of its stream, in order; empty: cannot be streamed again
    first_event: int = 0  # sequence number of the first event

    @property
    def size(self) -> int:
        return OVERHEAD + len(self.body) + len(self.input) + len(self.output) + sum(map(len, self.events))


class ResponseStore:
    """Responses by API key. Limited in number, bytes and age.

    If the store is full, the key with the largest share loses its oldest response. So a key that stores much evicts
    responses of itself, and not of other keys.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        most: int = MOST_RESPONSES,
        most_bytes: int = MOST_BYTES,
        most_each: int = MOST_EACH,
        time_to_live: float = TIME_TO_LIVE,
    ) -> None:
        self.most, self.most_bytes, self.most_each = most, most_bytes, min(most_each, most_bytes)
        self.time_to_live = time_to_live
        self._clock = clock
        self._shelves: dict[str, _TenantResponses] = {}  # by API key; a shelf is never empty
        self.bytes = 0
        self.count = 0

    def put(self, tenant: str, response: StoredResponse) -> bool:
        """Stores a response. Returns False if it is too large."""
        self.expire()
        if response.size > self.most_each or self.most < 1:
            return False
        self.remove(tenant, response.id)
        shelf = self._shelves.setdefault(tenant, _TenantResponses())
        shelf.responses[response.id] = (self._clock() + self.time_to_live, response)
        self._count(shelf, 1, response.size)
        while self.count > self.most:
            self._make_room(response, lambda shelf: len(shelf.responses))
        while self.bytes > self.most_bytes:
            self._make_room(response, lambda shelf: shelf.bytes)
        return True

    def get(self, tenant: str, id: str) -> StoredResponse | None:
        """The response with this id, or None if this key has not stored it or it was dropped."""
        self.expire()
        shelf = self._shelves.get(tenant)
        found = None if shelf is None else shelf.responses.get(id)
        return None if found is None else found[1]

    def remove(self, tenant: str, id: str) -> bool:
        """Drops a response. Returns whether it existed."""
        shelf = self._shelves.get(tenant)
        if shelf is None or id not in shelf.responses:
            return False
        _, response = shelf.responses.pop(id)
        self._count(shelf, -1, -response.size)
        if not shelf.responses:
            del self._shelves[tenant]
        return True

    def expire(self) -> None:
        """Drops responses older than time_to_live. `put` and `get` do so too; an idle server must call it regularly."""
        now = self._clock()
        for tenant in list(self._shelves):
            while tenant in self._shelves and self._shelves[tenant].oldest[0] <= now:
                self._drop_oldest(tenant)

    def _make_room(self, newest: StoredResponse, share: Callable[["_TenantResponses"], int]) -> None:
        """Drops the oldest response of the key with the largest share, but never `newest`."""
        names = [name for name, shelf in self._shelves.items() if shelf.oldest[1] is not newest]
        self._drop_oldest(max(names, key=lambda name: share(self._shelves[name])))

    def _drop_oldest(self, tenant: str) -> None:
        self.remove(tenant, self._shelves[tenant].oldest[1].id)

    def _count(self, shelf: "_TenantResponses", number: int, size: int) -> None:
        shelf.bytes += size
        self.bytes += size
        self.count += number


class _TenantResponses:
    """The responses of one key, oldest first, each with its expiry time."""

    def __init__(self) -> None:
        self.responses: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()
        self.bytes = 0

    @property
    def oldest(self) -> tuple[float, StoredResponse]:
        return next(iter(self.responses.values()))
