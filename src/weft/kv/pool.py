"""KVPool: the tensors of the KV cache on one device. A block id indexes them."""

import torch
from torch import Tensor


class KVPool:
    """Keys and values of every layer, in blocks: k[layer][block, offset, kv_head, head_dim], and v the same."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        # Not initialised: on a CPU, memory pages cost nothing before they are used. Backends must not let unwritten or
        # stale values reach a result: 0 times NaN is NaN.
        self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def fill(self) -> None:
        """Fills all blocks with random numbers (a GPU takes under 1 s), for measurements that read unwritten blocks."""
        for tensor in (*self.k, *self.v):
            tensor.normal_()

    def write(self, layer: int, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores k and v of one token per place. A place is block * block_size + offset."""
        self.k[layer].view(-1, *k.shape[1:]).index_copy_(0, places, k)
        self.v[layer].view(-1, *v.shape[1:]).index_copy_(0, places, v)

    def gather(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of whole block tables: [rows, blocks] -> [rows, blocks * block_size, kv_heads, head_dim]."""
        rows, blocks = tables.flatten(), (len(tables), -1)
        k, v = (pool[layer].index_select(0, rows) for pool in (self.k, self.v))
        return k.view(*blocks, *k.shape[2:]), v.view(*blocks, *v.shape[2:])


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize
