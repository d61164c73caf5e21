"""Blame: why a token was late. Divides each late gap and each late first token among its causes; the parts add up."""

from collections.abc import Iterator
from enum import StrEnum
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from weft.core.promises import CONSTRAINED_STEPS
from weft.core.step import WaitsFor
from weft.observe.frames import MOST_LATE_CHUNKS, LateChunk
from weft.observe.recording import EngineRun, Recording
from weft.observe.run_index import WAITS, Floats, Ints, OwnSlice, RunIndex

MOST_KEYS = 16  # sequences that a part names
KEPT_GAPS = 0.99  # share of a sequence's gaps that must be within the target
ROUNDING = 1e-9  # a share of the target


class Cause(StrEnum):
    PREFILL = "prefill"  # slices of other requests' prompts in the same steps
    OWN_PREFILL = "own_prefill"  # of a first token: the slices of its own prompt
    DECODES = "decodes"  # the decode batch, the request itself included
    QUEUE = "queue"  # waited to be screened and started, behind other prompts
    SEATS = "seats"  # waited because max_num_seqs requests ran
    BLOCKS = "blocks"  # waited because the KV cache was full
    PREEMPTION = "preemption"  # lost its blocks: waited again, and recomputed
    GRAMMAR = "grammar"  # the mask of its next token was not ready
    HOST = "host"  # the device idled: planning, submitting, committing, receiving and sending
    API = "api"  # the API process: parsing, tokenizing, event loop, detokenizing, formatting
    CLIENT = "client"  # the client reads slowly
    SLOW_STEP = "slow_step"  # the device took longer than for such steps: other programs, its clock, a stall
    TRANSFER = "transfer"  # KV blocks on their way between workers
    UNEXPLAINED = "unexplained"  # the recording lacks steps, or clocks disagree


# While a waiting request is not in a step, why: all of the step counts. Otherwise the step is divided.
WAIT_CAUSES: dict[WaitsFor, Cause] = {
    "seats": Cause.SEATS,
    "blocks": Cause.BLOCKS,
    "tenant": Cause.QUEUE,
    "gap": Cause.DECODES,  # one more decode would break a promised gap
    "grammar": Cause.GRAMMAR,
}
NEEDED = (Cause.DECODES, Cause.OWN_PREFILL)  # what every token needs


class Part(NamedTuple):
    cause: Cause
    seconds: float
    # Sequences that caused it, for PREFILL, QUEUE and PREEMPTION; most of it first, at most MOST_KEYS.
    keys: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()  # seconds of the slices of each of the keys


class LateToken(NamedTuple):
    """A token that came later than its target. `seconds` is the whole time, and the sum of the parts."""

    key: int
    token_index: int  # 0: a first token, late after its arrival; else late after the token before
    began: float
    ended: float
    target: float  # seconds
    is_promised: bool
    parts: tuple[Part, ...]  # the longest first
    output_tokens: int  # of the sequence, in the recording

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def late_tokens(
    run: EngineRun, recording: Recording, gap_goal: float | None = None, ttft_goal: float | None = None
) -> Iterator[LateToken]:
    """The late tokens of an engine process, in order of time.

    What the client saw counts: for a stream that has ended, the times of its chunks, otherwise the ends of the steps.
    The goals, in seconds, are for requests without a target, such as all of a server with another policy than `slo`.
    Their gaps are judged by the ends of the steps.
    """
    found = _Blame(run, gap_goal, ttft_goal).late_tokens()
    found.sort(key=lambda token: (token.ended, token.key, token.token_index))
    yield from found


class _Target(NamedTuple):
    seconds: float
    is_promised: bool
    is_goal: bool = False  # of the caller, for a request that has no target


def _target(seconds: float | None, is_promised: bool, goal: float | None) -> _Target | None:
    if seconds is not None:
        return _Target(seconds, is_promised)
    return None if goal is None else _Target(goal, False, is_goal=True)


