"""The forecast: when every prompt that is not computed yet would bring its first token, if nothing else arrived.

It walks the prompts in the order of service. Each is read at the pace that decodes leave it; then it decodes itself and
slows the prompts behind it. No running request is assumed to end before it must, so the forecast errs on the late side.
What a refused client is told is the expected time: there, requests end as they usually do.

The cost model is asked for about GROUPS paces, however long the queue: in a longer one, neighbours share a pace, the
slowest that one of them would have. Where a group finds no place among the decodes, its halves are asked about, up to
the first prompt without one; groups behind it wait for as many requests to end. All else is arithmetic on arrays.
"""

import math
import struct
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.budget import BATCH_SHARE, Allowance, Beside, StepLoad, least_step
from weft.core.cost import CostModel, decodes_alone
from weft.core.request import Request, State

GROUPS = 8
FINEST = 64  # groups, at most, that a queue is divided into to find the first prompt without a place
QUIET = 0.25  # load up to which a step may be cut short for any first token; above,
WORTH = 0.5  # only where that costs no more than this share of the request's own work

Array = NDArray[np.float64]
_ROW = struct.Struct("9d")


class Prefill(NamedTuple):
    """A prompt, or what is left of one."""

    request: Request
    first: int  # tokens that are computed or cached
    left: int  # tokens to compute

    def pack(self) -> bytes:
        """The row of a forecast. A request that waits keeps it, so that long queues become arrays in no time."""
        request = self.request
        decodes = request.max_tokens > 1
        waits_for_memory = request.state is State.WAITING and not request.sibling
        firm, soft = request.firm_gap, request.soft_gap
        memory = self.left if waits_for_memory else 0.0
        start, tag = float(request.rank[3]), math.nan if request.tag is None else request.tag
        return _ROW.pack(self.first, self.left, decodes, firm, soft, request.deadline, memory, start, tag)


