"""Block hashes: a block's name is a digest of its tokens and of everything before it."""

import hashlib

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16


def root_hash(salt: str = "") -> bytes:
    """What the first block hangs on. Requests with different salts never share blocks."""
    return hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()


def block_hash(parent: bytes, tokens: bytes) -> bytes:
    """`tokens` are the ids as 32-bit numbers, in the machine's order."""
    return hashlib.blake2b(parent + tokens, digest_size=DIGEST_BYTES).digest()


def prompt_hashes(root: bytes, tokens: NDArray[np.int32], block_size: int) -> list[bytes]:
    """One hash for each full block."""
    hashes: list[bytes] = []
    parent = root
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = block_hash(parent, tokens[end - block_size : end].tobytes())
        hashes.append(parent)
    return hashes
