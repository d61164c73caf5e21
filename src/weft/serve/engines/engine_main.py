"""The engine process: receives messages, runs engine steps, and sends the results of each step to the API process.

The API process starts it as `python -m weft.serve.engines.engine_main`. The first line of standard input holds the
`EngineProcessConfig`. End of file on standard input means that the API process has ended, for whatever reason. The
engine process then exits too.
"""

import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from weft.core import Request, StepRecord, Targets
from weft.engine.build import build_engine
from weft.engine.engine import Engine
from weft.engine.garbage_collection import GarbageCollection
from weft.engine.options import EngineOptions
from weft.engine.sequence import Sequence
from weft.engine.sequence_table import TokenEvent
from weft.engine.simulator_profile import profile_of
from weft.errors import EngineError, QueueFullError, RequestError, WeftError
from weft.observe.engine_metrics import EngineStep
from weft.observe.step_log import StepLog
from weft.observe.step_recorder import StepRecorder
from weft.serve.engines.heartbeat import Heartbeat
from weft.serve.engines.messages import (
    AbortSequences,
    AddPrompt,
    EngineFailed,
    EngineInfo,
    EngineProcessConfig,
    EngineReady,
    PrefillDone,
    PromptLogprobs,
    RequestRejected,
    ResetPrefixCache,
    SequenceEnd,
    StepOutputs,
    ToEngine,
    decode_for_engine,
    encode,
)
from weft.serve.log_limits import LogRateLimit

GIL_SWITCH_S = 0.0005  # seconds that another thread may hold the GIL while the loop waits for it
MOST_FAILURES = 3  # failed steps in a row. Then the process exits, and the API process starts another.
INLINE_HASH_TOKENS = 2048  # a prompt up to this length is hashed in the loop thread, which takes half a millisecond
# Between two steps, messages are read for at most this share of the last step's time, or LEAST_INTAKE_S if more.
INTAKE_SHARE = 0.1
LEAST_INTAKE_S = 0.001
PREPARING_POLL_MS = 1  # poll interval while the only work is a prompt that another thread prepares
IDLE_POLL_MS = 5000  # poll interval of an idle process, which checks for garbage collection each time
STDIN_FD = 0
LINGER_MS = 1000  # time that closing the socket may take to send the last messages


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the API process handles them
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        return 1
    config = msgspec.json.decode(line, type=EngineProcessConfig)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    heartbeat = Heartbeat(Path(config.heartbeat_file))
    heartbeat.start()
    sys.setswitchinterval(GIL_SWITCH_S)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.set_hwm(0)
    socket.connect(config.address)
    try:
        step_log = None if config.record_steps is None else StepLog(Path(config.record_steps))
        options = EngineOptions.of(**config.options)
        engine = build_engine(options, Path(config.path), config.eos_ids, is_served=True)
    except (WeftError, OSError) as error:
        socket.send(encode(EngineFailed(" ".join(str(error).split()))))
        socket.close()
        return 2
    garbage_collection = GarbageCollection()
    garbage_collection.freeze()
    socket.send(encode(EngineReady(engine_info_of(engine, config.options))))
    EngineProcessLoop(engine, socket, garbage_collection, heartbeat, step_log, config.engine).run()
    return 1


def engine_info_of(engine: Engine, options: dict[str, Any]) -> EngineInfo:
    scheduler, calibrated_targets = engine.loop.scheduler, engine.calibrated_targets
    targets = Targets() if calibrated_targets is None else calibrated_targets.targets
    executor = engine.loop.executor.facts
    profile = None
    if calibrated_targets is not None:
        profile = profile_of(engine, calibrated_targets.calibration, options["max_num_batched_tokens"])
    return EngineInfo(
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        block_size=scheduler.block_size,
        num_blocks=scheduler.num_blocks,
        max_num_seqs=scheduler.max_num_seqs,
        policy=options["policy"],
        enable_prefix_caching=scheduler.enable_prefix_caching,
        device=executor.device,
        device_type=executor.device_type,
        gap_target=_finite(targets.gap),
        gap_source=targets.gap_source,
        min_gap_target=targets.min_gap,
        ttft_target=_finite(targets.ttft),
        ttft_target_per_1k=targets.ttft_per_1k,
        ttft_source=targets.ttft_source,
        calibration_quality="" if calibrated_targets is None else calibrated_targets.calibration.quality,
        profile=profile,
        hidden_size=engine.hidden_size,
        max_num_batched_tokens=options["max_num_batched_tokens"],
        block_space=engine.block_space.hex(),
    )


