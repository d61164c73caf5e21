"""Pooling: the hidden states of a prompt become one vector, its embedding.

A request for an embedding is prefill only: it ends with the first token, which is thrown away.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import StepPlan
from weft.engine.executor import SlotSetup
from weft.engine.params import SamplingParams
from weft.errors import RequestError
from weft.files import read_json

if TYPE_CHECKING:  # this module is also read by processes that load no torch
    from torch import Tensor

POOLINGS = ("last", "mean")
Vector = NDArray[np.float32]


class Pooler:
    """Owns, for each slot of a request that pools, the sum of the hidden states so far."""

    def __init__(self) -> None:
        self._kinds: dict[int, str] = {}
        self._sums: dict[int, Tensor] = {}

    def setup(self, setup: SlotSetup) -> None:
        """A request took a slot."""
        self._sums.pop(setup.slot, None)
        self._kinds.pop(setup.slot, None)
        if setup.params.pooling is not None:
            self._kinds[setup.slot] = setup.params.pooling

    def pools(self, plan: StepPlan) -> bool:
        """Whether a prefill of the step belongs to a request that pools."""
        return bool(self._kinds) and not self._kinds.keys().isdisjoint(plan.slots[plan.num_decodes :].tolist())

    def take(self, plan: StepPlan, hidden: "Tensor") -> "Pooled":
        """Adds the hidden states [tokens of the step, size] of a step; returns the rows whose prompt is complete."""
        rows, vectors = [], []
        ends = np.cumsum(plan.count).tolist()
        for row in range(plan.num_decodes, len(plan.slots)):
            slot = int(plan.slots[row])
            kind = self._kinds.get(slot)
            if kind is None:
                continue
            end, count = ends[row], int(plan.count[row])
            if kind == "mean":
                added = hidden[end - count : end].float().sum(0)
                self._sums[slot] = self._sums[slot] + added if slot in self._sums else added
            if plan.samples[row]:
                rows.append(row)
                length = int(plan.first[row]) + count
                vectors.append(hidden[end - 1].float() if kind == "last" else self._sums.pop(slot) / length)
        return Pooled(rows, vectors)


class Pooled(NamedTuple):
    """Embeddings of a step, on the device or on their way to the host."""

    rows: list[int]
    vectors: "list[Tensor]"

    def sent(self) -> "Pooled":
        """The same in pinned memory, where they are once the device has come so far."""
        import torch

        return Pooled(
            self.rows,
            [torch.empty(one.shape, pin_memory=one.is_cuda).copy_(one, non_blocking=True) for one in self.vectors],
        )

    def read(self) -> dict[int, Vector]:
        """By row; when the device has come so far."""
        return {row: vector.cpu().numpy() for row, vector in zip(self.rows, self.vectors, strict=True)}


def pooling_of(path: Path) -> str:
    """How a model wants its hidden states pooled, as sentence-transformers writes it down; else the last token's."""
    file = path / "1_Pooling" / "config.json"
    if not file.is_file():
        return "last"
    found = read_json(file)
    if found.get("pooling_mode_mean_tokens"):
        return "mean"
    return "last"


def pooling_params(pooling: str) -> SamplingParams:
    """What a request for an embedding asks of the engine."""
    return SamplingParams(pooling=pooling, max_tokens=1, temperature=0.0)


def check_dimensions(dimensions: int | None, size: int) -> None:
    if dimensions is not None and not 1 <= dimensions <= size:
        raise RequestError(f"dimensions={dimensions} is out of range: the model's embeddings have {size}")


def finished(pooled: Vector, dimensions: int | None, normalize: bool) -> Vector:
    """The embedding that a caller wants: its first `dimensions` numbers, of length one where normalized."""
    check_dimensions(dimensions, len(pooled))
    vector = pooled[:dimensions]
    if not normalize:
        return vector
    return vector / max(float(np.linalg.norm(vector)), 1e-12)
