"""Masks: which tokens the grammars of running requests allow next, one bit a token and one row a slot.

A mask is made in the background as soon as the token before it is known, while the device computes the next step.
llguidance does that on threads of its own and without the GIL, for all rows of a step in two calls.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.engine.structured import Grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


class Masks:
    """A request is opened in its slot; then, for every token, its mask is asked for and it is moved on by the choice.

    One thread makes the masks in the order of these calls, so a slot's next owner never meets the last one's.
    """

    def __init__(self, slots: int) -> None:
        self.active = np.zeros(slots, np.bool_)  # slots whose request has a grammar
        self._bits = np.zeros((slots, 0), np.int32)
        self._matchers: dict[int, LLMatcher] = {}
        self._ends: dict[int, NDArray[np.int32]] = {}  # masks that allow the end of text and nothing else
        self._bans: dict[int, _Ban] = {}
        self._ready: dict[int, Future[None]] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="weft-masks")

    def open(
        self, slot: int, grammar: Grammar, output: NDArray[np.int32], banned: Sequence[int] = (), until: int = 0
    ) -> None:
        """A request takes a slot, perhaps with earlier output. What is `banned` before a position is so only while the
        grammar allows anything else.
        """
        words = -(-grammar.vocab_size // 32)
        if self._bits.shape[1] != words:  # the first
            self._bits = np.zeros((len(self._bits), words), np.int32)
        self.close(slot)
        self.active[slot] = True
        self._matchers[slot] = grammar.matcher
        self._ends[slot] = _pack(grammar.end_ids, words)
        if banned:
            self._bans[slot] = _Ban(until, ~_pack(banned, words))
        self._ready[slot] = self._worker.submit(self._begin, slot, grammar.matcher, output.tolist())

    def close(self, slot: int) -> None:
        self.active[slot] = False
        for books in (self._matchers, self._ends, self._bans, self._ready):
            books.pop(slot, None)

    def allowed(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """Masks of these slots for these positions. Waits for those that are not ready."""
        for slot in slots.tolist():
            self._ready[slot].result()
        masks: NDArray[np.int32] = self._bits[slots]
        if self._bans:
            for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
                ban = self._bans.get(slot)
                if ban is not None and position < ban.until and (rest := masks[row] & ban.others).any():
                    masks[row] = rest
        return masks

    def advance(self, slots: NDArray[np.int64], tokens: Sequence[int]) -> None:
        """Moves on by the tokens that were chosen from the masks."""
        moves = []
        for slot, token in zip(slots.tolist(), tokens, strict=True):
            ends = self._ends[slot]
            if ends[token >> 5] >> (token & 31) & 1:
                # It is over. The step in flight asks once more; its token will be thrown away.
                self._bits[slot] = ends
                self._matchers.pop(slot, None)
            elif slot in self._matchers:
                moves.append(_Move(slot, self._matchers[slot], token))
        if moves:
            self._ready.update(dict.fromkeys([move.slot for move in moves], self._worker.submit(self._move, moves)))

    def shutdown(self) -> None:
        self._worker.shutdown()

    def _begin(self, slot: int, matcher: "LLMatcher", output: list[int]) -> None:
        matcher.reset()  # it may have run in another slot; one that has failed stays as it is
        matcher.consume_tokens(output)
        self._fill([(matcher, slot)])

    def _move(self, moves: list["_Move"]) -> None:
        # A matcher that fails, because its grammar has become too complex, allows the end of text from here on.
        self._threads.consume_token_par([(move.matcher, move.token) for move in moves])
        self._fill([(move.matcher, move.slot) for move in moves])

    def _fill(self, rows: list[tuple["LLMatcher", int]]) -> None:
        bits = self._bits
        self._threads.unsafe_compute_mask_ptr(rows, bits.ctypes.data, bits.strides[0], len(bits))

    @cached_property
    def _threads(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()


class _Ban(NamedTuple):
    until: int  # position
    others: NDArray[np.int32]  # mask of all tokens that are not banned


class _Move(NamedTuple):
    slot: int
    matcher: "LLMatcher"
    token: int


def _pack(ids: Sequence[int], words: int) -> NDArray[np.int32]:
    """A mask that allows these tokens."""
    flags = np.zeros(32 * words, np.bool_)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
