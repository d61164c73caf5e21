"""Pooling: turns the hidden states of a prompt into one vector, its embedding.

A request for an embedding is prefill only: it ends with the first token, which is discarded.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import StepBatch
from weft.engine.executor import SlotSetup
from weft.engine.params import SamplingParams
from weft.errors import ModelError, RequestError
from weft.files import read_json

if TYPE_CHECKING:  # processes without torch also import this module
    from torch import Tensor

POOLING_MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}  # names of sentence-transformers
Vector = NDArray[np.float32]


class Pooler:
    """Owns the pooling mode of each slot that pools, and for mean pooling the sum of its hidden states so far."""

    def __init__(self) -> None:
        self._kinds: dict[int, str] = {}
        self._sums: dict[int, Tensor] = {}

    def setup(self, setup: SlotSetup) -> None:
        """Sets the pooling mode of a slot that a request takes."""
        self._sums.pop(setup.slot, None)
        self._kinds.pop(setup.slot, None)
        if setup.params.pooling is not None:
            self._kinds[setup.slot] = setup.params.pooling

    def has_pooling(self, batch: StepBatch) -> bool:
        """Whether the step has a prefill of a pooling request."""
        return bool(self._kinds) and not self._kinds.keys().isdisjoint(_prefills(batch))

    def needs_all_tokens(self, batch: StepBatch) -> bool:
        """Whether the step has a prefill with mean pooling, which needs the hidden states of all its tokens."""
        return bool(self._kinds) and any(self._kinds.get(slot) == "mean" for slot in _prefills(batch))

    def pool_last_tokens(self, batch: StepBatch, hidden: "Tensor") -> "PendingEmbeddings":
        """Like `pool`, for steps without mean pooling. `hidden` has only the rows that sample, in order."""
        sampling = np.flatnonzero(batch.is_sampled).tolist()
        found = [
            (row, hidden[index].float())
            for index, row in enumerate(sampling)
            if row >= batch.num_decodes and int(batch.slots[row]) in self._kinds
        ]
        return PendingEmbeddings([row for row, _ in found], [vector for _, vector in found])

    def pool(self, batch: StepBatch, hidden: "Tensor") -> "PendingEmbeddings":
        """Adds the hidden states [tokens of the step, size] of a step. Returns the embeddings of completed prompts."""
        rows, vectors = [], []
        ends = np.cumsum(batch.count).tolist()
        for row in range(batch.num_decodes, len(batch.slots)):
            slot = int(batch.slots[row])
            kind = self._kinds.get(slot)
            if kind is None:
                continue
            end, count = ends[row], int(batch.count[row])
            if kind == "mean":
                added = hidden[end - count : end].float().sum(0)
                self._sums[slot] = self._sums[slot] + added if slot in self._sums else added
            if batch.is_sampled[row]:
                rows.append(row)
                length = int(batch.first[row]) + count
                vectors.append(hidden[end - 1].float() if kind == "last" else self._sums.pop(slot) / length)
        return PendingEmbeddings(rows, vectors)


class PendingEmbeddings(NamedTuple):
    """Embeddings of a step, on the device or in transfer to the host."""

    rows: list[int]
    vectors: "list[Tensor]"

    def copied_to_host(self) -> "PendingEmbeddings":
        """Starts a copy to pinned memory, valid once the device has finished the step."""
        import torch

        return PendingEmbeddings(
            self.rows,
            [torch.empty(one.shape, pin_memory=one.is_cuda).copy_(one, non_blocking=True) for one in self.vectors],
        )

    def read(self) -> dict[int, Vector]:
        """Embeddings by row. Call it after the device has finished the step."""
        # Copies, because a view would keep the hidden states of the whole step alive.
        return {row: vector.cpu().numpy().copy() for row, vector in zip(self.rows, self.vectors, strict=True)}


def _prefills(batch: StepBatch) -> list[int]:
    """Slots of the step's prefills."""
    found: list[int] = batch.slots[batch.num_decodes :].tolist()
    return found


def pooling_of(path: Path) -> str:
    """The pooling mode in a model's sentence-transformers config; "last" if there is none."""
    file = path / "1_Pooling" / "config.json"
    if not file.is_file():
        return "last"
    found = read_json(file)
    modes = [name for name, is_on in found.items() if name.startswith("pooling_mode_") and is_on is True]
    kind = POOLING_MODES.get(modes[0]) if len(modes) == 1 else None
    if kind is None:
        said = " and ".join(modes) or "no pooling_mode"
        raise ModelError(f"{file} says {said}: only {' or '.join(POOLING_MODES)} is supported")
    return kind


def pooling_params(pooling: str) -> SamplingParams:
    """Parameters of a request for an embedding."""
    return SamplingParams(pooling=pooling, max_tokens=1, temperature=0.0)


def check_dimensions(dimensions: int | None, size: int) -> None:
    whole = isinstance(dimensions, int) and not isinstance(dimensions, bool)
    if dimensions is not None and not (whole and 1 <= dimensions <= size):
        raise RequestError(f"dimensions={dimensions!r:.40} must be 1 to {size}, which the model's embeddings have")


def finished(pooled: Vector, dimensions: int | None, normalize: bool) -> Vector:
    """The final embedding: the first `dimensions` numbers, scaled to length one if `normalize`."""
    vector = pooled[:dimensions]
    if not normalize:
        return vector
    return vector / max(float(np.linalg.norm(vector)), 1e-12)
