"""KVLayout and KVSpec: the shape of a KV cache. Two workers with equal layouts can exchange blocks."""

from typing import NamedTuple

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class KVLayout(NamedTuple):
    """Contents of a block: [layer, keys or values, position in the block, kv head, head dimension], in `dtype`.

    The bytes of a block are in this order wherever it lies: on a device, on the host, or on its way between workers.
    """

    num_layers: int
    block_size: int  # tokens
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        numbers = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return numbers * ITEM_BYTES[self.dtype]


class KVSpec(NamedTuple):
    """A KV cache to allocate."""

    layout: KVLayout
    num_blocks: int
