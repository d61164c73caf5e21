"""KVCacheManager: the blocks of each running request, the prefix cache, and blocks reserved for incoming contents."""

from collections.abc import Collection, Hashable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from weft.core.blocks import BlockPool
from weft.core.prefix import BeforeReuse, HashedBlocks, PrefixCache
from weft.core.request import Request
from weft.core.running import RunningRequests
from weft.core.slots import ints
from weft.core.step import BlockUpdates

MOST_INCOMING = 0.5  # share of all blocks that may be reserved for contents from elsewhere


class KVCacheManager:
    """Owns the block pool, the prefix cache and the block tables of running requests.

    It collects new block table entries for the next batch.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        running: RunningRequests,
        enable_prefix_caching: bool = True,
        before_reuse: BeforeReuse | None = None,
    ) -> None:
        self.block_size = block_size
        self.block_pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.block_pool, enable_prefix_caching, before_reuse)
        self.incoming: list[HashedBlocks] = []  # reserved for contents that have not arrived; no request can use them
        self._running = running
        self._slots = running.slots
        self._new_slots: list[int] = []  # block table entries since the last batch: slot, column, block
        self._new_columns: list[int] = []
        self._new_blocks: list[int] = []

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @property
    def free_share(self) -> float:
        return self.block_pool.num_free / self.block_pool.num_blocks

    def free_tokens(self) -> int:
        """Tokens of KV memory that new requests can use."""
        return self.num_unclaimed() * self.block_size

    # The prefix cache

    def cached_prefix(self, request: Request) -> list[int]:
        """Blocks of a waiting request's prompt that are in the prefix cache."""
        return self.cache.match(request.hashes, 0, self._shareable(request))

    def reuse_cached_blocks(self, request: Request) -> int:
        """Appends cached blocks to a prefilling request: blocks that other requests have computed or planned.

        Returns the number of tokens that the request need not compute.
        """
        slots, slot = self._slots, request.slot
        planned = int(slots.planned[slot])
        if not request.reuse_prefix or planned != slots.capacity[slot]:
            return 0
        # The last token is always computed, because the next token is sampled from its output.
        stop = (int(slots.num_tokens[slot]) - 1) // self.block_size
        blocks = self.cache.match(request.hashes, len(request.blocks), stop)
        for block in blocks:
            self.block_pool.retain(block)
        self._append(request, blocks)
        request.num_cached_blocks = len(request.blocks)
        cached_tokens = len(blocks) * self.block_size
        slots.planned[slot] += cached_tokens
        return cached_tokens

    def cache_full_blocks(self, request: Request, stop: int) -> None:
        """Inserts the request's full blocks up to `stop` into the prefix cache, as far as their hashes are known."""
        start, stop = request.num_cached_blocks, min(stop, len(request.hashes))
        if stop > start:
            self.cache.insert(request.hashes[start:stop], request.blocks[start:stop])
            request.num_cached_blocks = stop

    def clear_cache(self) -> None:
        """Empties the prefix cache. Running requests keep their blocks, but these are no longer in the cache."""
        self.cache.clear()
        for request in self._running:
            request.num_cached_blocks = len(request.blocks)

    def _shareable(self, request: Request) -> int:
        """Most blocks that a request may have from the prefix cache. Its last token is always computed."""
        return (request.num_tokens - 1) // self.block_size if request.reuse_prefix else 0

    # Blocks of running requests

    def has_room(self, request: Request, gone: Collection[Request] = ()) -> bool:
        """Whether the uncached part of the prompt fits into free blocks, beside what running requests need soon.

        Assumes that the requests in `gone` do not run any more.
        """
        if len(self._running) == len(gone):
            return True
        free = self.num_unclaimed(gone)
        if free < 1:  # every request needs at least one block, because its last block is never shared: skip the lookup
            return False
        hits = self.cached_prefix(request)
        unused_hits = sum(self.block_pool.refs[block] == 0 for block in hits)
        return self.blocks_for(request.num_tokens) - len(hits) + unused_hits <= free

    def num_unclaimed(self, gone: Collection[Request] = ()) -> int:
        """Free blocks, plus blocks of the requests in `gone`, minus blocks that other running requests need soon."""
        claimed = sum(
            self.blocks_for(int(self._slots.num_tokens[other.slot])) - len(other.blocks)
            for other in self._running.prefilling
            if other not in gone
        )
        growth_reserve = len(self._running) - len(gone)  # one block per request
        freed = sum(len(other.blocks) for other in gone)  # an upper bound: some may be shared
        return self.block_pool.num_free + freed - claimed - growth_reserve

    def allocate_blocks(self, request: Request, count: int) -> None:
        """Gives a request `count` more blocks, which must be free."""
        self._append(request, self.block_pool.allocate(max(0, count)))

    def allocate_block_each(self, short: NDArray[np.int64]) -> None:
        """Gives each of these slots one more block: the usual case of a decode step."""
        blocks = self.block_pool.allocate(len(short))
        slots = short.tolist()
        for slot, block in zip(slots, blocks, strict=True):
            request = self._running.at(slot)
            request.blocks.append(block)
            request.account.blocks += 1
        self._new_slots += slots
        self._new_columns += (self._slots.capacity[short] // self.block_size).tolist()
        self._new_blocks += blocks
        self._slots.capacity[short] += self.block_size

    def free(self, request: Request) -> None:
        """Frees the blocks of a request that gives up its seat. Its new block table entries are not needed any more."""
        if request.slot in self._new_slots:
            others = [index for index, slot in enumerate(self._new_slots) if slot != request.slot]
            self._new_slots = [self._new_slots[index] for index in others]
            self._new_columns = [self._new_columns[index] for index in others]
            self._new_blocks = [self._new_blocks[index] for index in others]
        request.account.blocks -= len(request.blocks)
        self.block_pool.release(request.blocks, keep=self.cache.cached_blocks)
        request.blocks = []
        request.num_cached_blocks = 0

    def pop_updates(self) -> BlockUpdates:
        """Returns the block table entries since the last call, and forgets them."""
        updates = BlockUpdates(ints(self._new_slots), ints(self._new_columns), ints(self._new_blocks))
        self._new_slots, self._new_columns, self._new_blocks = [], [], []
        return updates

    def _append(self, request: Request, blocks: list[int]) -> None:
        index = len(request.blocks)
        request.blocks += blocks
        request.account.blocks += len(blocks)
        self._slots.capacity[request.slot] = len(request.blocks) * self.block_size
        self._new_slots += [request.slot] * len(blocks)
        self._new_columns += range(index, index + len(blocks))
        self._new_blocks += blocks

    # Blocks whose contents come from elsewhere

    def reserve_incoming(self, hashes: Sequence[Hashable]) -> HashedBlocks | None:
        """Reserves blocks for incoming contents with these hashes. Leading blocks that are cached already are skipped.

        None if running requests leave no room for them, or if more than MOST_INCOMING of all blocks would be reserved.
        Before each write to the blocks, ask `is_incoming` on the loop's thread.
        """
        hashes = hashes[len(self.cache.match(hashes, 0, len(hashes))) :]
        num_reserved = sum(len(one.blocks) for one in self.incoming) + len(hashes)
        if len(hashes) > self.num_unclaimed() or num_reserved > MOST_INCOMING * self.block_pool.num_blocks:
            return None
        reserved = HashedBlocks(list(hashes), self.block_pool.allocate(len(hashes)))
        self.incoming.append(reserved)
        return reserved

    def is_incoming(self, reserved: HashedBlocks) -> bool:
        """Whether blocks are still reserved. After a reset they may belong to requests."""
        return any(one is reserved for one in self.incoming)

    def end_transfer(self, reserved: HashedBlocks, *, arrived: bool) -> bool:
        """Puts blocks that have arrived into the prefix cache, or frees blocks that will not.

        Nothing may write to the blocks afterwards. Returns False if they are not reserved any more, after a reset.
        """
        if not self.is_incoming(reserved):
            return False
        self.incoming = [one for one in self.incoming if one is not reserved]
        if arrived:
            self.cache.insert(reserved.hashes, reserved.blocks)
        self.block_pool.release(reserved.blocks, keep=self.cache.cached_blocks)
        return True

    def check_integrity(self) -> None:
        self.block_pool.check_integrity()
        self.cache.check_integrity()
        refs = [0] * self.block_pool.num_blocks
        for request in self._running:
            assert self._slots.capacity[request.slot] == len(request.blocks) * self.block_size
        used = (request.blocks for request in self._running)
        for block in chain.from_iterable([*used, *(reserved.blocks for reserved in self.incoming)]):
            refs[block] += 1
        assert refs == self.block_pool.refs, "references and block tables disagree"
        for reserved in self.incoming:
            assert not any(block in self.cache.cached_blocks for block in reserved.blocks), (
                "a block is in the cache before its contents have arrived"
            )
