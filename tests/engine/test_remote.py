"""An executor in another process, behind a socket: the loop speaks to it through the public protocol alone."""

import multiprocessing
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from tests.company import (
    BLOCK,
    Arrival,
    Case,
    assert_it_really_happened,
    cases,
    has_really_happened,
    play,
    repeat_until,
)
from tests.core.test_company import is_constrained, open_stream
from tests.strength import examples
from tests.toy import ReluctantExecutor, ToyExecutor, solo, toy_loop, toy_stream
from weft.core import StepBatch
from weft.engine.remote import MESSAGE_HEADER, RemoteExecutor, serve_executor
from weft.errors import EngineError
from weft.kv.spec import KVSpec


def executor_of(kind: str, *sizes: int) -> ToyExecutor:
    return {"toy": ToyExecutor, "reluctant": ReluctantExecutor, "slow": SlowExecutor}[kind](*sizes)


def serve_toys(orders: socket.socket) -> None:
    """Each connection that comes through `orders` gets a toy executor of its own, until `orders` is closed."""
    while True:
        request, descriptors, *_ = socket.recv_fds(orders, 64, 1)
        if not request:
            return
        kind, *sizes = request.decode().split()
        executor, connection = executor_of(kind, *map(int, sizes)), socket.socket(fileno=descriptors[0])
        threading.Thread(target=serve_executor, args=(executor, connection), daemon=True).start()


@contextmanager
def far_process() -> Iterator[socket.socket]:
    """A process with toy executors. Yields the socket that orders come through."""
    near, far = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=serve_toys, args=(far,), daemon=True)
    process.start()
    far.close()
    try:
        yield near
    finally:
        near.close()
        process.join(timeout=30)
        assert process.exitcode == 0


def remote(orders: socket.socket, slots: int, num_blocks: int, block_size: int, kind: str = "toy") -> RemoteExecutor:
    near, far = socket.socketpair()
    socket.send_fds(orders, [f"{kind} {slots} {num_blocks} {block_size}".encode()], [far.fileno()])
    far.close()
    executor = RemoteExecutor(near)
    assert executor.measure_memory().free > 0
    executor.allocate_kv_cache(KVSpec(executor.facts.layout, num_blocks))
    executor.warm_up()
    return executor


@pytest.mark.parametrize("kind", ["toy", "reluctant"])
def test_company_never_changes_tokens_behind_a_socket(kind: str) -> None:
    seen: Counter[str] = Counter()
    with far_process() as orders:

        @settings(max_examples=examples(450), deadline=None)
        @given(cases)
        def plays(case: Case) -> None:
            loop = toy_loop(
                num_blocks=case.num_blocks,
                block_size=BLOCK,
                policy=case.policy,
                seqs=case.seqs,
                depth=case.depth,
                caching=case.caching,
                make_executor=lambda *sizes: remote(orders, *sizes, kind=kind),
            )

            def alone(arrival: Arrival) -> list[int]:
                return solo(arrival.prompt, arrival.max_tokens, constrained=is_constrained(arrival))

            try:
                play(case, loop, open_stream, alone, seen)
            finally:
                loop.close()

        repeat_until(lambda: has_really_happened(seen), plays)
    assert_it_really_happened(seen)


def test_blocks_are_read_and_written_by_id_between_steps() -> None:
    """A prompt's blocks go to another executor, whose own loop then finds them in its prefix cache."""
    prompt = list(range(1, 24))
    expected = solo(prompt, 8)
    with far_process() as orders:
        loops = [toy_loop(make_executor=lambda *sizes: remote(orders, *sizes)) for _ in range(2)]
        first, second = (toy_stream(name, prompt, 8) for name in ("first", "second"))
        loops[0].add(first)
        while loops[0].has_work:
            loops[0].step()
        names = first.request.hashes[: len(prompt) // BLOCK]
        blocks = loops[0].scheduler.kv.cache.match(names, 0, len(names))
        assert len(blocks) == len(names)
        data = loops[0].executor.read_blocks(blocks).result()
        reserved = loops[1].scheduler.kv.reserve_incoming(names)
        assert reserved is not None
        loops[1].executor.write_blocks(reserved.blocks, data).result()
        assert loops[1].scheduler.kv.end_transfer(reserved, arrived=True)
        loops[1].add(second)
        while loops[1].has_work:
            loops[1].step()
        assert second.request.cached_tokens == len(names) * BLOCK
        assert first.output == second.output == expected
        for loop in loops:
            loop.scheduler.check_integrity()
            loop.close()


def test_an_error_at_the_far_end_is_an_error_of_the_step() -> None:
    with far_process() as orders:
        executor = remote(orders, 4, 8, BLOCK)
        with pytest.raises(EngineError, match="IndexError"):
            executor.read_blocks([99]).result()
        executor.write_blocks([1], np.full((1, 8 * BLOCK), 7, np.uint8)).result()
        assert (executor.read_blocks([1]).result() == 7).all(), "it goes on after an error"
        executor.close()


class SlowExecutor(ToyExecutor):
    def accepts(self, batch: StepBatch, row: int) -> bool:
        time.sleep(0.1)
        return True


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Ctrl-C, a little later, while the loop waits for the executor: in its bookkeeping it would end every sequence."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is threading.Condition.wait.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, 0.001)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_loses_nothing() -> None:
    with far_process() as orders:
        loop = toy_loop(make_executor=lambda *sizes: remote(orders, *sizes, kind="slow"))
        stream = toy_stream("r", list(range(1, 12)), 8)
        loop.add(stream)
        interrupts = 0
        while loop.has_work:
            try:
                with interrupted_after(0.03):
                    loop.step()
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts > 3
        assert stream.output == solo(list(range(1, 12)), 8)
        loop.close()


def test_results_may_be_waited_for_in_any_thread_and_order() -> None:
    with far_process() as orders:
        executor = remote(orders, 4, 32, BLOCK)
        data = [np.full((1, 8 * BLOCK), number, np.uint8) for number in range(32)]
        writes = [executor.write_blocks([number], one) for number, one in enumerate(data)]
        reads = [executor.read_blocks([number]) for number in range(32)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda read: read.result(), reversed(reads)))
        for write in writes:
            write.result()
        for one, expected in zip(found, reversed(data), strict=True):
            np.testing.assert_array_equal(one, expected)
        executor.close()


def test_what_is_not_answered_fails_when_the_process_ends() -> None:
    near, far = socket.socketpair()
    server = threading.Thread(target=serve_executor, args=(ToyExecutor(4, 8, BLOCK), far))
    server.start()
    executor = RemoteExecutor(near)
    far.shutdown(socket.SHUT_RDWR)
    server.join()
    with pytest.raises(EngineError, match="closed"):
        executor.read_blocks([1]).result()
    with pytest.raises(EngineError, match="closed"):
        executor.measure_memory()


def test_garbage_ends_the_connection_and_closes_the_executor() -> None:
    near, far = socket.socketpair()
    closed = threading.Event()
    executor = ToyExecutor(4, 8, BLOCK)
    executor.close = closed.set  # type: ignore[method-assign]

    def serve() -> None:
        with pytest.raises(msgspec.DecodeError):
            serve_executor(executor, far)

    server = threading.Thread(target=serve)
    server.start()
    near.sendall(MESSAGE_HEADER.pack(5, 1, False) + b"\xc1garb")
    server.join()
    assert closed.is_set()
    assert near.recv(1) == b""


def test_a_process_that_ended_is_told() -> None:
    near, far = socket.socketpair()
    far.close()
    with pytest.raises((EngineError, OSError)):
        RemoteExecutor(near)
