"""Records a simulated run: the frames that a server with the same requests and step times would record."""

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import NamedTuple, Never

import numpy as np
from numpy.typing import NDArray

from weft import __version__
from weft.core import CostModel, HostCost, Request, Scheduler, StepBatch, StepRecord, Targets
from weft.core.promises import Source
from weft.engine.simulated import VirtualClock
from weft.observe.frames import MOST_LATE_CHUNKS, EngineFrame, LateChunk, RequestFrame, decode_frame, encode_frame
from weft.observe.recording import Recording
from weft.observe.step_recorder import StepRecorder
from weft.sim.compare import run_policy
from weft.sim.profiles import Profile
from weft.sim.simulator import Played, TraceTable, Truth
from weft.sim.traces import Trace

ENGINE = "0"  # name of the simulated engine in the recording

Write = Callable[[bytes], object]  # takes an encoded frame


class Recorded(NamedTuple):
    """A simulated run with its recording."""

    played: Played
    recording: Recording


def record_policy(
    name: str,
    trace: Trace,
    profile: Profile,
    targets: Targets,
    truth: Truth,
    progress: Callable[[int], None] = lambda arrived: None,
    cost: CostModel | None = None,
) -> Recorded:
    """Like `run_policy`, with a recording. The key of a sequence is the number of its arrival."""
    frames: list[bytes] = []
    played = write_recording(frames.append, name, trace, profile, targets, truth, progress, cost)
    return Recorded(played, Recording.of(map(decode_frame, frames)))


def write_recording(
    write: Write,
    name: str,
    trace: Trace,
    profile: Profile,
    targets: Targets,
    truth: Truth,
    progress: Callable[[int], None] = lambda arrived: None,
    cost: CostModel | None = None,
) -> Played:
    """Like `run_policy`. Gives each encoded frame of the recording to `write`."""
    write(encode_frame(_engine_frame(name, profile, targets)))
    return run_policy(name, trace, profile, targets, truth, progress, cost, partial(RecordedTable, write=write))


class RecordedTable(TraceTable):
    """A TraceTable that also writes frames. Every simulated request is a stream."""

    def __init__(
        self,
        trace: Trace,
        scheduler: Scheduler,
        targets: Targets,
        clock: VirtualClock,
        host: HostCost,
        *,
        write: Write,
    ) -> None:
        super().__init__(trace, scheduler, targets, clock, host)
        self._write = write
        self._recorder = StepRecorder(ENGINE, scheduler.slots.size, self.index_of.__getitem__)
        count = len(trace.arrivals)
        # By number of the request.
        self._known = np.zeros(count)  # when the engine could receive it
        self._gap_target = np.full(count, np.inf)
        self._sent = np.zeros(count)  # when its last token was sent
        self._output_tokens = np.zeros(count, np.int64)
        self._late_chunks: dict[int, list[LateChunk]] = {}

    def note_added(self, request: Request, known: float) -> None:
        number = self.index_of[request]
        self._known[number], self._gap_target[number] = known, request.gap_target
        self._write(self._recorder.prompt(request, self.clock.now))

    def note_record(self, record: StepRecord) -> None:
        super().note_record(record)
        # The simulator charges the commit while the loop waits for the result, so the loop measures none.
        record.host = record.host._replace(commit=self.host.commit)
        self._write(self._recorder.step(record, self.scheduler.queued_tokens))

    def refuse(self, requests: list[Request]) -> list[Never]:
        for request in requests:
            self._write_request(request, "refused", self.clock.now)
        return super().refuse(requests)

    def forget(self, finished: list[tuple[Request, str]]) -> None:
        for request, reason in finished:
            self._write_request(request, reason, float(self._sent[self.index_of[request]]))

    def _note_tokens(self, batch: StepBatch) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        owners, times = super()._note_tokens(batch)
        before, index = self._sent[owners], self._output_tokens[owners]
        self._sent[owners] = times
        self._output_tokens[owners] += 1
        for row in np.flatnonzero((index > 0) & (times - before > self._gap_target[owners])).tolist():
            chunks = self._late_chunks.setdefault(int(owners[row]), [])
            if len(chunks) < MOST_LATE_CHUNKS:
                sent, previous = float(times[row]), float(before[row])
                chunks.append(LateChunk(int(index[row]), self.clock.now, sent, 0.0, previous))
        return owners, times

    def _write_request(self, request: Request, reason: str, finished: float) -> None:
        number = self.index_of[request]
        ttft = float(self.ttft[number])
        frame = RequestFrame(
            engine=ENGINE,
            key=number,
            request_id=request.id,
            tenant=request.tenant,
            choice_index=0,
            arrival=request.arrival,
            parsed=float(self._known[number]),
            started=request.started,
            first_token=request.first_token,
            first_sent=request.arrival + ttft if ttft < math.inf else None,
            finished=finished,
            reason=reason,
            prompt_tokens=request.prompt_tokens,
            output_tokens=int(self._output_tokens[number]),
            cached_tokens=request.cached_tokens,
            preemptions=request.preemptions,
            predicted_ttft=request.predicted_ttft,
            stream=True,
            late_chunks=self._late_chunks.pop(number, []),
        )
        self._write(encode_frame(frame))


def _engine_frame(policy: str, profile: Profile, targets: Targets) -> EngineFrame:
    has_gap, has_ttft = targets.gap < math.inf, targets.ttft < math.inf
    return EngineFrame(
        engine=ENGINE,
        time=0.0,
        epoch=0.0,
        weft=__version__,
        model=profile.name,
        device="virtual",
        policy=policy,
        gap_target=targets.gap if has_gap else None,
        gap_promised=has_gap and targets.gap_source is not Source.DEFAULT,
        ttft_target=targets.ttft if has_ttft else None,
        ttft_target_per_1k=targets.ttft_per_1k,
        ttft_promised=has_ttft and targets.ttft_source is not Source.DEFAULT,
        max_num_seqs=profile.max_num_seqs,
        num_blocks=profile.kv_tokens // profile.block_size,
        block_size=profile.block_size,
        enable_prefix_caching=True,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        profile=asdict(profile),
    )
