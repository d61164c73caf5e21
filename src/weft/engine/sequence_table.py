"""SequenceTable: the sequences of a loop. Makes the inputs of steps, and turns the results of steps into events."""

import time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import Outcome, Plan, Request, Scheduler, State, StepBatch
from weft.engine.executor import SlotSetup, StepInputs, StepMasks, StepResult, TokenLogprobs
from weft.engine.masks import MaskBuilder
from weft.engine.sequence import Sequence


class TokenEvent(NamedTuple):
    """What one step produced for one request."""

    sequence: Sequence
    token: int | None  # None: the request was refused, or only prompt log probabilities arrived
    finish_reason: str | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # for positions prompt_first + 1, prompt_first + 2, ...
    prompt_first: int = 0
    embedding: NDArray[np.float32] | None = None  # only of pooling requests


class SequenceTable:
    """Owns the waiting and running sequences, with their token ids, and the masks of their grammars."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.sequences: dict[str, Sequence] = {}  # by the id of the request
        self._by_slot: list[Any] = [None] * scheduler.slots.size  # by slot: the Sequence in it, or None
        self._masks = MaskBuilder()
        self._stop_ids: set[int] = set()  # of all sequences so far; most steps sample none of them

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.request.id] = sequence
        self._stop_ids |= sequence.stop_ids
        if sequence.grammar is not None:
            self._masks.add(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Forgets a sequence. Returns False if it has ended already."""
        if self.sequences.pop(sequence.request.id, None) is None:
            return False
        if sequence.request.slot >= 0:
            self._by_slot[sequence.request.slot] = None
        self._masks.drop(sequence)
        return True

    def wait_for_new_masks(self, seconds: float) -> bool:
        """Waits up to `seconds` for masks that were started since the last wait. Returns whether it waited."""
        return self._masks.wait_for_new(seconds)

    def wait_for_a_mask(self, seconds: float) -> None:
        """Waits up to `seconds` until a pending mask is ready. Sleeps if none is pending but a transfer is."""
        if not self._masks.wait_for_first(seconds) and self.scheduler.kv.incoming:
            time.sleep(seconds)

    def released(self) -> list[Request]:
        """Requests whose next mask became ready since the last call."""
        return [sequence.request for sequence in self._masks.collect()]

    def inputs(self, batch: StepBatch, joined: list[Request]) -> StepInputs:
        """Token ids of the prompts in a batch, and a SlotSetup of each request that got a slot since the last batch."""
        sequences = [self.sequences[request.id] for request in joined]
        for sequence in sequences:
            self._by_slot[sequence.request.slot] = sequence
        prefills = slice(batch.num_decodes, None)
        slots, first, count = (field[prefills].tolist() for field in (batch.slots, batch.first, batch.count))
        ids = [self._by_slot[slot].token_ids(*span) for slot, *span in zip(slots, first, count, strict=True)]
        return StepInputs(np.concatenate(ids) if ids else np.empty(0, np.int32), [_setup(one) for one in sequences])

    def masks(self, batch: StepBatch) -> StepMasks | None:
        """Masks for the rows of a batch that sample. Call `inputs` first: it notes the slots of new sequences."""
        if not self._masks.sequences:
            return None
        sampling = batch.slots[batch.is_sampled]
        rows = np.flatnonzero(self.scheduler.slots.constrained[sampling])
        if not len(rows):
            return None
        return StepMasks(rows, self._masks.read([self._by_slot[slot] for slot in sampling[rows].tolist()]))

    def refuse(self, requests: list[Request]) -> list[TokenEvent]:
        """Ends the sequences of refused requests."""
        events = [TokenEvent(self.sequences.pop(request.id), None, "refused") for request in requests]
        for event in events:
            self._masks.drop(event.sequence)
        return events

    def hash_filled(self, batch: StepBatch) -> list[Request]:
        """Hashes the blocks that a step fills, and returns their requests. A second call for one step is harmless.

        It needs no result of the step: the tokens that fill the blocks are inputs of the step.
        """
        size = self.scheduler.block_size
        end = batch.first + batch.count
        filled = []
        for row in np.flatnonzero(end // size > batch.first // size).tolist():
            sequence: Sequence | None = self._by_slot[batch.slots[row]]
            if sequence is not None:  # None: it has ended
                # The step before may have accepted fewer tokens than were planned. Only known tokens are hashed.
                known = len(sequence.prompt) + len(sequence.output)
                sequence.hash_full_blocks(min(int(end[row]), known), size)
                filled.append(sequence.request)
        return filled

    def process_result(self, plan: Plan, result: StepResult, outcome: Outcome) -> list[TokenEvent]:
        """Appends sampled tokens to their sequences, adds finished requests to `outcome` and returns the events."""
        batch = plan.batch
        assert batch is not None, "only a batch has a result"
        # Hot path, run for every request in every step: a look-up by slot, an append, a tuple built directly.
        # Finish reasons and log probabilities are rare and added afterwards.
        by_slot, make = self._by_slot, tuple.__new__
        rows, tokens = np.flatnonzero(batch.is_sampled), result.tokens
        if result.accepted is not None:  # a row without accepted tokens has no sampled token
            rows = rows[result.accepted[rows] > 0]
        sequences = [by_slot[slot] for slot in batch.slots[rows].tolist()]
        if None in sequences:  # aborted, or finished in the step before: drop the surplus token
            kept = [index for index, sequence in enumerate(sequences) if sequence is not None]
            rows, sequences = rows[kept], [sequences[index] for index in kept]
            tokens = [tokens[index] for index in kept]
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.output.append(token)
        events = self._prompt_logprobs(batch, result) if result.prompt_logprobs else []
        first = len(events)
        pairs = zip(sequences, tokens, strict=True)
        events += [make(TokenEvent, (sequence, token, None, None, None, 0, None)) for sequence, token in pairs]
        for index, reason in self._finish_reasons(plan.may_be_last[rows], sequences, tokens):
            events[first + index] = TokenEvent(sequences[index], tokens[index], reason)
            outcome.finished.append((sequences[index].request, reason))
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
        """Forgets the sequences of finished requests."""
        for request, _ in finished:
            self._masks.drop(self.sequences.pop(request.id))

    def fail(self, now: float) -> None:
        """Ends every sequence with "error"."""
        for sequence in self.sequences.values():
            request = sequence.request
            request.state, request.finish_reason, request.finished = State.FINISHED, "error", now
            request.slot = -1
        self.sequences.clear()
        self._by_slot = [None] * len(self._by_slot)
        self._masks.clear()

    def close(self) -> None:
        """Stops the threads that compute masks."""
        self._masks.close()

    def _prompt_logprobs(self, batch: StepBatch, result: StepResult) -> list[TokenEvent]:
        events = []
        for row, found in result.prompt_logprobs.items():
            sequence = self._by_slot[batch.slots[row]]
            if sequence is not None:
                first = int(batch.first[row])
                events.append(TokenEvent(sequence, None, None, prompt_logprobs=found, prompt_first=first))
        return events

    def _advance_masks(self, events: list[TokenEvent]) -> None:
        """Starts computing the next mask of each sequence with a grammar, in the background."""
        if self._masks.sequences:
            for sequence, token, reason, *_ in events:
                if sequence.grammar is not None and token is not None and reason is None:
                    self._masks.advance(sequence, token)

    def _finish_reasons(
        self, last: NDArray[np.bool_], sequences: list[Sequence], tokens: list[int]
    ) -> list[tuple[int, str]]:
        """(index, reason) of the sequences that end with their new token. `last`: they may have reached max_tokens."""
        reasons: dict[int, str] = {}
        for index in np.flatnonzero(last).tolist():
            if len(sequences[index].output) >= sequences[index].request.max_tokens:
                reasons[index] = "length"
        if not self._stop_ids.isdisjoint(tokens):
            for index, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
                # min_tokens cannot delay the end of a grammar.
                least = sequence.params.min_tokens if sequence.grammar is None else 0
                if token in sequence.stop_ids and len(sequence.output) >= least:
                    reasons[index] = "stop"
        return sorted(reasons.items())


def _setup(sequence: Sequence) -> SlotSetup:
    request: Request = sequence.request
    stop_ids = tuple(sequence.stop_ids) if sequence.grammar is None else ()  # with a grammar, the masks exclude them
    return SlotSetup(
        request.slot,
        sequence.params,
        sequence.seed & (2**64 - 1),  # the sampler uses these bits, and more cannot be sent to another process
        sequence.prompt,
        np.array(sequence.output, np.int32),
        stop_ids,
    )