class _Tally:
    """Seconds by cause, and by sequence within a cause."""

    def __init__(self) -> None:
        self._seconds: dict[Cause, float] = {}
        self._by_key: dict[Cause, dict[int, float]] = {}

    def add(self, cause: Cause, seconds: float) -> None:
        if seconds > 0:
            self._seconds[cause] = self._seconds.get(cause, 0.0) + seconds

    def add_for(self, cause: Cause, seconds: float, key: int) -> None:
        """Adds seconds that a sequence has caused."""
        if seconds > 0:
            self._seconds[cause] = self._seconds.get(cause, 0.0) + seconds
            self.name(cause, key, seconds)

    def name(self, cause: Cause, key: int, seconds: float) -> None:
        """Names a sequence as a cause, for seconds that are added elsewhere."""
        keys = self._by_key.setdefault(cause, {})
        keys[key] = keys.get(key, 0.0) + seconds

    @property
    def seconds(self) -> float:
        return sum(self._seconds.values())

    def parts(self) -> tuple[Part, ...]:
        found = []
        for cause, seconds in sorted(self._seconds.items(), key=itemgetter(1), reverse=True):
            by_key = self._by_key.get(cause)
            if by_key is None:
                found.append(Part(cause, seconds))
            else:
                most = sorted(by_key.items(), key=itemgetter(1), reverse=True)[:MOST_KEYS]
                found.append(Part(cause, seconds, *zip(*most, strict=True)))
        return tuple(found)


