"""PrefixCache: which block holds the content with which hash. It names blocks; the pool owns them."""

from collections.abc import Container, Hashable, Sequence

from weft.core.blocks import BlockPool


class PrefixCache:
    """Full blocks by the hash of their content and of all that precedes it (so equal hash means equal prefix).

    A named block stays usable while it is in the free list, until the pool gives it to somebody else.
    """

    def __init__(self, pool: BlockPool, enabled: bool = True) -> None:
        self.enabled = enabled
        self._pool = pool
        self._block_of: dict[Hashable, int] = {}
        self._hash_of: dict[int, Hashable] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, hashes: Sequence[Hashable], start: int, stop: int) -> list[int]:
        """Blocks for hashes[start:stop], up to the first that is missing. No reference is taken."""
        found: list[int] = []
        block_of = self._block_of
        for index in range(start, min(stop, len(hashes))):
            block = block_of.get(hashes[index])
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, hashes: Sequence[Hashable], blocks: Sequence[int]) -> None:
        """Names blocks. The first block with a content keeps the name: others hold equal content and stay nameless."""
        if not self.enabled:
            return
        block_of, hash_of = self._block_of, self._hash_of
        for digest, block in zip(hashes, blocks, strict=True):
            if digest not in block_of and block not in hash_of:
                block_of[digest] = block
                hash_of[block] = digest

    @property
    def named(self) -> Container[int]:
        """The blocks that have a name."""
        return self._hash_of

    def clear(self) -> None:
        """Forgets every name; blocks in use stay with their users."""
        self._block_of.clear()
        self._hash_of.clear()

    def check_integrity(self) -> None:
        assert len(self._block_of) == len(self._hash_of), "names and blocks do not pair"
        assert all(self._block_of[digest] == block for block, digest in self._hash_of.items()), (
            "a name points elsewhere"
        )

    def _forget(self, blocks: list[int]) -> None:
        block_of, hash_of = self._block_of, self._hash_of
        for block in blocks:
            digest = hash_of.pop(block, None)
            if digest is not None:
                del block_of[digest]
