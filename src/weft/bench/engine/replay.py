"""Replay: plays a trace on an engine in this process, in real time, without a server."""

import math
import time
from collections.abc import Callable

import numpy as np

from weft.core import StepRecord
from weft.engine.engine import Engine
from weft.engine.params import SamplingParams
from weft.engine.residuals import RunStep
from weft.engine.sequence import Sequence
from weft.engine.sequence_table import TokenEvent
from weft.sim.fidelity import Served
from weft.sim.simulator import Played
from weft.sim.traces import Trace

MOST_IDLE_SLEEP_S = 0.001  # the longest sleep while nothing runs
Prompts = list[tuple[int, ...]]  # token ids, one prompt for each request of a trace


def replay(
    engine: Engine,
    trace: Trace,
    prompts: Prompts,
    progress: Callable[[int], None] = lambda arrived: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Served:
    """Adds every request when it is due, and steps the engine until all have ended. `sleep` is called while idle."""
    play = _Play(engine, trace, prompts, sleep)
    listener = engine.loop.on_record
    engine.loop.on_record = play.note
    try:
        while play.advance():
            progress(play.arrived)
    finally:
        engine.loop.on_record = listener
    return play.served()


class _Play:
    def __init__(self, engine: Engine, trace: Trace, prompts: Prompts, sleep: Callable[[float], None]) -> None:
        self.engine, self.trace, self.prompts, self.sleep = engine, trace, prompts, sleep
        self.steps: list[RunStep] = []
        self._last_end = math.inf  # end of the last step
        self.clock = engine.loop.clock
        self.start = self.clock()
        self.arrived = 0
        self.sequences: list[Sequence] = []
        self.number: dict[Sequence, int] = {}
        count = len(trace.arrivals)
        self.times: list[list[float]] = [[] for _ in range(count)]  # of tokens, in seconds from the start
        self.finished = np.full(count, np.inf)
        self.refused = np.zeros(count, np.bool_)

    def note(self, record: StepRecord) -> None:
        idle = max(0.0, record.started - self._last_end)
        self.steps.append(RunStep(record.shape, record.finished - record.started, idle))
        self._last_end = record.finished

    def advance(self) -> bool:
        """Adds requests that are due, then runs one step. Returns False when all is done."""
        now, arrivals = self.clock() - self.start, self.trace.arrivals
        while self.arrived < len(arrivals) and arrivals[self.arrived].time <= now:
            self._add()
        if self.engine.loop.has_work:
            events = self.engine.loop.step()
            now = self.clock() - self.start
            for event in events:
                self._note_event(event, now)
        elif self.arrived == len(arrivals):
            return False
        else:
            self.sleep(min(max(arrivals[self.arrived].time - now, 0.0), MOST_IDLE_SLEEP_S))
        return True

    def _add(self) -> None:
        arrival = self.trace.arrivals[self.arrived]
        params = SamplingParams(temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True)
        (sequence,) = self.engine.create_sequences(self.prompts[self.arrived], params)
        sequence.request.arrival = self.start + arrival.time
        self.engine.loop.add(sequence)
        self.number[sequence] = self.arrived
        self.sequences.append(sequence)
        self.arrived += 1

    def _note_event(self, event: TokenEvent, now: float) -> None:
        number = self.number[event.sequence]
        if event.token is not None:
            self.times[number].append(now)
        if event.finish_reason == "refused":
            self.refused[number] = True
        elif event.finish_reason is not None:
            self.finished[number] = now

    def served(self) -> Served:
        arrivals = self.trace.arrivals
        due = np.array([arrival.time for arrival in arrivals])
        first = np.array([times[0] if times else math.inf for times in self.times])
        between = [np.diff(times) for times in self.times]
        cached = sum(sequence.request.cached_tokens for sequence in self.sequences)
        played = Played(
            span=self.trace.span,
            ended=max((times[-1] for times in self.times if times), default=0.0),
            arrival=due,
            prompt_tokens=np.array([arrival.prompt_tokens for arrival in arrivals]),
            output_tokens=np.array([len(times) for times in self.times]),
            ttft=first - due,
            finished=self.finished,
            refused=self.refused,
            promised=np.array([sequence.request.due < math.inf for sequence in self.sequences]),
            gap_owner=np.repeat(np.arange(len(arrivals)), [len(one) for one in between]),
            gaps=np.concatenate([np.empty(0), *between]),
            steps=len(self.steps),
            prefill_tokens=sum(arrival.prompt_tokens for arrival in arrivals) - cached,
            cached_tokens=cached,
            preemptions=sum(sequence.request.preemptions for sequence in self.sequences),
        )
        got = np.isfinite(first)
        token = np.array([(sequence.request.first_token or self.start) - self.start for sequence in self.sequences])
        inside = (token - due)[got]
        return Served(played, inside, (first - due)[got] - inside, np.zeros(len(inside)), steps=self.steps)
