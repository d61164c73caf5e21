"""Makes policies by name, runs them over a trace, and reports how many requests met their targets."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.core import CostModel, Policy, Scheduler, Targets, chunked, monolithic, slo, slo_order
from weft.errors import OptionError
from weft.sim.profiles import Profile
from weft.sim.simulator import MakeTable, Played, Truth, play
from weft.sim.traces import Trace

POLICIES = "monolithic, chunked:N, slo, slo-order:N"
PERCENTILES = {"p50": 50.0, "p99": 99.0, "p999": 99.9, "max": 100.0}
KEPT_GAPS = 0.99  # share of a request's gaps that must be within the target


@dataclass(frozen=True)
class Report:
    """One policy on one trace. Times in milliseconds, as percentiles."""

    policy: str
    kept: float  # share of all requests that met their targets (TTFT and gap)
    goodput_rps: float  # requests that met their targets, per second of arrivals
    refused: int
    requests: int
    preemptions: int
    prefix_hit_rate: float
    output_tokens_per_s: float
    steps: int
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    gap_ms: dict[str, float]


def make_policy(name: str, profile: Profile, cost: CostModel | None = None) -> Policy:
    """Returns a policy by name. `cost` is its initial cost model (default: the profile's exact coefficients)."""
    cost = CostModel(profile.coefficients, host=profile.host) if cost is None else cost
    kind, _, size = name.partition(":")
    if size and not (size.isdecimal() and int(size) > 0):
        raise OptionError(f"policy {name!r}: {size!r} is not a number of tokens")
    if kind == "monolithic" and not size:
        return monolithic(profile.max_num_batched_tokens)
    if kind == "chunked":
        return chunked(int(size) if size else profile.max_num_batched_tokens)
    if kind == "slo" and not size:
        return slo(cost, profile.max_num_batched_tokens)
    if kind == "slo-order" and size:
        return slo_order(cost, int(size))
    raise OptionError(f"unknown policy {name!r}; known: {POLICIES}")


def run_policy(
    name: str,
    trace: Trace,
    profile: Profile,
    targets: Targets,
    truth: Truth,
    progress: Callable[[int], None] = lambda arrived: None,
    cost: CostModel | None = None,
    make_table: MakeTable | None = None,
) -> Played:
    """Plays a trace under a policy. `cost` is the policy's initial cost model (see `make_policy`)."""
    scheduler = Scheduler(
        wave=profile.coefficients.wave,
        policy=make_policy(name, profile, cost),
        num_blocks=profile.kv_tokens // profile.block_size,
        block_size=profile.block_size,
        max_num_seqs=profile.max_num_seqs,
    )
    return play(trace, scheduler, truth, targets, progress, profile.host, make_table)


def kept_promises(played: Played, targets: Targets) -> NDArray[np.bool_]:
    """For each request: whether it met its TTFT target and 99% of its gaps met the gap target.

    A request that was refused or did not finish counts as missed.
    """
    requests = len(played.ttft)
    in_time = played.gaps <= targets.gap * (1 + 1e-9)
    good = np.bincount(played.gap_owner[in_time], minlength=requests)
    total = np.bincount(played.gap_owner, minlength=requests)
    due = np.array([targets.first_token(tokens) for tokens in played.prompt_tokens.tolist()])
    return (played.ttft <= due * (1 + 1e-9)) & (good >= KEPT_GAPS * total) & np.isfinite(played.finished)


def report(name: str, played: Played, targets: Targets) -> Report:
    kept = kept_promises(played, targets)
    served = np.isfinite(played.ttft)
    several = np.isfinite(played.finished) & (played.output_tokens > 1)
    decode = played.finished[several] - played.arrival[several] - played.ttft[several]
    prompt_tokens = played.prefill_tokens + played.cached_tokens
    return Report(
        policy=name,
        kept=float(kept.mean()),
        goodput_rps=float(kept.sum() / max(played.span, 1e-9)),
        refused=int(played.refused.sum()),
        requests=len(kept),
        preemptions=played.preemptions,
        prefix_hit_rate=played.cached_tokens / max(1, prompt_tokens),
        output_tokens_per_s=float(played.output_tokens[np.isfinite(played.finished)].sum() / max(played.ended, 1e-9)),
        steps=played.steps,
        ttft_ms=_percentiles(played.ttft[served]),
        tpot_ms=_percentiles(decode / (played.output_tokens[several] - 1)),
        gap_ms=_percentiles(played.gaps),
    )


def _percentiles(seconds: NDArray[np.float64]) -> dict[str, float]:
    if not len(seconds):
        return dict.fromkeys(PERCENTILES, 0.0)
    values = np.percentile(seconds, list(PERCENTILES.values())) * 1000
    return dict(zip(PERCENTILES, values.tolist(), strict=True))
