"""Finding: one answer of a diagnosis."""

from dataclasses import dataclass
from enum import StrEnum


class Symptom(StrEnum):
    """What hurts. Each has one rule for recordings, and most have one for metrics."""

    PREFILL_QUEUEING = "prefill queueing"  # first tokens are late: prompts wait for prefill
    DECODE_SCHEDULING = "decode scheduling"  # streams stutter: prefill takes too much of each step
    KV_PRESSURE = "KV cache pressure"
    INTERFERENCE = "phase interference"  # few long prompts delay all other requests
    PREFIX_REUSE = "prefix reuse"  # prompts are computed again although they were computed before
    HOST_BOUND = "host-bound steps"  # the device idles while there is work
    LARGE_BATCHES = "batches too large for the target"
    IMPOSSIBLE_TARGET = "a target that even an idle machine misses"
    SLOW_CLIENTS = "slow clients"
    FEW_SEATS = "too few seats"
    GRAMMAR_MASKS = "slow grammar masks"
    API_PROCESS = "slow API process"
    TRANSFERS = "transfers of KV blocks"
    SLOW_STEPS = "slow steps"
    UNEXPLAINED = "unexplained lateness"


@dataclass(frozen=True)
class Change:
    """A change that a replay can try."""

    words: str
    policy: str | None = None  # as in `weft simulate --policy`
    gap_target: float | None = None  # seconds, promised to every request
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    kv_factor: float = 1.0  # size of the KV cache, relative to the recorded one
    without: frozenset[int] = frozenset()  # keys of prompts that go to another engine
    keep_one_in: int = 1  # 2: every second request goes to another engine


@dataclass(frozen=True)
class Finding:
    """A symptom with its evidence. `weight` is the share of all late time that it explains; it orders findings."""

    symptom: Symptom
    weight: float
    phase: str  # the phase that hurts
    evidence: tuple[str, ...]
    inspect: str  # what to look at first
    setting: str  # what to change
    changes: tuple[Change, ...] = ()  # what a replay can try
    engine: str = ""
