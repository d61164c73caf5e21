"""RunningRequests: the requests that have a seat, their slots, and the ones that still prefill."""

from collections import Counter
from collections.abc import Iterator
from typing import cast

import numpy as np
from numpy.typing import NDArray

from weft.core.request import Request, State
from weft.core.slots import Slots


class RunningRequests:
    """Owns the seats (at most `max_num_seqs` requests run at a time) and the slots.

    A slot is freed later than its seat, because a step in flight may still use it.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.slots = Slots(max_num_seqs)
        self.requests: set[Request] = set()
        self.prefilling: list[Request] = []  # running requests with prompt tokens left to plan
        self.retiring: list[Request] = []  # have no seat any more; a step in flight may still use their slots
        self._classes: Counter[tuple[bool, int]] = Counter()  # running requests per class (flex, priority)
        self._num_wishing = 0  # running requests with a gap wish below their gap target

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    @property
    def has_wishes(self) -> bool:
        """Whether a running request wishes for a smaller gap than its target."""
        return self._num_wishing > 0

    def add(self, request: Request) -> None:
        """Gives a request a seat and a slot."""
        self.slots.reserve(request)
        request.state = State.RUNNING
        request.forecast_row = b""  # not kept while running: it changes with every slice
        self.requests.add(request)
        self.prefilling.append(request)
        request.account.seats += 1
        self._classes[request.class_key] += 1
        self._num_wishing += request.has_gap_wish

    def remove(self, request: Request) -> None:
        """Frees the seat at once. `retire_slots` frees the slot."""
        self.requests.remove(request)
        if request in self.prefilling:
            self.prefilling.remove(request)
        self.slots.decoding[request.slot] = False
        request.account.seats -= 1
        self._classes[request.class_key] -= 1
        self._num_wishing -= request.has_gap_wish
        self.retiring.append(request)

    def retire_slots(self) -> None:
        """Frees slots of requests without a seat, once no step in flight uses them.

        A slot that is freed while a plan is made is reused only by a later plan.
        """
        if self.retiring:
            staying = [request for request in self.retiring if self.slots.num_in_flight[request.slot]]
            for request in self.retiring:
                if not self.slots.num_in_flight[request.slot]:
                    self.slots.free(request)
            self.retiring = staying

    def at(self, slot: int) -> Request:
        request = self.slots.occupant[slot]
        assert request is not None, f"slot {slot} is empty"
        return request

    def at_all(self, slots: NDArray[np.int64]) -> list[Request]:
        return cast(list[Request], list(map(self.slots.occupant.__getitem__, slots.tolist())))

    def has_lower_class(self, request: Request) -> bool:
        """Whether a running request is of a lower class than this one."""
        class_key = request.class_key
        return any(other > class_key for other, count in self._classes.items() if count)

    def check_integrity(self) -> None:
        for request in self.requests:
            assert request.state is State.RUNNING, "a request with a seat does not run"
            assert self.slots.occupant[request.slot] is request, "a slot has two owners"
        assert all(not request.blocks for request in self.retiring), "a request without a seat holds blocks"
        used = len(self.requests) + len(self.retiring)
        assert self.slots.num_free == self.slots.size - used, "a slot is neither free nor used"
        assert len(self.requests) <= self.max_num_seqs, "more run than there are seats"
