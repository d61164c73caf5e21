"""StreamTable: the running streams of a loop, with their token values. Turns results of steps into events."""

import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import Outcome, Plan, Request, Scheduler, State, StepBatch
from weft.engine.executor import SlotSetup, StepInputs, StepMasks, StepResult, TokenLogprobs
from weft.engine.masks import MaskBuilder
from weft.engine.stream import Stream


class TokenEvent(NamedTuple):
    """What one step produced for one request."""

    stream: Stream
    token: int | None  # None: the request was refused, or only prompt log probabilities arrived
    finish_reason: str | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # for positions prompt_first + 1, prompt_first + 2, ...
    prompt_first: int = 0
    embedding: NDArray[np.float32] | None = None  # only of pooling requests


class StreamTable:
    """Owns the token values, the streams by request and by slot, and the masks of their grammars."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.streams: dict[str, Stream] = {}  # by the id of the request
        self._by_slot: list[Any] = [None] * scheduler.slots.size  # by slot: the Stream that gets its tokens, or None
        self._masks = MaskBuilder()
        self._stop_ids: set[int] = set()  # of all streams so far; most steps sample none of them

    def add(self, stream: Stream) -> None:
        self.streams[stream.request.id] = stream
        self._stop_ids |= stream.stop_ids
        if stream.grammar is not None:
            self._masks.open(stream)

    def remove(self, stream: Stream) -> bool:
        """Forgets a stream. Returns False if it has ended already."""
        if self.streams.pop(stream.request.id, None) is None:
            return False
        if stream.request.slot >= 0:
            self._by_slot[stream.request.slot] = None
        self._masks.drop(stream)
        return True

    def wait_for_new_masks(self, seconds: float) -> bool:
        """Waits up to `seconds` for masks that it has not waited for yet. Returns whether it waited."""
        return self._masks.wait_for_new(seconds)

    def wait_for_a_mask(self, seconds: float) -> None:
        """Waits up to `seconds` until one of the pending masks is ready, or until a transfer may have ended."""
        if not self._masks.wait_for_first(seconds) and self.scheduler.kv.incoming:
            time.sleep(seconds)

    def released(self) -> list[Request]:
        """Requests whose next mask became ready since the last call."""
        return [stream.request for stream in self._masks.collect()]

    def inputs(self, batch: StepBatch, new_requests: list[Request]) -> StepInputs:
        """Token values of a batch, and the set-ups of the requests that got a slot."""
        streams = [self.streams[request.id] for request in new_requests]
        for stream in streams:
            self._by_slot[stream.request.slot] = stream
        prefills = slice(batch.num_decodes, None)
        slots, first, count = (field[prefills].tolist() for field in (batch.slots, batch.first, batch.count))
        values = [self._by_slot[slot].values(*span) for slot, *span in zip(slots, first, count, strict=True)]
        return StepInputs(np.concatenate(values) if values else np.empty(0, np.int32), [_setup(one) for one in streams])

    def masks(self, batch: StepBatch) -> StepMasks | None:
        """Masks for the rows of a batch that sample. Call `inputs` first: it registers the streams that join."""
        if not self._masks.streams:
            return None
        sampling = batch.slots[batch.is_sampled]
        places = np.flatnonzero(self.scheduler.slots.constrained[sampling])
        if not len(places):
            return None
        return StepMasks(places, self._masks.take([self._by_slot[slot] for slot in sampling[places].tolist()]))

    def refuse(self, requests: list[Request]) -> list[TokenEvent]:
        """Ends the streams of refused requests."""
        events = [TokenEvent(self.streams.pop(request.id), None, "refused") for request in requests]
        for event in events:
            self._masks.drop(event.stream)
        return events

    def hash_filled(self, batch: StepBatch) -> list[Request]:
        """Hashes the blocks that a step fills; returns their requests. A second call, after Ctrl-C, hashes nothing.

        Call it before the result of the step is known: the tokens that fill the blocks are inputs of the step.
        """
        size = self.scheduler.block_size
        end = batch.first + batch.count
        filled = []
        for row in np.flatnonzero(end // size > batch.first // size).tolist():
            stream: Stream | None = self._by_slot[batch.slots[row]]
            if stream is not None:  # None: it has ended
                # A step before may have accepted fewer tokens than were planned. Only known tokens are hashed.
                known = len(stream.prompt) + len(stream.output)
                stream.hash_full_blocks(min(int(end[row]), known), size)
                filled.append(stream.request)
        return filled

    def take(self, plan: Plan, result: StepResult, outcome: Outcome) -> list[TokenEvent]:
        """Appends sampled tokens to their streams, adds finished requests to `outcome` and returns the events."""
        batch = plan.batch
        assert batch is not None, "only a batch has a result"
        # Hot path, run for every request in every step: a look-up by slot, an append, a tuple built directly.
        # Finish reasons and log probabilities are rare and added afterwards.
        by_slot, make = self._by_slot, tuple.__new__
        rows, tokens = np.flatnonzero(batch.is_sampled), result.tokens
        if result.accepted is not None:  # decodes of which no token is accepted have sampled none
            rows = rows[result.accepted[rows] > 0]
        streams = [by_slot[slot] for slot in batch.slots[rows].tolist()]
        if None in streams:  # aborted, or finished in the step before: drop the surplus token
            kept = [index for index, stream in enumerate(streams) if stream is not None]
            rows, streams = rows[kept], [streams[index] for index in kept]
            tokens = [tokens[index] for index in kept]
        for stream, token in zip(streams, tokens, strict=True):
            stream.output.append(token)
        events = self._prompt_logprobs(batch, result) if result.prompt_logprobs else []
        first = len(events)
        pairs = zip(streams, tokens, strict=True)
        events += [make(TokenEvent, (stream, token, None, None, None, 0, None)) for stream, token in pairs]
        for index, reason in self._ends(plan.may_be_last[rows], streams, tokens):
            events[first + index] = TokenEvent(streams[index], tokens[index], reason)
            outcome.finished.append((streams[index].request, reason))
            by_slot[batch.slots[rows[index]]] = None
        if result.logprobs:
            for index, row in enumerate(rows.tolist(), start=first):
                if row in result.logprobs:
                    events[index] = events[index]._replace(logprobs=result.logprobs[row])
        if result.embeddings:
            for index, row in enumerate(rows.tolist(), start=first):
                if row in result.embeddings:
                    events[index] = events[index]._replace(embedding=result.embeddings[row])
        self._advance_masks(events)
        return events

    def forget(self, finished: list[tuple[Request, str]]) -> None:
        """Forgets the streams of finished requests."""
        for request, _ in finished:
            self._masks.drop(self.streams.pop(request.id))

    def fail(self, now: float) -> None:
        """Ends every stream with "error"."""
        for stream in self.streams.values():
            request = stream.request
            request.state, request.finish_reason, request.finished = State.FINISHED, "error", now
            request.slot = -1
        self.streams.clear()
        self._by_slot = [None] * len(self._by_slot)
        self._masks.clear()

    def close(self) -> None:
        """Stops the threads that compute masks."""
        self._masks.close()

    def _prompt_logprobs(self, batch: StepBatch, result: StepResult) -> list[TokenEvent]:
        events = []
        for row, found in result.prompt_logprobs.items():
            stream = self._by_slot[batch.slots[row]]
            if stream is not None:
                first = int(batch.first[row])
                events.append(TokenEvent(stream, None, None, prompt_logprobs=found, prompt_first=first))
        return events

    def _advance_masks(self, events: list[TokenEvent]) -> None:
        """Starts computing the next mask of each stream with a grammar, in the background."""
        if self._masks.streams:
            for stream, token, reason, *_ in events:
                if stream.grammar is not None and token is not None and reason is None:
                    self._masks.advance(stream, token)

    def _ends(self, last: NDArray[np.bool_], streams: list[Stream], tokens: list[int]) -> list[tuple[int, str]]:
        """(index, reason) of the streams that finish with their new token. `last`: they may have reached max_tokens."""
        ends: dict[int, str] = {}
        for index in np.flatnonzero(last).tolist():
            if len(streams[index].output) >= streams[index].request.max_tokens:
                ends[index] = "length"
        if not self._stop_ids.isdisjoint(tokens):
            for index, (stream, token) in enumerate(zip(streams, tokens, strict=True)):
                # min_tokens cannot delay the end of a grammar.
                least = stream.params.min_tokens if stream.grammar is None else 0
                if token in stream.stop_ids and len(stream.output) >= least:
                    ends[index] = "stop"
        return sorted(ends.items())


def _setup(stream: Stream) -> SlotSetup:
    request: Request = stream.request
    stop_ids = tuple(stream.stop_ids) if stream.grammar is None else ()  # with a grammar, the masks exclude them
    return SlotSetup(
        request.slot,
        stream.params,
        stream.seed & (2**64 - 1),  # the sampler uses these bits, and more cannot be sent to another process
        stream.prompt,
        np.array(stream.output, np.int32),
        stop_ids,
    )
