"""Doubles of CUDA graphs for machines without a GPU.

A graph repeats the operations of its capture: the same kernels, with the same numbers, on the same memory. A double
runs the Python code of its step again at every replay. So a number that changes between replays, or memory that is new
each time, would go unnoticed: a graph would have frozen it at capture. That is why a double writes down the operations
of a step and compares them with those of the capture, or of its first replay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from weft.kernels.attention import AttentionParams

SplitPoint = Callable[[AttentionParams, Tensor, Tensor], None]
HOST_READS = ("aten._local_scalar_dense.default",)  # the host waits for a number: a capture fails


class Tape(TorchDispatchMode):
    """The operations of one step: torch's, and launches of Triton's kernels in the interpreter.

    A tensor that the step makes is known by its number, any other by its address. With `undo`, `restore` gives all
    memory that existed before the step its earlier contents.
    """

    current: "Tape | None" = None

    def __init__(self, *, undo: bool = False) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self._undo = undo
        self._is_paused = False
        self._made: dict[int, int] = {}  # number of each storage that the step made, by its address
        self._kept: list[Tensor] = []  # so that no address is used twice
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # other storages, and copies

    def __enter__(self) -> "Tape":
        Tape.current = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Tape.current = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        assert str(func) not in HOST_READS, f"{func}: the host reads a number of the device in a captured step"
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(numbers): a graph keeps the numbers
            with self.paused():
                self.operations.append((str(func), args[0].tolist()))
        else:
            self.note(str(func), args, kwargs)
        result = func(*args, **kwargs)
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor) and self._address(one) not in self._before:
                self._made.setdefault(self._address(one), len(self._made))
                self._kept.append(one)
        return result

    def note(self, name: str, *values: Any) -> None:
        with self.paused():  # copies of storages are made by operations too
            self.operations.append((name, *(self._described(value) for value in values)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def restore(self) -> None:
        for storage, copy in self._before.values():
            storage.copy_(copy)

    @staticmethod
    def _address(tensor: Tensor) -> int:
        return int(tensor.untyped_storage().data_ptr())

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            address = self._address(value)
            if address not in self._made and address not in self._before:
                storage = value.untyped_storage()
                self._before[address] = (storage, storage.clone() if self._undo else storage)
            place = ("made", self._made[address]) if address in self._made else ("at", address)
            return (*place, value.storage_offset(), tuple(value.shape), value.stride(), str(value.dtype))
        if isinstance(value, list | tuple):
            return tuple(self._described(one) for one in value)
        if isinstance(value, dict):
            return tuple((key, self._described(one)) for key, one in value.items())
        return value if isinstance(value, bool | int | float | str | None) else str(value)


def compare(expected: list[tuple[Any, ...]], found: list[tuple[Any, ...]]) -> None:
    for index, (one, other) in enumerate(zip(expected, found, strict=False)):
        assert one == other, f"operation {index} of a captured step was\n{one}\nand is now\n{other}"
    assert len(expected) == len(found), f"a captured step had {len(expected)} operations and has {len(found)} now"


class FullGraphDouble:
    """Runs a step again at every replay. `is_exact`: compares with the capture, not with the first replay.

    In a capture nothing runs: with `is_exact`, what the step has changed is undone.
    """

    is_warm_up = False
    is_exact = False

    def __init__(self, step: Callable[..., Any], pool: object) -> None:
        assert not FullGraphDouble.is_warm_up
        self._step = step
        self._operations: list[tuple[Any, ...]] | None = None
        if FullGraphDouble.is_exact:
            tape = Tape(undo=True)
            with tape:
                self._run(tape, lambda heads, q, out: None)
            tape.restore()
            self._operations = tape.operations

    def replay(self, *attend: SplitPoint) -> Any:
        tape = Tape()
        with tape:
            result = self._run(tape, *attend)
        if self._operations is None:
            self._operations = tape.operations
        compare(self._operations, tape.operations)
        return result

    def _run(self, tape: Tape, *attend: SplitPoint) -> Any:
        return self._step()


class PiecewiseGraphDouble(FullGraphDouble):
    """A graph for each layer. What runs between them is in none of them."""

    def _run(self, tape: Tape, *attend: SplitPoint) -> Any:
        (between,) = attend

        def cut(heads: AttentionParams, q: Tensor, out: Tensor) -> None:
            tape.note("between two pieces", heads.layer, q, out)
            with tape.paused():
                between(heads, q, out)

        return self._step(cut)


@contextmanager
def launches_on_tape() -> Iterator[None]:
    """Writes launches of Triton's kernels on the current tape, without what the interpreter does with torch itself."""
    launch = interpreter.GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        tape = Tape.current
        if tape is None:
            return launch(self, *args, **kwargs)
        tape.note(self.fn.__name__, self.grid, args, kwargs)
        with tape.paused():
            return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = noted
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = launch
