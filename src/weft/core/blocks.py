"""BlockPool: reference counts of KV blocks, and the order in which free blocks are reused."""

from collections.abc import Callable, Container, Sequence


class BlockPool:
    """Reference counts and a free list of block ids.

    The free list is doubly linked through two arrays, so that a cached block can be removed from its middle in O(1).
    Blocks are allocated from its front: first blocks without content to keep, then the least recently released ones.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.refs = [0] * num_blocks
        # Called with newly allocated blocks, which lose their old content. The prefix cache sets it.
        self.on_evict: Callable[[list[int]], None] = lambda blocks: None
        self._end = num_blocks  # sentinel: next[end] is the front, prev[end] the back
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` free blocks, each with one reference. Raises ValueError if there are fewer."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked of a pool with {self.num_free} free")
        allocated: list[int] = []
        following, refs = self._next, self.refs  # local names: a long prompt needs thousands of blocks at once
        block = following[self._end]
        for _ in range(count):
            allocated.append(block)
            refs[block] = 1
            block = following[block]
        following[self._end] = block
        self._prev[block] = self._end
        self.num_free -= count
        self.on_evict(allocated)
        return allocated

    def retain(self, block: int) -> None:
        """Adds a reference to a block, free or not."""
        if self.refs[block] == 0:
            self._unlink(block)
        self.refs[block] += 1

    def release(self, blocks: Sequence[int], keep: Container[int] = ()) -> None:
        """Drops one reference per block. Unused blocks go to the back of the free list if in `keep`, else to the front.

        `blocks` is in block table order. They are released from the tail, so that a prefix is evicted after the blocks
        that depend on it.
        """
        refs = self.refs
        with_content: list[int] = []
        empty: list[int] = []
        for block in reversed(blocks):
            refs[block] -= 1
            if not refs[block]:
                (with_content if block in keep else empty).append(block)
        empty.reverse()
        self._link(empty, self._next[self._end])
        self._link(with_content, self._end)

    def free_blocks(self) -> list[int]:
        """The free list; the next block to allocate comes first."""
        order, block = [], self._next[self._end]
        while block != self._end:
            order.append(block)
            block = self._next[block]
        return order

    def check_integrity(self) -> None:
        free = self.free_blocks()
        assert len(free) == len(set(free)) == self.num_free, "the free list lost or repeats a block"
        assert not any(map(self.refs.__getitem__, free)), "a block in use is in the free list"
        assert self.refs.count(0) == self.num_free, "a block is neither used nor free"
        assert min(self.refs) >= 0, "a block was released more often than retained"

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, blocks: list[int], after: int) -> None:
        """Inserts blocks into the free list, in this order, in front of `after`."""
        following, previous = self._next, self._prev
        before = previous[after]
        for block in blocks:
            following[before] = block
            previous[block] = before
            before = block
        following[before], previous[after] = after, before
        self.num_free += len(blocks)
