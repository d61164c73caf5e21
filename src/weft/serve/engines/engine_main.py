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

from weft.core import StepRecord, Targets
from weft.engine.build import build_engine
from weft.engine.collector import Collector
from weft.engine.engine import Engine
from weft.engine.options import EngineOptions
from weft.engine.profile import profile_of
from weft.engine.stream import Stream
from weft.engine.streams import TokenEvent
from weft.errors import EngineError, QueueFullError, RequestError, WeftError
from weft.observe.engine_metrics import EngineStep
from weft.observe.steps import StepLog
from weft.serve.engines.heartbeat import Heartbeat
from weft.serve.engines.messages import (
    AbortSequences,
    AddRequest,
    EngineFailed,
    EngineInfo,
    EngineProcessConfig,
    EngineReady,
    FirstToken,
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

SWITCH = 0.0005  # seconds; the longest time that another thread may hold the GIL while the loop waits for it
MOST_FAILURES = 3  # failed steps in a row; then the device is not trusted and the process exits, to be replaced
SHORT = 2048  # tokens; a prompt up to this length is hashed in the loop thread, which takes half a millisecond
INTAKE_SHARE = 0.1  # share of the last step's time: the time limit for reading messages per step,
LEAST_INTAKE = 0.001  # seconds; but the limit is at least this
SOON = 1  # milliseconds between checks of prompts in preparation, while nothing else is to be done
IDLE = 5000  # milliseconds between garbage collection checks of an idle process
STDIN = 0  # file descriptor
LINGER = 1000  # milliseconds that closing the socket may take to send the last messages


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
    sys.setswitchinterval(SWITCH)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, LINGER)
    socket.set_hwm(0)
    socket.connect(config.address)
    try:
        log = None if config.record_steps is None else StepLog(Path(config.record_steps))
        options = EngineOptions.of(**config.options)
        engine = build_engine(options, Path(config.path), config.eos_ids, is_served=True)
    except (WeftError, OSError) as error:
        socket.send(encode(EngineFailed(" ".join(str(error).split()))))
        socket.close()
        return 2
    collector = Collector()
    collector.freeze()
    socket.send(encode(EngineReady(engine_info_of(engine, config.options))))
    EngineServer(engine, socket, collector, heartbeat, log).run()
    return 1


def engine_info_of(engine: Engine, options: dict[str, Any]) -> EngineInfo:
    scheduler, promises = engine.loop.scheduler, engine.promises
    targets = Targets() if promises is None else promises.targets
    executor = engine.loop.executor.facts
    profile = None
    if promises is not None:
        profile = profile_of(engine, promises.calibration, options["max_num_batched_tokens"])
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
        calibration_quality="" if promises is None else promises.calibration.quality,
        profile=profile,
        hidden_size=engine.hidden_size,
        block_space=engine.block_space.hex(),
    )


