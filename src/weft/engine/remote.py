"""An executor in another process, behind a socket: RemoteExecutor is the client, `serve_executor` the server.

`weft serve` and `weft.LLM` do not use it.

Requests are numbered, and answers come in the order of the requests. Threads send and receive, so that an interrupt of
the caller (Ctrl-C) leaves no half message, and results may be waited for in any thread.

Both processes must trust each other: do not share the socket. The times of steps are on the server's clock, so
both must be on one machine. A server process should ignore SIGINT, which a terminal sends to all processes.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import msgspec

from weft.core import StepBatch
from weft.engine import wire
from weft.engine.executor import (
    Bytes,
    DeviceMemory,
    Executor,
    ExecutorFacts,
    PendingRead,
    PendingStep,
    PendingWrite,
    StepInputs,
    StepMasks,
    StepResult,
)
from weft.errors import EngineError
from weft.kv.spec import KVSpec

# In front of every message: bytes that follow, number of the request, whether it failed.
MESSAGE_HEADER = struct.Struct(">QQ?")
MAX_MESSAGE_BYTES = 1 << 34
JOINED_BYTES = 1 << 16  # smaller messages are copied behind their header and sent together with it
CONNECTION_CLOSED = "the connection to the executor's process is closed"


class GetFacts(msgspec.Struct, tag=True):
    pass


class MeasureMemory(msgspec.Struct, tag=True):
    pass


class AllocateKVCache(msgspec.Struct, tag=True):
    spec: KVSpec


class WarmUp(msgspec.Struct, tag=True):
    pass


class Submit(msgspec.Struct, tag=True):
    batch: StepBatch
    inputs: StepInputs
    masks: StepMasks | None


class ReadBlocks(msgspec.Struct, tag=True):
    blocks: list[int]


class WriteBlocks(msgspec.Struct, tag=True):
    blocks: list[int]
    data: Bytes


class FillKVCacheWithNoise(msgspec.Struct, tag=True):
    pass


class Close(msgspec.Struct, tag=True):
    pass


Message = (
    GetFacts
    | MeasureMemory
    | AllocateKVCache
    | WarmUp
    | Submit
    | ReadBlocks
    | WriteBlocks
    | FillKVCacheWithNoise
    | Close
)


class RemoteExecutor:
    """The client of an executor in another process. Owns the connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # for the two below
        self._num_requests = 0  # so far
        # Requests without an answer, by number, with the type of the result. None: the connection is closed.
        self._open: dict[int, tuple[Future[Any], Any]] | None = {}
        self._sending: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        threading.Thread(target=self._send, name="weft-remote-send", daemon=True).start()
        threading.Thread(target=self._receive, name="weft-remote-receive", daemon=True).start()
        try:
            self.facts: ExecutorFacts = self._ask(GetFacts(), ExecutorFacts).result()
        except BaseException:
            self._end()
            raise

    def measure_memory(self) -> DeviceMemory:
        found: DeviceMemory = self._ask(MeasureMemory(), DeviceMemory).result()
        return found

    def allocate_kv_cache(self, spec: KVSpec) -> None:
        self._ask(AllocateKVCache(spec), None).result()

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """`progress` is called at the end only."""
        self._ask(WarmUp(), None).result()
        progress(1, 1)

    def submit(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None = None) -> PendingStep:
        return self._ask(Submit(batch, inputs, masks), StepResult)

    def read_blocks(self, blocks: Sequence[int]) -> PendingRead:
        return self._ask(ReadBlocks(list(blocks)), Bytes)

    def write_blocks(self, blocks: Sequence[int], data: Bytes) -> PendingWrite:
        return self._ask(WriteBlocks(list(blocks), data), None)

    def fill_kv_cache_with_noise(self) -> None:
        self._ask(FillKVCacheWithNoise(), None).result()

    def close(self) -> None:
        try:
            self._ask(Close(), None).result()
        finally:
            self._end()

    def _ask(self, message: Message, kind: Any) -> "Future[Any]":
        """Sends a request. Returns its result, which fails with an EngineError if the request does."""
        data, found = wire.encode(message), Future[Any]()
        with self._lock:
            if self._open is None:
                raise EngineError(CONNECTION_CLOSED)
            self._num_requests += 1
            self._open[self._num_requests] = found, kind
            self._sending.put((self._num_requests, data))
        return found

    def _send(self) -> None:
        while (item := self._sending.get()) is not None:
            number, data = item
            try:
                _send(self._connection, number, data)
            except OSError:
                self._end()

    def _receive(self) -> None:
        try:
            while (answer := _receive(self._connection)) is not None:
                number, failed, data = answer
                with self._lock:
                    found, kind = (self._open or {}).pop(number, (None, None))
                if found is None:  # no answer to anything that was asked
                    break
                try:
                    if failed:
                        raise EngineError(data.decode())
                    found.set_result(wire.decode(data, kind))
                except Exception as error:
                    found.set_exception(error)
        finally:
            self._end()

    def _end(self) -> None:
        """Closes the connection. What is not answered fails."""
        with self._lock:
            left, self._open = self._open or {}, None
        self._sending.put(None)
        with contextlib.suppress(OSError):  # the other end may have been faster
            self._connection.shutdown(socket.SHUT_RDWR)  # ends the threads
        self._connection.close()
        for found, _ in left.values():
            found.set_exception(EngineError(CONNECTION_CLOSED))


