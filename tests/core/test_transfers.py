"""Blocks whose contents leave before they are reused, and blocks whose contents are on their way in."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.test_scheduler import prompt
from tests.strength import examples
from tests.toy import advance, solo, toy_loop, toy_stream
from weft.core.prefix import HashedBlocks
from weft.engine.hashing import prompt_hashes, root_hash
from weft.engine.loop import Loop

BLOCK = 4
ACTIONS = ("ask", "expect", "arrive", "fail", "step")


def run(loop: Loop) -> None:
    while loop.has_work:
        loop.step()
        loop.scheduler.check_integrity()


def states_of(tokens: Sequence[int]) -> dict[bytes, list[int]]:
    """What the toy model stores in each full block of these tokens, by its block hash."""
    states, state = [], 0
    for token in tokens:
        state = advance(state, token)
        states.append(state)
    hashes = prompt_hashes(root_hash(), np.array(tokens, np.int32), BLOCK)
    return {block_hash: states[index * BLOCK : (index + 1) * BLOCK] for index, block_hash in enumerate(hashes)}


def test_what_a_block_holds_can_be_copied_before_it_is_reused() -> None:
    copies: list[tuple[Any, Any]] = []  # hashes, and the copies that were submitted

    def copy(lost: HashedBlocks) -> None:
        copies.append((lost.hashes, loop.executor.read_blocks(lost.blocks)))

    loop = toy_loop(num_blocks=12, block_size=BLOCK, before_reuse=copy)
    known: dict[bytes, list[int]] = {}
    for number in range(12):
        tokens = prompt(number, 17 + number)
        loop.add(toy_stream(f"r{number}", tokens, 6))
        known |= states_of([*tokens, *solo(tokens, 6)])
        run(loop)
    found = 0
    for hashes, pending in copies:
        for block_hash, data in zip(hashes, pending.result(), strict=True):
            assert data.view(np.int64).tolist() == known[block_hash]
            found += 1
    assert found > 20


def test_blocks_on_their_way_in_are_nobody_elses_until_they_arrive() -> None:
    loop = toy_loop(num_blocks=16, block_size=BLOCK)
    scheduler, tokens = loop.scheduler, prompt(3, 20)
    content = states_of(tokens)
    hashes = list(content)
    reserved = scheduler.kv.reserve_incoming(hashes)
    assert reserved is not None
    before = toy_stream("before", tokens, 5)
    loop.add(before)
    run(loop)
    assert before.request.cached_tokens == 0, "its contents are not there yet"
    loop.scheduler.kv.clear_cache()
    data = np.array([content[block_hash] for block_hash in hashes]).view(np.uint8)
    loop.executor.write_blocks(reserved.blocks, data).result()
    assert scheduler.kv.end_transfer(reserved, arrived=True)
    after = toy_stream("after", tokens, 5)
    loop.add(after)
    run(loop)
    assert after.request.cached_tokens == 16, "all but the block with its last token"
    assert after.output == before.output == solo(tokens, 5)


def test_blocks_that_are_cached_already_are_not_reserved() -> None:
    loop = toy_loop(num_blocks=16, block_size=BLOCK)
    tokens = prompt(3, 20)
    loop.add(toy_stream("r", tokens[:13], 1))
    run(loop)
    hashes = list(states_of(tokens))
    reserved = loop.scheduler.kv.reserve_incoming(hashes)
    assert reserved is not None
    assert reserved.hashes == hashes[3:]


def test_a_request_waits_for_blocks_that_a_transfer_has_reserved() -> None:
    loop = toy_loop(num_blocks=8, block_size=BLOCK)
    reserved = loop.scheduler.kv.reserve_incoming([b"a", b"b", b"c", b"d"])
    assert reserved is not None
    stream = toy_stream("r", prompt(1, 25), 4)  # it needs seven blocks
    loop.add(stream)
    for _ in range(20):
        loop.step()
        loop.scheduler.check_integrity()
    assert not stream.output
    assert loop.scheduler.kv.end_transfer(reserved, arrived=False)
    run(loop)
    assert stream.output == solo(prompt(1, 25), 4)


def test_a_transfer_that_fails_gives_its_blocks_back() -> None:
    scheduler = toy_loop(num_blocks=8, block_size=BLOCK).scheduler
    reserved = scheduler.kv.reserve_incoming([b"a", b"b", b"c"])
    assert reserved is not None
    assert scheduler.kv.block_pool.num_free == 5
    assert scheduler.kv.reserve_incoming([bytes([n]) for n in range(2)]) is None, "more than half of all blocks"
    assert scheduler.kv.end_transfer(reserved, arrived=False)
    assert not scheduler.kv.end_transfer(reserved, arrived=True), "it has ended"
    assert scheduler.kv.block_pool.num_free == 8
    assert not scheduler.kv.cache.match([b"a"], 0, 1)
    scheduler.check_integrity()


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), max_size=40))
def test_transfers_beside_requests_lose_no_block_and_change_no_token(script: list[tuple[str, int]]) -> None:
    loop = toy_loop(num_blocks=20, block_size=BLOCK)
    scheduler, streams, reserved = loop.scheduler, [], []
    for turn, (action, number) in enumerate(script):
        tokens = prompt(number, 14)
        if action == "ask":
            streams.append(toy_stream(f"r{turn}", tokens, 5))
            loop.add(streams[-1])
        elif action == "expect" and (found := scheduler.kv.reserve_incoming(list(states_of(tokens)))) is not None:
            reserved.append((found, states_of(tokens)))
        elif action in ("arrive", "fail") and reserved:
            blocks, content = reserved.pop(number % len(reserved))
            assert scheduler.kv.is_incoming(blocks)
            if action == "arrive" and blocks.hashes:
                data = np.array([content[block_hash] for block_hash in blocks.hashes]).view(np.uint8)
                loop.executor.write_blocks(blocks.blocks, data).result()
            assert scheduler.kv.end_transfer(blocks, arrived=action == "arrive")
        loop.step()
        scheduler.check_integrity()
    for blocks, _ in reserved:
        scheduler.kv.end_transfer(blocks, arrived=False)
    run(loop)
    for stream in streams:
        assert stream.output == solo(stream.prompt.tolist(), 5)
    assert scheduler.kv.block_pool.num_free == 20