class EngineServer:
    """Runs one engine in one thread. Messages come and go through one socket."""

    def __init__(
        self,
        engine: Engine,
        socket: "zmq.Socket[bytes]",
        collector: Collector,
        heartbeat: Heartbeat,
        log: StepLog | None = None,
    ) -> None:
        self.collector, self.heartbeat, self.log = collector, heartbeat, log
        self.errors = LogRateLimit()
        self.engine, self.loop, self.socket = engine, engine.loop, socket
        self.loop.on_record = self._keep_record
        self._streams: dict[int, Stream] = {}
        self._keys: dict[Stream, int] = {}
        self._opening: dict[AddRequest, Future[list[Stream]]] = {}  # prompts that another thread is preparing
        # Two separate threads, so that hashing a long prompt never waits for a grammar of another request.
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="weft-hash")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="weft-grammar")
        self._record: StepRecord | None = None
        self._failures = 0
        self._taken = 0  # streams accepted, rejected or aborted during preparation, since the process started

    def run(self) -> None:
        """Runs until MOST_FAILURES steps in a row have failed. `_end_with_parent` exits when the API process ends."""
        while self._failures < MOST_FAILURES:
            self.heartbeat.count_iteration(busy=self.loop.has_work)
            if not self.loop.has_work and not self._opening:
                self.collector.idle()
            self._receive(0 if self.loop.has_work else SOON if self._opening else IDLE)
            for message in [message for message, opening in self._opening.items() if opening.done()]:
                self._add(message, self._opening.pop(message).result)
            if self.loop.has_work:
                self.heartbeat.count_iteration(busy=True)
                self._run_step()

    def _receive(self, patience: int) -> None:
        """Reads and handles pending messages. Waits up to `patience` milliseconds for the first one.

        A burst of messages is spread over several steps, so that running streams do not wait long while new ones are
        opened. The time limit grows with the step time, so that messages behind a burst are not delayed much.
        """
        began, most = None, max(LEAST_INTAKE, INTAKE_SHARE * self.loop.last_seconds)
        while self.socket.poll(patience):
            self._handle(decode_for_engine(self.socket.recv()))
            patience = 0
            now = self.loop.clock()
            began = now if began is None else began
            if now - began > most and self.loop.has_work:
                return

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self._open(message)
            case AbortSequences(keys):
                aborted = [
                    added for added in self._opening if added.key in keys
                ]  # with all n streams: none has started
                for added in aborted:
                    self._opening.pop(added).cancel()
                    self._taken += added.params.n
                for key in keys:
                    if (stream := self._streams.pop(key, None)) is not None:
                        del self._keys[stream]
                        self.loop.abort(stream)
                if not self.loop.has_work:
                    self._send_idle()
            case ResetPrefixCache():
                self.loop.scheduler.kv.clear_cache()

    def _open(self, message: AddRequest) -> None:
        """Opens a prompt's streams. Long prompts and grammars are prepared in other threads, so that no step waits."""
        prompt: Any = np.frombuffer(message.prompt, np.int32)

        def work() -> list[Stream]:
            return self.engine.open_streams(prompt, message.params, wishes=message.wishes, salt=message.salt)

        if message.params.structured_outputs is not None:
            self._opening[message] = self._compiling.submit(work)
        elif len(prompt) > SHORT:
            self._opening[message] = self._hashing.submit(work)
        else:
            self._add(message, work)

    def _add(self, message: AddRequest, opened: Callable[[], list[Stream]]) -> None:
        self._taken += message.params.n
        taken: list[Stream] = []
        try:
            for stream in opened():
                stream.request.arrival = message.arrival
                self.loop.add(stream)
                taken.append(stream)
        except Exception as error:  # an error in one request must not end other requests
            for stream in taken:
                self.loop.abort(stream)
            kind = "queue_full" if isinstance(error, QueueFullError) else "request"
            if not isinstance(error, RequestError):
                self.errors.write(traceback.format_exc())
                kind = "error"
            self.socket.send(encode(RequestRejected(message.key, kind, str(error))))
            return
        for key, stream in enumerate(taken, start=message.key):
            self._streams[key] = stream
            self._keys[stream] = key

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
        """Ends every running and waiting stream with "error" after a failed step. The loop has already reset itself."""
        self._failures += 1
        text = traceback.format_exc()
        if not isinstance(error, EngineError):
            text += f"weft: a step failed ({self._failures} in a row)"
        self.errors.write(text)
        ends = [_end(key, stream, None, "error") for key, stream in self._streams.items()]
        self._streams.clear()
        self._keys.clear()
        self.socket.send(encode(StepOutputs([], [], [], ends, {}, [], None)))
        self._send_idle()

    def _send(self, events: list[TokenEvent]) -> None:
        keys: list[int] = []
        tokens: list[int] = []
        step = self._last_step()
        if step is None and not self.loop.has_work:
            step = self._idle_step()  # all were refused: no step follows that reports the empty queue
        outputs = StepOutputs(keys, tokens, [], [], {}, [], step)
        key_of = self._keys
        for stream, token, reason, logprobs, prompt_logprobs, first, embedding in events:
            key = key_of.get(stream)
            if key is None:
                continue  # aborted in the meantime
            if len(stream.output) == 1 and token is not None:
                outputs.first_tokens.append(_first_token(key, stream))
            if logprobs is not None:
                outputs.logprobs[key] = logprobs
            if embedding is not None:
                outputs.embeddings[key] = embedding.tobytes()
            if prompt_logprobs is not None:
                outputs.prompt_logprobs.append(PromptLogprobs(key, first + 1, prompt_logprobs))
            elif reason is not None:
                outputs.ends.append(_end(key, stream, token, reason))
                del self._streams[key], key_of[stream]
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
        return EngineStep(now, now, None, 0, 0, 0, 0, 0, 0, waiting, 0, free, taken=self._taken)

    def _keep_record(self, record: StepRecord) -> None:
        self._record = record
        if self.log is not None:
            self.log.write(record)

    def _last_step(self) -> EngineStep | None:
        record, self._record = self._record, None
        if record is None:
            return None
        return EngineStep.of(record, self.loop.scheduler.queued_tokens, self._taken)


def _first_token(key: int, stream: Stream) -> FirstToken:
    request = stream.request
    started, first = request.started or 0.0, request.first_token or 0.0
    predicted, is_promised = _finite(request.predicted_ttft), request.ttft_target < math.inf
    return FirstToken(key, started, first, request.cached_tokens, predicted, is_promised)


def _end(key: int, stream: Stream, token: int | None, reason: str) -> SequenceEnd:
    request = stream.request
    return SequenceEnd(key, token, reason, request.finished, request.preemptions, _finite(request.predicted_ttft))


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or seconds == float("inf") else seconds


def _end_with_parent() -> None:
    """Exits at end of file on stdin.

    Reads the descriptor, not `sys.stdin`: Python aborts at exit if a thread still holds the lock of `sys.stdin`.
    """
    while os.read(STDIN, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
