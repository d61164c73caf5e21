"""BlameSummary: the late tokens of an engine process, added up by cause."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from weft.observe.blame import KEPT_GAPS, NEEDED, Cause, LateToken

MOST_READERS = 100  # sequences that a summary names


@dataclass(frozen=True)
class Reader:
    """A sequence whose prompt was read while others waited for a token."""

    key: int
    seconds: float  # of late tokens of other sequences


@dataclass(frozen=True)
class BlameSummary:
    """Late tokens of an engine process, by cause. Causes have the most seconds (or requests) first."""

    late_gaps: int
    late_first_tokens: int
    gap_seconds: dict[Cause, float]  # whole seconds of the late gaps
    first_token_seconds: dict[Cause, float]
    broken: dict[Cause, int]  # requests with a broken promise, by its main cause
    readers: tuple[Reader, ...]  # the sequences with the most PREFILL seconds

    @property
    def broken_promises(self) -> int:
        return sum(self.broken.values())


def summary(late: Iterable[LateToken]) -> BlameSummary:
    """Sums late tokens of one engine process.

    A promise is broken if a promised first token is late, or more than 1% of the promised gaps of a sequence. Its main
    cause is the one with the most seconds beyond the target (see `excess`), over all late tokens that were promised.
    """
    counts = {True: 0, False: 0}
    seconds: dict[bool, dict[Cause, float]] = {True: {}, False: {}}
    readers: dict[int, float] = {}
    promised: dict[int, list[LateToken]] = {}
    for token in late:
        is_first = token.token_index == 0
        counts[is_first] += 1
        for part in token.parts:
            seconds[is_first][part.cause] = seconds[is_first].get(part.cause, 0.0) + part.seconds
            if part.cause is Cause.PREFILL:
                for key, share in zip(part.keys, part.shares, strict=True):
                    readers[key] = readers.get(key, 0.0) + share
        if token.is_promised:
            promised.setdefault(token.key, []).append(token)
    broken: dict[Cause, int] = {}
    for tokens in promised.values():
        if (cause := _main_cause(tokens)) is not None:
            broken[cause] = broken.get(cause, 0) + 1
    most = sorted(readers.items(), key=lambda item: -item[1])[:MOST_READERS]
    return BlameSummary(
        counts[False],
        counts[True],
        _most_first(seconds[False]),
        _most_first(seconds[True]),
        _most_first(broken),
        tuple(Reader(key, time) for key, time in most),
    )


def _main_cause(tokens: list[LateToken]) -> Cause | None:
    """The main cause of a sequence's broken promise. None: too few of its gaps are late."""
    firsts = [token for token in tokens if token.token_index == 0]
    gaps = [token for token in tokens if token.token_index > 0]
    if gaps and len(gaps) <= (1 - KEPT_GAPS) * (gaps[0].output_tokens - 1):
        gaps = []
    total: dict[Cause, float] = {}
    for token in firsts + gaps:
        for cause, seconds in excess(token).items():
            total[cause] = total.get(cause, 0.0) + seconds
    return max(total, key=lambda cause: total[cause]) if total else None


def excess(token: LateToken) -> dict[Cause, float]:
    """Seconds of each cause beyond the target.

    The target is used first by what every token needs: the decodes of a step, and the slices of the own prompt. The
    other causes share what it leaves, in proportion to their seconds.
    """
    needed = sum(part.seconds for part in token.parts if part.cause in NEEDED)
    others = sum(part.seconds for part in token.parts if part.cause not in NEEDED)
    left = max(0.0, token.target - needed)
    found = {}
    for part in token.parts:
        total, available = (needed, token.target) if part.cause in NEEDED else (others, left)
        if total > available:
            found[part.cause] = part.seconds * (total - available) / total
    return found


Number = TypeVar("Number", int, float)


def _most_first(values: dict[Cause, Number]) -> dict[Cause, Number]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))
