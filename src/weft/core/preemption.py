"""Preemption: which running requests give up their seat and blocks for another request. It changes nothing itself."""

from collections.abc import Collection
from dataclasses import dataclass

from weft.core.batch_builder import BatchBuilder
from weft.core.budget import StepLoad
from weft.core.decode_batch import DecodeBatch
from weft.core.kv_cache_manager import KVCacheManager
from weft.core.policies import Policy
from weft.core.request import Request
from weft.core.running import RunningRequests
from weft.core.tenants import Account, Tenants


@dataclass(slots=True, eq=False)
class Preemption:
    """Chooses the victims. A request with a prefill slice in the current plan is never a victim."""

    policy: Policy
    running: RunningRequests
    kv: KVCacheManager
    decodes: DecodeBatch
    tenants: Tenants
    builder: BatchBuilder

    def has_possible_victims(self, request: Request) -> bool:
        """Whether any running request could be preempted for this one, because of its class or its tenant's share."""
        return self.tenants.has_several or self.running.has_lower_class(request)

    def has_room(self, request: Request, gone: Collection[Request] = ()) -> bool:
        """Whether there is a seat, and memory for the whole prompt, if the requests in `gone` do not run."""
        running = self.running
        return len(running) - len(gone) < running.max_num_seqs and self.kv.has_room(request, gone)

    def victims_for_start(self, request: Request, load: StepLoad) -> list[Request]:
        """Requests to preempt so that this one can start, cheapest first. Empty if they would not be enough.

        For a seat and blocks, victims are requests of lower classes and of tenants above their share. For time in the
        decode step, victims are flex requests only.
        """
        has_room, fits_step = self.has_room(request), self.decodes.fits_decode_step(request, load)
        if (has_room and fits_step) or not self.has_possible_victims(request):
            return []
        chosen: list[Request] = []
        freed: dict[Account, tuple[int, int]] = {}  # seats and blocks that the chosen victims free
        for other in sorted(self.running.requests - self.builder.scheduled_prefills, key=self.victim_key):
            if (has_room and fits_step) or (has_room and not other.flex):
                break
            seats, blocks = freed.get(other.account, (0, 0))
            if self._gives_way(other, request, seats, blocks):
                chosen.append(other)
                freed[other.account] = seats + 1, blocks + len(other.blocks)
                gone = frozenset(chosen)
                has_room, fits_step = self.has_room(request, gone), self.decodes.fits_decode_step(request, load, gone)
        return chosen if has_room and fits_step else []

    def victim_for_blocks(self, claimant: Request) -> Request | None:
        """The cheapest request to preempt so that `claimant`, which runs, gets a block; None if there is none."""
        others = self.running.requests - self.builder.scheduled_prefills
        victims = [other for other in others if self._gives_way(other, claimant) or self._is_junior(other, claimant)]
        return min(victims, key=self.victim_key, default=None)

    def victim_key(self, request: Request) -> tuple[bool, int, bool, float, float, str]:
        """Sort key of victims, cheapest first: lowest class, no promise, least work lost, latest arrival."""
        work = self.policy.recompute_cost(int(self.running.slots.computed[request.slot]))
        return not request.flex, -request.priority, request.has_promise, work, -request.arrival, request.id

    def _gives_way(self, request: Request, claimant: Request, seats: int = 0, blocks: int = 0) -> bool:
        """Whether `request` may be preempted for `claimant` because of class or tenant share.

        A lower class is preempted for a higher one. Within a class, a tenant above its share is preempted for a tenant
        within its share. `seats` and `blocks` are what the victims chosen so far free of the tenant of `request`.
        """
        if request.class_key != claimant.class_key:
            return request.class_key > claimant.class_key
        over = self.tenants.is_over(request.account, flex=request.flex, seats=-seats, blocks=-blocks)
        return over and not self._is_over(claimant)

    def _is_junior(self, request: Request, claimant: Request) -> bool:
        """Whether `request` may be preempted for `claimant` because it is younger.

        Not if the tenant of `claimant` is above its share and the tenant of `request` is not.
        """
        if request.age_key <= claimant.age_key:
            return False
        return self._is_over(request) or not self._is_over(claimant)

    def _is_over(self, request: Request) -> bool:
        return self.tenants.is_over(request.account, flex=request.flex)
