"""RunningRequests: the requests that have a seat, their slots, and which of them still prefill."""

from collections import Counter
from collections.abc import Iterator
from typing import cast

import numpy as np
from numpy.typing import NDArray

from weft.core.request import Request, State
from weft.core.slots import Slots


class RunningRequests:
    """Owns the seats (at most `max_num_seqs` running requests) and the slots behind them.

    A slot is freed later than its seat: a step in flight may still use it.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.slots = Slots(max_num_seqs)
        self.requests: set[Request] = set()
        self.prefilling: list[Request] = []  # running requests with prompt tokens left to plan
        self.leaving: list[Request] = []  # without a seat; a step in flight may still use their slot
        self._classes: Counter[tuple[bool, int]] = Counter()  # running requests per class (batch, priority)
        self._wishing = 0  # running requests with a gap wish below their gap target

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    @property
    def has_wishes(self) -> bool:
        """Whether a running request wishes for a smaller gap than its target."""
        return self._wishing > 0

    def take_seat(self, request: Request) -> None:
        self.slots.take(request)
        request.state = State.RUNNING
        request.packed = b""  # not kept while running: it changes with every slice
        self.requests.add(request)
        self.prefilling.append(request)
        request.account.seats += 1
        self._classes[request.class_key] += 1
        self._wishing += request.wishes_more

    def leave_seat(self, request: Request) -> None:
        """Frees the seat at once. `retire_slots` frees the slot."""
        self.requests.remove(request)
        if request in self.prefilling:
            self.prefilling.remove(request)
        self.slots.decoding[request.slot] = False
        request.account.seats -= 1
        self._classes[request.class_key] -= 1
        self._wishing -= request.wishes_more
        self.leaving.append(request)

    def retire_slots(self) -> None:
        """Frees slots of requests without a seat, once no step in flight uses them.

        A slot that is given up while a plan is made is reused only by a later plan.
        """
        if self.leaving:
            staying = [request for request in self.leaving if self.slots.in_flight[request.slot]]
            for request in self.leaving:
                if not self.slots.in_flight[request.slot]:
                    self.slots.give_back(request)
            self.leaving = staying

    def at(self, slot: int) -> Request:
        request = self.slots.occupant[slot]
        assert request is not None, f"slot {slot} is empty"
        return request

    def at_all(self, slots: NDArray[np.int64]) -> list[Request]:
        return cast(list[Request], list(map(self.slots.occupant.__getitem__, slots.tolist())))

    def has_lower_class(self, request: Request) -> bool:
        """Whether a running request is of a lower class than this one."""
        own = request.class_key
        return any(other > own for other, count in self._classes.items() if count)

    def check_integrity(self) -> None:
        for request in self.requests:
            assert request.state is State.RUNNING, "a request sits without running"
            assert self.slots.occupant[request.slot] is request, "a slot has two owners"
        assert all(not request.blocks for request in self.leaving), "a seatless request holds blocks"
        taken = len(self.requests) + len(self.leaving)
        assert self.slots.num_free == self.slots.size - taken, "a slot is neither free nor taken"
        assert len(self.requests) <= self.max_num_seqs, "more run than there are seats"
