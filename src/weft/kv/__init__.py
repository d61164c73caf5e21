"""The tensors behind the block ids."""

from weft.kv.pool import KVPool, block_bytes

__all__ = ["KVPool", "block_bytes"]