def serve_executor(executor: Executor, connection: socket.socket) -> None:
    """Runs what a RemoteExecutor asks for, until it closes the executor or the connection. Closes both at the end.

    Results are waited for in a thread, so that the next step is received while one runs.
    """
    answers: SimpleQueue[tuple[int, Callable[[], Any]] | None] = SimpleQueue()  # in order; None: no more
    answering = threading.Thread(target=_answer, args=(answers, connection), daemon=True)
    answering.start()
    is_closed = False
    try:
        while not is_closed and (request := _receive(connection)) is not None:
            number, _, data = request
            message = wire.decode(data, Message)
            answers.put((number, _start(executor, message)))
            is_closed = isinstance(message, Close)
    finally:
        answers.put(None)
        answering.join()
        if not is_closed:
            executor.close()
        connection.close()


def _start(executor: Executor, message: Message) -> Callable[[], Any]:
    """Starts what a message asks for. Returns a function that waits for the result."""
    try:
        match message:
            case Submit(batch, inputs, masks):
                return executor.submit(batch, inputs, masks).result
            case ReadBlocks(blocks):
                return executor.read_blocks(blocks).result
            case WriteBlocks(blocks, data):
                return executor.write_blocks(blocks, data).result
            case GetFacts():
                return partial(_result, executor.facts)
            case MeasureMemory():
                return partial(_result, executor.measure_memory())
            case AllocateKVCache(spec):
                executor.allocate_kv_cache(spec)
            case WarmUp():
                executor.warm_up()
            case FillKVCacheWithNoise():
                executor.fill_kv_cache_with_noise()
            case Close():
                executor.close()
    except Exception as error:
        return partial(_error, error)
    return partial(_result, None)


def _result(found: Any) -> Any:
    return found


def _error(error: Exception) -> None:
    raise error


def _answer(answers: "SimpleQueue[tuple[int, Callable[[], Any]] | None]", connection: socket.socket) -> None:
    while (item := answers.get()) is not None:
        number, wait = item
        failed = False
        try:
            data = wire.encode(wait())
        except Exception as error:
            data, failed = f"{type(error).__name__}: {error}".encode(), True
        with contextlib.suppress(OSError):  # if the client is gone, submitted steps must still be waited for
            _send(connection, number, data, failed=failed)


def _send(connection: socket.socket, number: int, data: bytes, *, failed: bool = False) -> None:
    head = MESSAGE_HEADER.pack(len(data), number, failed)
    if len(data) < JOINED_BYTES:
        connection.sendall(head + data)  # two packets would wait for each other
    else:
        connection.sendall(head)
        connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[int, bool, bytearray] | None:
    """Number, whether it failed, and contents of the next message; None if the connection is closed."""
    head = _exactly(connection, MESSAGE_HEADER.size)
    if head is None:
        return None
    length, number, failed = MESSAGE_HEADER.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise EngineError(f"a message of {length} bytes is above the limit of {MAX_MESSAGE_BYTES}")
    data = _exactly(connection, length)
    return None if data is None else (number, failed, data)


def _exactly(connection: socket.socket, count: int) -> bytearray | None:
    found = bytearray(count)
    view, filled = memoryview(found), 0
    while filled < count:
        try:
            part = connection.recv_into(view[filled:])
        except OSError:
            return None
        if not part:
            return None
        filled += part
    return found
