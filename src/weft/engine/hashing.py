"""Block hashes for the prefix cache: digests of a block's tokens and of all tokens before it.

The hashes are equal in every process that serves the same model in the same way (see fingerprint.py).
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16


def root_hash(salt: str = "", space: bytes = b"") -> bytes:
    """The parent hash of the first block. `space` is a block space (fingerprint.py).

    Requests with different salts or spaces never share blocks.
    """
    return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES, key=space).digest()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash of a block after `parent`. `tokens` are its ids as 32-bit integers in native (little-endian) order."""
    return hashlib.blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()


def prompt_hashes(root: bytes, tokens: NDArray[np.int32], block_size: int) -> list[bytes]:
    """One hash for each full block of a prompt."""
    hashes: list[bytes] = []
    parent = root
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = block_hash(parent, tokens[end - block_size : end].tobytes())
        hashes.append(parent)
    return hashes
