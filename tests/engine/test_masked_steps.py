"""Requests with a grammar in the loop: their rows sit out steps, and no other request notices."""

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest

from tests.core.test_scheduler import prompt, run
from tests.step_lines import line_of
from tests.toy import ToyExecutor, ToyMatcher, solo, toy_loop, toy_stream
from weft.core import Coefficients, CostModel, State, slo
from weft.engine import loop as loop_module
from weft.engine.loop import Loop
from weft.engine.sequence import Sequence
from weft.engine.structured import NoMatcherError


def long_prompt(tokens: int, *, constrained: bool, length: int = 4) -> list[int]:
    """A prompt behind which so many tokens are generated without an end."""
    prompts = (prompt(tag, length) for tag in range(3000))
    return next(p for p in prompts if len(solo(p, tokens, constrained=constrained)) == tokens)


class Gate:
    """Masks wait here while it is shut."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waited = threading.Event()

    def __call__(self) -> None:
        if not self._open.is_set():
            self.waited.set()
            assert self._open.wait(60), "the test never opened the gate"

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes the masks that are there."""
    monkeypatch.setattr(loop_module, "MASK_SHARE", 0.0)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a step is in flight, new masks are waited for, however slow this machine is."""
    monkeypatch.setattr(loop_module, "MASK_SHARE", 100.0)


FREE, BOUND = long_prompt(30, constrained=False), long_prompt(9, constrained=True)


@pytest.mark.usefixtures("patient")
def test_a_constrained_row_sits_out_every_second_step_and_the_others_none() -> None:
    loop = toy_loop(depth=1)
    free = [toy_stream(name, FREE, 30) for name in "ab"]
    bound = toy_stream("c", BOUND, 9, matcher=ToyMatcher())
    for stream in [*free, bound]:
        loop.add(stream)
    steps = [line.split() for line in run(loop)]
    named = [{part.split(":")[0] for part in step} for step in steps]
    assert len(steps) == 30
    assert all({"a", "b"} <= names for names in named)
    first = next(number for number, names in enumerate(named) if "c" in names)
    assert [number for number, names in enumerate(named) if "c" in names] == list(range(first, first + 18, 2))
    assert bound.output == solo(BOUND, 9, constrained=True)
    assert [stream.output for stream in free] == [solo(FREE, 30)] * 2


@pytest.mark.parametrize("depth", [0, 1])
def test_a_lone_constrained_request_takes_one_step_a_token(depth: int) -> None:
    loop = toy_loop(depth=depth)
    stream = toy_stream("a", BOUND, 9, matcher=ToyMatcher())
    loop.add(stream)
    assert run(loop) == ["a:0+4*", *(f"a:{position}+1*" for position in range(4, 12))]
    assert stream.output == solo(BOUND, 9, constrained=True)
    loop.scheduler.check_integrity()


def test_a_mask_that_cannot_be_made_ends_its_stream_and_no_other() -> None:
    class Failing(ToyMatcher):
        def consume_token(self, token: int) -> bool:
            raise NoMatcherError

    loop = toy_loop(depth=1)
    free, bound = toy_stream("a", FREE, 30), toy_stream("c", BOUND, 9, matcher=Failing())
    loop.add(free)
    loop.add(bound)
    run(loop)
    assert bound.request.finish_reason == "stop"
    assert len(bound.output) == 2
    assert free.output == solo(FREE, 30)


def test_the_end_of_a_grammar_wastes_no_step() -> None:
    ending = next(p for tag in range(1000) if len(solo(p := prompt(tag, 4), 30, constrained=True)) == 5)
    loop = toy_loop(depth=1)
    stream = toy_stream("a", ending, 30, matcher=ToyMatcher())
    loop.add(stream)
    assert len(run(loop)) == 5
    assert stream.request.finish_reason == "stop"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("shut_after", [0, 1, 3])
def test_a_slow_mask_delays_no_other_stream(depth: int, shut_after: int, gate: Gate) -> None:
    """Not even one that has a grammar as well."""
    loop = toy_loop(depth=depth)
    slow = toy_stream("slow", BOUND, 9, matcher=ToyMatcher(gate))
    if shut_after == 0:
        gate.shut()
    loop.add(slow)
    while len(slow.output) < shut_after:
        loop.step()
    gate.shut()
    while not gate.waited.is_set():
        loop.step()
    had = len(slow.output)
    free, bound = toy_stream("free", FREE, 30), toy_stream("bound", BOUND, 9, matcher=ToyMatcher())
    for stream in (free, bound):
        loop.add(stream)
    lines = watch(loop)
    while {free.request.state, bound.request.state} != {State.FINISHED}:
        loop.step()
    assert len([line for line in lines if "free:" in line]) == 30
    assert not any("slow:" in line for line in lines)
    assert free.output == solo(FREE, 30)
    assert bound.output == solo(BOUND, 9, constrained=True)
    assert (len(slow.output), loop.has_work) == (had, True)
    assert loop.step() == []  # it comes back, so that its owner can look for messages
    gate.open()
    run(loop)
    assert slow.output == solo(BOUND, 9, constrained=True)
    loop.scheduler.check_integrity()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("tokens", [0, 1, 4])
@pytest.mark.parametrize("is_pending", [True, False])
def test_an_abort_at_any_moment_frees_everything(depth: int, tokens: int, is_pending: bool, gate: Gate) -> None:
    loop = toy_loop(depth=depth)
    victim = toy_stream("victim", BOUND, 9, matcher=ToyMatcher(gate))
    other = toy_stream("other", BOUND, 9, matcher=ToyMatcher())
    if is_pending and not tokens:
        gate.shut()
    for stream in (victim, other):
        loop.add(stream)
    while len(victim.output) < tokens:
        loop.step()
    if is_pending:
        gate.shut()
        while not gate.waited.is_set():
            loop.step()
    loop.abort(victim)
    loop.scheduler.check_integrity()
    gate.open()
    run(loop)
    assert other.output == solo(BOUND, 9, constrained=True)
    assert loop.scheduler.kv.block_pool.num_free == loop.scheduler.kv.block_pool.num_blocks
    loop.scheduler.check_integrity()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_is_preempted_without_a_mask_waits_for_it(depth: int, gate: Gate) -> None:
    loop = toy_loop(num_blocks=8, budget=64, depth=depth)
    old, young = (
        toy_stream(name, long_prompt(16, constrained=True, length=length), 16, arrival=arrival, matcher=matcher)
        for name, length, arrival, matcher in (("old", 10, 0.0, ToyMatcher()), ("young", 9, 1.0, ToyMatcher(gate)))
    )
    for stream in (old, young):
        loop.add(stream)
    while len(young.output) < 2:
        # A late thread with young's masks would let old run ahead, and young be preempted before the gate is shut.
        wait(loop.table._masks._pending.values())
        loop.step()
    gate.shut()
    while not gate.waited.is_set():
        loop.step()
    had = len(young.output)
    while old.request.state is not State.FINISHED:
        loop.step()
    assert young.request.preemptions == 1
    for _ in range(3):  # there is room for it now
        loop.step()
    assert (len(young.output), young.request.state) == (had, State.WAITING)
    gate.open()
    run(loop)
    for stream in (old, young):
        assert stream.output == solo(stream.prompt.tolist(), 16, constrained=True)
    loop.scheduler.check_integrity()


@pytest.mark.parametrize("where", ["mask", "step"])
def test_after_an_error_the_loop_goes_on(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    loop = toy_loop(depth=1)
    calls = iter(range(100))
    matcher = ToyMatcher(lambda: fail() if where == "mask" and next(calls) == 3 else None)
    lost = [toy_stream("lost", BOUND, 9, matcher=matcher), toy_stream("too", BOUND, 9, matcher=ToyMatcher())]
    for stream in lost:
        loop.add(stream)
    loop.step()
    with monkeypatch.context() as patch:
        if where == "step":
            patch.setattr(ToyExecutor, "run", fail)
        with pytest.raises(RuntimeError, match="broken"):
            run(loop)
    assert [stream.request.finish_reason for stream in lost] == ["error"] * 2
    assert not loop.has_work
    again = toy_stream("again", BOUND, 9, matcher=ToyMatcher())
    loop.add(again)
    run(loop)
    assert again.output == solo(BOUND, 9, constrained=True)


# What a request that sits out a step is promised still counts in that step. A token takes 10 ms.
SLOW = Coefficients(fixed=0, weights=0, token=0.01, pair=0, slice=0, decode=0.01, context=0)


def promised(name: str, **options: Any) -> Sequence:
    steps = 2 if "matcher" in options else 1  # a constrained request is promised the time of two
    return toy_stream(name, BOUND, 9, gap_target=0.1 * steps, **options)


@pytest.mark.usefixtures("patient")
def test_a_gap_target_bounds_the_step_that_its_request_sits_out() -> None:
    loop = toy_loop(num_blocks=64, policy=slo(CostModel(SLOW, spread=0.0), 64), depth=1)
    bound = promised("bound", matcher=ToyMatcher())
    loop.add(bound)
    while not bound.output:
        loop.step()
    loop.add(toy_stream("long", prompt(5, 60), 2))
    lines = watch(loop)
    while bound.request.state is not State.FINISHED:
        loop.step()
    slices = [int(part.rpartition("+")[2].rstrip("*")) for line in lines for part in line.split() if "long:" in part]
    assert sum(slices[:4]) > 20
    assert max(slices[:4]) <= 10


@pytest.mark.usefixtures("patient")
def test_who_may_join_counts_requests_that_sit_out_the_step() -> None:
    loop = toy_loop(num_blocks=64, policy=slo(CostModel(SLOW, spread=0.0), 64), depth=1)
    running = [promised(f"r{number}", matcher=ToyMatcher()) for number in range(5)]  # 0.1 s in a decode step
    for stream in running:
        loop.add(stream)
    while not all(stream.output for stream in running):
        loop.step()
    newcomer = toy_stream("newcomer", prompt(5, 4), 2)
    loop.add(newcomer)
    while newcomer.request.started is None:
        loop.step()
    assert any(stream.request.state is State.FINISHED for stream in running)


def watch(loop: Loop) -> list[str]:
    """A list that grows by a line for every plan (see `line_of`)."""
    lines: list[str] = []
    plan_of = loop.scheduler.plan

    def watched(now: float) -> Any:
        plan = plan_of(now)
        if plan.batch is not None:
            lines.append(line_of(loop.scheduler.steps_in_flight[-1]))
        return plan

    loop.scheduler.plan = watched  # type: ignore[method-assign]
    return lines
