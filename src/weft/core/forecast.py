"""The forecast: when every prompt that is not computed yet would bring its first token, if nothing else arrived.

It walks the prompts in the order of service. Each is read at the pace that decodes leave it; then it decodes itself and
slows the prompts behind it. No running request is assumed to end before all of them must have, so the forecast errs on
the late side.

The cost model is asked for about GROUPS paces, however long the queue: in a longer one, neighbours share a pace, the
slowest that one of them would have. Where a group finds no room, its halves are asked about. All else is arithmetic on
arrays.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.budget import BATCH_SHARE, Allowance, Beside, StepLoad, least_step
from weft.core.cost import CostModel, decodes_alone
from weft.core.request import Request, State

GROUPS = 8
QUIET = 0.25  # load up to which a step may be cut short for any first token; above,
WORTH = 0.5  # only where that costs no more than this share of the request's own work

Array = NDArray[np.float64]
_ROW = struct.Struct("7d")


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
        return _ROW.pack(self.first, self.left, decodes, firm, soft, request.deadline, memory)


class Rows(NamedTuple):
    """Prompts in the order of service, as columns."""

    first: Array  # tokens that are computed or cached
    left: Array  # tokens to compute
    decodes: Array  # 1 where it decodes afterwards
    gap: Array  # seconds; promised between its tokens, infinite where nothing is
    soft_gap: Array  # seconds; a default target, which gives way
    deadline: Array  # seconds on the scheduler's clock; infinite where no first token is promised
    memory: Array  # tokens of KV memory that it must find free before it can start

    @classmethod
    def of(cls, packed: Sequence[bytes]) -> "Rows":
        return cls(*np.frombuffer(b"".join(packed), np.float64).reshape(-1, _ROW.size // 8).T)

    def take(self, places: NDArray[np.int64] | NDArray[np.bool_]) -> "Rows":
        return Rows(*(column[places] for column in self))


class Forecast(NamedTuple):
    """Of each prompt, in the order of service."""

    ends: Array  # when its first token comes at the latest; infinite where decodes leave it no room
    expected: Array  # when it comes if all goes as predicted, and steps are cut short for it
    seconds: Array  # that reading it takes; 0 where it has no room
    visits: int  # paces that the cost model was asked for


def forecast(cost: CostModel, allowance: Allowance, load: StepLoad, rows: Rows, busy: float) -> Forecast:
    """`busy` is the recent load, from 0 to 1: above QUIET a step is not cut short for every first token."""
    walk = _Walk(cost, allowance, load, rows, busy)
    count = len(rows.first)
    size = -(-count // GROUPS)
    for begin in range(0, count, max(1, size)):
        walk.serve(begin, min(begin + size, count))
    return Forecast(walk.ends, walk.expected, walk.seconds, walk.visits)


class _Walk:
    """The queue as it would be served from now on."""

    def __init__(self, cost: CostModel, allowance: Allowance, load: StepLoad, rows: Rows, busy: float) -> None:
        self.cost, self.allowance, self.load, self.rows = cost, allowance, load, rows
        self.quiet = busy < QUIET
        self.clock = load.start
        self.running = load.beside  # the decodes that are not among the prompts, and the tokens written meanwhile
        # All that decode now must have ended by then; until then none is assumed to.
        self.drained = load.start + load.longest * min(load.gap, load.soft_gap) if load.longest else load.start
        self.free = load.free
        self.is_full = False  # a prompt found no room even after the running requests had ended
        count = len(rows.first)
        self.reach: Array = rows.first + rows.left  # tokens of context that its last slice reads
        self.work: Array = cost.coefficients.prompt_seconds(rows.first, rows.left) * cost.bias
        self.waits = bool(load.freed is not None and rows.memory.any())
        self.has_room = np.ones(count, np.bool_)
        self.ends = np.full(count, math.inf)
        self.expected = np.full(count, math.inf)
        self.seconds = np.zeros(count)
        self.visits = 0
        self._sum_up()

    def _sum_up(self) -> None:
        """Of the prompts before each place that will decode: how many, their context, their tightest gaps."""
        decodes = self.rows.decodes * self.has_room
        none = decodes == 0
        self._decodes = [0, *np.cumsum(decodes).astype(np.int64).tolist()]
        self._context = [0.0, *np.cumsum(decodes * self.reach).tolist()]
        gaps = (np.where(none, math.inf, gap) for gap in (self.rows.gap, self.rows.soft_gap))
        self._gap, self._soft_gap = ([math.inf, *np.minimum.accumulate(gap).tolist()] for gap in gaps)

    def _beside(self, place: int) -> Beside:
        """The decodes when all prompts before this place have been read."""
        decodes, context, gap, soft_gap = self.running
        return Beside(
            decodes + self._decodes[place],
            context + self._context[place],
            min(gap, self._gap[place]),
            min(soft_gap, self._soft_gap[place]),
        )

    def serve(self, begin: int, end: int) -> None:
        """Reads these prompts, all at the pace of the slowest: the last, beside all before it."""
        if self.waits:
            self._wait_for_memory(begin, end)
        reach = float(self.reach[begin:end].max())
        pace = self._pace(reach, end - 1)
        if pace is None and self.clock < self.drained < math.inf:
            self._drain()
            pace = self._pace(reach, end - 1)
        if pace is None:
            self._find_room(begin, end)
            return
        beside = self._beside(end - 1)
        step = self.allowance.step(self.cost, beside, reach)
        seconds = self.work[begin:end] / pace
        self.seconds[begin:end] = seconds
        clocks = self.clock + np.cumsum(seconds)
        read = float(clocks[-1]) - self.clock
        self._note_ends(begin, end, clocks, step)
        self.clock = float(clocks[-1])
        written = beside.decodes * read / step  # each that decodes writes a token a step
        self.running = self.running._replace(context=self.running.context + written)

    def _find_room(self, begin: int, end: int) -> None:
        """Some of these prompts have no room: the first of them may. The others wait, and no prompt waits for them."""
        if end - begin > 1 and not self.is_full:
            middle = (begin + end) // 2
            self.serve(begin, middle)
            self.serve(middle, end)
        else:
            self.is_full = True
            self.has_room[begin:end] = False
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
            clocks[0] += more
            ends = clocks
        # Errors of single steps add up as in a random walk: one spread of their sum is to spare.
        late = np.sqrt(step * np.maximum(0.0, ends - self.load.start))
        self.ends[begin:end] = ends + self.cost.prefill.spread * late

    def _wait_for_memory(self, begin: int, end: int) -> None:
        need = float(self.rows.memory[begin:end].sum())
        if need and self.load.freed is not None:
            self.clock = max(self.clock, self.load.start + max(0.0, need - self.free) / self.load.freed)
        self.free -= float((self.rows.memory[begin:end] * self.rows.decodes[begin:end]).sum())

    def _pace(self, reach: float, last: int) -> float | None:
        """Seconds of prefill work in a second; None where there is none, or where prompt `last` could not decode."""
        self.visits += 1
        beside = self._beside(last)
        pace = self.allowance.pace(self.cost, beside, reach)
        if not beside.decodes:
            return pace or 1.0  # waiting would not make it any better, and an engine that serves nothing learns nothing
        if pace <= 0 or (self.rows.decodes[last] and not self._may_decode(beside, last)):
            return None
        return min(pace, 1 - BATCH_SHARE) if self.load.crowded else pace

    def _may_decode(self, beside: Beside, last: int) -> bool:
        after = decodes_alone(beside.decodes + 1, int(beside.context + self.reach[last]))
        gap = min(beside.gap, float(self.rows.gap[last]))
        return self.cost.predict(after) * self.cost.decode.tail <= gap

    def _drain(self) -> None:
        """Waits until all requests that decode now have ended."""
        self.clock = self.drained
        shape = self.load.shape
        written = max(0.0, self.running.context - shape.context)
        self.running = Beside(max(0, self.running.decodes - shape.decodes), written, math.inf)
