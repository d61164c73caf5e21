"""DecodeBatch: the decodes of the step that is being planned, the step that they make, and what may join it."""

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from weft.core.budget import StepLoad
from weft.core.policies import Policy
from weft.core.promises import CONSTRAINED_STEPS
from weft.core.request import Request
from weft.core.running import RunningRequests
from weft.core.shape import StepShape, decodes_alone
from weft.core.slots import NO_SLOTS
from weft.core.turnover import EndForecast, Turnover

SlotArray = NDArray[np.int64]


class DecodeBatch:
    """The chosen decodes. Requests that are preempted afterwards drop out of it."""

    def __init__(self, policy: Policy, running: RunningRequests) -> None:
        self.policy = policy
        self._running = running
        self._slots = running.slots
        self._chosen = NO_SLOTS
        self._held = NO_SLOTS  # slots of requests that could decode but wait for a mask

    def clear(self) -> None:
        self._chosen = self._held = NO_SLOTS

    def choose(self) -> SlotArray:
        """Chooses all requests that can decode. Returns the slots that need another block for it."""
        slots = self._slots
        ready = np.flatnonzero(slots.decoding & (slots.known < slots.limit))
        self._held = NO_SLOTS
        if slots.held.any():
            held = slots.held[ready]
            self._held, ready = ready[held], ready[~held]
        self._chosen = ready
        short: SlotArray = ready[slots.planned[ready] == slots.capacity[ready]]
        return short

    def slots(self) -> SlotArray:
        """Slots of the chosen decodes, without requests that were preempted since."""
        chosen: SlotArray = self._chosen[self._slots.decoding[self._chosen]]
        return chosen

    def load(self, start: float) -> StepLoad:
        """The step with these decodes and no prefill. It starts at `start`."""
        return self._load(self.slots(), start)

    def tightest_wish(self) -> float:
        """Seconds: the tightest gap wish of the decodes; infinite if there is none."""
        return float(self._slots.gap_wish[self.slots()].min(initial=math.inf))

    def firm_load(self, load: StepLoad, free_tokens: float, turnover: Turnover) -> StepLoad:
        """The load without batch requests (they can be preempted), with free memory and when the others end."""
        decodes = self._with_held()
        firm = decodes[~self._slots.batch[decodes]]
        return self._load(firm, load.start)._replace(
            ends=self._ends(firm, turnover), crowded=len(firm) < len(decodes), free=free_tokens, freed=turnover.rate
        )

    def may_join(self, request: Request, load: StepLoad, gone: Collection[Request] = ()) -> bool:
        """Whether a decode step with all running prefills and this request would still keep every promised gap.

        Assumes that the requests in `gone` do not run any more.
        """
        if len(self._running) == len(gone):
            return True
        decodes = self._with_held()
        if gone:
            decodes = decodes[~np.isin(decodes, [other.slot for other in gone])]
        prefills = [other for other in self._running.prefilling if other not in gone] + [request]
        prefills = [other for other in prefills if other.known + 1 < other.limit]  # drops requests that never decode
        if not prefills:
            return True
        if request.batch:
            return self._has_slack(decodes, prefills, load, joins=True)
        gap = min(self._load(decodes, load.start).gap, min(other.firm_gap for other in prefills))
        return self.policy.admission.may_join(self._shape(decodes, prefills), gap)

    def batch_requests(self) -> list[Request]:
        """The batch requests among the decodes."""
        decodes = self.slots()
        return [self._running.at(slot) for slot in decodes[self._slots.batch[decodes]].tolist()]

    def has_slack(self, load: StepLoad) -> bool:
        """Whether the batch requests among the decodes may share a step with the other decodes."""
        return self._has_slack(self.slots(), (), load, joins=False)

    def _has_slack(self, decodes: SlotArray, prefills: Sequence[Request], load: StepLoad, *, joins: bool) -> bool:
        others = [request for request in prefills if not request.batch]
        alone = self._shape(decodes[~self._slots.batch[decodes]], others)
        found = self._load(decodes, load.start)
        gap = min(found.gap, min((request.firm_gap for request in others), default=math.inf))
        soft_gap = min(found.soft_gap, min((request.soft_gap for request in others), default=math.inf))
        after = self._shape(decodes, prefills)
        return self.policy.admission.has_slack(after, alone, gap, soft_gap, joins)

    def _with_held(self) -> SlotArray:
        """Slots of the decodes of this step and of held requests, which skip it."""
        decodes, held = self.slots(), self._held
        return np.concatenate([decodes, held[self._slots.decoding[held]]]) if len(held) else decodes

    def _shape(self, decodes: SlotArray, prefills: Sequence[Request]) -> StepShape:
        """Shape of the step in which all of these requests decode."""
        context = int(self._slots.planned[decodes].sum()) + len(decodes) + sum(request.known for request in prefills)
        return decodes_alone(len(decodes) + len(prefills), context)

    def _load(self, decodes: SlotArray, start: float) -> StepLoad:
        slots, count = self._slots, len(decodes)
        context = int(slots.planned[decodes].sum()) + count
        # Held requests wait for this step as well.
        waiting = np.concatenate([decodes, self._held]) if len(self._held) else decodes
        gap = float(slots.gap_target[waiting].min(initial=math.inf))
        soft_gap = float(slots.soft_gap[waiting].min(initial=math.inf))
        return StepLoad(start, decodes_alone(count, context), gap, soft_gap)

    def _ends(self, decodes: SlotArray, turnover: Turnover) -> EndForecast:
        """When these decodes end."""
        slots = self._slots
        known = slots.known[decodes]
        gap = slots.gap_target[decodes] * np.where(slots.constrained[decodes], CONSTRAINED_STEPS, 1)  # seconds
        return turnover.lengths.expect(
            known - slots.prompt[decodes], slots.limit[decodes] - known, gap, slots.planned[decodes]
        )
