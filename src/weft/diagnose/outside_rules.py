"""Findings from the metrics of a server, with what can be known from outside and no more.

Metrics have no blame, so that each rule names the pattern that it takes for its symptom.
"""

from collections.abc import Callable

from weft.diagnose.finding import Finding, Symptom
from weft.diagnose.metrics_page import Distribution
from weft.diagnose.outside import OutsideFacts

FULL_KV = 0.9  # share of the KV cache in use at which new requests soon wait for blocks
PREEMPTED_SHARE = 0.01  # preemptions for each first token
QUEUE_SHARE = 0.5  # of the mean time to first token is spent in the queue
LATE_PERCENTILE = 0.99  # this percentile of times must be within the target
STUTTER = 3.0  # p99 of gaps over their median: a stream with a steady pace has less than this
LONG_TAIL = 4.0  # p99 of prompt lengths over their median: few prompts are much longer than the rest
LEAST_LONG_TOKENS = 2000.0  # p99 of prompt lengths; shorter prompts take one step
HIT_DROP = 0.5  # hit rate of the interval over that before: below this, reuse has broken
LEAST_HIT_RATE = 0.2  # a hit rate that was lower means that few prompts share a beginning


def diagnose_outside(facts: OutsideFacts) -> list[Finding]:
    """The findings, the main one first. None: the server looks healthy from outside."""
    found = [finding for rule in RULES if (finding := rule(facts)) is not None]
    return sorted(found, key=lambda finding: -finding.weight)


def kv_pressure(facts: OutsideFacts) -> Finding | None:
    """The cache is full while requests wait, or requests are preempted. It comes first: the others follow from it."""
    preemptions = facts.preemptions or 0.0
    preempts = preemptions > PREEMPTED_SHARE * max(1.0, facts.ttft.count)
    waits = (facts.kv_used or 0.0) >= FULL_KV and facts.waiting > 0
    if not preempts and not waits:
        return None
    used = "not exported" if facts.kv_used is None else f"{facts.kv_used:.0%} used"
    return Finding(
        Symptom.KV_PRESSURE,
        1.0,
        "KV cache",
        (
            f"KV cache {used}, {facts.running:.0f} requests running, {facts.waiting:.0f} waiting",
            f"{preemptions:.0f} preemptions in {facts.seconds:g} s, with {facts.ttft.count:.0f} first tokens",
        ),
        "active sequences and their lengths, and preemptions",
        {
            "vllm": "--gpu-memory-utilization up, or --max-num-seqs and --max-model-len down",
            "sglang": "--mem-fraction-static up, or --max-running-requests and --context-length down",
        }[facts.engine],
        engine=facts.engine,
    )


def prefix_reuse(facts: OutsideFacts) -> Finding | None:
    """The cache answered much more before."""
    now, earlier = facts.hit_rate, facts.earlier_hit_rate
    if now is None or earlier is None or earlier < LEAST_HIT_RATE or now > HIT_DROP * earlier:
        return None
    return Finding(
        Symptom.PREFIX_REUSE,
        0.9,
        "prefix cache",
        (f"{now:.0%} of the prompt tokens were cached in these {facts.seconds:g} s, {earlier:.0%} since the start",),
        "what changed: the beginning of prompts, the routing of sessions (affinity), or evictions by other traffic",
        "session affinity in the router, and prompts that only append",
        engine=facts.engine,
    )


def prefill_queueing(facts: OutsideFacts) -> Finding | None:
    """First tokens are late, and most of the time was spent in the queue or in prefill."""
    p99 = facts.ttft.percentile(LATE_PERCENTILE)
    if not facts.ttft.count or p99 <= facts.ttft_target:
        return None
    evidence = [
        f"first token: p50 {_ms(facts.ttft.percentile(0.5))}, p99 {_ms(p99)} (target {_ms(facts.ttft_target)} for a "
        f"mean prompt)"
    ]
    where = "where they wait is not exported"
    if facts.queue is not None and facts.queue.count:
        share = facts.queue.mean / max(1e-9, facts.ttft.mean)
        where = f"{share:.0%} of the mean time to first token is spent in the queue"
        if share < QUEUE_SHARE:
            where += ": prompts take long themselves"
    evidence.append(f"{where}; {facts.waiting:.0f} requests wait")
    if facts.prompt_lengths is not None:
        evidence.append(_lengths(facts.prompt_lengths))
    return Finding(
        Symptom.PREFILL_QUEUEING,
        0.7,
        "prefill",
        tuple(evidence),
        "the histogram of input tokens, and the batch policy",
        {
            "vllm": "--max-num-batched-tokens up (gaps get longer), or another replica",
            "sglang": "--chunked-prefill-size up (gaps get longer), or another replica",
        }[facts.engine],
        engine=facts.engine,
    )


def decode_batches(facts: OutsideFacts) -> Finding | None:
    """Even the median gap is late: not single steps but all of them take too long."""
    p50 = facts.gap.percentile(0.5)
    if not facts.gap.count or p50 <= facts.gap_target:
        return None
    return Finding(
        Symptom.LARGE_BATCHES,
        0.8,
        "decode",
        (f"gaps: p50 {_ms(p50)} (target {_ms(facts.gap_target)}), with {facts.running:.0f} requests running",),
        "the number of running requests and the length of their contexts; the host, which metrics do not show",
        {
            "vllm": "--max-num-seqs down, or another replica",
            "sglang": "--max-running-requests down, or another replica",
        }[facts.engine],
        engine=facts.engine,
    )


def stutter(facts: OutsideFacts) -> Finding | None:
    """The median gap is in time, and the slowest are not: some steps are longer than the others."""
    p50, p95, p99 = (facts.gap.percentile(share) for share in (0.5, 0.95, LATE_PERCENTILE))
    if not facts.gap.count or p50 > facts.gap_target or p99 <= facts.gap_target or p99 < STUTTER * p50:
        return None
    lengths = facts.prompt_lengths
    has_tail = lengths is not None and lengths.percentile(0.99) >= max(
        LEAST_LONG_TOKENS, LONG_TAIL * lengths.percentile(0.5)
    )
    evidence = [f"gaps: p50 {_ms(p50)}, p95 {_ms(p95)}, p99 {_ms(p99)} (target {_ms(facts.gap_target)})"]
    if lengths is not None:
        evidence.append(_lengths(lengths))
    if facts.prefill_tokens is not None:
        evidence.append(f"{facts.prefill_tokens / facts.seconds:.0f} prompt tokens a second beside the decodes")
    setting = {
        "vllm": "--max-num-batched-tokens down",
        "sglang": "--chunked-prefill-size down (and --enable-mixed-chunk)",
    }[facts.engine]
    if has_tail:
        return Finding(
            Symptom.INTERFERENCE,
            0.75,
            "prefill against decode",
            tuple(evidence),
            "the long prompts: which ones they are is not known from outside",
            f"{setting}, or a separate server for long prompts (disaggregated prefill)",
            engine=facts.engine,
        )
    return Finding(
        Symptom.DECODE_SCHEDULING,
        0.75,
        "decode",
        tuple(evidence),
        "how prefill and decodes share steps",
        setting,
        engine=facts.engine,
    )


RULES: tuple[Callable[[OutsideFacts], Finding | None], ...] = (
    kv_pressure,
    prefix_reuse,
    decode_batches,
    stutter,
    prefill_queueing,
)


def _lengths(lengths: Distribution) -> str:
    p50, p99 = lengths.percentile(0.5), lengths.percentile(0.99)
    return f"input tokens of a prompt: p50 {p50:.0f}, p99 {p99:.0f} (interpolated in the histogram)"


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