class _Blame:
    """Walks the time before a late token along the steps of the device. Every piece of it goes to one cause."""

    def __init__(self, run: EngineRun, gap_goal: float | None, ttft_goal: float | None) -> None:
        self.run, self.info = run, run.info
        self.gap_goal, self.ttft_goal = gap_goal, ttft_goal
        self.index = RunIndex(run)

    def late_tokens(self) -> list[LateToken]:
        found = []
        for key in self.index.keys:
            steps = self.index.token_steps(key)
            offset = self._offset(key, len(steps))
            found += self._late_first_token(key, steps, offset)
            found += self._late_gaps(key, steps, offset)
        return found

    def _offset(self, key: int, tokens: int) -> int:
        """Index of the first known token. Above 0 if the recording begins later than the sequence."""
        request = self.run.requests.get(key)
        if key in self.run.prompts or request is None:
            return 0
        return max(0, request.output_tokens - tokens)

    def _late_token(
        self, key: int, token: int, began: float, ended: float, target: _Target, tally: _Tally
    ) -> LateToken:
        rest = ended - began - tally.seconds
        if rest > ROUNDING * (ended - began):  # clocks that disagree, or steps that the recording lacks
            tally.add(Cause.UNEXPLAINED, rest)
        tokens = len(self.index.token_steps(key))
        return LateToken(key, token, began, ended, target.seconds, target.is_promised, tally.parts(), tokens)

    def _gap_target(self, key: int) -> _Target | None:
        prompt, info = self.run.prompts.get(key), self.info
        if prompt is not None:
            target = _target(prompt.gap_target, prompt.gap_promised, self.gap_goal)
        elif info is not None:
            target = _target(info.gap_target, info.gap_promised, self.gap_goal)
        else:
            target = _target(None, False, self.gap_goal)
        return target

    # First tokens

    def _late_first_token(self, key: int, steps: Ints, offset: int) -> list[LateToken]:
        prompt, request = self.run.prompts.get(key), self.run.requests.get(key)
        if prompt is None or offset or not len(steps):
            return []
        target = _target(prompt.ttft_target, prompt.ttft_promised, self.ttft_goal)
        if target is None:
            return []
        step = int(steps[0])
        ended = end_of_step = self.index.finished_list[step]
        if request is not None and request.stream and request.first_sent is not None:
            ended = max(ended, request.first_sent)
        if ended - prompt.arrival <= target.seconds * (1 + ROUNDING):
            return []
        tally = _Tally()
        parsed = prompt.time if request is None else min(request.parsed, prompt.time)
        slices = self.index.own_slices(key)
        first_step = slices[0].step if slices else step
        parsed = min(max(parsed, prompt.arrival), self.index.started_list[first_step])
        began = min(prompt.arrival, parsed)
        tally.add(Cause.API, parsed - began)
        self._wait(tally, parsed, prompt.time, first_step)
        self._read_prompt(tally, key, slices, first_step, step, parsed)
        self._deliver(tally, step, end_of_step, ended, ended, 0.0)
        return [self._late_token(key, 0, began, ended, target, tally)]

    def _wait(self, tally: _Tally, began: float, known: float, first_step: int) -> None:
        """The time in the queue, from `began` until the device was free for `first_step`, its first one.

        Plans that were made before `known` could not consider it.
        """
        index = self.index
        low = int(np.searchsorted(index.finished, began, "right"))
        idle_before_first = index.started_list[first_step] - max(began, index.previous_list[first_step])
        if low < first_step:
            steps = slice(low, first_step)
            started, finished, previous = index.started[steps], index.finished[steps], index.previous[steps]
            idle = np.maximum(0.0, started - np.maximum(previous, began))
            whole = finished - started
            busy = finished - np.maximum(started, began)
            share = np.divide(busy, whole, out=np.zeros_like(busy), where=whole > 0)
            waits_for = np.where(previous > known, index.waits_for[steps], WAITS.index(""))
            for reason, cause in WAIT_CAUSES.items():
                tally.add(cause, float(busy[waits_for == WAITS.index(reason)].sum()))
            mask = waits_for == WAITS.index("grammar")
            tally.add(Cause.GRAMMAR, float(idle[mask].sum()))
            tally.add(Cause.HOST, float(idle[~mask].sum()))
            behind = ~np.isin(waits_for, [WAITS.index(reason) for reason in WAIT_CAUSES])
            tally.add(Cause.DECODES, float((index.decodes[steps] * share)[behind].sum()))
            tally.add(Cause.SLOW_STEP, float((index.excess[steps] * share)[behind].sum()))
            bounds = index.slice_bounds
            slices = slice(int(bounds[low]), int(bounds[first_step]))
            share_of_slice = np.repeat(share * behind, np.diff(bounds[low : first_step + 1]))
            seconds = index.slice_seconds[slices] * share_of_slice
            keys, places = np.unique(index.slice_keys[slices], return_inverse=True)
            by_key = np.bincount(places, seconds, len(keys)) if len(keys) else np.empty(0)
            tally.add(Cause.QUEUE, float(seconds.sum()))
            for place in np.argsort(-by_key)[:MOST_KEYS].tolist():
                if by_key[place] > 0:
                    tally.name(Cause.QUEUE, int(keys[place]), float(by_key[place]))
        tally.add(Cause.HOST, idle_before_first)

    def _read_prompt(
        self, tally: _Tally, key: int, slices: list[OwnSlice], first_step: int, last_step: int, began: float
    ) -> None:
        """The time from the start of the first step with a slice of the prompt to the end of the last one."""
        regained = self._regained(key, slices, first_step, last_step)
        began = max(began, self.index.started_list[first_step])
        step = first_step
        while step <= last_step:
            back = regained.get(step)
            if back is not None and back > step:
                self._preempted(tally, key, step, back, began)
                step = back
            recomputes = any(low <= step <= high for low, high in regained.items())
            self._step(tally, step, began, key, Cause.PREEMPTION if recomputes else Cause.OWN_PREFILL)
            step += 1

    def _regained(self, key: int, slices: list[OwnSlice], first_step: int, last_step: int) -> dict[int, int]:
        """For each preemption while the prompt was read: the step of its plan, and the step that regained the position.

        A preemption before that is part of the same stretch.
        """
        found: dict[int, int] = {}
        until = -1
        for preempted in self.index.preempted.get(key, ()):
            if not first_step < preempted <= last_step or preempted <= until:
                continue
            position = max((one.end for one in slices if one.step < preempted), default=0)
            regained = (one.step for one in slices if one.step >= preempted and one.end >= position)
            until = found[preempted] = min(next(regained, last_step), last_step)
        return found

    # Gaps

    def _late_gaps(self, key: int, steps: Ints, offset: int) -> list[LateToken]:
        target = self._gap_target(key)
        if target is None or len(steps) < 2:
            return []
        request = self.run.requests.get(key)
        limit = target.seconds * (1 + ROUNDING)
        found = []
        ends = self.index.finished[steps]
        from_token = 1
        if request is not None and request.stream and not target.is_goal:
            for chunk in request.late_chunks:
                late = self._late_chunk(key, steps, ends, offset, chunk, target, limit)
                if late is not None:
                    found.append(late)
            if len(request.late_chunks) < MOST_LATE_CHUNKS:
                return found
            from_token = request.late_chunks[-1].token_index + 1 - offset
        for token in (np.flatnonzero(np.diff(ends) > limit) + 1).tolist():
            if token < from_token:
                continue
            tally = _Tally()
            began, ended = float(ends[token - 1]), float(ends[token])
            self._between_tokens(tally, key, int(steps[token - 1]), int(steps[token]), began)
            found.append(self._late_token(key, token + offset, began, ended, target, tally))
        return found

    def _late_chunk(
        self, key: int, steps: Ints, ends: Floats, offset: int, chunk: LateChunk, target: _Target, limit: float
    ) -> LateToken | None:
        """The gap before a chunk. None: the recording begins later, or the chunk is not late after all."""
        token = chunk.token_index - offset
        if not 0 < token < len(steps):
            return None
        began = chunk.previous_sent if chunk.previous_sent is not None else float(ends[token - 1])
        if chunk.sent - began <= limit:
            return None
        tally = _Tally()
        # A chunk may have several tokens: a character or a stop string was not complete before.
        for later in range(max(1, int(ends.searchsorted(began, "right"))), token + 1):
            self._between_tokens(tally, key, int(steps[later - 1]), int(steps[later]), began)
        last = int(steps[token])
        arrived = min(max(began, self.index.finished_list[last]), chunk.sent)
        self._deliver(tally, last, arrived, chunk.received, chunk.sent, chunk.waited)
        return self._late_token(key, chunk.token_index, began, chunk.sent, target, tally)

    def _between_tokens(self, tally: _Tally, key: int, previous: int, last: int, began: float) -> None:
        """The time from `began`, or the end of step `previous`, to the end of step `last`, which sample two tokens."""
        if last == previous + 1:  # most gaps
            self._step(tally, last, began, key, Cause.PREEMPTION)
            return
        preempted = next((step for step in self.index.preempted.get(key, ()) if previous < step <= last), last)
        prompt = self.run.prompts.get(key)
        constrained = prompt is not None and prompt.constrained
        for step in range(previous + 1, min(preempted, last)):
            if constrained and step > previous + CONSTRAINED_STEPS - 1:
                tally.add(Cause.GRAMMAR, self._seconds(step, began))
            else:
                self._step(tally, step, began, key, Cause.PREEMPTION)
        if preempted < last:
            self._preempted(tally, key, preempted, last, began)
        self._step(tally, last, began, key, Cause.PREEMPTION)

    # Pieces of time

    def _seconds(self, step: int, began: float) -> float:
        """Seconds from `began`, or the end of the step before, to the end of a step."""
        return max(0.0, self.index.finished_list[step] - max(began, self.index.previous_list[step]))

    def _step(self, tally: _Tally, step: int, began: float, key: int, own: Cause) -> None:
        """Divides the time of a step and the idle time before it, from `began` on. `own`: cause of its own slices."""
        index = self.index
        started, finished = index.started_list[step], index.finished_list[step]
        tally.add(Cause.HOST, started - max(began, index.previous_list[step]))
        share = 1.0
        if began > started:
            if began >= finished:
                return
            share = (finished - began) / (finished - started)
        tally.add(Cause.DECODES, share * index.decode_list[step])
        tally.add(Cause.SLOW_STEP, share * index.excess_list[step])
        for place in range(index.bounds_list[step], index.bounds_list[step + 1]):
            reader, seconds = index.slice_key_list[place], share * index.slice_seconds_list[place]
            if reader == key:
                tally.add(own, seconds)
            else:
                tally.add_for(Cause.PREFILL, seconds, reader)

    def _preempted(self, tally: _Tally, key: int, step: int, back: int, began: float) -> None:
        """The time from the preemption, planned in `step`, until step `back` begins. The step's slices took its place.

        Up to the end of the step before `back`: what precedes `back` itself is divided with it.
        """
        index = self.index
        start = max(began, index.previous_list[step])
        seconds = index.finished_list[back - 1] - start
        if seconds <= 0:
            return
        tally.add(Cause.PREEMPTION, seconds)
        for place in range(index.bounds_list[step], index.bounds_list[step + 1]):
            if (reader := index.slice_key_list[place]) != key:
                tally.name(Cause.PREEMPTION, reader, index.slice_seconds_list[place])

    def _deliver(self, tally: _Tally, step: int, began: float, received: float, sent: float, waited: float) -> None:
        """The time from the end of a step until its token was sent."""
        total = sent - began
        if total <= 0:
            return
        client = min(waited, total)
        noticed = self.index.finished_list[step] + self._host_seconds_after(step)
        host = min(max(0.0, min(noticed, received) - began), total - client)
        tally.add(Cause.CLIENT, client)
        tally.add(Cause.HOST, host)
        tally.add(Cause.API, total - client - host)

    def _host_seconds_after(self, step: int) -> float:
        """Seconds from the end of a step until the engine process had sent its tokens.

        The step after it may still have been planned and submitted then. Its idle time says how long that took.
        """
        index, steps = self.index, self.run.steps
        seconds = steps[step].host_times.commit
        if step + 1 < len(steps):
            later = steps[step + 1].host_times
            idle = index.started_list[step + 1] - index.finished_list[step]
            seconds += min(idle, later.outside + later.plan + later.submit)
        return seconds
