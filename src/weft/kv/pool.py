"""KVPool: the memory of the KV cache on one device. A block id indexes it."""

import torch
from torch import Tensor

from weft.kv.spec import KVSpec


class KVPool:
    """Keys and values of all layers in one allocation: data[layer, keys or values, block, offset, kv_head, head_dim].

    `k[layer]` and `v[layer]` are contiguous views of it.
    """

    def __init__(self, spec: KVSpec, device: torch.device) -> None:
        self.spec = spec
        self.num_blocks = spec.num_blocks
        self.block_size = spec.layout.block_size
        layers, block_size, heads, head_dim, dtype = spec.layout
        shape = (layers, 2, spec.num_blocks, block_size, heads, head_dim)
        # Not initialised: on a CPU, memory pages cost nothing before they are used. Backends must not let unwritten or
        # stale values reach a result: 0 times NaN is NaN.
        self.data = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        self.k, self.v = ([self.data[layer, which] for layer in range(layers)] for which in (0, 1))

    def fill_with_noise(self) -> None:
        """Fills all blocks with random numbers (a GPU takes under 1 s), for measurements that read unwritten blocks."""
        for layer in self.data:
            layer.normal_()

    def write(self, layer: int, kv_indices: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores one token's k and v at each index, which is block * block_size + offset. (vLLM: slot mapping.)"""
        self.k[layer].view(-1, *k.shape[1:]).index_copy_(0, kv_indices, k)
        self.v[layer].view(-1, *v.shape[1:]).index_copy_(0, kv_indices, v)

    def gather(self, layer: int, block_tables: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of whole block tables: [rows, blocks] -> [rows, blocks * block_size, kv_heads, head_dim]."""
        blocks, shape = block_tables.flatten(), (len(block_tables), -1)
        k, v = (cache[layer].index_select(0, blocks) for cache in (self.k, self.v))
        return k.view(*shape, *k.shape[2:]), v.view(*shape, *v.shape[2:])

    def read_blocks(self, blocks: Tensor) -> Tensor:
        """The bytes of blocks: uint8 [blocks, block_bytes], each block in the order of KVLayout."""
        found = self.data.index_select(2, blocks).movedim(2, 0).contiguous()
        return found.view(torch.uint8).view(len(blocks), self.spec.layout.block_bytes)

    def write_blocks(self, blocks: Tensor, data: Tensor) -> None:
        """Writes bytes from `read_blocks` into these blocks."""
        layers, two, _, *rest = self.data.shape
        found = data.contiguous().view(self.data.dtype).view(len(blocks), layers, two, *rest)
        self.data.index_copy_(2, blocks, found.movedim(0, 2))
