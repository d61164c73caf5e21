"""Traces of real requests: arrival times, lengths, and shared prefixes."""

import csv
import json
import math
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from weft.errors import OptionError

MOONCAKE_BLOCK = 512  # tokens per entry of hash_ids
MOONCAKE_BIN = 3.0  # seconds: its timestamps are multiples of this
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    time: float  # seconds from the start of the trace
    prompt_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()  # equal ids at equal indices mean equal blocks of MOONCAKE_BLOCK tokens
    tenant: str = ""
    flex: bool = False
    max_tokens: int = 0  # limit that the scheduler sees instead of output_tokens; 0: it sees output_tokens


@dataclass(frozen=True)
class LeftOut:
    """Requests of a trace that are left out because they are longer than the context."""

    count: int
    of: int  # all requests of the trace
    longest: int  # tokens of prompt and output
    context: int  # tokens

    def __str__(self) -> str:
        return (
            f"{self.count:,} of {self.of:,} requests are longer than the context of {self.context:,} tokens and are "
            f"left out; the longest has {self.longest:,}"
        )


@dataclass(frozen=True)
class Trace:
    name: str
    arrivals: tuple[Arrival, ...]  # sorted by time
    was_unsorted: bool = False

    def first(self, seconds: float) -> "Trace":
        """The arrivals of the first `seconds`."""
        return replace(self, arrivals=tuple(arrival for arrival in self.arrivals if arrival.time < seconds))

    def scaled(self, rate: float) -> "Trace":
        """The same requests, `rate` times as fast."""
        return replace(self, arrivals=tuple(replace(arrival, time=arrival.time / rate) for arrival in self.arrivals))

    def fitting(self, context: int) -> tuple["Trace", "LeftOut | None"]:
        """The trace without requests longer than `context` tokens, and a count of the left-out ones."""
        lengths = [arrival.prompt_tokens + arrival.output_tokens for arrival in self.arrivals]
        longest = max(lengths, default=0)
        if longest <= context:
            return self, None
        kept = tuple(one for one, length in zip(self.arrivals, lengths, strict=True) if length <= context)
        left_out = LeftOut(len(lengths) - len(kept), len(lengths), longest, context)
        if not kept:
            raise OptionError(f"{self.name}: {left_out}; nothing remains: choose a longer context or another trace")
        return replace(self, arrivals=kept), left_out

    @property
    def span(self) -> float:
        """Seconds from the start to the last arrival."""
        return self.arrivals[-1].time if self.arrivals else 0.0


def load_trace(path: Path) -> Trace:
    """Loads a trace: Mooncake's JSON lines if the file ends in .jsonl, else Azure's CSV."""
    try:
        text = path.read_text(encoding="utf-8")
        arrivals = _read_mooncake(text) if path.suffix == ".jsonl" else _read_azure(text)
    except (OSError, ValueError, csv.Error) as error:
        raise OptionError(f"cannot read the trace {path}: {error}") from None
    if not arrivals:
        raise OptionError(f"the trace {path} has no requests in it")
    ordered = sorted(arrivals, key=lambda arrival: arrival.time)
    start = ordered[0].time
    moved = tuple(replace(arrival, time=arrival.time - start) for arrival in ordered)
    return Trace(path.stem, moved, was_unsorted=ordered != arrivals)


def _read_azure(text: str) -> list[Arrival]:
    rows = csv.DictReader(text.splitlines())
    missing = [name for name in AZURE_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        raise ValueError(f"column {missing[0]} is missing; a trace has {', '.join(AZURE_COLUMNS)}")
    arrivals = []
    for row in rows:
        try:
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            arrivals.append(Arrival(moment, *_lengths(row["ContextTokens"], row["GeneratedTokens"])))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"line {rows.line_num}: {error}") from None
    return arrivals


def _read_mooncake(text: str) -> list[Arrival]:
    arrivals = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            arrivals.append(_mooncake_arrival(json.loads(line)))
        except KeyError as error:
            known = ", ".join(MOONCAKE_KEYS)
            raise ValueError(f"line {number}: {error} is missing; a line has {known}") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"line {number}: {error}") from None
    return _spread(arrivals)


def _mooncake_arrival(row: object) -> Arrival:
    if not isinstance(row, dict):
        raise TypeError(f"{row!r} is not an object")
    prompt, output = _lengths(row["input_length"], row["output_length"])
    moment, ids = float(row["timestamp"]) / 1000, row["hash_ids"]
    if not math.isfinite(moment):
        raise ValueError(f"timestamp {row['timestamp']} is not a time")
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        raise TypeError(f"hash_ids {ids!r} is not a list of whole numbers")
    return Arrival(moment, prompt, output, tuple(ids))


def _spread(arrivals: list[Arrival]) -> list[Arrival]:
    """Spreads requests with the same timestamp evenly over the time bin that the timestamp stands for."""
    moments: dict[float, int] = {}
    for arrival in arrivals:
        moments[arrival.time] = moments.get(arrival.time, 0) + 1
    spread_so_far: dict[float, int] = {}
    spread = []
    for arrival in arrivals:
        index = spread_so_far.get(arrival.time, 0)
        spread_so_far[arrival.time] = index + 1
        offset = MOONCAKE_BIN * index / moments[arrival.time]
        spread.append(replace(arrival, time=arrival.time + offset))
    return spread


def _lengths(prompt: str | int, output: str | int) -> tuple[int, int]:
    lengths = int(prompt), int(output)
    if min(lengths) < 1 or not all(map(math.isfinite, lengths)):
        raise ValueError(f"lengths must be at least 1, got {lengths[0]} and {lengths[1]}")
    return lengths
