"""The forecast: when each prompt that is not computed yet would give its first token, if no other request arrived.

It simulates the prompts in the order of service. Each prompt is prefilled at the pace that the decodes leave. Then it
decodes and slows down the prompts behind it. `forecast` assumes that every running request generates max_tokens, so it
errs on the late side. A refused client is told the expected time (`expected_first_tokens`), which assumes usual output
lengths.

The pace is the share of the device's time that is left for prefill. The cost model is asked for about FORECAST_GROUPS
paces, however long the queue is: neighbours in a long queue form a group and share the slowest pace among them. If the
decode batch has no room for a group, the group is split in halves to find the first prompt without room. Later groups
wait until as many running requests have ended as they have prompts. All other work is array arithmetic.
"""

import math
import struct
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.budget import FLEX_SHARE, LEAST_SLICE_TOKENS, BudgetPolicy, DecodeLoad, StepLoad
from weft.core.cost import CostModel
from weft.core.request import Request, State
from weft.core.shape import decodes_alone

FORECAST_GROUPS = 8  # of prompts that share a pace
MOST_FORECAST_GROUPS = 64  # if groups are split to find the first prompt without room in the decode batch
QUIET_LOAD = 0.25  # below this load, a step may be shortened for any first token
SHORTENING_COST_SHARE = 0.5  # above it, only if that costs at most this share of the request's prefill time

Array = NDArray[np.float64]
_ROW = struct.Struct("9d")


class PendingPrefill(NamedTuple):
    """A prompt, or the part of one that is not computed yet."""

    request: Request
    first: int  # tokens that are computed, planned or cached
    remaining: int  # tokens to compute

    def pack(self) -> bytes:
        """One forecast row as bytes. Waiting requests store it, so that a long queue becomes an array quickly."""
        request = self.request
        decodes = request.max_tokens > 1
        waits_for_memory = request.state is State.WAITING and not request.sibling
        promised, default = request.promised_max_step, request.default_max_step
        memory = self.remaining if waits_for_memory else 0.0
        start = float(request.order_key[3])
        service = math.nan if request.service_at_start is None else request.service_at_start
        return _ROW.pack(
            self.first, self.remaining, decodes, promised, default, request.promised_due, memory, start, service
        )


