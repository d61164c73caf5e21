"""The forecast: when each prompt that is not computed yet would give its first token, if no other request arrived.

It simulates the prompts in the order of service. Each prompt is prefilled at the pace that the decodes leave. Then it
decodes and slows down the prompts behind it. `forecast` assumes that every running request generates max_tokens, so it
errs on the late side. A refused client is told the expected time (`expect`), which assumes usual output lengths.

The cost model is asked for about GROUPS paces, however long the queue is. In a longer queue, neighbours form a group
and share the slowest pace among them. If a group finds no room in the decode batch, it is split in halves to find the
first prompt without room. Later groups wait until as many running requests have ended as they have prompts. All other
work is array arithmetic.
"""

import math
import struct
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.budget import BATCH_SHARE, LEAST_SLICE, Allowance, Beside, StepLoad
from weft.core.cost import CostModel
from weft.core.request import Request, State
from weft.core.shape import decodes_alone

GROUPS = 8
FINEST = 64  # most groups that a queue is split into to find the first prompt without room in the decode batch
QUIET = 0.25  # below this load, a step may be cut short for any first token
WORTH = 0.5  # above it, only if that costs at most this share of the prefill time of the request

Array = NDArray[np.float64]
_ROW = struct.Struct("9d")


class PendingPrefill(NamedTuple):
    """A prompt, or the part of one that is not computed yet."""

    request: Request
    first: int  # tokens that are computed, planned or cached
    left: int  # tokens to compute

    def pack(self) -> bytes:
        """One forecast row as bytes. Waiting requests store it, so that a long queue becomes an array quickly."""
        request = self.request
        decodes = request.max_tokens > 1
        waits_for_memory = request.state is State.WAITING and not request.sibling
        firm, soft = request.firm_gap, request.soft_gap
        memory = self.left if waits_for_memory else 0.0
        start = float(request.rank[3])
        service = math.nan if request.service_at_start is None else request.service_at_start
        return _ROW.pack(self.first, self.left, decodes, firm, soft, request.deadline, memory, start, service)


