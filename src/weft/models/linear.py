"""The types of a model's numbers."""

from typing import NamedTuple, Self

import torch


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
