"""BlockPool: who holds which KV block, and in which order unused ones are given out again."""

from collections.abc import Callable, Iterable


class BlockPool:
    """Reference counts and a free list of block ids.

    The free list is doubly linked through two arrays, so that a block which the prefix cache still knows can be taken
    out of its middle in O(1). Its front is given out first: blocks without content worth keeping, then the least
    recently released ones.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.refs = [0] * num_blocks
        # Names a block whose content is about to be lost; the prefix cache listens.
        self.on_evict: Callable[[int], None] = lambda block: None
        self._end = num_blocks  # sentinel: next[end] is the front, prev[end] the back
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference. The caller has made sure that they are there."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked of a pool with {self.num_free} free")
        taken = []
        for _ in range(count):
            block = self._next[self._end]
            self._unlink(block)
            self.on_evict(block)
            self.refs[block] = 1
            taken.append(block)
        return taken

    def retain(self, block: int) -> None:
        """Adds a reference to a block, free or not."""
        if self.refs[block] == 0:
            self._unlink(block)
        self.refs[block] += 1

    def release(self, blocks: Iterable[int], keep: Callable[[int], bool]) -> None:
        """Drops one reference each. Unused blocks with content to keep queue at the back, the others at the front.

        Blocks come in table order and are released from the tail, so that a prefix outlives what hangs on it.
        """
        for block in reversed(list(blocks)):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self._link(block, self._end if keep(block) else self._next[self._end])

    def free_blocks(self) -> list[int]:
        """The free list, next to be given out first."""
        order, block = [], self._next[self._end]
        while block != self._end:
            order.append(block)
            block = self._next[block]
        return order

    def check_integrity(self) -> None:
        free = self.free_blocks()
        assert len(free) == len(set(free)) == self.num_free, "the free list lost or repeats a block"
        assert all(self.refs[block] == 0 for block in free), "a block in use is in the free list"
        assert sum(count > 0 for count in self.refs) == self.num_blocks - self.num_free, (
            "a block is neither used nor free"
        )
        assert min(self.refs) >= 0, "a block was released more often than taken"

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block: int, after: int) -> None:
        """Puts a block into the free list in front of `after`."""
        before = self._prev[after]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1