class PromptRows(NamedTuple):
    """Prompts in the order of service, as columns."""

    first: Array  # tokens that are computed, planned or cached
    remaining: Array  # tokens to compute
    decodes: Array  # 1 if the request decodes afterwards, else 0
    promised_max_step: Array  # seconds: longest step that keeps the promised gap; infinite if there is none
    default_max_step: Array  # seconds: longest step that keeps the default gap target, which may be exceeded under load
    promised_due: Array  # seconds on the scheduler's clock; infinite if no first token is promised
    memory_tokens: Array  # tokens of KV memory that must be free before it can start
    start_key: Array  # order within class and service; see `Order.key`
    service: Array  # service of the tenant when the request first started; NaN if it has not started

    @classmethod
    def of(cls, packed: Sequence[bytes | bytearray]) -> "PromptRows":
        return cls(*np.frombuffer(b"".join(packed), np.float64).reshape(-1, _ROW.size // 8).T)

    def select(self, positions: NDArray[np.int64] | NDArray[np.bool_]) -> "PromptRows":
        return PromptRows(*(column[positions] for column in self))


class Forecast(NamedTuple):
    """Result for each prompt, in the order of service."""

    latest_first_token: Array  # latest time of its first token; infinite if there is no room for it in the decode batch
    expected_first_token: Array  # expected time of its first token, if steps take as predicted and are shortened for it
    prefill_seconds: Array  # seconds that its prefill takes; 0 if it has no room
    visits: int  # number of paces that the cost model was asked for
    waited: NDArray[np.bool_]  # whether it, or a prompt before it, must wait until a running request ends


def forecast(
    cost: CostModel, budget_policy: BudgetPolicy, load: StepLoad, rows: PromptRows, load_ahead: float
) -> Forecast:
    """Latest times of first tokens, if running requests generate max_tokens.

    `load_ahead` is the recent load that is served before the prompts, from 0 to 1. From QUIET_LOAD on, a step is not
    shortened for every first token.
    """
    seconds, context = load.end_forecast.latest
    # Seconds of a decode-only step: the lower bound of all steps, with which the most tokens are generated.
    step = max(cost.predict(load.shape), 1e-6)
    simulation = _QueueSimulation(cost, budget_policy, load, rows, load_ahead, DecodeEnds(seconds, context, step))
    simulation.serve_all()
    return Forecast(
        simulation.latest_first_token,
        simulation.expected_first_token,
        simulation.prefill_seconds,
        simulation.visits,
        simulation.waited,
    )


def expected_first_tokens(
    cost: CostModel,
    budget_policy: BudgetPolicy,
    load: StepLoad,
    rows: PromptRows,
    load_ahead: float,
    left_out: NDArray[np.bool_],
) -> Array:
    """Expected times of first tokens, if requests have usual output lengths.

    Prompts in `left_out` delay no other prompt. Each of them is forecast as if the other ones did not exist.
    """
    step = budget_policy.step_seconds(cost, load.decode_load, 0.0)
    steps, context = load.end_forecast.expected
    decode_ends = DecodeEnds(steps * step, context, step, load.end_forecast.typical_steps * step)
    simulation = _QueueSimulation(cost, budget_policy, load, rows, load_ahead, decode_ends, left_out)
    simulation.serve_all()
    return simulation.expected_first_token


class DecodeEnds(NamedTuple):
    """When decodes end: `after` for the running ones, `life` for the prompts of the forecast."""

    after: Array  # seconds from now, ascending
    context: Array  # tokens of context of each running request now
    step: float  # seconds of a step while no prompt is prefilled
    life: float = math.inf  # seconds that a request decodes after its prefill; infinite: it does not end


class _QueueSimulation:
    """Simulation of the queue from now on. A position is an index in the order of service."""

    def __init__(
        self,
        cost: CostModel,
        budget_policy: BudgetPolicy,
        load: StepLoad,
        rows: PromptRows,
        load_ahead: float,
        decode_ends: DecodeEnds,
        left_out: NDArray[np.bool_] | None = None,
    ) -> None:
        self.cost, self.budget_policy, self.load, self.rows = cost, budget_policy, load, rows
        self.is_quiet = load_ahead < QUIET_LOAD
        self.decode_ends = decode_ends
        self.clock = load.start
        self.steps = 0.0  # steps since load.start
        self.num_running_ended = 0  # running decodes that have ended
        # Of each prefilled group: the end time of its prefill, and the position after the group.
        self.prefilled: deque[tuple[float, int]] = deque()
        self.num_ended = 0  # prompts of the forecast that have finished decoding: all before this position
        self.generated = 0.0  # tokens generated by prompts that were prefilled in this forecast
        self.running_decodes = load.decode_load  # the running decodes that have not ended
        self.bias = cost.bias  # read often
        self.most_small_slice_pace = cost.most_small_slice_pace(LEAST_SLICE_TOKENS)
        self.waits_for_room = False  # a prompt had no room until a running decode ended
        self.is_full = False  # a prompt had no room even after all running decodes had ended
        self.free_tokens = load.free_tokens
        count = len(rows.first)
        self.smallest_group = max(1, count // MOST_FORECAST_GROUPS)  # prompts in a group that is not split further
        self.reach: Array = rows.first + rows.remaining  # tokens of context that the last slice of each prompt reads
        self.work: Array = cost.prompt_seconds(rows.first, rows.remaining) * self.bias
        self.memory_is_scarce = bool(load.freed_per_second is not None and rows.memory_tokens.any())
        self.weights: Array = np.ones(count)  # 1, or 0 if the prompt takes no time and no room from other prompts
        self.none_left_out = left_out is None  # all weights are 1
        if left_out is not None:
            self.weights[left_out] = 0.0
        self._sum_up()
        self.waited = np.zeros(count, np.bool_)  # it, or a prompt before it, waits for room in the decode batch
        self.latest_first_token = np.full(count, math.inf)
        self.expected_first_token = np.full(count, math.inf)
        self.prefill_seconds = np.zeros(count)
        self.visits = 0

    def serve_all(self) -> None:
        """Serves the queue in FORECAST_GROUPS groups, with about the same number of prompts that take time."""
        total = np.cumsum(self.weights)
        if not len(total):
            return
        marks = np.linspace(0.0, total[-1], FORECAST_GROUPS + 1)[1:-1]
        bounds = {0, len(total), *(1 + np.searchsorted(total, marks)).tolist()}
        for begin, end in pairwise(sorted(bounds)):
            self._serve(begin, end)

    def _sum_up(self) -> None:
        """Prefix sums for each position, over prompts before it that will decode: count, context and longest steps."""
        decodes = self.rows.decodes * self.weights
        self._decodes = np.concatenate([[0.0], np.cumsum(decodes)])
        self._context = np.concatenate([[0.0], np.cumsum(decodes * self.reach)])
        columns = self.rows.promised_max_step, self.rows.default_max_step
        limits = (np.where(decodes == 0, math.inf, column) for column in columns)
        self._promised_max_step, self._default_max_step = (
            np.concatenate([[math.inf], np.minimum.accumulate(limit)]) for limit in limits
        )

    def _decodes_before(self, position: int) -> DecodeLoad:
        """The decodes when all prompts before this position are prefilled."""
        decodes, context, promised, default = self.running_decodes
        begun = self._decodes.item(position) - self._decodes.item(self.num_ended)
        generated = self.generated if begun else 0.0
        if self.decode_ends.life < math.inf:  # the context of ended requests is not read any more
            generated = min(generated, begun * self.decode_ends.life / self.decode_ends.step)
        return DecodeLoad(
            decodes + int(begun),
            context + generated + (self._context.item(position) - self._context.item(self.num_ended)),
            min(promised, self._promised_max_step.item(position)),
            min(default, self._default_max_step.item(position)),
        )

    def _serve(self, begin: int, end: int) -> None:
        """Prefills these prompts at one pace: the pace of the last prompt, when all prompts before it decode."""
        self._remove_ended()
        reach = float(self.reach[begin:end].max())
        pace = self._pace(reach, end - 1)
        if pace is None and (end - begin <= self.smallest_group or self.waits_for_room):
            pace = self._wait_for_room(begin, end, reach)
        if pace is None and end - begin > self.smallest_group and not self.is_full:  # the first ones may have room
            middle = (begin + end) // 2
            self._serve(begin, middle)
            self._serve(middle, end)
            return
        if pace is None:
            self._skip(begin, end)
            return
        seconds = self.work[begin:end] / pace
        self.prefill_seconds[begin:end] = seconds
        if self.none_left_out and not self.memory_is_scarce:
            elapsed = np.cumsum(seconds)
            clocks = self.clock + elapsed
        else:
            is_left_out = 1 - self.weights[begin:end]  # 1 for left-out prompts: no other prompt waits for them
            ready = self._wait_for_memory(begin, end, is_left_out)
            elapsed = np.cumsum(seconds * self.weights[begin:end])
            clocks = np.maximum(self.clock + elapsed, is_left_out * ready) + is_left_out * seconds
        step = self.budget_policy.step_seconds(self.cost, self.last_decode_load, reach)
        self._note_first_tokens(begin, end, clocks, step)
        self._advance(float(elapsed[-1]), step, end - 1)
        self.prefilled.append((self.clock, end))

    def _advance(self, seconds: float, step: float, position: int) -> None:
        """Advances the clock, in steps of `step` seconds. Each decode generates one token per step."""
        self.clock += seconds
        self.steps += seconds / step
        self.generated += (self._decodes.item(position) - self._decodes.item(self.num_ended)) * seconds / step

    def _skip(self, begin: int, end: int) -> None:
        """Skips prompts that have no room even after all running decodes ended. No other prompt waits for them."""
        self.is_full, self.none_left_out = True, False
        self.weights[begin:end] = 0.0
        self._sum_up()

    def _note_first_tokens(self, begin: int, end: int, clocks: Array, step: float) -> None:
        """Records the times of first tokens. A first token comes at the end of its step, whatever the step carries.

        A step is shortened for a first token that is due (see Budget.tighten). That costs the other prompts one more
        step. The forecast does so for single prompts only, not for groups.
        """
        bias, decodes = self.bias, self._decodes_before(begin)
        ends = clocks + step * bias
        more = self.cost.least_step(decodes.num_decodes, decodes.context, float(self.reach[begin])) * bias
        self.expected_first_token[begin:end] = np.minimum(ends, clocks + more)
        is_shortened = (
            end - begin == 1 and self.budget_policy.shortens_steps and ends[0] > self.rows.promised_due[begin]
        )
        if is_shortened and (self.is_quiet or more <= SHORTENING_COST_SHARE * self.prefill_seconds[begin]):
            ends = clocks + more
            self.clock += more
        # Errors of single steps add up as in a random walk. The margin is one standard deviation of their sum.
        late = np.sqrt(step * np.maximum(0.0, ends - self.load.start))
        self.latest_first_token[begin:end] = ends + self.cost.prefill.spread * late

    def _wait_for_memory(self, begin: int, end: int, is_left_out: Array) -> Array:
        """Waits until there is memory for all of these prompts. Returns the time at which each has memory."""
        if not self.memory_is_scarce or self.load.freed_per_second is None:
            return np.zeros(end - begin)
        need = self.rows.memory_tokens[begin:end] * self.weights[begin:end]
        lacking = np.cumsum(need) + is_left_out * self.rows.memory_tokens[begin:end] - self.free_tokens
        ready = self.load.start + np.maximum(0.0, lacking) / self.load.freed_per_second
        if need.any():
            seconds = max(0.0, float(need.sum()) - self.free_tokens) / self.load.freed_per_second
            self.clock = max(self.clock, self.load.start + seconds)
        self.free_tokens -= float((need * self.rows.decodes[begin:end]).sum())
        return ready

    def _pace(self, reach: float, last: int) -> float | None:
        """Pace of prompt `last` and the ones grouped with it; None if it is 0, or if `last` has no room to decode."""
        self.visits += 1
        decodes = self.last_decode_load = self._decodes_before(last)
        pace = self.budget_policy.pace(self.cost, decodes, reach)
        # `life` is finite if expected times are wanted, not the latest ones.
        if self.decode_ends.life < math.inf and pace < self.most_small_slice_pace:
            pace = max(pace, self.budget_policy.small_slice_pace(self.cost, decodes, reach))
        if not decodes.num_decodes:
            return pace or 1.0  # waiting would not help, and an engine without steps cannot learn
        if pace <= 0 or (self.rows.decodes[last] and not self._may_decode(decodes, last)):
            return None
        return min(pace, 1 - FLEX_SHARE) if self.load.has_flex_decodes else pace

    def _may_decode(self, decode_load: DecodeLoad, last: int) -> bool:
        after = decodes_alone(decode_load.num_decodes + 1, int(decode_load.context + self.reach[last]))
        max_step = min(decode_load.promised_max_step, float(self.rows.promised_max_step[last]))
        return self.cost.p99_seconds(after) <= max_step

    def _wait_for_room(self, begin: int, end: int, reach: float) -> float | None:
        """Waits until enough running decodes have ended. Returns the pace then, or None if there is still no room."""
        self.waits_for_room = True
        self.waited[begin:] = True
        pace, count = None, max(1, int(self.weights[begin:end].sum()))
        while pace is None and self._remove_ended(count, begin):
            pace = self._pace(reach, end - 1)
            count *= 2  # a long prompt needs the room of several requests; too many errs on the late side
        return pace

    def _remove_ended(self, count: int = 0, position: int = 0) -> bool:
        """Removes ended requests. With `count`, advances the clock until that many more have ended.

        Returns False if none was removed.
        """
        has_removed = self._remove_ended_running(count, position)
        life = self.decode_ends.life
        while self.prefilled:
            if self.prefilled[0][0] + life > self.clock and not (count and not has_removed and life < math.inf):
                break
            when, self.num_ended = self.prefilled.popleft()
            self._advance(max(0.0, when + life - self.clock), self.decode_ends.step, position)
            has_removed = True
        return has_removed

    def _remove_ended_running(self, count: int, position: int) -> bool:
        after, contexts, step, _ = self.decode_ends
        total = len(after)
        ended = min(self.num_running_ended + count, total)
        if self.num_running_ended == total or (count and after[ended - 1] == math.inf):
            return False
        if count:
            self._advance(max(0.0, self.load.start + float(after[ended - 1]) - self.clock), step, position)
        self.num_running_ended = max(ended, int(np.searchsorted(after, self.clock - self.load.start, "right")))
        remaining = total - self.num_running_ended
        context = float(contexts[self.num_running_ended :].sum()) + remaining * self.steps
        load = self.load
        promised, default = (load.promised_max_step, load.default_max_step) if remaining else (math.inf, math.inf)
        self.running_decodes = DecodeLoad(remaining, context, promised, default)
        return True
