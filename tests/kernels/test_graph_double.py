"""The doubles of graphs notice what a graph would freeze at its capture."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.kernels.device import DEVICE
from tests.kernels.graph_double import FullGraphDouble, PiecewiseGraphDouble, launches_on_tape
from weft.kernels import fused

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU has graphs")


class Steps:
    """Steps that a graph can repeat, and steps that it cannot."""

    def __init__(self) -> None:
        self.number = 1
        self.is_long = False
        self.x = torch.ones(4, 8)
        self.weight = torch.ones(8)

    def same(self) -> None:
        self.x.add_(torch.arange(8) * torch.tensor(2))

    def kernel(self) -> None:
        self.x.copy_(fused.add_rms_norm(self.x, None, self.weight, 1e-6)[0])

    def with_a_number(self) -> None:
        self.x.add_(self.number)

    def with_a_tensor_of_a_number(self) -> None:
        self.x.add_(torch.tensor(self.number))

    def with_a_number_for_a_kernel(self) -> None:
        fused.add_rms_norm(self.x, None, self.weight, float(self.number))

    def with_new_memory(self) -> None:
        self.x.copy_(torch.full((8,), 3.0) if self.number == 1 else self.weight.clone())
        self.x.add_(self.weight)

    def with_other_memory(self) -> None:
        self.x.add_(self.weight)

    def with_a_branch(self) -> None:
        self.x.add_(1)
        if self.is_long:
            self.x.add_(1)

    def on_the_host(self) -> None:
        self.x.add_(float(self.x[0, 0]))


@pytest.fixture(autouse=True, params=[False, True], ids=["first replay", "capture"])
def _on_tape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(FullGraphDouble, "is_exact", request.param)
    with launches_on_tape():
        yield


def replayed(step: Callable[[], None], steps: Steps) -> None:
    graph = FullGraphDouble(step, None)
    if not FullGraphDouble.is_exact:
        graph.replay()
    steps.number, steps.is_long = 2, True
    steps.weight = steps.weight.clone()
    graph.replay()


def test_what_is_the_same_each_time_passes() -> None:
    steps = Steps()
    graph = FullGraphDouble(steps.same, None)
    assert torch.equal(steps.x, torch.ones(4, 8)), "nothing runs in a capture"
    graph.replay()
    graph.replay()
    assert torch.equal(steps.x, 1 + 4 * torch.arange(8).expand(4, 8))
    kernel = FullGraphDouble(steps.kernel, None)
    kernel.replay()
    kernel.replay()


@pytest.mark.parametrize(
    "name",
    [
        "with_a_number",
        "with_a_tensor_of_a_number",
        "with_a_number_for_a_kernel",
        "with_new_memory",
        "with_other_memory",
        "with_a_branch",
        "on_the_host",
    ],
)
def test_what_a_graph_would_freeze_is_noticed(name: str) -> None:
    steps = Steps()
    with pytest.raises(AssertionError, match="captured step"):
        replayed(getattr(steps, name), steps)


def test_what_runs_between_pieces_may_change() -> None:
    steps = Steps()

    class Layer:
        layer = 0

    def forward(cut: Callable[..., None]) -> torch.Tensor:
        steps.x.add_(1)
        cut(Layer, steps.x, steps.weight)
        return steps.x

    graph = PiecewiseGraphDouble(forward, None)
    for number in (1, 2):
        graph.replay(lambda heads, q, out, factor=number: q.mul_(factor))
    assert torch.equal(steps.x, torch.full((4, 8), 6.0))
    steps.weight = steps.weight.clone()
    with pytest.raises(AssertionError, match="between two pieces"):
        graph.replay(lambda heads, q, out: None)
