"""Prompts through FlashInfer, whichever way it takes, against plain torch."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from weft.kernels.attention import Heads
from weft.kv import KVPool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HEADS, KV_HEADS, HEAD_DIM, BLOCK, LONGEST = 32, 8, 128, 16, 40_000
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
    "the other way round": Case([(0, 700), (16_000, 99)], ["paged", "after"]),
    "both": Case([(9_000, 20), (0, 700), (16_000, 99), (3, 5)], ["divided", "paged", "after"]),
    "more than few": Case([(5_000, 200), (5_000, 200)], ["divided", "after"]),
    "more than twice as many": Case([(5_000, 200)] * 3, ["divided", "paged", "after"]),
    "more than a wave": Case([(9_003, 512 + 300)], ["gathered"]),
    "few and short, few and long": Case([(0, 60), (8_400, 57)], ["divided"]),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_plain_torch(name: str) -> None:
    pytest.importorskip("flashinfer")
    from weft.kernels.cuda import PlainPrefills
    from weft.kernels.flashinfer import FlashInfer

    device = torch.device("cuda")
    torch.manual_seed(0)
    slices, ways = CASES[name]
    first, count = (np.array(numbers) for numbers in zip(*slices, strict=True))
    pages = -(-(first + count) // BLOCK)
    order = np.random.default_rng(0).permutation(int(pages.sum())).astype(np.int32)
    tables = np.split(order, np.cumsum(pages)[:-1])
    sizes: dict[str, Any] = {"num_blocks": len(order), "block_size": BLOCK, "num_kv_heads": KV_HEADS}
    kv = KVPool(num_layers=1, head_dim=HEAD_DIM, dtype=torch.bfloat16, device=device, **sizes)
    kv.k[0].normal_()
    kv.v[0].normal_()
    slots = torch.zeros((len(slices), int(pages.max())), dtype=torch.int32)
    for slot, table in enumerate(tables):
        slots[slot, : len(table)] = torch.from_numpy(table)

    def send(*numbers: Any) -> list[torch.Tensor]:
        return [torch.from_numpy(number).to(device) for number in numbers]

    owner = FlashInfer(KV_HEADS, HEAD_DIM, torch.bfloat16, LONGEST, device)
    q = torch.randn(int(count.sum()), HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    heads = Heads(0, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, None, None)  # type: ignore[arg-type]
    expected, found = torch.empty_like(q), torch.empty_like(q)
    PlainPrefills(kv, slots.to(device), np.arange(len(slices)), first, count).attend(heads, q, expected)
    prefills = owner.prefills(kv, HEADS, first, count, tables, send)
    prefills.attend(heads, q, found)
    assert (found.float() - expected.float()).abs().max() < ERROR
    if torch.cuda.get_device_capability(device)[0] == 9:
        assert prefills.ways == ways
