"""PrefixCache: maps block hashes to KV blocks. The BlockPool owns the blocks."""

from collections.abc import Callable, Container, Hashable, Sequence
from typing import NamedTuple

from weft.core.blocks import BlockPool


class HashedBlocks(NamedTuple):
    """Blocks and their block hashes."""

    hashes: list[Hashable]
    blocks: list[int]


BeforeReuse = Callable[[HashedBlocks], None]


class PrefixCache:
    """Full blocks by their block hash. It covers the block's content and all content before it, so equal hashes mean
    equal prefixes.

    A block is cached if it has a hash here. It stays usable in the free list until the pool allocates it again.
    """

    def __init__(self, pool: BlockPool, enabled: bool = True, before_reuse: BeforeReuse | None = None) -> None:
        """`before_reuse` gets the cached blocks that are allocated again, while they still have their contents."""
        self.enabled = enabled
        self._before_reuse = before_reuse
        self._pool = pool
        self._block_of: dict[Hashable, int] = {}
        self._hash_of: dict[int, Hashable] = {}
        pool.on_evict = self._evict

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, hashes: Sequence[Hashable], start: int, stop: int) -> list[int]:
        """Blocks for hashes[start:stop], up to the first missing one. Takes no reference."""
        found: list[int] = []
        block_of = self._block_of
        for index in range(start, min(stop, len(hashes))):
            block = block_of.get(hashes[index])
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, hashes: Sequence[Hashable], blocks: Sequence[int]) -> None:
        """Adds blocks to the cache. If a hash is present already, its first block stays; the new one is not added."""
        if not self.enabled:
            return
        block_of, hash_of = self._block_of, self._hash_of
        for block_hash, block in zip(hashes, blocks, strict=True):
            if block_hash not in block_of and block not in hash_of:
                block_of[block_hash] = block
                hash_of[block] = block_hash

    @property
    def cached_blocks(self) -> Container[int]:
        """The blocks in the cache."""
        return self._hash_of

    def clear(self) -> None:
        """Empties the cache. Requests keep the blocks that they use."""
        self._block_of.clear()
        self._hash_of.clear()

    def check_integrity(self) -> None:
        assert len(self._block_of) == len(self._hash_of), "hashes and blocks do not pair"
        assert all(self._block_of[block_hash] == block for block, block_hash in self._hash_of.items()), (
            "a hash points to another block"
        )

    def _evict(self, blocks: list[int]) -> None:
        block_of, hash_of = self._block_of, self._hash_of
        if self._before_reuse is not None:
            lost = [block for block in blocks if block in hash_of]
            if lost:
                self._before_reuse(HashedBlocks([hash_of[block] for block in lost], lost))
        for block in blocks:
            block_hash = hash_of.pop(block, None)
            if block_hash is not None:
                del block_of[block_hash]
