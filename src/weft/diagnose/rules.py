"""Rules: one small function per symptom, from the facts of an engine process to a finding or nothing.

A rule's `weight` is the share of the late time that its symptom explains. Late time is what first tokens and gaps took
beyond their targets; which cause gets it is said in facts.py. Symptoms that cost without making tokens late have a
small weight: they come after all that does.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from weft.diagnose.facts import Facts, Lateness
from weft.diagnose.finding import Change, Finding, Symptom
from weft.observe.blame import Cause

# A promise allows 1% of a request's gaps to be late, and p99 of first tokens is what servers are judged by. So this
# share of the first tokens, of the gaps, or of the requests with more late gaps than that, is no finding.
LATE_SHARE = 0.01
STALL_SHARE = 0.001  # of all gaps: fewer late gaps than LATE_SHARE are a finding if so many are twice the target
LEAST_WEIGHT = 0.1  # of the late time; less is not listed
WITHOUT_LATENESS = 0.01  # weight of a symptom that costs, but makes no token late
AGAIN_SHARE = 0.3  # of the computed prompt tokens were computed before: a third of the prefill is waste
ENOUGH_AGAIN_SHARE = 0.6  # if so much was computed before, all late time of prefill is due to it: no queue would remain
LONG_SHARE = 0.5  # of the late time because of prefill is due to few long prompts: without them, most would be in time
LEAST_AGAIN_PROMPTS = 3  # fewer are no pattern
IDLE_SHARE = 0.3  # of the time with work, the device idles: the host sets the pace
LEAST_IDLE_STEPS = 50  # fewer steps say nothing about a pace
PREEMPTED_SHARE = 0.05  # of the requests are preempted: their prefill is paid twice
IMPOSSIBLE_SHARE = 0.01  # of the requests have a target that even an idle machine misses
BLOCKED_SHARE = 0.1  # of the steps, the first waiting request waits for blocks
SLOW_RATIO = 1.2  # measured over predicted: weft learns smaller errors while it serves
SPARE_GAP = 1.5  # a target needs this many lone decode steps; `weft serve` raises smaller ones to it


def diagnose(facts: Facts) -> list[Finding]:
    """The findings, the main one first. None: the engine is healthy."""
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    named = [replace(finding, engine=facts.engine) for finding in found]
    return sorted(named, key=lambda finding: -finding.weight)


def summary(facts: Facts) -> list[str]:
    """What was recorded, in two lines."""
    targets = "" if facts.has_own_targets else " (requests without a target: see --gap-target-ms and --ttft-target-ms)"
    return [
        f"engine {facts.engine}: {facts.prompts} requests, {facts.steps} steps in {facts.seconds:.1f} s, policy "
        f"{facts.policy or 'not recorded'}{targets}",
        f"first token p50 {_ms(facts.ttft.p50)}, p99 {_ms(facts.ttft.p99)} ({facts.first_tokens.late} of "
        f"{facts.first_tokens.tokens} late); gaps p50 {_ms(facts.gap.p50)}, p99 {_ms(facts.gap.p99)} "
        f"({facts.gaps.late} of {facts.gaps.tokens} late); KV cache {facts.kv_used.p50:.0%} used; device idle "
        f"{facts.idle_share:.0%} of the time with work",
    ]


def is_late(facts: Facts) -> bool:
    """Whether enough tokens are late to look for a cause."""
    first, gaps = facts.first_tokens, facts.gaps
    return (
        first.late_share > LATE_SHARE
        or gaps.late_share > LATE_SHARE
        or gaps.broken > LATE_SHARE * max(1, facts.prompts)
        or gaps.stalls > STALL_SHARE * max(1, gaps.tokens)
        or facts.refused > LATE_SHARE * max(1, facts.prompts)
    )


def prefill_queueing(facts: Facts) -> Finding | None:
    """First tokens are late because prompts wait for each other, or take long themselves."""
    first = facts.first_tokens
    causes = (Cause.QUEUE, Cause.OWN_PREFILL, Cause.PREFILL, Cause.DECODES)
    seconds = (first.of(*causes) - _by_long(facts, first) - _starved(facts)) * (1 - _again(facts))
    refused = facts.refused > LATE_SHARE * max(1, facts.prompts)
    weight = _weight(facts, seconds)
    if weight is None and not (refused and is_late(facts)):
        return None
    evidence = [
        f"first token: p50 {_ms(facts.ttft.p50)}, p99 {_ms(facts.ttft.p99)} (target {_ms(facts.ttft_target)}); "
        f"{first.late} of {first.tokens} late",
        f"late time of first tokens: {_split(first.seconds)}",
        f"input tokens of a prompt: p50 {facts.prompt_tokens.p50:.0f}, p95 {facts.prompt_tokens.p95:.0f}, "
        f"p99 {facts.prompt_tokens.p99:.0f}; waiting requests: p50 {facts.waiting.p50:.0f}, "
        f"p99 {facts.waiting.p99:.0f}",
        f"a step with prefill computes {facts.prefill_tokens_per_step.p50:.0f} tokens (p50) in "
        f"{_ms(facts.prefill_step.p50)}",
    ]
    if facts.refused:
        evidence.append(f"{facts.refused} of {facts.prompts} requests were refused")
    changes = []
    if facts.policy != "slo":
        changes.append(Change("policy slo: the prompt with the least slack goes first", policy="slo"))
    if facts.max_num_batched_tokens:
        tokens = 4 * facts.max_num_batched_tokens
        changes.append(Change(f"--max-num-batched-tokens {tokens}", max_num_batched_tokens=tokens))
    changes.append(Change("a second engine for every second request", keep_one_in=2))
    return Finding(
        Symptom.PREFILL_QUEUEING,
        weight or WITHOUT_LATENESS,
        "prefill",
        tuple(evidence),
        "the histogram of input tokens, and the batch policy (--policy, --max-num-batched-tokens)",
        "--policy slo with a target for the first token, or more --max-num-batched-tokens; if the queue still grows, "
        "another engine",
        tuple(changes),
    )


def decode_scheduling(facts: Facts) -> Finding | None:
    """Streams stutter because every prompt takes too much of a step, not only a few long ones."""
    weight = _weight(facts, (facts.gaps.of(Cause.PREFILL) - _by_long(facts, facts.gaps)) * (1 - _again(facts)))
    if weight is None:
        return None
    changes = []
    if facts.policy != "slo":
        changes.append(_slo(facts))
    elif not facts.gap_is_promised and facts.gap_target is not None:
        changes.append(Change(f"--gap-target-ms {1e3 * facts.gap_target:g}, promised", gap_target=facts.gap_target))
    if facts.max_num_batched_tokens and facts.policy != "slo":
        tokens = max(64, int(facts.prefill_tokens_per_step.p95 or facts.max_num_batched_tokens) // 4)
        changes.append(
            Change(
                f"--policy chunked --max-num-batched-tokens {tokens}", policy="chunked", max_num_batched_tokens=tokens
            )
        )
    return Finding(
        Symptom.DECODE_SCHEDULING,
        weight,
        "decode",
        (
            _gap_line(facts),
            f"a step with prefill takes {_ms(facts.prefill_step.p50)} (p99 {_ms(facts.prefill_step.p99)}), a step "
            f"without {_ms(facts.decode_step.p50)}: prefill of {facts.prefill_tokens_per_step.p50:.0f} tokens (p50) is "
            "between two tokens of a stream",
            f"late time of gaps: {_split(facts.gaps.seconds)}",
        ),
        "how prefill and decodes share steps: p95 and p99 of the gaps, and the prefill tokens of a step",
        "a gap target (--gap-target-ms) with --policy slo, or fewer --max-num-batched-tokens",
        tuple(changes),
    )


def kv_pressure(facts: Facts) -> Finding | None:
    """Requests wait for blocks, or lose theirs."""
    seconds = sum(one.of(Cause.BLOCKS, Cause.PREEMPTION) for one in (facts.first_tokens, facts.gaps))
    weight = _weight(facts, seconds)
    preempts = facts.preempted_requests > PREEMPTED_SHARE * max(1, facts.prompts)
    blocked = facts.waits.get("blocks", 0.0)
    if weight is None and not preempts and not (blocked > BLOCKED_SHARE and is_late(facts)):
        return None
    changes = [Change("a KV cache of twice the size", kv_factor=2.0)]
    if facts.running.p50 > 1:
        seqs = max(1, int(facts.running.p50 * 0.75))
        changes.append(Change(f"--max-num-seqs {seqs}", max_num_seqs=seqs))
    return Finding(
        Symptom.KV_PRESSURE,
        weight or WITHOUT_LATENESS,
        "KV cache",
        (
            f"requests hold {facts.kv_used.p50:.0%} (p50) and {facts.kv_used.p99:.0%} (p99) of the "
            f"{facts.num_blocks or 0} blocks, with {facts.running.p50:.0f} (p50) and {facts.running.p99:.0f} (p99) "
            f"requests running of at most {facts.max_num_seqs or 0}",
            f"{facts.preemptions} preemptions of {facts.preempted_requests} requests threw {facts.lost_tokens} "
            "computed tokens away",
            f"in {blocked:.0%} of the steps the first waiting request waits for blocks",
        ),
        "active sequences and their lengths, evictions and preemptions (weft_preemptions_total, weft_kv_blocks_free)",
        "more memory for the KV cache (--gpu-memory-utilization, --kv-cache-memory-bytes), a smaller --max-num-seqs or "
        "a smaller max_tokens in requests",
        tuple(changes),
    )


def interference(facts: Facts) -> Finding | None:
    """A few long prompts delay the tokens of all other requests."""
    weight = _weight(facts, _by_long(facts, facts.first_tokens) + _by_long(facts, facts.gaps))
    if weight is None:
        return None
    keys = [one.key for one in facts.blamed]
    named = ", ".join(map(str, facts.blamed[:5]))
    changes = []
    if facts.policy != "slo":
        changes.append(_slo(facts))
    elif not facts.gap_is_promised and facts.gap_target is not None:
        changes.append(Change(f"--gap-target-ms {1e3 * facts.gap_target:g}, promised", gap_target=facts.gap_target))
    if keys:
        changes.append(Change("prefill isolation: the blamed prompts on another engine", without=frozenset(keys)))
    return Finding(
        Symptom.INTERFERENCE,
        weight,
        "prefill against decode",
        (
            _gap_line(facts),
            f"{facts.long_prompts} of {facts.prompts} prompts are long: {facts.long_prompt_tokens.p50:.0f} tokens "
            f"(p50), where the median prompt has {facts.prompt_tokens.p50:.0f}",
            f"they caused {_ms(facts.gaps.long_prompt_seconds)} of late gaps and "
            f"{_ms(facts.first_tokens.long_prompt_seconds)} of late first tokens of other requests",
            *([f"requests that caused most: {named}"] if named else []),
        ),
        "which prompts are in the steps of the late gaps (weft timeline shows them)",
        "a gap target (--gap-target-ms) with --policy slo, or a second engine for long prompts",
        tuple(changes),
    )


def prefix_reuse(facts: Facts) -> Finding | None:
    """Prompts are computed again although the cache had them, or would have had them."""
    prefix = facts.prefix
    again = _again(facts)
    if not again:
        return None
    seconds = again * (
        facts.first_tokens.of(Cause.QUEUE, Cause.OWN_PREFILL, Cause.PREFILL, Cause.DECODES)
        - _by_long(facts, facts.first_tokens)
        + facts.gaps.of(Cause.PREFILL)
        - _by_long(facts, facts.gaps)
    )
    evidence = [
        f"hit rate {prefix.hit_rate:.0%}; {prefix.again_share:.0%} of the computed prompt tokens were computed before"
    ]
    setting = []
    changes: tuple[Change, ...] = ()
    if not facts.prefix_caching:
        evidence.append(f"prefix caching is off; {prefix.evicted_prompts} prompts repeat the beginning of earlier ones")
        setting.append("--enable-prefix-caching")
    elif prefix.evicted_prompts:
        evidence.append(
            f"{prefix.evicted_prompts} of {prefix.prompts} prompts begin like an earlier one whose blocks were "
            f"overwritten meanwhile: {prefix.evicted_tokens} tokens were computed again"
        )
        setting.append("a larger KV cache (--gpu-memory-utilization, --kv-cache-memory-bytes)")
        changes = (Change("a KV cache of four times the size", kv_factor=4.0),)
    if prefix.broken_prompts:
        evidence.append(
            f"{prefix.broken_prompts} next turns differ from the turn before, most often at block "
            f"{prefix.broken_block}: {prefix.broken_tokens} tokens behind the change were computed again"
        )
        setting.append("a prompt that only appends (no time, no counter near its beginning)")
    return Finding(
        Symptom.PREFIX_REUSE,
        _weight(facts, seconds) or WITHOUT_LATENESS,
        "prefix cache",
        tuple(evidence),
        "the hit rate, where turns of a session differ, and whether they reach the same engine (session affinity)",
        "; ".join(setting),
        changes,
    )


def host_bound(facts: Facts) -> Finding | None:
    """The device idles while there is work, because the host is not ready with the next step."""
    weight = _weight(facts, sum(one.of(Cause.HOST) for one in (facts.first_tokens, facts.gaps)))
    # A small model leaves a device idle between its steps, which hurts only where tokens are late.
    idles = facts.idle_share > IDLE_SHARE and facts.steps >= LEAST_IDLE_STEPS and is_late(facts)
    if weight is None and not idles:
        return None
    slowest = max(facts.host_parts, key=lambda part: facts.host_parts[part], default="")
    parts = ", ".join(f"{part} {_ms(seconds)}" for part, seconds in facts.host_parts.items())
    return Finding(
        Symptom.HOST_BOUND,
        weight or WITHOUT_LATENESS,
        "host",
        (
            f"the device idles {facts.idle_share:.0%} of the time with work",
            f"host time of a step: p50 {_ms(facts.host.p50)}, p99 {_ms(facts.host.p99)} ({parts}); the device's step: "
            f"p50 {_ms(facts.step.p50)}",
            f"decodes of a step: p50 {facts.decodes.p50:.0f}",
        ),
        f"host time of a step by part (weft_host_seconds); the slowest part is {slowest}",
        "a faster or less busy CPU for the engine process, fewer other processes on its cores, CUDA graphs for all "
        "batch sizes in use; larger batches do not make a step's host time longer",
    )


def large_batches(facts: Facts) -> Finding | None:
    """The decode batch alone takes longer than the gap target."""
    weight = _weight(facts, facts.gaps.of(Cause.DECODES))
    if weight is None:
        return None
    fitting = facts.most_seqs_in_target
    changes = []
    seqs = fitting if fitting else max(1, int(facts.decodes.p50 // 2))
    if seqs and (facts.max_num_seqs is None or seqs < facts.max_num_seqs):
        changes.append(Change(f"--max-num-seqs {seqs}", max_num_seqs=seqs))
    changes.append(Change("a second engine for every second request", keep_one_in=2))
    known = f"; by the profile, at most {fitting} decodes keep it" if fitting else ""
    slow = facts.decode_ratio.p50
    slower = [f"such steps take {slow:.2f} times what is predicted: the device is busy, or its calibration is old"]
    return Finding(
        Symptom.LARGE_BATCHES,
        weight,
        "decode",
        (
            _gap_line(facts),
            f"a step without prefill takes {_ms(facts.decode_step.p50)} (p50) and {_ms(facts.decode_step.p99)} (p99) "
            f"with {facts.decodes.p50:.0f} (p50) and {facts.decodes.p99:.0f} (p99) decodes{known}",
            *(slower if slow > SLOW_RATIO else []),
        ),
        "the number of decodes of a step and the length of their contexts",
        "a smaller --max-num-seqs, a larger --gap-target-ms, or another engine",
        tuple(changes),
    )


def impossible_target(facts: Facts) -> Finding | None:
    """A target that this device misses even for a single request."""
    first, gaps = facts.first_tokens, facts.gaps
    weight = _weight(facts, first.impossible_seconds + gaps.impossible_seconds + _starved(facts))
    requests = max(facts.impossible_ttft, facts.impossible_gap)
    if weight is None or requests <= IMPOSSIBLE_SHARE * facts.prompts:
        return None
    evidence = []
    changes: tuple[Change, ...] = ()
    setting = []
    if facts.impossible_gap and facts.lone_decode is not None:
        evidence.append(
            f"{facts.impossible_gap} of {facts.prompts} requests have a gap target below a lone decode step: "
            f"{_ms(facts.least_gap_target)} against {_ms(facts.lone_decode)}"
        )
        least = SPARE_GAP * facts.lone_decode
        setting.append(f"a gap target of at least {_ms(least)} (1.5 lone decode steps)")
        changes = (Change(f"--gap-target-ms {1e3 * least:.3g}", gap_target=least),)
    if facts.impossible_ttft:
        evidence.append(
            f"{facts.impossible_ttft} of {facts.prompts} requests have a target for the first token below the prefill "
            "of their prompt on an idle machine"
        )
        setting.append("a larger --ttft-target-per-1k-ms")
    return Finding(
        Symptom.IMPOSSIBLE_TARGET,
        weight,
        "targets",
        tuple(evidence),
        "the targets of the server and of its requests, and `weft calibrate`",
        "; ".join([*setting, "or a faster device"]),
        changes,
    )


def slow_clients(facts: Facts) -> Finding | None:
    """Tokens wait in sockets because clients read slowly."""
    blamed = sum(one.of(Cause.CLIENT) for one in (facts.first_tokens, facts.gaps))
    weight = _weight(facts, blamed)
    if weight is None:
        return None
    return Finding(
        Symptom.SLOW_CLIENTS,
        weight,
        "clients",
        (
            f"{facts.slow_requests} requests have clients that made a chunk wait; their sockets took "
            f"{_ms(facts.slow_seconds)} in total",
            f"late time because of clients: {_ms(blamed)}",
        ),
        "the network and the clients of these requests; the engine had their tokens in time",
        "nothing in weft: a faster client, a proxy that does not buffer, a nearer server",
    )


def few_seats(facts: Facts) -> Finding | None:
    """Requests wait because max_num_seqs requests run."""
    weight = _weight(facts, sum(one.of(Cause.SEATS) for one in (facts.first_tokens, facts.gaps)))
    if weight is None:
        return None
    changes = []
    if facts.max_num_seqs:
        changes.append(Change(f"--max-num-seqs {2 * facts.max_num_seqs}", max_num_seqs=2 * facts.max_num_seqs))
    changes.append(Change("a second engine for every second request", keep_one_in=2))
    return Finding(
        Symptom.FEW_SEATS,
        weight,
        "queue",
        (
            f"in {facts.waits.get('seats', 0.0):.0%} of the steps the first waiting request waits for a seat; "
            f"{facts.running.p50:.0f} (p50) of {facts.max_num_seqs or 0} seats are taken",
            f"requests hold {facts.kv_used.p50:.0%} of the KV cache (p50)",
        ),
        "running requests against --max-num-seqs, and the KV cache that is left",
        "a larger --max-num-seqs, if the gap target leaves room for it; else another engine",
        tuple(changes),
    )


def grammar_masks(facts: Facts) -> Finding | None:
    return _simple(
        facts,
        Cause.GRAMMAR,
        Symptom.GRAMMAR_MASKS,
        "structured output",
        "the schemas of the late requests: large ones have masks that take long to compute",
        "a simpler schema, or more CPU cores for the engine process",
    )


def api_process(facts: Facts) -> Finding | None:
    found = _simple(
        facts,
        Cause.API,
        Symptom.API_PROCESS,
        "API process",
        "the CPU use of the API process, and other processes on its cores",
        "a free core for the API process; fewer streams a server; less work on each token (log probabilities)",
    )
    if found is None or not facts.lags:
        return found
    lag = f"its event loop stood still {facts.lags} times, {_ms(facts.lag_seconds)} in total"
    return replace(found, evidence=(*found.evidence, lag))


def transfers(facts: Facts) -> Finding | None:
    return _simple(
        facts,
        Cause.TRANSFER,
        Symptom.TRANSFERS,
        "transfer",
        "the connection between the workers",
        "a faster connection between workers, or prefill and decode on the same worker",
    )


def slow_steps(facts: Facts) -> Finding | None:
    return _simple(
        facts,
        Cause.SLOW_STEP,
        Symptom.SLOW_STEPS,
        "device",
        "other programs on the device or on the engine's cores, and the device's clock and temperature: single steps "
        "took more than 1.25 times as long as such steps usually do",
        "a device and cores without other work; larger targets if that cannot be",
    )


def unexplained(facts: Facts) -> Finding | None:
    return _simple(
        facts,
        Cause.UNEXPLAINED,
        Symptom.UNEXPLAINED,
        "not known",
        "whether the recording is complete: a ring in memory holds only the last minutes",
        "weft serve --record FILE for a complete recording",
    )


RULES: tuple[Callable[[Facts], Finding | None], ...] = (
    prefill_queueing,
    decode_scheduling,
    kv_pressure,
    interference,
    prefix_reuse,
    host_bound,
    large_batches,
    impossible_target,
    slow_clients,
    few_seats,
    grammar_masks,
    api_process,
    transfers,
    slow_steps,
    unexplained,
)


def _simple(facts: Facts, cause: Cause, symptom: Symptom, phase: str, inspect: str, setting: str) -> Finding | None:
    """The finding of a symptom that is one cause and has no numbers beside its late time."""
    first, gaps = facts.first_tokens.of(cause), facts.gaps.of(cause)
    weight = _weight(facts, first + gaps)
    if weight is None:
        return None
    evidence = (
        f"it explains {_ms(first)} of late first tokens and {_ms(gaps)} of late gaps, {weight:.0%} of the late time"
    )
    return Finding(symptom, weight, phase, (evidence,), inspect, setting)


def _weight(facts: Facts, seconds: float) -> float | None:
    """The share of the late time that `seconds` are; None if that is no finding."""
    if not is_late(facts):
        return None
    share = seconds / max(1e-9, facts.first_tokens.total + facts.gaps.total)
    return share if share >= LEAST_WEIGHT else None


def _by_long(facts: Facts, lateness: Lateness) -> float:
    """Late seconds because of few long prompts; 0 if these are not most of what prefill causes."""
    both = (facts.first_tokens, facts.gaps)
    long = sum(one.long_prompt_seconds for one in both)
    is_most = long >= LONG_SHARE * sum(one.prefill_seconds for one in both)
    return lateness.long_prompt_seconds if is_most else 0.0


def _again(facts: Facts) -> float:
    """Share of the late time of prefill that is due to computing prompts again; 0 if that is no pattern."""
    prefix = facts.prefix
    if prefix.evicted_prompts + prefix.broken_prompts < LEAST_AGAIN_PROMPTS or prefix.again_share < AGAIN_SHARE:
        return 0.0
    return min(1.0, prefix.again_share / ENOUGH_AGAIN_SHARE)


def _starved(facts: Facts) -> float:
    """Seconds of late first tokens that an impossible gap target causes: `slo` leaves prefill no time beside it."""
    if not facts.policy.startswith("slo") or facts.impossible_gap <= IMPOSSIBLE_SHARE * facts.prompts:
        return 0.0
    return facts.first_tokens.of(Cause.DECODES, Cause.QUEUE) - _by_long(facts, facts.first_tokens)


def _slo(facts: Facts) -> Change:
    target = facts.gap_target
    words = "policy slo" if target is None else f"policy slo with --gap-target-ms {1e3 * target:g}"
    return Change(words, policy="slo", gap_target=target)


def _gap_line(facts: Facts) -> str:
    gaps = facts.gaps
    return (
        f"gaps: p50 {_ms(facts.gap.p50)}, p95 {_ms(facts.gap.p95)}, p99 {_ms(facts.gap.p99)} (target "
        f"{_ms(facts.gap_target)}); {gaps.late} of {gaps.tokens} late, {gaps.stalls} of them twice the target; "
        f"more than 1% of the gaps of {gaps.broken} requests are late"
    )


def _split(seconds: dict[str, float]) -> str:
    """The causes with their shares, the largest first."""
    total = sum(seconds.values())
    shares: Iterable[tuple[str, float]] = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{cause} {value / total:.0%}" for cause, value in shares if value >= 0.01 * total) or "none"


def _ms(seconds: float | None) -> str:
    """Seconds as text, in the unit that suits them."""
    if seconds is None:
        return "none"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
