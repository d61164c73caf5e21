"""The second copy of a prompt's keys and values against the cache, in random traffic."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.device import DEVICE
from tests.strength import is_long
from weft.kernels.attention import Angles, AttentionParams, HeadNorm
from weft.kernels.cuda import CudaAttention, PromptKVTarget
from weft.kernels.flashinfer import PrefillSlices, PromptKVCopy
from weft.kv.pool import KVPool
from weft.kv.spec import KVLayout, KVSpec

LAYERS, HEADS, KV_HEADS, DIM, BLOCK, COLUMNS, SLOTS, CAPACITY = 3, 2, 1, 16, 4, 12, 4, 40


class Rotation:
    def __init__(self) -> None:
        angles = torch.rand(COLUMNS * BLOCK, DIM // 2, device=DEVICE)
        self.table = torch.stack((angles.cos(), angles.sin()), 1)

    def __call__(self, positions: torch.Tensor) -> Angles:
        cos, sin = self.table[positions.long()][:, None].unbind(2)
        return Angles(cos, sin)


class Traffic:
    """Requests come and go in slots, some behind what is cached, and are read in slices, one or several in a step."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        layout = KVLayout(LAYERS, BLOCK, KV_HEADS, DIM, "float32")
        self.kv = KVPool(KVSpec(layout, (SLOTS + 1) * COLUMNS + 1), DEVICE)
        self.kv.fill_with_noise()
        self.tables = self.random.permutation((SLOTS + 1) * COLUMNS).astype(np.int32).reshape(SLOTS + 1, COLUMNS)
        copy = torch.full((LAYERS, 2, CAPACITY + 1, KV_HEADS, DIM), torch.nan, device=DEVICE)
        self.copy, self.slot = PromptKVCopy(copy), torch.full((1,), -1, dtype=torch.int32, device=DEVICE)
        self.read, self.length = [0] * SLOTS, [0] * SLOTS
        self.ways: set[str] = set()

    def step(self, norm: HeadNorm, rotation: Rotation) -> None:
        random = self.random
        for slot in range(SLOTS):
            if self.read[slot] == self.length[slot] or random.random() < 0.25:
                self.length[slot] = int(random.integers(2, COLUMNS * BLOCK))
                self.read[slot] = int(random.choice([0, random.integers(self.length[slot])]))
                self.tables[[slot, SLOTS]] = self.tables[[SLOTS, slot]]  # other blocks, with something else in them
                self.copy.forget(slot)
        chosen = random.permutation(SLOTS)[: random.choice([1, 1, 2, 3])]
        slices = [(slot, self.read[slot], self._count(slot)) for slot in chosen.tolist()]
        self.copy.writing = -1
        is_copied = random.random() < 0.8 and self.copy.claim(self._slices(slices[0]))
        self.slot[0] = self.copy.writing
        where: Any = (self.kv, self._tensor(self.tables), *self._tokens(slices), 0, {}, None)
        attention = CudaAttention(*where, prompt_copy=PromptKVTarget(self.copy.copy, self.slot))
        reads_last = random.random() < 0.3
        for layer in range(LAYERS):
            params = AttentionParams(layer, HEADS, KV_HEADS, DIM, 1.0, None, rotation, norm, norm)
            attention.write(params, torch.randn(len(attention.slots), (HEADS + 2 * KV_HEADS) * DIM, device=DEVICE))
            if is_copied and (layer < LAYERS - 1 or reads_last):
                self._check(layer, slices[0])
        for slot, first, count in slices:
            self.read[slot] = first + count
        self.ways.add("copied" if is_copied else "others")

    def _count(self, slot: int) -> int:
        return int(min(self.random.choice([1, 2, 5, 9, 17]), self.length[slot] - self.read[slot]))

    def _slices(self, one: tuple[int, int, int]) -> PrefillSlices:
        slot, first, count = one
        ends = np.array([first + count == self.length[slot]])
        return PrefillSlices(np.array([slot]), np.array([first]), np.array([count]), ends, [self.tables[slot]])

    def _tokens(self, slices: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Slot and position of each; the last ones are padding."""
        padding = [-1] * int(self.random.integers(4))
        slots = [slot for slot, _, count in slices for _ in range(count)] + padding
        positions = [position for _, first, count in slices for position in range(first, first + count)]
        return self._tensor(np.array(slots)), self._tensor(np.array(positions + [0] * len(padding)))

    def _check(self, layer: int, one: tuple[int, int, int]) -> None:
        slot, first, count = one
        positions = np.arange(first + count)
        places = self._tensor(self.tables[slot][positions // BLOCK] * BLOCK + positions % BLOCK)
        found = self.copy.gather(self.kv, layer, lambda: places)
        for half, cache in zip(found, (self.kv.k[layer], self.kv.v[layer]), strict=True):
            assert torch.equal(half, cache.flatten(0, 1)[places.long()])

    @staticmethod
    def _tensor(numbers: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(numbers.astype(np.int32)).to(DEVICE)


NORMS: dict[str, Callable[[], torch.Tensor | None]] = {
    "by the kernel": lambda: torch.rand(DIM, device=DEVICE),
    "in plain torch": lambda: None,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(4 if is_long() or DEVICE.type == "cuda" else 1))
@pytest.mark.parametrize("written", NORMS)
def test_what_is_copied_is_what_the_cache_holds(written: str, seed: int) -> None:
    traffic = Traffic(seed)
    norm = HeadNorm(lambda x: 2 * x, NORMS[written](), 1e-6)
    rotation = Rotation()
    for _ in range(40):
        traffic.step(norm, rotation)
    assert traffic.ways == {"copied", "others"}