class Rows(NamedTuple):
    """Prompts in the order of service, as columns."""

    first: Array  # tokens that are computed or cached
    left: Array  # tokens to compute
    decodes: Array  # 1 where it decodes afterwards
    gap: Array  # seconds; promised between its tokens, infinite where nothing is
    soft_gap: Array  # seconds; a default target, which gives way
    deadline: Array  # seconds on the scheduler's clock; infinite where no first token is promised
    memory: Array  # tokens of KV memory that it must find free before it can start
    start: Array  # its order within class and service; see `Order.rank`
    tag: Array  # its tenant's service when it started first; not a number where it has not

    @classmethod
    def of(cls, packed: Sequence[bytes | bytearray]) -> "Rows":
        return cls(*np.frombuffer(b"".join(packed), np.float64).reshape(-1, _ROW.size // 8).T)

    def take(self, places: NDArray[np.int64] | NDArray[np.bool_]) -> "Rows":
        return Rows(*(column[places] for column in self))


class Forecast(NamedTuple):
    """Of each prompt, in the order of service."""

    ends: Array  # when its first token comes at the latest; infinite where it finds no place among the decodes
    expected: Array  # when it comes if all goes as predicted, and steps are cut short for it
    seconds: Array  # that reading it takes; 0 where it has no place
    visits: int  # paces that the cost model was asked for
    waited: NDArray[np.bool_]  # whether it, or one before it, must wait until a running request ends


def forecast(cost: CostModel, allowance: Allowance, load: StepLoad, rows: Rows, busy: float) -> Forecast:
    """`busy` is the recent load, from 0 to 1: above QUIET a step is not cut short for every first token."""
    leaving, context = load.ends.latest
    step = max(
        cost.predict(load.shape), 1e-6
    )  # while no prompt is read: the shortest, in which most tokens are written
    walk = _Walk(cost, allowance, load, rows, busy, Departures(leaving, context, step))
    walk.serve_all()
    return Forecast(walk.ends, walk.expected, walk.seconds, walk.visits, walk.waited)


def expect(
    cost: CostModel, allowance: Allowance, load: StepLoad, rows: Rows, busy: float, left_out: NDArray[np.bool_]
) -> Array:
    """When first tokens come if requests end as they usually do. Prompts that are left out are read as if they were the
    only one of these."""
    step = allowance.step(cost, load.beside, 0.0)
    steps, context = load.ends.expected
    departures = Departures(steps * step, context, step, load.ends.typical * step)
    walk = _Walk(cost, allowance, load, rows, busy, departures, left_out)
    walk.serve_all()
    return walk.expected


class Departures(NamedTuple):
    """When the requests that decode now end, and give up their places."""

    after: Array  # seconds, ascending
    context: Array  # tokens that each of them reads now
    step: float  # seconds of a step while none is read
    life: float = math.inf  # seconds that a prompt which is read decodes; infinite where it is not assumed to end


class _Walk:
    """The queue as it would be served from now on."""

    def __init__(
        self,
        cost: CostModel,
        allowance: Allowance,
        load: StepLoad,
        rows: Rows,
        busy: float,
        departures: Departures,
        left_out: NDArray[np.bool_] | None = None,
    ) -> None:
        self.cost, self.allowance, self.load, self.rows = cost, allowance, load, rows
        self.quiet = busy < QUIET
        self.departures = departures
        self.clock = load.start
        self.steps = 0.0  # that have passed since
        self.ended = 0  # of the requests that decode now, how many have ended
        self.read: deque[tuple[float, int]] = deque()  # when prompts were read, and the place behind them
        self.first = 0  # the prompts before this place have been read, and have ended
        self.written = 0.0  # tokens that the others write meanwhile
        self.running = load.beside
        self.lacks_place = False  # a prompt found no place before one of them ends
        self.is_full = False  # a prompt found no place even after all of them had ended
        self.free = load.free
        count = len(rows.first)
        self.finest = max(1, count // FINEST)  # prompts of a group that is not divided further
        self.reach: Array = rows.first + rows.left  # tokens of context that its last slice reads
        self.work: Array = cost.coefficients.prompt_seconds(rows.first, rows.left) * cost.bias
        self.memory_is_scarce = bool(load.freed is not None and rows.memory.any())
        self.stays: Array = np.ones(count)  # 0 where it takes no time and no place from the others
        if left_out is not None:
            self.stays[left_out] = 0.0
        self._sum_up()
        self.waited = np.zeros(count, np.bool_)  # for a place among the decodes, itself or one before it
        self.ends = np.full(count, math.inf)
        self.expected = np.full(count, math.inf)
        self.seconds = np.zeros(count)
        self.visits = 0

    def serve_all(self) -> None:
        """In GROUPS groups, with about as many prompts each that take time."""
        total = np.cumsum(self.stays)
        if not len(total):
            return
        marks = np.linspace(0.0, total[-1], GROUPS + 1)[1:-1]
        bounds = {0, len(total), *(1 + np.searchsorted(total, marks)).tolist()}
        for begin, end in pairwise(sorted(bounds)):
            self._serve(begin, end)

    def _sum_up(self) -> None:
        """Of the prompts before each place that will decode: how many, their context, their tightest gaps."""
        decodes = self.rows.decodes * self.stays
        self._decodes = np.concatenate([[0.0], np.cumsum(decodes)])
        self._context = np.concatenate([[0.0], np.cumsum(decodes * self.reach)])
        gaps = (np.where(decodes == 0, math.inf, gap) for gap in (self.rows.gap, self.rows.soft_gap))
        self._gap, self._soft_gap = (np.concatenate([[math.inf], np.minimum.accumulate(gap)]) for gap in gaps)

    def _beside(self, place: int) -> Beside:
        """The decodes when all prompts before this place have been read."""
        decodes, context, gap, soft_gap = self.running
        begun = float(self._decodes[place] - self._decodes[self.first])
        written = self.written if begun else 0.0
        if self.departures.life < math.inf:  # those that have ended are not read any more
            written = min(written, begun * self.departures.life / self.departures.step)
        return Beside(
            decodes + int(begun),
            context + written + float(self._context[place] - self._context[self.first]),
            min(gap, float(self._gap[place])),
            min(soft_gap, float(self._soft_gap[place])),
        )

    def _serve(self, begin: int, end: int) -> None:
        """Reads these prompts, all at the pace of the slowest: the last, beside all before it."""
        self._let_end()
        reach = float(self.reach[begin:end].max())
        pace = self._pace(reach, end - 1)
        if pace is None and (end - begin <= self.finest or self.lacks_place):
            pace = self._wait_for_place(begin, end, reach)
        if pace is None and end - begin > self.finest and not self.is_full:  # the first of them may have a place
            middle = (begin + end) // 2
            self._serve(begin, middle)
            self._serve(middle, end)
            return
        if pace is None:
            self._leave_out(begin, end)
            return
        own = 1 - self.stays[begin:end]  # of prompts that are left out: only they themselves wait for what they need
        ready = self._wait_for_memory(begin, end, own)
        step = self.allowance.step(self.cost, self._beside(end - 1), reach)
        seconds = self.work[begin:end] / pace
        self.seconds[begin:end] = seconds
        taken = np.cumsum(seconds * self.stays[begin:end])
        self._note_ends(begin, end, np.maximum(self.clock + taken, own * ready) + own * seconds, step)
        self._pass(float(taken[-1]), step, end - 1)
        self.read.append((self.clock, end))

    def _pass(self, seconds: float, step: float, place: int) -> None:
        """Time passes, in steps of so many seconds. Each that decodes writes a token a step."""
        self.clock += seconds
        self.steps += seconds / step
        self.written += float(self._decodes[place] - self._decodes[self.first]) * seconds / step

    def _leave_out(self, begin: int, end: int) -> None:
        """These prompts have no place even when all requests that decode now have ended. None waits for them."""
        self.is_full = True
        self.stays[begin:end] = 0.0
        self._sum_up()

    def _note_ends(self, begin: int, end: int, clocks: Array, step: float) -> None:
        """First tokens come at the end of a step, whatever else that carries. A step will be cut short for one that
        is due (see Budget.tighten), which costs the others one step more; in a group, that is not counted with."""
        bias, beside = self.cost.bias, self._beside(begin)
        ends = clocks + step * bias
        more = least_step(self.cost, beside.decodes, beside.context, float(self.reach[begin])) * bias
        self.expected[begin:end] = np.minimum(ends, clocks + more)
        is_cut = end - begin == 1 and self.allowance.cuts and ends[0] > self.rows.deadline[begin]
        if is_cut and (self.quiet or more <= WORTH * self.seconds[begin]):
            ends = clocks + more
            self.clock += more
        # Errors of single steps add up as in a random walk: one spread of their sum is to spare.
        late = np.sqrt(step * np.maximum(0.0, ends - self.load.start))
        self.ends[begin:end] = ends + self.cost.prefill.spread * late

    def _wait_for_memory(self, begin: int, end: int, own: Array) -> Array:
        """Waits until there is memory for all of these; returns when there is for each."""
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
        """Seconds of prefill work in a second; None where there is none, or where prompt `last` could not decode."""
        self.visits += 1
        beside = self._beside(last)
        pace = self.allowance.pace(self.cost, beside, reach)
        if self.departures.life < math.inf:  # what is expected, not what is promised
            pace = max(pace, self.allowance.squeezed_pace(self.cost, beside, reach))
        if not beside.decodes:
            return pace or 1.0  # waiting would not make it any better, and an engine that serves nothing learns nothing
        if pace <= 0 or (self.rows.decodes[last] and not self._may_decode(beside, last)):
            return None
        return min(pace, 1 - BATCH_SHARE) if self.load.crowded else pace

    def _may_decode(self, beside: Beside, last: int) -> bool:
        after = decodes_alone(beside.decodes + 1, int(beside.context + self.reach[last]))
        gap = min(beside.gap, float(self.rows.gap[last]))
        return self.cost.predict(after) * self.cost.decode.tail <= gap

    def _wait_for_place(self, begin: int, end: int, reach: float) -> float | None:
        """The pace once enough of the requests that decode now have ended; None where there is none even then."""
        self.lacks_place = True
        self.waited[begin:] = True
        pace, count = None, max(1, int(self.stays[begin:end].sum()))
        while pace is None and self._let_end(count, begin):
            pace = self._pace(reach, end - 1)
            count *= 2  # long prompts need the places of several; more than enough is on the late side
        return pace

    def _let_end(self, count: int = 0, place: int = 0) -> bool:
        """Takes out the requests that have ended by now, or waits until `count` more have; False where none is left."""
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
