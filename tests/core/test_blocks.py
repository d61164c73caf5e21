"""BlockPool and PrefixCache: who holds what, what is evicted first, what is found again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core import BlockPool, PrefixCache


def digests(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def test_blocks_come_in_order_and_return_to_be_used_again() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([0, 1])
    assert pool.num_free == 3
    pool.check_integrity()
    assert sorted(pool.allocate(3)) == [0, 1, 3]
    with pytest.raises(ValueError, match="1 blocks asked of a pool with 0 free"):
        pool.allocate(1)


def test_a_request_s_tail_is_evicted_before_its_head_and_worthless_blocks_before_both() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool)
    blocks = pool.allocate(4)
    cache.insert(digests("a", "ab", "abc"), blocks[:3])
    pool.release(blocks, keep=cache.cached_blocks)
    assert pool.free_blocks() == [3, 2, 1, 0]  # 3 is not cached, 2 is the tail of the prefix
    pool.allocate(2)
    assert cache.match(digests("a", "ab", "abc"), 0, 3) == [0, 1]


def test_a_cached_block_leaves_the_free_list_when_it_is_retained() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool)
    (block,) = pool.allocate(1)
    cache.insert([b"a"], [block])
    pool.release([block], keep=cache.cached_blocks)
    pool.retain(block)
    assert pool.num_free == 1
    assert pool.allocate(1) != [block]
    pool.check_integrity()


def test_the_first_block_with_a_content_keeps_its_name() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool)
    first, second = pool.allocate(2)
    cache.insert([b"a"], [first])
    cache.insert([b"a"], [second])
    assert cache.match([b"a"], 0, 1) == [first]
    assert second not in cache.cached_blocks


def test_a_disabled_cache_finds_nothing() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool, enabled=False)
    cache.insert([b"a"], pool.allocate(1))
    assert cache.match([b"a"], 0, 1) == []


@given(st.lists(st.tuples(st.sampled_from(["allocate", "release", "share", "insert"]), st.integers(0, 7)), max_size=60))
def test_any_order_of_operations_keeps_the_books_balanced(script: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool)
    used: list[int] = []
    for action, number in script:
        if action == "allocate" and pool.num_free:
            used += pool.allocate(1)
        elif action == "release" and used:
            pool.release([used.pop(number % len(used))], keep=cache.cached_blocks)
        elif action == "insert" and used:
            cache.insert([bytes([number])], [used[number % len(used)]])
        elif action == "share" and (found := cache.match([bytes([number])], 0, 1)):
            pool.retain(found[0])
            used.append(found[0])
        pool.check_integrity()
        cache.check_integrity()
        assert sum(pool.refs) == len(used)
