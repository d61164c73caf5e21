"""MaskBuilder: which tokens a grammar allows next, one bit a token, for each stream that has a grammar.

A mask is computed on a background thread as soon as the token before it is known, without the GIL. A stream whose mask
is not ready sits out a step, so no other stream waits for it.

Matchers are made on threads of their own, at a low priority: one of a large schema takes 30 ms of a core, and a mask
takes 50 us. So many large schemas at once delay neither steps nor the masks of other streams.
"""

import os
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from weft.engine.stream import Stream
from weft.engine.structured import Grammar, Mask, NoMatcherError

THREADS = 4  # so that a mask that takes long does not hold up those of other streams
MATCHER_THREADS = 2
NICE = 10  # of the threads that make matchers; 0 is the priority of the loop


class MaskBuilder:
    """Owns the matchers' progress and the next mask of every stream with a grammar.

    A stream is opened once. Each mask is taken once, and `advance` starts the next. A preemption changes nothing: the
    matcher has consumed every token of the stream's output.
    """

    def __init__(self) -> None:
        self.streams: set[Stream] = set()  # that are open
        self._pending: dict[Stream, Future[Mask]] = {}
        self._ready: dict[Stream, Mask] = {}
        self._new: list[Future[Mask]] = []  # that were not waited for
        # Both start their threads when needed.
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="weft-masks")
        self._matchers = ThreadPoolExecutor(
            MATCHER_THREADS, thread_name_prefix="weft-matchers", initializer=_lower_priority
        )

    def open(self, stream: Stream) -> None:
        """Begins the mask of a stream's first token."""
        self.streams.add(stream)
        self._begin(stream, None)

    def advance(self, stream: Stream, token: int) -> None:
        """Begins the mask behind a token, the last of the stream's output."""
        self._begin(stream, token)

    def drop(self, stream: Stream) -> None:
        """Forgets a stream that has ended. Harmless if it has no grammar."""
        self.streams.discard(stream)
        self._ready.pop(stream, None)
        if (pending := self._pending.pop(stream, None)) is not None:
            pending.cancel()

    def clear(self) -> None:
        for stream in list(self.streams):
            self.drop(stream)

    def close(self) -> None:
        self.clear()
        self._pool.shutdown()
        self._matchers.shutdown()

    def wait_for_new(self, seconds: float) -> bool:
        """Waits for new masks, no longer than so; a mask is waited for once. Returns whether there was one."""
        self._new = [pending for pending in self._new if not pending.done()]
        if not self._new or seconds <= 0:
            return False
        new, self._new = self._new, []
        wait(new, seconds)
        return True

    def wait_for_first(self, seconds: float) -> None:
        """Waits until one of the pending masks is ready, no longer than so."""
        if self._pending:
            wait(self._pending.values(), seconds, FIRST_COMPLETED)

    def collect(self) -> list[Stream]:
        """Streams whose mask has become ready since the last call."""
        done = [stream for stream, pending in self._pending.items() if pending.done()]
        for stream in done:
            self._ready[stream] = self._pending.pop(stream).result()
        return done

    def take(self, streams: Sequence[Stream]) -> NDArray[np.int32]:
        """The masks of these streams, which are ready, one row each. Streams that begin get their matchers while the
        step runs."""
        for stream in streams:
            if not stream.output and stream.grammar is not None:
                self._matchers.submit(stream.grammar.prepare)
        return np.stack([self._ready.pop(stream) for stream in streams])

    def _begin(self, stream: Stream, token: int | None) -> None:
        assert stream.grammar is not None, "only a stream with a grammar has masks"
        too_short = len(stream.output) < stream.params.min_tokens
        banned = tuple(stream.stop_ids) if too_short else ()
        pool = self._pool if stream.grammar.is_ready(token) else self._matchers
        pending = pool.submit(_build, stream.grammar, token, banned)
        self._pending[stream] = pending
        self._new.append(pending)


def _lower_priority() -> None:
    """Lets all other threads of the process go first. Linux only: elsewhere a priority is the whole process's."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _build(grammar: Grammar, token: int | None, banned: Sequence[int]) -> Mask:
    """The mask behind a token. `banned` tokens are left out while the grammar allows anything else."""
    try:
        mask = grammar.mask(token)
    except NoMatcherError:  # this stream ends, and no other
        traceback.print_exc()
        words = -(-grammar.form.tokenizer.vocab_size // 32)
        return _pack(grammar.form.tokenizer.eos_tokens, words)
    if banned:
        others = mask & ~_pack(banned, len(mask))
        return others if others.any() else mask
    return mask


def _pack(ids: Sequence[int], words: int) -> Mask:
    """A mask that allows these tokens."""
    flags = np.zeros(32 * words, np.bool_)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
