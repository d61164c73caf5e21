"""An executor in another process, behind a socket: RemoteExecutor is the near end, `serve_executor` the far end.

Requests are answered in order. Steps run in the order of submission, as everywhere. Results that take long are waited
for by a thread at the far end, so that the next step is received while one runs.
"""

import socket
import threading
from collections.abc import Callable, Sequence
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
    StepInputs,
    StepMasks,
    StepResult,
)
from weft.errors import EngineError
from weft.kv.spec import KVSpec

LENGTH_BYTES = 8  # in front of every message: its length, the highest byte first
DONE, FAILED = b"+", b"-"  # first byte of an answer; a result or the text of an error follows
MOST = 1 << 34  # bytes of a message


class Hello(msgspec.Struct, tag=True):
    """Asks for the facts."""


class Measure(msgspec.Struct, tag=True):
    pass


class Allocate(msgspec.Struct, tag=True):
    spec: KVSpec


class WarmUp(msgspec.Struct, tag=True):
    pass


class Submit(msgspec.Struct, tag=True):
    """A step. The masks of its rows, if it has any, are in the message before."""

    batch: StepBatch
    inputs: StepInputs


class Masks(msgspec.Struct, tag=True):
    """Masks for rows of the next step. Has no answer."""

    masks: StepMasks


class ReadBlocks(msgspec.Struct, tag=True):
    blocks: list[int]


class WriteBlocks(msgspec.Struct, tag=True):
    blocks: list[int]
    data: Bytes


class Fill(msgspec.Struct, tag=True):
    pass


class Close(msgspec.Struct, tag=True):
    pass


Message = Hello | Measure | Allocate | WarmUp | Submit | Masks | ReadBlocks | WriteBlocks | Fill | Close


class RemoteExecutor:
    """Speaks to an executor behind a connected socket. Owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._asked = 0
        self._answers: dict[int, bytes] = {}  # by number of the request, until they are asked for
        self._read = 0
        self.facts: ExecutorFacts = self._ask(Hello(), ExecutorFacts).result()

    def measure(self) -> DeviceMemory:
        found: DeviceMemory = self._ask(Measure(), DeviceMemory).result()
        return found

    def allocate(self, spec: KVSpec) -> None:
        self._ask(Allocate(spec), None).result()

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        self._ask(WarmUp(), None).result()
        progress(1, 1)

    def submit(self, batch: StepBatch, inputs: StepInputs, masks: StepMasks | None = None) -> "Answer":
        if masks is not None:
            _send(self._connection, wire.encode(Masks(masks)))
        return self._ask(Submit(batch, inputs), StepResult)

    def read_blocks(self, blocks: Sequence[int]) -> "Answer":
        return self._ask(ReadBlocks(list(blocks)), Bytes)

    def write_blocks(self, blocks: Sequence[int], data: Bytes) -> "Answer":
        return self._ask(WriteBlocks(list(blocks), data), None)

    def fill(self) -> None:
        self._ask(Fill(), None).result()

    def close(self) -> None:
        try:
            self._ask(Close(), None).result()
        finally:
            self._connection.close()

    def _ask(self, message: Message, kind: Any) -> "Answer":
        _send(self._connection, wire.encode(message))
        self._asked += 1
        return Answer(self, self._asked, kind)

    def wait_for(self, number: int) -> bytes:
        """The answer to a request, by its number. Answers that come before it are kept."""
        while self._read < number:
            data = _receive(self._connection)
            if data is None:
                raise EngineError("the executor's process ended")
            self._read += 1
            self._answers[self._read] = data
        return self._answers.pop(number)


class Answer:
    """The answer to a request, which may not be there yet."""

    def __init__(self, executor: RemoteExecutor, number: int, kind: Any) -> None:
        self._executor, self._number, self._kind = executor, number, kind
        self._found: list[Any] = []

    def result(self) -> Any:
        """Waits for the answer. Raises an EngineError if the request failed or the other process has ended."""
        if not self._found:
            data = self._executor.wait_for(self._number)
            failed = data[:1] == FAILED
            self._found = [EngineError(data[1:].decode()) if failed else wire.decode(data[1:], self._kind)]
        if isinstance(self._found[0], EngineError):
            raise self._found[0]
        return self._found[0]


def serve_executor(executor: Executor, connection: socket.socket) -> None:
    """Runs what a RemoteExecutor asks for until it closes the executor or the connection."""
    answers: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()  # in order; None: no more
    answering = threading.Thread(target=_answer, args=(answers, connection), daemon=True)
    answering.start()
    masks: StepMasks | None = None
    try:
        while (data := _receive(connection)) is not None:
            message = wire.decode(data, Message)
            if isinstance(message, Masks):
                masks = message.masks
                continue
            answers.put(_start(executor, message, masks))
            masks = None
            if isinstance(message, Close):
                break
        else:
            executor.close()
    finally:
        answers.put(None)
        answering.join()
        connection.close()


def _start(executor: Executor, message: Message, masks: StepMasks | None) -> Callable[[], Any]:
    """Starts what a message asks for. Returns a function that waits for the result."""
    try:
        match message:
            case Submit(batch, inputs):
                return executor.submit(batch, inputs, masks).result
            case ReadBlocks(blocks):
                return executor.read_blocks(blocks).result
            case WriteBlocks(blocks, data):
                return executor.write_blocks(blocks, data).result
            case Hello():
                return partial(_same, executor.facts)
            case Measure():
                return partial(_same, executor.measure())
            case Allocate(spec):
                executor.allocate(spec)
            case WarmUp():
                executor.warm_up()
            case Fill():
                executor.fill()
            case Close():
                executor.close()
    except Exception as error:
        return partial(_raise, error)
    return partial(_same, None)


def _same(found: Any) -> Any:
    return found


def _raise(error: Exception) -> None:
    raise error


def _answer(answers: "SimpleQueue[Callable[[], Any] | None]", connection: socket.socket) -> None:
    while (wait := answers.get()) is not None:
        try:
            data = DONE + wire.encode(wait())
        except Exception as error:
            data = FAILED + f"{type(error).__name__}: {error}".encode()
        try:
            _send(connection, data)
        except OSError:
            return  # the other end has closed the connection


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)


def _receive(connection: socket.socket) -> bytes | None:
    """The next message, or None if the other end has closed the connection."""
    head = _exactly(connection, LENGTH_BYTES)
    if head is None:
        return None
    length = int.from_bytes(head, "big")
    if length > MOST:
        raise EngineError(f"a message of {length} bytes is above the limit of {MOST}")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        try:
            part = connection.recv(min(count - len(found), 1 << 20))
        except OSError:
            return None
        if not part:
            return None
        found += part
    return bytes(found)
