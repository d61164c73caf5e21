"""MaskBuilder: computes which tokens a grammar allows next, one bit per token, for each stream with a grammar.

A mask is computed on a background thread, without the GIL, as soon as the token before it is known. A stream without a
ready mask skips a step, so that no other stream waits for it.

Matchers are built on separate threads at a low priority. A matcher of a large schema takes 30 ms of a core, while a
mask takes 50 us. So large schemas, even many at once, delay neither steps nor the masks of other streams.
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
from weft.engine.structured import Mask, NoMatcherError, RequestGrammar

THREADS = 4  # several, so that a slow mask does not delay the masks of other streams
MATCHER_THREADS = 2
NICE = 10  # of the threads that build matchers; the loop runs at 0


class MaskBuilder:
    """Owns the progress of the matchers and the next mask of every stream with a grammar.

    A stream is opened once. A mask stays ready until `advance` starts the next: a step that did not accept its token is
    repeated. A preemption changes nothing: the matcher has consumed every token of the stream's output.
    """

    def __init__(self) -> None:
        self.streams: set[Stream] = set()  # open streams
        self._pending: dict[Stream, Future[Mask]] = {}
        self._ready: dict[Stream, Mask] = {}
        self._new: list[Future[Mask]] = []  # not yet waited for
        # Both pools start threads on demand.
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="weft-masks")
        self._matchers = ThreadPoolExecutor(
            MATCHER_THREADS, thread_name_prefix="weft-matchers", initializer=_lower_priority
        )

    def open(self, stream: Stream) -> None:
        """Starts computing the mask of a stream's first token."""
        self.streams.add(stream)
        self._begin(stream, None)

    def advance(self, stream: Stream, token: int) -> None:
        """Starts computing the mask after `token`, the last token of the stream's output."""
        self._begin(stream, token)

    def drop(self, stream: Stream) -> None:
        """Forgets a stream that has ended. Does nothing if it has no grammar."""
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

    def collect(self) -> list[Stream]:
        """Streams with a mask that became ready since the last call."""
        done = [stream for stream, pending in self._pending.items() if pending.done()]
        for stream in done:
            self._ready[stream] = self._pending.pop(stream).result()
        return done

    def take(self, streams: Sequence[Stream]) -> NDArray[np.int32]:
        """Returns the masks of these streams, one row each; all must be ready.

        Matchers of streams without output are built while the step runs."""
        for stream in streams:
            if not stream.output and stream.grammar is not None:
                self._matchers.submit(stream.grammar.prepare)
        return np.stack([self._ready[stream] for stream in streams])

    def _begin(self, stream: Stream, token: int | None) -> None:
        assert stream.grammar is not None, "only a stream with a grammar has masks"
        too_short = len(stream.output) < stream.params.min_tokens
        banned = tuple(stream.stop_ids) if too_short else ()
        pool = self._pool if stream.grammar.is_ready(token) else self._matchers
        pending = pool.submit(_build, stream.grammar, token, banned)
        self._ready.pop(stream, None)
        self._pending[stream] = pending
        self._new.append(pending)


def _lower_priority() -> None:
    """Lowers the priority of this thread. Linux only: elsewhere a priority applies to the whole process."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _build(grammar: RequestGrammar, token: int | None, banned: Sequence[int]) -> Mask:
    """The mask after `token`. `banned` tokens are excluded if the grammar allows any other token."""
    try:
        mask = grammar.mask(token)
    except NoMatcherError:  # ends only this stream
        traceback.print_exc()
        words = -(-grammar.form.tokenizer.vocab_size // 32)
        return _pack(grammar.form.tokenizer.eos_tokens, words)
    if banned:
        others = mask & ~_pack(banned, len(mask))
        return others if others.any() else mask
    return mask


def _pack(ids: Sequence[int], words: int) -> Mask:
    """A mask that allows only these tokens."""
    flags = np.zeros(32 * words, np.bool_)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
