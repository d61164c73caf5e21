"""DecodeBatch: the decodes of the step that is being planned, and the checks on that step."""

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
        self._awaiting_mask = NO_SLOTS  # slots of requests that could decode if their mask were ready

    def clear(self) -> None:
        self._chosen = self._awaiting_mask = NO_SLOTS

    def choose(self) -> SlotArray:
        """Chooses all requests that can decode. Returns the slots that need another block."""
        slots = self._slots
        ready = np.flatnonzero(slots.decoding & (slots.num_tokens < slots.limit))
        self._awaiting_mask = NO_SLOTS
        if slots.awaits_mask.any():
            awaits_mask = slots.awaits_mask[ready]
            self._awaiting_mask, ready = ready[awaits_mask], ready[~awaits_mask]
        self._chosen = ready
        short: SlotArray = ready[slots.planned[ready] == slots.capacity[ready]]
        return short

    def slots(self) -> SlotArray:
        """Slots of the chosen decodes, without requests that were preempted since."""
        chosen: SlotArray = self._chosen[self._slots.decoding[self._chosen]]
        return chosen

    def step_load(self, start: float) -> StepLoad:
        """The load of the step with these decodes and no prefill. The step starts at `start`."""
        return self._step_load(self.slots(), start)

    def wished_max_step(self) -> float:
        """Seconds of the longest step that meets all gap wishes of the decodes; infinite if there is none."""
        return float(self._slots.wished_max_step[self.slots()].min(initial=math.inf))

    def standard_load(self, load: StepLoad, free_tokens: float, turnover: Turnover) -> StepLoad:
        """The load for admission: without flex requests, which can be preempted, and with memory and expected ends."""
        decodes = self._with_awaiting_mask()
        standard = decodes[~self._slots.is_flex[decodes]]
        return self._step_load(standard, load.start)._replace(
            end_forecast=self._end_forecast(standard, turnover),
            has_flex_decodes=len(standard) < len(decodes),
            free_tokens=free_tokens,
            freed_per_second=turnover.freed_per_second,
        )

    def fits_decode_step(self, request: Request, load: StepLoad, gone: Collection[Request] = ()) -> bool:
        """Whether a decode step with all running prefills and this request would still keep every promised gap.

        Assumes that the requests in `gone` do not run any more.
        """
        if len(self._running) == len(gone):
            return True
        decodes = self._with_awaiting_mask()
        if gone:
            decodes = decodes[~np.isin(decodes, [other.slot for other in gone])]
        prefills = [other for other in self._running.prefilling if other not in gone] + [request]
        prefills = [other for other in prefills if other.num_tokens + 1 < other.limit]  # the others never decode
        if not prefills:
            return True
        if request.flex:
            return self._has_slack(decodes, prefills, load, is_start=True)
        max_step = self._step_load(decodes, load.start).promised_max_step
        max_step = min(max_step, min(other.promised_max_step for other in prefills))
        return self.policy.admission.fits_decode_step(self._shape(decodes, prefills), max_step)

    def flex_requests(self) -> list[Request]:
        """The flex requests among the decodes."""
        decodes = self.slots()
        return [self._running.at(slot) for slot in decodes[self._slots.is_flex[decodes]].tolist()]

    def has_slack(self, load: StepLoad) -> bool:
        """Whether the flex requests among the decodes may share a step with the other decodes."""
        return self._has_slack(self.slots(), (), load, is_start=False)

    def _has_slack(self, decodes: SlotArray, prefills: Sequence[Request], load: StepLoad, *, is_start: bool) -> bool:
        standard = [request for request in prefills if not request.flex]
        alone = self._shape(decodes[~self._slots.is_flex[decodes]], standard)
        found = self._step_load(decodes, load.start)
        promised = min(found.promised_max_step, min((other.promised_max_step for other in standard), default=math.inf))
        default = min(found.default_max_step, min((other.default_max_step for other in standard), default=math.inf))
        after = self._shape(decodes, prefills)
        return self.policy.admission.has_slack(after, alone, promised, default, is_start)

    def _with_awaiting_mask(self) -> SlotArray:
        """Slots of the decodes of this step, and of requests that skip it because their mask is not ready."""
        decodes, awaiting = self.slots(), self._awaiting_mask
        return np.concatenate([decodes, awaiting[self._slots.decoding[awaiting]]]) if len(awaiting) else decodes

    def _shape(self, decodes: SlotArray, prefills: Sequence[Request]) -> StepShape:
        """Shape of the step in which all of these requests decode."""
        context = int(self._slots.planned[decodes].sum()) + len(decodes) + sum(one.num_tokens for one in prefills)
        return decodes_alone(len(decodes) + len(prefills), context)

    def _step_load(self, decodes: SlotArray, start: float) -> StepLoad:
        slots, count = self._slots, len(decodes)
        context = int(slots.planned[decodes].sum()) + count
        # This step delays the requests that await a mask as well.
        waiting = np.concatenate([decodes, self._awaiting_mask]) if len(self._awaiting_mask) else decodes
        promised = float(slots.promised_max_step[waiting].min(initial=math.inf))
        default = float(slots.default_max_step[waiting].min(initial=math.inf))
        return StepLoad(start, decodes_alone(count, context), promised, default)

    def _end_forecast(self, decodes: SlotArray, turnover: Turnover) -> EndForecast:
        """When these decodes are expected to end."""
        slots = self._slots
        num_tokens = slots.num_tokens[decodes]
        steps_per_token = np.where(slots.constrained[decodes], CONSTRAINED_STEPS, 1)
        promised_gap = slots.promised_max_step[decodes] * steps_per_token  # seconds
        return turnover.lengths.end_forecast(
            num_tokens - slots.prompt_tokens[decodes],
            slots.limit[decodes] - num_tokens,
            promised_gap,
            slots.planned[decodes],
        )
