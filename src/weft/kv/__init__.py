"""The tensors of the KV cache."""

from weft.kv.pool import KVPool, block_bytes

__all__ = ["KVPool", "block_bytes"]
