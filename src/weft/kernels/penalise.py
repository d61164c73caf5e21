"""Penalties for tokens that occur in a row's prompt or output. Imported only where there is a GPU."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

LOGITS_TILE = 2048  # logits
PENALTY_FIELDS = 5  # index of the row and of its history; float32 bits of repetition, frequency and presence


class Histories(NamedTuple):
    """Tokens of each row so far, [H, V]."""

    counts: Tensor  # int32: how often the output has the token
    seen: Tensor  # bool: whether prompt or output has the token


def penalise(logits: Tensor, numbers: Tensor, histories: Histories) -> None:
    """Changes logits [N, V] float32 in place. `numbers` [PENALTY_FIELDS, P] int32 has one column per penalised row. A
    column that starts with -1 is padding.
    """
    rows, vocab = numbers.shape[1], logits.shape[1]
    assert numbers.shape[0] == PENALTY_FIELDS
    assert logits.is_contiguous()
    assert numbers.is_contiguous()
    _penalise[(triton.cdiv(vocab, LOGITS_TILE), rows)](
        logits, numbers, *histories, vocab, rows, TILE=LOGITS_TILE, num_warps=4
    )


def note(tokens: Tensor, numbers: Tensor, histories: Histories) -> None:
    """Adds the sampled tokens [N] int32 to the histories of their rows. Reads the first two fields of `numbers`."""
    rows, vocab = numbers.shape[1], histories.counts.shape[1]
    assert numbers.is_contiguous()
    _note[(rows,)](tokens, numbers, *histories, vocab, rows, num_warps=1)


@triton.jit(do_not_specialize=["rows"])
def _penalise(logits, numbers, counts, seen, vocab, rows, TILE: tl.constexpr):
    number = numbers + tl.program_id(1)
    place = tl.load(number).to(tl.int64)
    if place >= 0:
        history = tl.load(number + rows).to(tl.int64) * vocab
        repetition = tl.load(number + 2 * rows).to(tl.float32, bitcast=True)
        frequency = tl.load(number + 3 * rows).to(tl.float32, bitcast=True)
        presence = tl.load(number + 4 * rows).to(tl.float32, bitcast=True)
        tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
        exists = tokens < vocab
        at = logits + place * vocab + tokens
        values = tl.load(at, mask=exists, other=0.0)
        times = tl.load(counts + history + tokens, mask=exists, other=0)
        is_seen = tl.load(seen + history + tokens, mask=exists, other=0) != 0
        repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
        values = tl.where(is_seen, repeated, values) - frequency * times - tl.where(times > 0, presence, 0.0)
        tl.store(at, values, mask=exists)


@triton.jit(do_not_specialize=["rows"])
def _note(tokens, numbers, counts, seen, vocab, rows):
    number = numbers + tl.program_id(0)
    place = tl.load(number)
    if place >= 0:
        at = tl.load(number + rows).to(tl.int64) * vocab + tl.load(tokens + place)
        tl.store(counts + at, tl.load(counts + at) + 1)
        tl.store(seen + at, 1)
