"""Timeline: a recording as events for Perfetto and chrome://tracing, made frame by frame.

Only requests that have not ended are kept in memory, so a recording may be larger than the memory.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

from weft.observe.blame import Cause
from weft.observe.frames import EngineFrame, Frame, LagFrame, PromptFrame, RequestFrame, StepFrame
from weft.observe.step_shares import DividedStep, StepShares, coefficients_of

Event = dict[str, Any]

API_PID = 1  # "process" of the viewer, with the tracks of the API process; engines follow
STEPS, HOST = 1, 2  # "threads" of the viewer
LEAST_HOST_S = 1e-6  # shorter pieces of host time are left out
KEPT_STEPS = 4096  # last steps, to find what a stall was made of
KEPT_ENDS = 10_000  # last sequences that ended
MOST_SLICES = 16  # that the arguments of a step name
# Colours of chrome://tracing. Perfetto colours by name.
COLOURS = {
    "api": "grey",
    "queue": "thread_state_runnable",
    "prefill": "rail_response",
    "recompute": "rail_animation",
    "between slices": "thread_state_sleeping",
    "decode": "good",
    "stall": "terrible",
    "preempted": "bad",
    "send": "grey",
}


def frame_time(frame: Frame) -> float:
    """When a frame was made, in seconds."""
    match frame:
        case StepFrame() | RequestFrame():
            return frame.finished
        case EngineFrame() | PromptFrame() | LagFrame():
            return frame.time


def write_timeline(frames: Iterable[Frame], file: BinaryIO, since: float = -math.inf) -> int:
    """Writes events from time `since` on as JSON. Returns their number, without the names of tracks."""
    encode = msgspec.json.Encoder().encode
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    separator, count = b"\n", 0
    for event in timeline(frames, since):
        file.write(separator + encode(event))
        separator = b",\n"
        count += event["ph"] != "M"
    file.write(b"\n]}\n")
    return count


def timeline(frames: Iterable[Frame], since: float = -math.inf) -> Iterator[Event]:
    """The events of a recording, nearly in order of time. Each follows soon after the frame that ends it."""
    clock: _TimelineClock | None = None
    engines: dict[str, _EngineTracks] = {}
    events: list[Event] = []
    count = 0
    for frame in frames:
        if clock is None:
            clock = _TimelineClock(max(since, frame.arrival if isinstance(frame, PromptFrame) else _begin(frame)))
        if isinstance(frame, LagFrame):
            _note_lag(frame, clock, events)
        else:
            tracks = engines.get(frame.engine)
            if tracks is None or (isinstance(frame, EngineFrame) and tracks.info != frame):
                if tracks is not None:
                    tracks.finish()
                tracks = engines[frame.engine] = _EngineTracks(frame.engine, API_PID + 1 + 2 * count, clock, events)
                count += 1
            tracks.note(frame)
        yield from events
        events.clear()
    for tracks in engines.values():
        tracks.finish()
    yield from events


def _begin(frame: Frame) -> float:
    return frame.started if isinstance(frame, StepFrame) else frame_time(frame)


class _TimelineClock:
    """Times of the recording as nanoseconds since the beginning of the timeline."""

    def __init__(self, zero: float) -> None:
        self.zero = zero
        self.has_api_track = False

    def __call__(self, seconds: float) -> int:
        return max(0, round((seconds - self.zero) * 1e9))


@dataclass
class _Row:
    """One sequence that has not ended. Its phases follow each other without a hole from its arrival on."""

    key: int
    began: int  # nanoseconds
    upto: int  # end of the last phase that was written
    prompt: PromptFrame | None
    last_token: int | None = None  # when it got its last token
    last_step: int = -1  # index of the step that sampled it
    tokens: int = 0
    decoded: int = 0  # tokens since the last phase
    reached: int = 0  # position after the last token that was ever computed
    is_preempted: bool = False
    waited_for: str = ""
    stalls: int = 0
    is_shown: bool = False  # the viewer knows its track
    has_started: bool = False


@dataclass
class _Step:
    """A step, with what is needed to divide its time."""

    frame: StepFrame
    idle: float  # seconds of the device before it
    seconds: float
    shares: DividedStep | None = None  # computed when it is first needed


@dataclass
class _EngineTracks:
    """The tracks of one engine process."""

    name: str
    pid: int  # of steps and host; the requests have the next one
    clock: _TimelineClock
    events: list[Event]
    info: EngineFrame | None = None
    rows: dict[int, _Row] = field(default_factory=dict)
    ended: dict[int, None] = field(default_factory=dict)  # keys of the last sequences that ended, oldest first
    steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    num_steps: int = 0
    shares: StepShares = field(default_factory=StepShares)
    previous_end: float = -math.inf  # of the step before
    latest: int = 0  # nanoseconds: end of all that was seen
    counters: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.host = _HostTrack(self)
        for pid, kind in ((self.pid, "steps"), (self.pid + 1, "requests")):
            self._name("process_name", pid, 0, f"engine {self.name}: {kind}")
        self._name("thread_name", self.pid, STEPS, "device: steps")
        self._name("thread_name", self.pid, HOST, "host")

    def note(self, frame: Frame) -> None:
        match frame:
            case EngineFrame():
                self.info, self.shares = frame, StepShares(coefficients_of(frame))
            case PromptFrame():
                self._open(frame)
            case StepFrame():
                self._step(frame)
            case RequestFrame():
                self._close(frame)

    def finish(self) -> None:
        """Ends what is open, at the end of the recording or of the process."""
        self.host.finish()
        for row in self.rows.values():
            self._end_decodes(row)
            if not row.has_started or row.is_preempted:
                self._phase(row, "preempted" if row.is_preempted else "queue", self.latest)
            self._outer(row, self.latest, {"end": "not in the recording"})
        self.rows.clear()

    # Events

    def piece(self, pid: int, tid: int, name: str, start: int, end: int, args: Event, colour: str = "") -> None:
        """A piece of a track, if it is within the timeline."""
        self.latest = max(self.latest, end)
        if end <= 0 or end < start:
            return
        event: Event = {
            "ph": "X",
            "pid": pid,
            "tid": tid,
            "name": name,
            "ts": start / 1000,
            "dur": (end - start) / 1000,
        }
        if colour:
            event["cname"] = colour
        if args:
            event["args"] = args
        self.events.append(event)

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self.events.append({"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}})

    def _count(self, at: int, name: str, value: int) -> None:
        if at > 0 and self.counters.get(name) != value:
            self.counters[name] = value
            self.events.append({"ph": "C", "pid": self.pid, "name": name, "ts": at / 1000, "args": {"value": value}})

    # Requests

    def _open(self, prompt: PromptFrame) -> None:
        arrival = self.clock(prompt.arrival)
        row = self.rows[prompt.key] = _Row(prompt.key, arrival, arrival, prompt)
        self._phase(row, "api", self.clock(prompt.time))

    def _row(self, key: int, began: int) -> _Row | None:
        """The row of a sequence in a step. None: it has ended. A new one if the recording begins within its life."""
        row = self.rows.get(key)
        if row is None and key >= 0 and key not in self.ended:
            row = self.rows[key] = _Row(key, began, began, None, has_started=True)
        return row

    def _phase(self, row: _Row, phase: str, end: int, args: Event | None = None, detail: str = "") -> None:
        """Writes the next phase of a row: from the end of the one before to `end`."""
        if end > row.upto:
            name = f"{phase}: {detail}" if detail else phase
            self._show(row, end)
            self.piece(self.pid + 1, row.key + 1, name, row.upto, end, args or {}, COLOURS[phase])
            row.upto = end

    def _show(self, row: _Row, end: int) -> None:
        if not row.is_shown and end > 0:
            row.is_shown = True
            tokens = "" if row.prompt is None else f" ({row.prompt.prompt_tokens} tokens)"
            self._name("thread_name", self.pid + 1, row.key + 1, f"#{row.key}{tokens}")

    def _end_decodes(self, row: _Row) -> None:
        if row.decoded and row.last_token is not None:
            self._phase(row, "decode", row.last_token, {"tokens": row.decoded})
            row.decoded = 0

    def _outer(self, row: _Row, end: int, args: Event) -> None:
        """The piece around all phases of a row."""
        end = max(end, row.upto)
        self._show(row, end)
        if row.prompt is not None:
            prompt = row.prompt
            args = {
                "prompt_tokens": prompt.prompt_tokens,
                "gap_target_ms": _ms(prompt.gap_target),
                "gap_promised": prompt.gap_promised,
                "ttft_target_ms": _ms(prompt.ttft_target),
                "ttft_promised": prompt.ttft_promised,
                "flex": prompt.flex,
                **args,
            }
        name = args.get("request_id") or f"#{row.key}"
        self.piece(self.pid + 1, row.key + 1, name, row.began, end, {**args, "stalls": row.stalls})

    def _close(self, frame: RequestFrame) -> None:
        row = self.rows.pop(frame.key, None)
        self.ended[frame.key] = None
        while len(self.ended) > KEPT_ENDS:
            del self.ended[next(iter(self.ended))]
        if row is None:
            return
        end = max(self.clock(frame.finished), row.upto)
        self._end_decodes(row)
        if row.is_preempted:
            self._phase(row, "preempted", end)
        elif not row.has_started:
            self._phase(row, "queue", end, {"waits_for": row.waited_for})
        self._phase(row, "send", end)
        ttft = None if frame.first_token is None else frame.first_token - frame.arrival
        self._outer(
            row,
            end,
            {
                "request_id": frame.request_id,
                "end": frame.reason,
                "output_tokens": frame.output_tokens,
                "cached_tokens": frame.cached_tokens,
                "preemptions": frame.preemptions,
                "ttft_ms": _ms(ttft),
                "predicted_ttft_ms": _ms(frame.predicted_ttft),
                "late_chunks": len(frame.late_chunks),
            },
        )

    # Steps

    def _step(self, frame: StepFrame) -> None:
        index, self.num_steps = self.num_steps, self.num_steps + 1
        started = max(frame.started, self.previous_end)
        finished = max(frame.finished, started)
        idle = started - self.previous_end if self.previous_end > -math.inf else 0.0
        self.steps.append(_Step(frame, idle, finished - started))
        self.shares.note(frame)
        begin, end = self.clock(started), self.clock(finished)
        for key in frame.preempted:
            self._preempt(key, begin)
        if frame.waiting and frame.waits_for:
            self._note_waits(frame)
        for key, first, count, ends_its_prompt in frame.slices:
            if (row := self._row(key, begin)) is not None:
                self._slice(row, first, count, begin, end)
                if ends_its_prompt:
                    self._token(row, index, end)
        for key in frame.decode_keys.tolist():
            if (row := self._row(key, begin)) is not None:
                self._decode(row, index, end)
        self.piece(self.pid, STEPS, _step_name(frame), begin, end, self._step_args(frame))
        self.host.note(frame, started, finished)
        if self.info is not None:
            self._count(end, "KV blocks in use", self.info.num_blocks - frame.free_blocks)
        self._count(end, "queue", frame.waiting)
        self._count(end, "running", frame.running)
        self.previous_end = finished

    def _step_args(self, frame: StepFrame) -> Event:
        predicted = self.shares.predict(frame) if frame.predicted is None else frame.predicted
        return {
            "step": frame.number,
            "measured_ms": (frame.finished - frame.started) * 1000,
            "predicted_ms": _ms(predicted),
            "decodes": len(frame.decode_keys),
            "slices": [f"#{key}: {count} from {first}" for key, first, count, _ in frame.slices[:MOST_SLICES]],
            "context": frame.step_shape.context,
            "prefill_limit": frame.prefill_limit,
            "waits_for": frame.waits_for,
            "preempted": [f"#{key}" for key in frame.preempted],
            "cached_tokens": frame.cached_tokens,
            "starved": frame.starved,
        }

    def _note_waits(self, frame: StepFrame) -> None:
        """Tells the rows in the queue what the first of them waits for."""
        waiting = frame.waiting
        for row in reversed(self.rows.values()):  # the newest are last, and most of the others run
            if waiting == 0:
                break
            if not row.has_started:
                row.waited_for = frame.waits_for
                waiting -= 1

    def _preempt(self, key: int, begin: int) -> None:
        row = self.rows.get(key)
        if row is None:
            return
        self._end_decodes(row)
        row.is_preempted = True

    def _slice(self, row: _Row, first: int, count: int, begin: int, end: int) -> None:
        if row.is_preempted:
            self._phase(row, "preempted", begin)
        elif not row.has_started:
            self._phase(row, "queue", begin, {"waits_for": row.waited_for} if row.waited_for else None)
        else:
            self._phase(row, "between slices", begin)
        row.has_started, row.is_preempted = True, False
        recomputes = first < row.reached
        row.reached = max(row.reached, first + count)
        self._phase(row, "recompute" if recomputes else "prefill", end, {"first": first, "tokens": count})

    def _token(self, row: _Row, index: int, end: int) -> None:
        """A slice sampled a token: the phases already say what happened before."""
        row.last_token, row.last_step = end, index
        row.tokens += 1

    def _decode(self, row: _Row, index: int, end: int) -> None:
        last, target = row.last_token, self._gap_target(row)
        row.reached += row.last_token is not None
        if last is not None and target is not None and end - last > target * 1e9 * (1 + 1e-9):
            self._end_decodes(row)
            row.stalls += 1
            cause, args = self._why(row, index)
            args |= {"gap_ms": (end - last) / 1e6, "target_ms": target * 1000}
            self._phase(row, "stall", end, args, cause)
        else:
            row.decoded += 1
        row.last_token, row.last_step = end, index
        row.tokens += 1

    def _gap_target(self, row: _Row) -> float | None:
        if row.prompt is not None:
            return row.prompt.gap_target
        return None if self.info is None else self.info.gap_target

    def _why(self, row: _Row, index: int) -> tuple[str, Event]:
        """The main cause of a stall, and the milliseconds of all causes, by what the device did since the last token.

        `weft.observe.blame` says it more exactly, from the whole recording.
        """
        seconds = dict.fromkeys((Cause.HOST, Cause.DECODES, Cause.PREFILL, Cause.SLOW_STEP), 0.0)
        readers: dict[int, float] = {}
        count = min(index - row.last_step, len(self.steps))
        for place in range(len(self.steps) - count, len(self.steps)):
            step = self.steps[place]
            if step.shares is None:
                step.shares = self.shares.divide(step.frame, step.seconds)
            seconds[Cause.HOST] += step.idle
            seconds[Cause.DECODES] += step.shares.decodes
            seconds[Cause.SLOW_STEP] += step.shares.excess
            seconds[Cause.PREFILL] += sum(step.shares.slices)
            for (key, *_), part in zip(step.frame.slices, step.shares.slices, strict=True):
                readers[key] = readers.get(key, 0.0) + part
        cause = max(seconds, key=lambda one: seconds[one])
        args: Event = {f"{one}_ms": time * 1000 for one, time in seconds.items() if time > 0}
        args["prompts"] = [f"#{key}" for key in sorted(readers, key=lambda key: -readers[key])[:MOST_SLICES]]
        detail = str(cause)
        if cause is Cause.PREFILL:
            detail += f" of {args['prompts'][0]}"
        return detail, args


class _HostTrack:
    """The host's track. A recording has the durations of host work; when it took place follows from the steps.

    The loop plans and submits a step, then waits for the step before and commits it. If the device was idle before a
    step, the submit ended when the step started. Otherwise the work followed the commit before it.
    """

    def __init__(self, tracks: _EngineTracks) -> None:
        self._tracks = tracks
        self._upto = -math.inf  # end of the last piece, seconds
        self._before: tuple[StepFrame, float] | None = None  # the step that is not committed yet, and its end

    def note(self, frame: StepFrame, started: float, finished: float) -> None:
        times = frame.host_times
        before = times.outside + times.plan + times.submit
        if self._before is not None and started - before >= self._before[1] + self._before[0].host_times.commit:
            self._commit()  # nothing was in flight while this step was planned
        is_after_idle = self._before is None or started > self._before[1]
        begin = started - before if is_after_idle else self._upto
        for name, seconds in (("outside", times.outside), ("plan", times.plan), ("submit", times.submit)):
            begin = self._piece(name, max(begin, self._upto), seconds, frame)
        self._commit()
        self._before = frame, finished

    def finish(self) -> None:
        self._commit()

    def _commit(self) -> None:
        if self._before is not None:
            frame, finished = self._before
            self._piece("commit", max(finished, self._upto), frame.host_times.commit, frame)
            self._before = None

    def _piece(self, name: str, begin: float, seconds: float, frame: StepFrame) -> float:
        if begin == -math.inf:
            begin = frame.started - seconds
        end = begin + seconds
        if seconds >= LEAST_HOST_S:
            clock = self._tracks.clock
            self._tracks.piece(self._tracks.pid, HOST, name, clock(begin), clock(end), {"step": frame.number})
        self._upto = end
        return end


def _step_name(frame: StepFrame) -> str:
    decodes, tokens = len(frame.decode_keys), sum(count for _, _, count, _ in frame.slices)
    parts = [f"{decodes} decodes"] if decodes else []
    if tokens:
        parts.append(f"{tokens} tokens of prompts")
    return " + ".join(parts)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _note_lag(frame: LagFrame, clock: _TimelineClock, events: list[Event]) -> None:
    if not clock.has_api_track:
        clock.has_api_track = True
        for kind, name in (("process_name", "API process"), ("thread_name", "event loop")):
            events.append({"ph": "M", "pid": API_PID, "tid": 1, "name": kind, "args": {"name": name}})
    begin, end = clock(frame.time - frame.seconds), clock(frame.time)
    if end > 0:
        event = {"ph": "X", "pid": API_PID, "tid": 1, "name": "stood still", "cname": "terrible"}
        events.append({**event, "ts": begin / 1000, "dur": (end - begin) / 1000})


def last_time(frames: Iterable[Frame]) -> float:
    """The latest time in a recording; -inf if it has no frame."""
    return max(map(frame_time, frames), default=-math.inf)