class EngineProcessLoop:
    """The loop of the engine process: reads messages, runs a step, sends its results. One thread, one socket."""

    def __init__(
        self,
        engine: Engine,
        socket: "zmq.Socket[bytes]",
        garbage_collection: GarbageCollection,
        heartbeat: Heartbeat,
        step_log: StepLog | None = None,
        name: str = "0",
    ) -> None:
        self.garbage_collection, self.heartbeat, self.step_log = garbage_collection, heartbeat, step_log
        self.error_log = LogRateLimit()
        self.engine, self.loop, self.socket = engine, engine.loop, socket
        self.loop.on_record = self._keep_record
        self._sequences: dict[int, Sequence] = {}
        self._keys: dict[Sequence, int] = {}
        self._opening: dict[AddPrompt, Future[list[Sequence]]] = {}  # prompts that another thread is preparing
        # Two separate threads, so that hashing a long prompt never waits for a grammar of another request.
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="weft-hash")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="weft-grammar")
        self._record: StepRecord | None = None
        self._recorder = StepRecorder(name, self.loop.scheduler.slots.size, self._key_of)
        self._request_keys: dict[Request, int] = {}  # of sequences that have not ended
        self._prompt_frames: list[bytes] = []  # not sent yet
        self._step_frame = b""
        self._failures = 0
        # Sequences that were accepted, rejected, or aborted in preparation, since the process started. The API process
        # subtracts this from the number that it sent.
        self._num_handled = 0

    def run(self) -> None:
        """Runs until MOST_FAILURES steps in a row have failed. `_end_with_parent` exits when the API process ends."""
        while self._failures < MOST_FAILURES:
            self.heartbeat.count_iteration(busy=self.loop.has_work)
            if not self.loop.has_work and not self._opening:
                self.garbage_collection.collect_when_idle()
            self._receive(0 if self.loop.has_work else PREPARING_POLL_MS if self._opening else IDLE_POLL_MS)
            for message in [message for message, opening in self._opening.items() if opening.done()]:
                self._add(message, self._opening.pop(message).result)
            if self.loop.has_work:
                self.heartbeat.count_iteration(busy=True)
                self._run_step()

    def _receive(self, timeout_ms: int) -> None:
        """Reads and handles pending messages. Waits up to `timeout_ms` for the first one.

        A burst of messages is spread over several steps, so that running sequences do not wait long while new ones are
        opened. The time limit grows with the step time, so that messages behind a burst are not delayed much.
        """
        began, most = None, max(LEAST_INTAKE_S, INTAKE_SHARE * self.loop.last_seconds)
        while self.socket.poll(timeout_ms):
            self._handle(decode_for_engine(self.socket.recv()))
            timeout_ms = 0
            now = self.loop.clock()
            began = now if began is None else began
            if now - began > most and self.loop.has_work:
                return

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddPrompt():
                self._open(message)
            case AbortSequences(keys):
                aborted = [
                    added for added in self._opening if added.key in keys
                ]  # with all n sequences: none has started
                for added in aborted:
                    self._opening.pop(added).cancel()
                    self._num_handled += added.params.n
                for key in keys:
                    if (sequence := self._sequences.pop(key, None)) is not None:
                        self._forget(sequence)
                        self.loop.abort(sequence)
                if not self.loop.has_work:
                    self._send_idle()
            case ResetPrefixCache():
                self.loop.scheduler.kv.clear_cache()

    def _open(self, message: AddPrompt) -> None:
        """Opens a prompt's sequences. Other threads prepare long prompts and grammars, so that no step waits."""
        prompt: Any = np.frombuffer(message.prompt, np.int32)

        def work() -> list[Sequence]:
            return self.engine.create_sequences(prompt, message.params, options=message.options, salt=message.salt)

        if message.params.structured_outputs is not None:
            self._opening[message] = self._compiling.submit(work)
        elif len(prompt) > INLINE_HASH_TOKENS:
            self._opening[message] = self._hashing.submit(work)
        else:
            self._add(message, work)

    def _add(self, message: AddPrompt, opened: Callable[[], list[Sequence]]) -> None:
        self._num_handled += message.params.n
        taken: list[Sequence] = []
        try:
            for sequence in opened():
                sequence.request.arrival = message.arrival
                self.loop.add(sequence)
                taken.append(sequence)
        except Exception as error:  # an error in one request must not end other requests
            for sequence in taken:
                self.loop.abort(sequence)
            kind = "queue_full" if isinstance(error, QueueFullError) else "request"
            if not isinstance(error, RequestError):
                self.error_log.write(f"weft: an error in request {message.request_id}:\n{traceback.format_exc()}")
                kind = "error"
            self.socket.send(encode(RequestRejected(message.key, kind, str(error))))
            return
        for key, sequence in enumerate(taken, start=message.key):
            self._sequences[key] = sequence
            self._keys[sequence] = self._request_keys[sequence.request] = key
            self._prompt_frames.append(self._recorder.prompt(sequence.request, self.loop.clock()))

    def _run_step(self) -> None:
        try:
            events = self.loop.step()
        except Exception as error:
            self._fail(error)
            return
        if self._record is not None:
            self._failures = 0
        if events or self._record is not None:
            self._send(events)

    def _fail(self, error: Exception) -> None:
        """Ends every running and waiting sequence with "error" after a failed step. The loop has reset itself."""
        self._failures += 1
        text = traceback.format_exc()
        if not isinstance(error, EngineError):
            text += f"weft: a step failed ({self._failures} in a row)"
        self.error_log.write(text)
        ends = [_end(key, sequence, None, "error") for key, sequence in self._sequences.items()]
        self._sequences.clear()
        self._keys.clear()
        self._request_keys.clear()
        self.socket.send(encode(StepOutputs([], [], [], ends, {}, [], None)))
        self._send_idle()

    def _send(self, events: list[TokenEvent]) -> None:
        keys: list[int] = []
        tokens: list[int] = []
        step = self._last_step()
        if step is None and not self.loop.has_work:
            step = self._idle_step()  # all waiting requests were refused and no step ran: report the empty queue
        frames, self._prompt_frames = self._prompt_frames, []
        outputs = StepOutputs(keys, tokens, [], [], {}, [], step, {}, frames, self._step_frame)
        self._step_frame = b""
        key_of = self._keys
        for sequence, token, reason, logprobs, prompt_logprobs, first, embedding in events:
            key = key_of.get(sequence)
            if key is None:
                continue  # aborted in the meantime
            if len(sequence.output) == 1 and token is not None:
                outputs.prefills_done.append(_prefill_done(key, sequence))
            if logprobs is not None:
                outputs.logprobs[key] = logprobs
            if embedding is not None:
                outputs.embeddings[key] = embedding.tobytes()
            if prompt_logprobs is not None:
                outputs.prompt_logprobs.append(PromptLogprobs(key, first + 1, prompt_logprobs))
            elif reason is not None:
                outputs.sequence_ends.append(_end(key, sequence, token, reason))
                del self._sequences[key]
                self._forget(sequence)
            elif token is not None:
                keys.append(key)
                tokens.append(token)
        self.socket.send(encode(outputs))

    def _send_idle(self) -> None:
        self.socket.send(encode(StepOutputs([], [], [], [], {}, [], self._idle_step())))

    def _idle_step(self) -> EngineStep:
        """The current counters as a step without tokens, for when nothing runs."""
        now, scheduler = self.loop.clock(), self.loop.scheduler
        waiting, free = scheduler.num_waiting, scheduler.kv.block_pool.num_free
        return EngineStep(now, now, None, 0, 0, 0, 0, 0, 0, waiting, 0, free, num_handled=self._num_handled)

    def _keep_record(self, record: StepRecord) -> None:
        self._step_frame = self._recorder.step(record, self.loop.scheduler.queued_tokens)
        self._record = record
        if self.step_log is not None:
            self.step_log.write(record)

    def _forget(self, sequence: Sequence) -> None:
        del self._keys[sequence]
        self._request_keys.pop(sequence.request, None)

    def _key_of(self, request: Request) -> int:
        """The key of a request; -1 if its sequence has ended in the meantime."""
        return self._request_keys.get(request, -1)

    def _last_step(self) -> EngineStep | None:
        record, self._record = self._record, None
        if record is None:
            return None
        return EngineStep.of(record, self.loop.scheduler.queued_tokens, self._num_handled)


def _prefill_done(key: int, sequence: Sequence) -> PrefillDone:
    request = sequence.request
    started, first = request.started or 0.0, request.first_token or 0.0
    predicted, has_promise = _finite(request.predicted_ttft), request.promised_due < math.inf
    return PrefillDone(key, started, first, request.cached_tokens, predicted, has_promise)


def _end(key: int, sequence: Sequence, token: int | None, reason: str) -> SequenceEnd:
    request = sequence.request
    return SequenceEnd(key, token, reason, request.finished, request.preemptions, _finite(request.predicted_ttft))


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or seconds == float("inf") else seconds


def _end_with_parent() -> None:
    """Exits at end of file on stdin.

    Reads the descriptor, not `sys.stdin`: Python aborts at exit if a thread still holds the lock of `sys.stdin`.
    """
    while os.read(STDIN_FD, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
