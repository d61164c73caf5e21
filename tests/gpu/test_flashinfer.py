"""Prompts through FlashInfer, whichever way it takes, against plain torch."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from weft.kernels.attention import AttentionParams
from weft.kv.pool import KVPool
from weft.kv.spec import KVLayout, KVSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HEADS, KV_HEADS, HEAD_DIM, BLOCK, LONGEST = 32, 8, 128, 16, 40_000
DEVICE = torch.device("cuda")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
ERROR = 2e-2  # of values with a deviation of one; bfloat16 keeps eight bits


class Case(NamedTuple):
    slices: list[tuple[int, int]]  # first position, tokens
    ways: list[str]  # on a Hopper GPU


CASES = {
    "one long": Case([(0, 4096)], ["gathered"]),
    "behind much": Case([(20_000, 2048)], ["gathered"]),
    "short": Case([(0, 7), (0, 100)], ["paged"]),
    "few behind much": Case([(30_000, 16)], ["divided"]),
    "few behind much, several": Case([(30_000, 5), (9_000, 200), (2_100, 31)], ["divided"]),
    "the end of one and the beginning of another": Case([(16_000, 99), (0, 700)], ["divided", "paged"]),
    "the other way round": Case([(0, 700), (16_000, 99)], ["paged", "divided_end"]),
    "both": Case([(9_000, 20), (0, 700), (16_000, 99), (3, 5)], ["divided", "paged", "divided_end"]),
    "more than few": Case([(5_000, 200), (5_000, 200)], ["divided", "divided_end"]),
    "more than twice as many": Case([(5_000, 200)] * 3, ["divided", "paged", "divided_end"]),
    "more than a wave": Case([(9_003, 512 + 300)], ["gathered"]),
    "few and short, few and long": Case([(0, 60), (8_400, 57)], ["divided"]),
}


class Bench:
    """A cache with something in it, and prompts in it."""

    def __init__(self, ends: list[int]) -> None:
        from weft.kernels.flashinfer import FlashInfer

        torch.manual_seed(0)
        pages = [-(-end // BLOCK) for end in ends]
        order = np.random.default_rng(0).permutation(sum(pages)).astype(np.int32)
        self.tables = np.split(order, np.cumsum(pages)[:-1])
        layout = KVLayout(2, BLOCK, KV_HEADS, HEAD_DIM, "bfloat16")
        self.kv = KVPool(KVSpec(layout, len(order)), DEVICE)
        self.refill()
        self.slots = torch.zeros((len(ends), max(pages)), dtype=torch.int32)
        for slot, table in enumerate(self.tables):
            self.slots[slot, : len(table)] = torch.from_numpy(table)
        self.owner = FlashInfer(2, HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, LONGEST, DEVICE, self._send)

    def refill(self) -> None:
        for cache in (*self.kv.k, *self.kv.v):
            cache.normal_()

    def check(
        self, slices: list[tuple[int, int, int]], *, end: bool = True, layers: tuple[int, ...] = (0, 1)
    ) -> list[str]:
        """Slot, first position and tokens of each; returns the ways that were taken."""
        from weft.kernels.cuda import PlainPrefills
        from weft.kernels.flashinfer import PrefillSlices

        slots, first, count = (np.array(numbers) for numbers in zip(*slices, strict=True))
        tables = [self.tables[slot][: -(-(first + count) // BLOCK)] for slot, first, count in slices]
        prefills = self.owner.prefills(self.kv, PrefillSlices(slots, first, count, np.full(len(slices), end), tables))
        self._keep(slices)
        q = torch.randn(int(count.sum()), HEADS, HEAD_DIM, dtype=torch.bfloat16, device=DEVICE)
        for layer in layers:
            params = AttentionParams(layer, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, None, None)  # type: ignore[arg-type]
            expected, found = torch.empty_like(q), torch.empty_like(q)
            PlainPrefills(self.kv, self.slots.to(DEVICE), slots, first, count).attend(params, q, expected)
            prefills.attend(params, q, found)
            assert (found.float() - expected.float()).abs().max() < ERROR
        return list(prefills.ways)

    def _keep(self, slices: list[tuple[int, int, int]]) -> None:
        """What a step does when it writes keys and values to the cache."""
        copy = self.owner.prompt_copy
        for slot, first, count in slices:
            if slot == copy.writing:
                positions = torch.arange(first, first + count)
                blocks = torch.from_numpy(self.tables[slot])[positions // BLOCK].to(DEVICE)
                for layer in range(2):
                    for half, cache in enumerate((self.kv.k[layer], self.kv.v[layer])):
                        copy.copy[layer, half, first : first + count] = cache[blocks, (positions % BLOCK).to(DEVICE)]

    @staticmethod
    def _send(*numbers: Any) -> list[torch.Tensor]:
        return [torch.from_numpy(number).to(DEVICE) for number in numbers]


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_plain_torch(name: str) -> None:
    pytest.importorskip("flashinfer")
    slices, ways = CASES[name]
    found = Bench([first + count for first, count in slices]).check([(slot, *one) for slot, one in enumerate(slices)])
    assert found == ways or not IS_HOPPER


def test_the_keys_of_a_prompt_that_goes_on_are_kept() -> None:
    pytest.importorskip("flashinfer")
    bench = Bench([20_000, 20_000, 4_000])
    ways = [
        bench.check([(0, 0, 700)], end=False),
        bench.check([(0, 700, 600)], end=False, layers=(0,)),  # the other layer has to catch up
        bench.check([(0, 1300, 480)], end=False),
        bench.check([(0, 1780, 480), (2, 3000, 40)], end=False),  # with somebody beside it
        bench.check([(0, 2260, 100)], end=False),  # few
        bench.check([(0, 2360, 480)], end=True),
    ]
    assert ways == [["copied"]] * 3 + [["copied", "divided_end"], ["divided"], ["copied"]] or not IS_HOPPER
    ways = [
        bench.check([(1, 0, 480)], end=True),  # read at once
        bench.check([(1, 9000, 480)], end=False),  # others had read to here
        bench.check([(1, 9480, 480)], end=True),
        bench.check([(0, 15_000, 700), (1, 15_000, 700)], end=False),  # two at once
        bench.check([(0, 18_000, 480)], end=True),  # no longer here, and not worth it any more
    ]
    assert ways == [["paged"], ["copied"], ["copied"], ["gathered"], ["paged"]] or not IS_HOPPER
    bench.owner.prompt_copy.forget(1)
    bench.refill()
    ways = [bench.check([(1, 9960, 480)], end=False)]  # another request in the same slot
    bench.refill()
    ways.append(bench.check([(1, 0, 480)], end=False))
    assert ways == [["copied"]] * 2 or not IS_HOPPER
