"""Sampler: samples one token per row from logits. A row's token depends on its logits, parameters, seed and position,
never on other rows.

On a CPU, `Sampler.sample` does all of it. On a GPU, the executor samples with kernels/draw.py, and uses the rest.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.engine.executor import SlotSetup, StepMasks
from weft.engine.logprobs import LogprobsChunk, PendingLogprobs
from weft.models.layers import wide

CHUNK_ELEMENTS = 1 << 24  # most elements (rows x vocabulary) that sorting and logprobs process at once: 64 MB


class Sampler:
    """Owns the sampling parameters of each slot, as host arrays. Tensors exist only for rows that need them."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.temperature = np.zeros(slots, np.float64)
        self.top_k = np.zeros(slots, np.int64)  # 0: all
        self.top_p = np.ones(slots, np.float64)
        self.min_p = np.zeros(slots, np.float64)
        self.seed = np.zeros(slots, np.uint64)
        # The same for kernels: temperature, lower and upper half of the seed, top_k, top_p, logarithm of min_p.
        # Fractional numbers are stored as the bits of a float32.
        self.kernel_params = np.zeros((6, slots), np.int32)
        self.logprobs = np.full(slots, -1, np.int64)  # -1: none
        self.prompt_logprobs = np.full(slots, -1, np.int64)
        self.penalties = np.zeros((slots, 3), np.float64)  # repetition, frequency, presence
        self.min_position = np.zeros(slots, np.int64)  # before this position the slot's stop ids are banned
        self._biased = np.zeros(slots, np.bool_)
        self._truncated = np.zeros(slots, np.bool_)  # uses top_k, top_p or min_p
        self._edited = np.zeros(slots, np.bool_)  # always samples from edited logits: bias, penalties, allowed tokens
        self._restricted = np.zeros(slots, np.bool_)
        self._allowed: dict[int, NDArray[np.int64]] = {}  # tokens of restricted slots
        self._biases: dict[int, _TokenValues] = {}
        self._bans: dict[int, _TokenValues] = {}
        self._prompts: dict[int, NDArray[np.int32]] = {}  # only for prompt log probabilities
        self._history = _History(slots, vocab_size, device)

    def setup(self, setup: SlotSetup) -> None:
        """Sets the parameters of a slot that a request takes, for the first time or after a preemption."""
        slot, params = setup.slot, setup.params
        # A temperature below 1e-5 would overflow float32.
        self.temperature[slot] = params.temperature if params.temperature >= 1e-5 else 0.0
        self.top_k[slot] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seed[slot] = np.uint64(setup.seed & (2**64 - 1))
        self.kernel_params[:, slot] = self._kernel_params(slot)
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.prompt_logprobs[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.penalties[slot] = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._biased[slot] = bool(params.logit_bias)
        if params.logit_bias:
            self._biases[slot] = _TokenValues.of(list(params.logit_bias), list(params.logit_bias.values()))
        allowed = params.allowed_token_ids
        self._restricted[slot] = allowed is not None
        if allowed is not None:
            self._allowed[slot] = np.unique(np.array(allowed, np.int64))
        banned = params.min_tokens > 0 and len(setup.stop_ids) > 0
        if allowed is not None and set(allowed) <= set(setup.stop_ids):
            banned = False  # some token must stay allowed
        self.min_position[slot] = len(setup.prompt) + params.min_tokens if banned else 0
        if banned:
            self._bans[slot] = _TokenValues.of(list(setup.stop_ids), [-np.inf] * len(setup.stop_ids))
        if params.prompt_logprobs is not None:
            self._prompts[slot] = setup.prompt
        if params.has_penalties:
            self._history.activate(slot, setup.prompt, setup.output)
        else:
            self._history.deactivate(slot)
        is_truncated = self.top_k[slot] > 0 or params.top_p < 1 or params.min_p > 0
        self._truncated[slot] = is_truncated and self.temperature[slot] > 0  # greedy: the most likely token stays
        self._edited[slot] = params.has_penalties or bool(params.logit_bias) or allowed is not None

    def _kernel_params(self, slot: int) -> NDArray[np.int32]:
        log_min_p = np.log(self.min_p[slot]) if self.min_p[slot] > 0 else -np.inf
        top_p = self.top_p[slot] if self.top_p[slot] < 1 else 2.0
        temperature, top_p, log_min_p = np.array([self.temperature[slot], top_p, log_min_p], np.float32).view(np.int32)
        low, high = self.seed[slot : slot + 1].view(np.int32)  # little-endian
        top_k = self.top_k[slot] or np.iinfo(np.int32).max
        return np.array([temperature, low, high, top_k, top_p, log_min_p], np.int32)

    def close(self) -> None:
        self._history = _History(0, self.vocab_size, self.device)  # frees memory, even if self stays referenced

    @property
    def later_bytes(self) -> int:
        """Device memory that is allocated later, when the first request asks for penalties."""
        return self._history.later_bytes

    def edits(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> bool:
        """Whether a row samples from edited logits, even without a grammar mask. `positions` are of the new tokens."""
        return bool((self._edited[slots] | (positions < self.min_position[slots])).any())

    def uses_truncation(self, slots: NDArray[np.int64]) -> bool:
        """Whether a row uses top_k, top_p or min_p. A greedy row does not."""
        return bool(self._truncated[slots].any())

    def sample(
        self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64], masks: StepMasks | None = None
    ) -> Tensor:
        """Returns one token per row, for `positions`, from raw logits [rows, vocab]. Does not change the logits."""
        logits = self.edit(logits, slots, positions, masks)
        greedy = not self.temperature[slots].any()
        tokens = logits.argmax(-1) if greedy else self._sample(logits, slots, positions)
        self.note_tokens(slots, tokens)
        return tokens

    def note_tokens(self, slots: NDArray[np.int64], tokens: Tensor) -> None:
        """Records sampled tokens for later penalties."""
        penalised = np.flatnonzero(self._history.active[slots])
        if len(penalised):
            self._history.append(penalised, slots[penalised], tokens)

    def warm_up_kernels(self, logits: Tensor) -> None:
        """Runs log probabilities and penalties on dummy rows, so that a GPU compiles kernels now and not in service."""
        first = self._row_chunks(len(logits))[0]
        tokens = torch.zeros(len(logits), dtype=torch.int32, device=self.device)
        LogprobsChunk.of(logits[first], tokens[first], [1] * (first.stop - first.start))
        self._history.warm_up_kernels(logits, tokens)

    def rows_with_logprobs(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices of the slots that want log probabilities of sampled tokens."""
        return np.flatnonzero(self.logprobs[slots] >= 0)

    def compute_logprobs(self, logits: Tensor, tokens: Tensor, slots: NDArray[np.int64]) -> PendingLogprobs:
        """Log probabilities of sampled tokens, from unedited logits. All `slots` must want them."""
        wanted = self.logprobs[slots].tolist()
        return PendingLogprobs(
            [LogprobsChunk.of(logits[rows], tokens[rows], wanted[rows]) for rows in self._row_chunks(len(tokens))]
        )

    def wants_prompt_logprobs(self, slot: int) -> bool:
        return bool(self.prompt_logprobs[slot] >= 0)

    def compute_prompt_logprobs(
        self, to_logits: Callable[[Tensor], Tensor], hidden: Tensor, slot: int, first: int
    ) -> PendingLogprobs:
        """Log probabilities of the prompt tokens at first+1, first+2, ... from the hidden states at first, ..."""
        targets = self._prompts[slot][first + 1 : first + 1 + len(hidden)].astype(np.int64)
        wanted = [int(self.prompt_logprobs[slot])] * len(targets)
        return PendingLogprobs(
            [
                LogprobsChunk.of(to_logits(hidden[rows]), upload(targets[rows], self.device), wanted[rows])
                for rows in self._row_chunks(len(targets))
            ]
        )

    def _row_chunks(self, rows: int) -> list[slice]:
        """Splits rows into chunks of at most CHUNK_ELEMENTS: intermediate results take many times their memory."""
        most = max(1, CHUNK_ELEMENTS // self.vocab_size)
        return [slice(begin, min(begin + most, rows)) for begin in range(0, rows, most)]

    def edit(
        self,
        logits: Tensor,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        masks: StepMasks | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Applies allowed tokens, bias, bans and penalties, in vLLM's order, then grammar masks.

        Forbidden tokens become -inf. Returns float32 or wider, in `out` if given. Does not change `logits`.
        """
        restricted = np.flatnonzero(self._restricted[slots])
        biased = np.flatnonzero(self._biased[slots])
        banned = np.flatnonzero(positions < self.min_position[slots])
        penalised = np.flatnonzero(self._history.active[slots])
        if out is not None:
            logits = out.copy_(logits)
        elif not (len(restricted) or len(biased) or len(banned) or len(penalised) or masks is not None):
            return wide(logits)
        else:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if len(restricted):
            _keep_only(logits, restricted, [self._allowed[slot] for slot in slots[restricted].tolist()])
        for rows, values in ((biased, self._biases), (banned, self._bans)):
            if len(rows):
                _add(logits, rows, [values[slot] for slot in slots[rows].tolist()])
        if len(penalised):
            self._history.penalise(logits, penalised, slots[penalised], self.penalties[slots[penalised]])
        if masks is not None:
            index = upload(masks.rows, self.device)
            allowed = _unpack(upload(masks.bits.view(np.uint8), self.device))[:, : self.vocab_size]
            logits[index] = logits[index].masked_fill(~allowed, -torch.inf)
        return logits

    def _sample(self, logits: Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Samples: inverts each row's cumulative distribution at one uniform number, a hash of seed and position."""
        temperature = self.temperature[slots]
        greedy = temperature == 0
        divisor = upload(np.where(greedy, 1.0, temperature), self.device, logits.dtype)
        scaled = self._truncate(logits / divisor[:, None], slots)
        # float64: a float32 sum over a large vocabulary would shift the borders between tokens
        cumulative = torch.softmax(scaled.double(), -1).cumsum(-1)
        uniform = upload(hashed_uniform(self.seed[slots], positions), self.device)
        sampled = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(-1)
        if not greedy.any():
            return sampled
        return torch.where(upload(greedy, self.device), logits.argmax(-1), sampled)

    def _truncate(self, logits: Tensor, slots: NDArray[np.int64]) -> Tensor:
        """Applies min_p, top_k and top_p: tokens that are left out become -inf."""
        min_p, top_k, top_p = self.min_p[slots], self.top_k[slots], self.top_p[slots]
        if min_p.any():
            log_min_p = upload(np.log(np.maximum(min_p, 1e-300)), self.device, logits.dtype)
            logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + log_min_p[:, None], -torch.inf)
        sorting = np.flatnonzero((top_k > 0) | (top_p < 1))
        for chunk in self._row_chunks(len(sorting)):
            rows = sorting[chunk]
            index = upload(rows, self.device)
            logits = logits.index_copy(0, index, self._truncate_sorted(logits[index], top_k[rows], top_p[rows]))
        return logits

    def _truncate_sorted(self, logits: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        keep_k = upload(np.where(top_k > 0, top_k, self.vocab_size), self.device)
        ranks = torch.arange(self.vocab_size, device=self.device)
        values = values.masked_fill(ranks >= keep_k[:, None], -torch.inf)
        probabilities = torch.softmax(values.double(), -1)
        before = probabilities.cumsum(-1) - probabilities
        mass = upload(np.where(top_p < 1, top_p, 2.0), self.device)
        values = values.masked_fill((before >= mass[:, None]) & (ranks > 0), -torch.inf)
        return torch.empty_like(logits).scatter_(-1, order, values)


class _TokenValues(NamedTuple):
    """Numbers to add to the logits of a few tokens."""

    ids: NDArray[np.int64]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, ids: list[int], values: list[float]) -> "_TokenValues":
        return cls(np.array(ids, np.int64), np.array(values, np.float64))


class _History:
    """Tokens in prompt and output of requests with penalties, by slot. Memory is allocated for the first such request,
    because many engines never see one."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.active = np.zeros(slots, np.bool_)
        # Memory that is not allocated yet, in bytes.
        self.later_bytes = slots * vocab_size * (torch.int32.itemsize + torch.bool.itemsize)
        self._size = (slots, vocab_size)
        self._counts = torch.empty((0, vocab_size), dtype=torch.int32, device=device)  # occurrences in the output
        self._seen = torch.empty((0, vocab_size), dtype=torch.bool, device=device)  # in prompt or output
        self._pool: torch.cuda.MemPool | None = None  # must outlive its tensors

    def activate(self, slot: int, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> None:
        if self.later_bytes:
            self._allocate()
        self.active[slot] = True
        device = self._counts.device
        tokens, counts = np.unique(output, return_counts=True)
        self._counts[slot].zero_()
        self._counts[slot].index_copy_(0, upload(tokens.astype(np.int64), device), upload(counts, device, torch.int32))
        self._seen[slot].zero_()
        self._seen[slot].index_fill_(0, upload(np.union1d(prompt, tokens).astype(np.int64), device), True)

    def deactivate(self, slot: int) -> None:
        self.active[slot] = False

    def _allocate(self) -> None:
        # On a GPU, a separate pool: in the memory that torch keeps for steps, the largest step would no longer fit.
        self._pool = torch.cuda.MemPool() if self._counts.is_cuda else None
        with nullcontext() if self._pool is None else torch.cuda.use_mem_pool(self._pool):
            self._counts, self._seen = self._counts.new_empty(self._size), self._seen.new_empty(self._size)
        self.later_bytes = 0

    def append(self, rows: NDArray[np.int64], slots: NDArray[np.int64], tokens: Tensor) -> None:
        """Counts tokens[rows] for the slots, in the same order."""
        if tokens.is_cuda:
            from weft.kernels.penalise import Histories, note

            numbers = upload(np.stack([rows, slots]).astype(np.int32), tokens.device)
            note(tokens, numbers, Histories(self._counts, self._seen))
            return
        histories, tokens = torch.from_numpy(slots), tokens[torch.from_numpy(rows)]
        self._counts[histories, tokens] += 1
        self._seen[histories, tokens] = True

    def penalise(
        self, logits: Tensor, rows: NDArray[np.int64], slots: NDArray[np.int64], penalties: NDArray[np.float64]
    ) -> None:
        """Applies penalties to logits[rows] in place; `slots` and `penalties` [rows, 3] are in the same order."""
        if logits.is_cuda:
            from weft.kernels.penalise import PENALTY_FIELDS, Histories, penalise

            numbers = np.empty((PENALTY_FIELDS, len(rows)), np.int32)
            numbers[:2] = rows, slots
            numbers[2:].view(np.float32)[:] = penalties.T
            penalise(logits, upload(numbers, logits.device), Histories(self._counts, self._seen))
            return
        index, histories = torch.from_numpy(rows), torch.from_numpy(slots)
        counts, seen, given = self._counts[histories], self._seen[histories], logits[index]
        repetition, frequency, presence = torch.from_numpy(penalties).to(logits.dtype)[:, :, None].unbind(1)
        repeated = torch.where(given > 0, given / repetition, given * repetition)
        logits[index] = torch.where(seen, repeated, given) - frequency * counts - presence * (counts > 0)

    def warm_up_kernels(self, logits: Tensor, tokens: Tensor) -> None:
        from weft.kernels.penalise import PENALTY_FIELDS, Histories, note, penalise

        padding = torch.full((PENALTY_FIELDS, 1), -1, dtype=torch.int32, device=tokens.device)
        histories = Histories(self._counts, self._seen)
        penalise(logits, padding, histories)
        note(tokens, padding[:2], histories)


def upload(array: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copies an array to the device, through pinned memory. From pageable memory, the host would wait for the GPU."""
    tensor = torch.from_numpy(array).to(dtype)  # before pinning: a copy that converts goes through other memory
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def hashed_uniform(seed: NDArray[np.uint64], position: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns a number in [0, 1) for each (seed, position), by two rounds of the splitmix64 finaliser."""
    bits = _mix(seed + np.uint64(0x9E3779B97F4A7C15))
    bits = _mix(bits ^ (position.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)))
    # 32 bits: below 1 by more than float64 rounding, so that no token after the last one with a probability is sampled
    return (bits >> np.uint64(32)).astype(np.float64) / 2.0**32


def _mix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _unpack(bits: Tensor) -> Tensor:
    """Unpacks each row's bytes into booleans, lowest bit first."""
    each = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, :, None] >> each) & 1).bool().flatten(1)


def _keep_only(logits: Tensor, rows: NDArray[np.int64], ids: list[NDArray[np.int64]]) -> None:
    """Sets all logits of these rows to -inf, except the given tokens of each row."""
    where = np.stack([np.repeat(rows, [len(one) for one in ids]), np.concatenate(ids)])
    row, token = upload(where, logits.device)
    kept = logits[row, token]
    logits.index_fill_(0, upload(rows, logits.device), -torch.inf)
    logits[row, token] = kept


def _add(logits: Tensor, rows: NDArray[np.int64], entries: list[_TokenValues]) -> None:
    """Adds each row's values to its tokens, all rows at once."""
    lengths = [len(entry.ids) for entry in entries]
    where = np.stack([np.repeat(rows, lengths), np.concatenate([entry.ids for entry in entries])])
    row, token = upload(where, logits.device)
    values = np.concatenate([entry.values for entry in entries])
    logits[row, token] += upload(values, logits.device, logits.dtype)
