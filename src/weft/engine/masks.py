"""MaskBuilder: computes which tokens a grammar allows next, one bit per token, for each sequence with a grammar.

A mask is computed on a background thread, without the GIL, as soon as the token before it is known. A sequence without
a ready mask skips a step, so that no other sequence waits for it.

Matchers are built on separate threads at a low priority. A matcher of a large schema takes 30 ms of a core, while a
mask takes 50 us. So large schemas, even many at once, delay neither steps nor the masks of other sequences.
"""

import os
import sys
import threading
import traceback
from collections import abc
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from weft.engine.sequence import Sequence
from weft.engine.structured import Mask, NoMatcherError, RequestGrammar

MASK_THREADS = 4  # several, so that a slow mask does not delay the masks of other sequences
MATCHER_THREADS = 2
MATCHER_NICENESS = 10  # of the threads that build matchers; the loop runs at 0


class MaskBuilder:
    """Owns the progress of the matchers and the next mask of every sequence with a grammar.

    A sequence is added once. Its mask can be read again until `advance` starts the next one, because a step that did
    not accept the token is repeated. A preemption changes nothing: the matcher has consumed every token of the output.
    """

    def __init__(self) -> None:
        self.sequences: set[Sequence] = set()  # the ones that have not ended
        self._pending: dict[Sequence, Future[Mask]] = {}
        self._ready: dict[Sequence, Mask] = {}
        self._new: list[Future[Mask]] = []  # started since the last wait
        # Both pools start threads on demand.
        self._mask_threads = ThreadPoolExecutor(MASK_THREADS, thread_name_prefix="weft-masks")
        self._matcher_threads = ThreadPoolExecutor(
            MATCHER_THREADS, thread_name_prefix="weft-matchers", initializer=_lower_priority
        )

    def add(self, sequence: Sequence) -> None:
        """Starts computing the mask of a sequence's first token."""
        self.sequences.add(sequence)
        self._start_mask(sequence, None)

    def advance(self, sequence: Sequence, token: int) -> None:
        """Starts computing the mask after `token`, the last token of the sequence's output."""
        self._start_mask(sequence, token)

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended. Does nothing if it has no grammar."""
        self.sequences.discard(sequence)
        self._ready.pop(sequence, None)
        if (pending := self._pending.pop(sequence, None)) is not None:
            pending.cancel()

    def clear(self) -> None:
        for sequence in list(self.sequences):
            self.drop(sequence)

    def close(self) -> None:
        self.clear()
        self._mask_threads.shutdown()
        self._matcher_threads.shutdown()

    def wait_for_new(self, seconds: float) -> bool:
        """Waits up to `seconds` for new masks. Each mask is waited for only once. Returns whether it waited."""
        self._new = [pending for pending in self._new if not pending.done()]
        if not self._new or seconds <= 0:
            return False
        new, self._new = self._new, []
        wait(new, seconds)
        return True

    def wait_for_first(self, seconds: float) -> bool:
        """Waits up to `seconds` until one of the pending masks is ready. Returns False if none is pending."""
        if self._pending:
            wait(self._pending.values(), seconds, FIRST_COMPLETED)
        return bool(self._pending)

    def collect(self) -> list[Sequence]:
        """Streams with a mask that became ready since the last call."""
        done = [sequence for sequence, pending in self._pending.items() if pending.done()]
        for sequence in done:
            self._ready[sequence] = self._pending.pop(sequence).result()
        return done

    def read(self, sequences: abc.Sequence[Sequence]) -> NDArray[np.int32]:
        """Returns the masks of these sequences, one row each; all must be ready.

        Matchers of sequences without output are built while the step runs."""
        for sequence in sequences:
            if not sequence.output and sequence.grammar is not None:
                self._matcher_threads.submit(sequence.grammar.prepare)
        return np.stack([self._ready[sequence] for sequence in sequences])

    def _start_mask(self, sequence: Sequence, token: int | None) -> None:
        assert sequence.grammar is not None, "only a sequence with a grammar has masks"
        too_short = len(sequence.output) < sequence.params.min_tokens
        banned = tuple(sequence.stop_ids) if too_short else ()
        pool = self._mask_threads if sequence.grammar.is_ready(token) else self._matcher_threads
        pending = pool.submit(_build, sequence.grammar, token, banned)
        self._ready.pop(sequence, None)
        self._pending[sequence] = pending
        self._new.append(pending)


def _lower_priority() -> None:
    """Lowers the priority of this thread. Linux only: elsewhere a priority applies to the whole process."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), MATCHER_NICENESS)


def _build(grammar: RequestGrammar, token: int | None, banned: abc.Sequence[int]) -> Mask:
    """The mask after `token`. `banned` tokens are excluded if the grammar allows any other token."""
    try:
        mask = grammar.mask(token)
    except NoMatcherError:  # ends only this sequence
        traceback.print_exc()
        words = -(-grammar.compiled.tokenizer.vocab_size // 32)
        return _pack(grammar.compiled.tokenizer.eos_tokens, words)
    if banned:
        others = mask & ~_pack(banned, len(mask))
        return others if others.any() else mask
    return mask


def _pack(ids: abc.Sequence[int], words: int) -> Mask:
    """A mask that allows only these tokens."""
    flags = np.zeros(32 * words, np.bool_)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
