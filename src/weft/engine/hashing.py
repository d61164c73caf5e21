"""Block hashes for the prefix cache: digests of a block's tokens and of all tokens before it.

The names mean the same in every process that serves the same model with the same layout of the KV cache.
"""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.engine.fingerprint import fingerprint
from weft.kv.spec import KVLayout

DIGEST_BYTES = 16


def block_space(path: Path, load_format: str, dtypes: str, layout: KVLayout) -> bytes:
    """What blocks of equal tokens need in common to hold equal numbers: weights, types of numbers, and layout."""
    key = repr((fingerprint(path, load_format), dtypes, tuple(layout)))
    return hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES).digest()


def root_hash(salt: str = "", space: bytes = b"") -> bytes:
    """The parent hash of the first block. Requests with different salts or spaces never share blocks."""
    return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES, key=space).digest()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash of a block after `parent`. `tokens` are its ids as 32-bit integers, the lowest byte first."""
    return hashlib.blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()


def prompt_hashes(root: bytes, tokens: NDArray[np.int32], block_size: int) -> list[bytes]:
    """One hash for each full block of a prompt."""
    hashes: list[bytes] = []
    parent, tokens = root, tokens.astype("<i4", copy=False)
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = block_hash(parent, tokens[end - block_size : end].tobytes())
        hashes.append(parent)
    return hashes