class PromptRows(NamedTuple):
    """Prompts in the order of service, as columns."""

    first: Array  # tokens that are computed, planned or cached
    left: Array  # tokens to compute
    decodes: Array  # 1 if the request decodes afterwards, else 0
    gap: Array  # seconds; promised gap between tokens, infinite if there is none
    soft_gap: Array  # seconds; default gap target, which may be exceeded under load
    deadline: Array  # seconds on the scheduler's clock; infinite if no first token is promised
    memory: Array  # tokens of KV memory that must be free before it can start
    start: Array  # order within class and service; see `Order.rank`
    service: Array  # service of the tenant when the request first started; NaN if it has not started

    @classmethod
    def of(cls, packed: Sequence[bytes | bytearray]) -> "PromptRows":
        return cls(*np.frombuffer(b"".join(packed), np.float64).reshape(-1, _ROW.size // 8).T)

    def take(self, places: NDArray[np.int64] | NDArray[np.bool_]) -> "PromptRows":
        return PromptRows(*(column[places] for column in self))


class Forecast(NamedTuple):
    """Result for each prompt, in the order of service."""

    ends: Array  # latest time of its first token; infinite if it finds no room in the decode batch
    expected: Array  # expected time of its first token, if steps take as predicted and are cut short for it
    seconds: Array  # seconds that its prefill takes; 0 if it has no room
    visits: int  # number of paces that the cost model was asked for
    waited: NDArray[np.bool_]  # whether it, or a prompt before it, must wait until a running request ends


def forecast(cost: CostModel, allowance: Allowance, load: StepLoad, rows: PromptRows, busy: float) -> Forecast:
    """Latest times of first tokens, if running requests generate max_tokens.

    `busy` is the recent load, from 0 to 1. From QUIET on, a step is not cut short for every first token.
    """
    leaving, context = load.ends.latest
    step = max(
        cost.predict(load.shape), 1e-6
    )  # while no prompt is prefilled. The shortest step generates the most tokens
    walk = _Walk(cost, allowance, load, rows, busy, Departures(leaving, context, step))
    walk.serve_all()
    return Forecast(walk.ends, walk.expected, walk.seconds, walk.visits, walk.waited)


def expect(
    cost: CostModel, allowance: Allowance, load: StepLoad, rows: PromptRows, busy: float, left_out: NDArray[np.bool_]
) -> Array:
    """Expected times of first tokens, if requests have usual output lengths.

    Prompts in `left_out` delay no other prompt: each is forecast as if the other left-out prompts did not exist.
    """
    step = allowance.step(cost, load.beside, 0.0)
    steps, context = load.ends.expected
    departures = Departures(steps * step, context, step, load.ends.typical * step)
    walk = _Walk(cost, allowance, load, rows, busy, departures, left_out)
    walk.serve_all()
    return walk.expected


class Departures(NamedTuple):
    """When the running decodes end and leave the decode batch."""

    after: Array  # seconds from now, ascending
    context: Array  # tokens of context of each request now
    step: float  # seconds of a step while no prompt is prefilled
    life: float = math.inf  # seconds that a request decodes after its prefill; infinite: it never ends


class _Walk:
    """Simulation of the queue from now on."""

    def __init__(
        self,
        cost: CostModel,
        allowance: Allowance,
        load: StepLoad,
        rows: PromptRows,
        busy: float,
        departures: Departures,
        left_out: NDArray[np.bool_] | None = None,
    ) -> None:
        self.cost, self.allowance, self.load, self.rows = cost, allowance, load, rows
        self.quiet = busy < QUIET
        self.departures = departures
        self.clock = load.start
        self.steps = 0.0  # steps since load.start
        self.ended = 0  # how many of the running decodes have ended
        self.read: deque[tuple[float, int]] = deque()  # end time of each prefilled group, and the position after it
        self.first = 0  # prompts before this position have also finished decoding
        self.written = 0.0  # tokens generated by prompts that were prefilled in this forecast
        self.running = load.beside
        self.bias = cost.bias  # read often
        self.most_squeezed = cost.most_small_slice_pace(LEAST_SLICE)
        self.lacks_place = False  # a prompt had no room until a running decode ended
        self.is_full = False  # a prompt had no room even after all running decodes had ended
        self.free = load.free
        count = len(rows.first)
        self.finest = max(1, count // FINEST)  # prompts in a group that is not split further
        self.reach: Array = rows.first + rows.left  # tokens of context that the last slice of each prompt reads
        self.work: Array = cost.prompt_seconds(rows.first, rows.left) * self.bias
        self.memory_is_scarce = bool(load.freed is not None and rows.memory.any())
        self.stays: Array = np.ones(count)  # 0 if the prompt takes no time and no room from other prompts
        self.all_stay = left_out is None  # no prompt is left out
        if left_out is not None:
            self.stays[left_out] = 0.0
        self._sum_up()
        self.waited = np.zeros(count, np.bool_)  # it, or a prompt before it, waits for room in the decode batch
        self.ends = np.full(count, math.inf)
        self.expected = np.full(count, math.inf)
        self.seconds = np.zeros(count)
        self.visits = 0

    def serve_all(self) -> None:
        """Serves the queue in GROUPS groups. Each has about the same number of prompts that take time."""
        total = np.cumsum(self.stays)
        if not len(total):
            return
        marks = np.linspace(0.0, total[-1], GROUPS + 1)[1:-1]
        bounds = {0, len(total), *(1 + np.searchsorted(total, marks)).tolist()}
        for begin, end in pairwise(sorted(bounds)):
            self._serve(begin, end)

    def _sum_up(self) -> None:
        """Prefix sums for each position, over prompts before it that will decode: count, context and tightest gaps."""
        decodes = self.rows.decodes * self.stays
        self._decodes = np.concatenate([[0.0], np.cumsum(decodes)])
        self._context = np.concatenate([[0.0], np.cumsum(decodes * self.reach)])
        gaps = (np.where(decodes == 0, math.inf, gap) for gap in (self.rows.gap, self.rows.soft_gap))
        self._gap, self._soft_gap = (np.concatenate([[math.inf], np.minimum.accumulate(gap)]) for gap in gaps)

    def _beside(self, place: int) -> Beside:
        """The decodes when all prompts before this position are prefilled."""
        decodes, context, gap, soft_gap = self.running
        begun = self._decodes.item(place) - self._decodes.item(self.first)
        written = self.written if begun else 0.0
        if self.departures.life < math.inf:  # the context of ended requests is not read any more
            written = min(written, begun * self.departures.life / self.departures.step)
        return Beside(
            decodes + int(begun),
            context + written + (self._context.item(place) - self._context.item(self.first)),
            min(gap, self._gap.item(place)),
            min(soft_gap, self._soft_gap.item(place)),
        )

    def _serve(self, begin: int, end: int) -> None:
        """Prefills these prompts, all at the slowest pace. That is the pace of the last one, beside all before it."""
        self._let_end()
        reach = float(self.reach[begin:end].max())
        pace = self._pace(reach, end - 1)
        if pace is None and (end - begin <= self.finest or self.lacks_place):
            pace = self._wait_for_place(begin, end, reach)
        if pace is None and end - begin > self.finest and not self.is_full:  # the first ones may have room
            middle = (begin + end) // 2
            self._serve(begin, middle)
            self._serve(middle, end)
            return
        if pace is None:
            self._leave_out(begin, end)
            return
        seconds = self.work[begin:end] / pace
        self.seconds[begin:end] = seconds
        if self.all_stay and not self.memory_is_scarce:
            taken = np.cumsum(seconds)
            clocks = self.clock + taken
        else:
            own = 1 - self.stays[begin:end]  # 1 for left-out prompts: no other prompt waits for them
            ready = self._wait_for_memory(begin, end, own)
            taken = np.cumsum(seconds * self.stays[begin:end])
            clocks = np.maximum(self.clock + taken, own * ready) + own * seconds
        step = self.allowance.step(self.cost, self.beside_last, reach)
        self._note_ends(begin, end, clocks, step)
        self._pass(float(taken[-1]), step, end - 1)
        self.read.append((self.clock, end))

    def _pass(self, seconds: float, step: float, place: int) -> None:
        """Advances the clock, in steps of `step` seconds. Each decode generates one token per step."""
        self.clock += seconds
        self.steps += seconds / step
        self.written += (self._decodes.item(place) - self._decodes.item(self.first)) * seconds / step

    def _leave_out(self, begin: int, end: int) -> None:
        """Skips prompts that have no room even after all running decodes ended. No other prompt waits for them."""
        self.is_full, self.all_stay = True, False
        self.stays[begin:end] = 0.0
        self._sum_up()

    def _note_ends(self, begin: int, end: int, clocks: Array, step: float) -> None:
        """Records the times of first tokens. A first token comes at the end of its step, whatever the step carries.

        A step is cut short for a first token that is due (see Budget.tighten). That costs the other prompts one more
        step. It is taken into account for single prompts only, not for groups.
        """
        bias, beside = self.bias, self._beside(begin)
        ends = clocks + step * bias
        more = self.cost.least_step(beside.decodes, beside.context, float(self.reach[begin])) * bias
        self.expected[begin:end] = np.minimum(ends, clocks + more)
        is_cut = end - begin == 1 and self.allowance.cuts and ends[0] > self.rows.deadline[begin]
        if is_cut and (self.quiet or more <= WORTH * self.seconds[begin]):
            ends = clocks + more
            self.clock += more
        # Errors of single steps add up as in a random walk. The margin is one standard deviation of their sum.
        late = np.sqrt(step * np.maximum(0.0, ends - self.load.start))
        self.ends[begin:end] = ends + self.cost.prefill.spread * late

    def _wait_for_memory(self, begin: int, end: int, own: Array) -> Array:
        """Waits until there is memory for all of these prompts. Returns the time at which each has memory."""
        if not self.memory_is_scarce or self.load.freed is None:
            return np.zeros(end - begin)
        need = self.rows.memory[begin:end] * self.stays[begin:end]
        lacking = np.cumsum(need) + own * self.rows.memory[begin:end] - self.free
        ready = self.load.start + np.maximum(0.0, lacking) / self.load.freed
        if need.any():
            self.clock = max(self.clock, self.load.start + max(0.0, float(need.sum()) - self.free) / self.load.freed)
        self.free -= float((need * self.rows.decodes[begin:end]).sum())
        return ready

    def _pace(self, reach: float, last: int) -> float | None:
        """Seconds of prefill work done in a second; None if there are none, or if prompt `last` could not decode."""
        self.visits += 1
        beside = self.beside_last = self._beside(last)
        pace = self.allowance.pace(self.cost, beside, reach)
        if self.departures.life < math.inf and pace < self.most_squeezed:  # the expected pace, not the promised one
            pace = max(pace, self.allowance.squeezed_pace(self.cost, beside, reach))
        if not beside.decodes:
            return pace or 1.0  # waiting would not help, and an engine without steps cannot learn
        if pace <= 0 or (self.rows.decodes[last] and not self._may_decode(beside, last)):
            return None
        return min(pace, 1 - BATCH_SHARE) if self.load.crowded else pace

    def _may_decode(self, beside: Beside, last: int) -> bool:
        after = decodes_alone(beside.decodes + 1, int(beside.context + self.reach[last]))
        gap = min(beside.gap, float(self.rows.gap[last]))
        return self.cost.tail(after) <= gap

    def _wait_for_place(self, begin: int, end: int, reach: float) -> float | None:
        """Waits until enough running decodes have ended. Returns the pace then, or None if there is still no room."""
        self.lacks_place = True
        self.waited[begin:] = True
        pace, count = None, max(1, int(self.stays[begin:end].sum()))
        while pace is None and self._let_end(count, begin):
            pace = self._pace(reach, end - 1)
            count *= 2  # a long prompt needs the room of several requests; too many errs on the late side
        return pace

    def _let_end(self, count: int = 0, place: int = 0) -> bool:
        """Removes requests that have ended by now, or waits until `count` more have. False if no more will end."""
        moved = self._let_running_end(count, place)
        life = self.departures.life
        while self.read and (self.read[0][0] + life <= self.clock or (count and not moved and life < math.inf)):
            when, self.first = self.read.popleft()
            self._pass(max(0.0, when + life - self.clock), self.departures.step, place)
            moved = True
        return moved

    def _let_running_end(self, count: int, place: int) -> bool:
        after, contexts, step, _ = self.departures
        total = len(after)
        ended = min(self.ended + count, total)
        if self.ended == total or (count and after[ended - 1] == math.inf):
            return False
        if count:
            self._pass(max(0.0, self.load.start + float(after[ended - 1]) - self.clock), step, place)
        self.ended = max(ended, int(np.searchsorted(after, self.clock - self.load.start, "right")))
        stay = total - self.ended
        context = float(contexts[self.ended :].sum()) + stay * self.steps
        gap, soft_gap = (self.load.gap, self.load.soft_gap) if stay else (math.inf, math.inf)
        self.running = Beside(stay, context, gap, soft_gap)
        return True
