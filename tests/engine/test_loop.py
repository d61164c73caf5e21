"""The loop under interrupts: Ctrl-C comes where it waits, which is for a step's result."""

import contextlib
from typing import Any

import pytest

from tests.core.test_scheduler import prompt
from tests.toy import solo, toy_loop, toy_stream
from weft.core import State
from weft.engine.loop import Loop


@pytest.mark.parametrize("depth", [0, 1])
def test_interrupts_do_not_pile_up_steps(depth: int) -> None:
    """An executor has buffers for so many steps, and who is not waited for is not read."""
    loop = toy_loop(depth=depth)
    submit, turns, unread, most = loop.executor.submit, iter(range(1000)), 0, 0

    class Waiting:
        def __init__(self, pending: Any) -> None:
            self.pending = pending

        def result(self) -> Any:
            nonlocal unread
            if next(turns) % 3 == 2:
                raise KeyboardInterrupt
            unread -= 1
            return self.pending.result()

    def submitted(plan: Any, inputs: Any, masks: Any) -> Any:
        nonlocal unread, most
        most = max(most, unread)
        unread += 1
        return Waiting(submit(plan, inputs, masks))

    loop.executor.submit = submitted  # type: ignore[method-assign]
    expected = {}
    for number in range(3):
        stream = toy_stream(f"r{number}", prompt(number, 5), 40)
        expected[stream.request.id] = solo(prompt(number, 5), 40)
        loop.add(stream)
    found: dict[str, list[int]] = {}
    interrupts = 0
    while loop.has_work:
        try:
            for event in loop.step():
                found.setdefault(event.sequence.request.id, []).append(event.token or 0)
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > 10
    assert found == expected
    assert most <= depth


@pytest.mark.parametrize("depth", [0, 1])
def test_blocks_are_hashed_while_the_device_computes(depth: int) -> None:
    """Many streams may fill a block in one step: what they hold is known before, so that no step waits for it."""
    loop = toy_loop(depth=depth)
    submit, size, waits = loop.executor.submit, loop.scheduler.block_size, 0

    class Waiting:
        def __init__(self, batch: Any, pending: Any) -> None:
            self.batch, self.pending = batch, pending
            self.requests = loop.scheduler.steps_in_flight[-1].requests

        def result(self) -> Any:
            nonlocal waits
            waits += 1
            ends = (self.batch.first + self.batch.count).tolist()
            for request, end in zip(self.requests, ends, strict=True):
                if request.state is not State.FINISHED:
                    assert len(request.hashes) == max(end, request.prompt_tokens) // size
            if waits % 5 == 0:
                raise KeyboardInterrupt
            return self.pending.result()

    loop.executor.submit = lambda batch, *rest: Waiting(batch, submit(batch, *rest))  # type: ignore[method-assign]
    for number in range(3):
        loop.add(toy_stream(f"r{number}", prompt(number, 9), 40))
    while loop.has_work:
        with contextlib.suppress(KeyboardInterrupt):
            loop.step()
        loop.scheduler.check_integrity()
    computed = [9 + len(solo(prompt(number, 9), 40)) - 1 for number in range(3)]  # the last token is not
    assert len(loop.scheduler.kv.cache) == sum(tokens // size for tokens in computed)


def test_an_interrupt_in_the_middle_of_a_hash_leaves_nothing_half_done() -> None:
    class Interrupted(list[Any]):
        def append(self, digest: Any) -> None:
            raise KeyboardInterrupt

    loop = toy_loop(depth=1)
    stream = toy_stream("r", prompt(0, 9), 40)
    loop.add(stream)
    loop.step()
    stream.request.hashes = Interrupted(stream.request.hashes)
    with pytest.raises(KeyboardInterrupt):
        _run(loop)
    assert not loop.sequences
    assert stream.request.finish_reason == "error"
    loop.scheduler.check_integrity()


def _run(loop: Loop) -> None:
    while loop.has_work:
        loop.step()
