"""Linear: a layer that is a matrix product. LinearMethod: how its weights are stored, loaded and multiplied.

Every matrix product of a model is one of a Linear's method. `choose_method` selects the method of each layer. Families
build Linears by shape only, so another format of weights needs another method and no change in a family.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.kernels import ops

Activation = Callable[[Tensor], Tensor]


class Dtypes(NamedTuple):
    """The types of a model's numbers."""

    weights: torch.dtype  # of the matrices of Linears, as their methods store them
    activations: torch.dtype  # of hidden states, and of embeddings and norms
    kv_cache: torch.dtype  # of keys and values in the KV cache

    @classmethod
    def of(cls, dtype: torch.dtype) -> Self:
        """The same type for all."""
        return cls(dtype, dtype, dtype)

    @property
    def name(self) -> str:
        """Such as bfloat16 if all are equal, otherwise all three in order."""
        names = [str(dtype).removeprefix("torch.") for dtype in self]
        return names[0] if len(set(names)) == 1 else "-".join(names)


class ParameterSource(NamedTuple):
    """A parameter and its source: the whole checkpoint tensor `name`, or one checkpoint tensor per view in `parts`."""

    name: str
    target: Tensor
    parts: dict[str, Tensor]


class Linear(nn.Module):
    """Projections of the same input as one matrix: their rows are concatenated. With `experts`, one matrix for each.

    Owns the parameters that its method creates. `outputs` has the rows of each projection, by its name in a published
    checkpoint. A tied layer has no parameters: its weight is that of the embedding.
    """

    method: "LinearMethod"
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        inputs: int,
        outputs: dict[str, int],
        *,
        bias: bool = False,
        experts: int | None = None,
        is_router: bool = False,
        is_tied: bool = False,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.rows = inputs, outputs, sum(outputs.values())
        self.has_bias, self.experts, self.is_router, self.is_tied = bias, experts, is_router, is_tied

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.method.apply(self, x, out)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up, where the projections are the gate and then the up projection."""
        return self.method.gated(self, x, activation)

    def expert(self, index: int, x: Tensor) -> Tensor:
        return self.method.expert(self, index, x)

    def views(self, tensor: Tensor) -> dict[str, Tensor]:
        """The rows of each projection in a tensor [rows, ...], or of each expert's in a tensor [experts, rows, ...]."""
        if self.experts is None:
            return self._split(tensor)
        each = enumerate(tensor)
        return {f"{index}.{name}": rows for index, one in each for name, rows in self._split(one).items()}

    def _split(self, tensor: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.outputs, torch.split(tensor, list(self.outputs.values())), strict=True))


class LinearMethod(ABC):
    """How the weights of Linears are stored, loaded and multiplied. Has no state of a layer."""

    @abstractmethod
    def create(self, layer: Linear) -> None:
        """Gives the layer its parameters, without values. Not called for a tied layer."""

    def parameter_sources(self, layer: Linear, name: str) -> Iterator[ParameterSource]:
        """Yields the source of every parameter. Names of tensors are relative to the layer's parent.

        `name` is the layer's own in a Transformers 5 model, where the matrices of experts have no suffix.
        """
        for key, parameter in layer.named_parameters(recurse=False):
            whole = name if layer.experts is not None and key == "weight" else f"{name}.{key}"
            yield ParameterSource(
                whole, parameter, {f"{part}.{key}": view for part, view in layer.views(parameter).items()}
            )

    @abstractmethod
    def finish(self, layer: Linear) -> None:
        """Called once, when the parameters have their values: may replace them, for example by packed ones.

        New tensors are parameters too: `CausalLM.abridged` compares layers by their parameters. A tied layer has the
        embedding's `weight` by then, which may be replaced but not written to.
        """

    @abstractmethod
    def apply(self, layer: Linear, x: Tensor, out: Tensor | None) -> Tensor:
        """x [T, inputs] times the transposed weight, plus the bias: [T, rows].

        Written to `out` if it is given, which only layers without bias support.
        """

    def gated(self, layer: Linear, x: Tensor, activation: Activation) -> Tensor:
        """`apply`, then the activation of the first half of the columns times the second half."""
        return ops.gated(self.apply(layer, x, None), activation)

    @abstractmethod
    def expert(self, layer: Linear, index: int, x: Tensor) -> Tensor:
        """`apply` with the matrix of one expert. Experts have no bias."""


class PlainLinear(LinearMethod):
    """Weights of unquantized checkpoints. A product needs activations of the same type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def create(self, layer: Linear) -> None:
        shape = (layer.rows,) if layer.experts is None else (layer.experts, layer.rows)
        layer.weight = self._parameter(*shape, layer.inputs)
        layer.bias = self._parameter(*shape) if layer.has_bias else None

    def finish(self, layer: Linear) -> None:
        """Changes nothing."""

    def apply(self, layer: Linear, x: Tensor, out: Tensor | None) -> Tensor:
        if layer.is_router:  # runs in the library's kernel for any number of rows, as the experts do
            return F.linear(x, layer.weight, layer.bias)
        return ops.linear(x, layer.weight, layer.bias) if out is None else ops.linear_into(out, x, layer.weight)

    def gated(self, layer: Linear, x: Tensor, activation: Activation) -> Tensor:
        return ops.gated_linear(x, layer.weight, layer.bias, activation)

    def expert(self, layer: Linear, index: int, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight[index])

    def _parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.dtype), requires_grad=False)


ChooseMethod = Callable[[str, Linear, Dtypes], LinearMethod]


def choose_method(name: str, layer: Linear, dtypes: Dtypes) -> LinearMethod:
    """The method of a layer. `name` is the layer's in a Transformers 5 model, such as model.layers.0.mlp.down_proj."""
    return PlainLinear(dtypes.weights)
