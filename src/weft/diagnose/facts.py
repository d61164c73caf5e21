"""Facts: what one engine process of a recording did, as numbers. The rules read these and nothing else."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import msgspec
import numpy as np

from weft.core import StepShape
from weft.core.shape import decodes_alone
from weft.diagnose.prefixes import PrefixFacts, prefix_facts
from weft.diagnose.step_times import StepTimes
from weft.observe.blame import KEPT_GAPS, Cause, late_tokens
from weft.observe.blame_summary import excess
from weft.observe.frames import EngineFrame, PromptFrame
from weft.observe.recording import EngineRun, Recording
from weft.sim.profiles import Profile, read_profile

DEFAULT_BLOCK_SIZE = 16  # tokens; only for a recording that begins after its engine's start
# A prompt is long if it has this many times the tokens of the median prompt, and at least LEAST_LONG_TOKENS.
LONG_PROMPT = 4.0
LEAST_LONG_TOKENS = 512
# Idle seconds of the device between two steps count as the host's only up to this: a longer pause had no work.
MOST_HOST_PAUSE_S = 0.25
MOST_BLAMED = 1000  # long prompts that are named as causes
STALL = 2.0  # a gap of this many targets is a stall, which a reader of the text notices
NO_PREFIXES = PrefixFacts()
SPARE_STEP = 0.9  # of a gap target, for a planned step: steps vary, and the host takes time as well
SLOW_CLIENT_S = 0.05  # seconds that the socket made one chunk wait


@dataclass(frozen=True)
class Yardsticks:
    """Targets for requests that have none, in seconds. They are goals of this diagnosis, not promises."""

    gap: float = 0.05
    ttft: float = 1.0
    ttft_per_1k: float = 0.25  # added per 1,000 prompt tokens

    def first_token(self, prompt_tokens: int) -> float:
        return self.ttft + self.ttft_per_1k * prompt_tokens / 1000


@dataclass(frozen=True)
class Spread:
    """Percentiles of some values; 0 if there are none."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        found = np.fromiter(values, np.float64)
        return cls(*np.percentile(found, (50, 95, 99)).tolist()) if len(found) else cls()


@dataclass(frozen=True)
class Lateness:
    """Late tokens of one kind: first tokens, or later ones. Seconds are beyond the targets.

    The seconds of a token go first to the causes that it could do without, then to the decode batch and to its own
    prefill (see `excess`).
    """

    tokens: int = 0  # all tokens of this kind, late or not
    late: int = 0
    stalls: int = 0  # late by STALL targets
    broken: int = 0  # requests with a late first token, or with more than 1% of their gaps late
    seconds: dict[str, float] = field(default_factory=dict)  # by Cause
    long_prompt_seconds: float = 0.0  # of those, caused by prefill of few long prompts of other requests
    impossible_seconds: float = 0.0  # late against a target that even an idle machine misses; in no other sum
    impossible: int = 0  # such tokens

    @property
    def prefill_seconds(self) -> float:
        """Seconds because of prefill of other requests, in the same steps or before the first one."""
        return self.of(Cause.PREFILL, Cause.QUEUE)

    @property
    def late_share(self) -> float:
        return self.late / max(1, self.tokens)

    def of(self, *causes: Cause) -> float:
        return sum(self.seconds.get(cause, 0.0) for cause in causes)

    @property
    def total(self) -> float:
        return sum(self.seconds.values()) + self.impossible_seconds


class BlamedPrompt(NamedTuple):
    """A long prompt that made tokens of other requests late."""

    key: int
    request_id: str  # "": not known, or another tenant's
    prompt_tokens: int
    seconds: float  # beyond the targets of others

    def __str__(self) -> str:
        known = "".join(one if one.isprintable() else "?" for one in self.request_id)  # clients may choose it
        return f"{known or f'sequence {self.key}'} ({self.prompt_tokens} tokens: {self.seconds:.3g} s)"


@dataclass(frozen=True)
class Facts:
    """Times are seconds, if not stated otherwise."""

    engine: str = "0"
    policy: str = ""  # "": the recording begins after its engine's start
    seconds: float = 0.0  # from the first recorded step to the last
    steps: int = 0
    prompts: int = 0
    finished: int = 0
    refused: int = 0
    prompt_tokens: Spread = Spread()
    long_prompts: int = 0
    long_prompt_tokens: Spread = Spread()
    ttft: Spread = Spread()
    ttft_of_long: Spread = Spread()
    gap: Spread = Spread()
    step: Spread = Spread()
    decode_step: Spread = Spread()  # steps without prefill
    decode_ratio: Spread = Spread()  # measured over predicted, of steps without prefill; 0: nothing was predicted
    prefill_step: Spread = Spread()  # steps with prefill
    prefill_tokens_per_step: Spread = Spread()
    first_tokens: Lateness = Lateness()
    gaps: Lateness = Lateness()
    gap_target: float | None = None  # median of the targets of its prompts
    gap_is_promised: bool = False
    ttft_target: float | None = None
    has_own_targets: bool = True  # False: the yardsticks were taken for most prompts
    blamed: tuple[BlamedPrompt, ...] = ()  # the most first
    running: Spread = Spread()
    waiting: Spread = Spread()
    decodes: Spread = Spread()  # by step that has any
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_blocks: int | None = None
    kv_used: Spread = Spread()  # share of the blocks that requests hold
    preemptions: int = 0
    preempted_requests: int = 0
    lost_tokens: int = 0
    waits: dict[str, float] = field(default_factory=dict)  # share of the steps in which the first request waits for it
    prefix: PrefixFacts = NO_PREFIXES
    prefix_caching: bool = True
    idle_share: float = 0.0  # of the time with work, how much of it the device idled
    host: Spread = Spread()  # host time of a step: plan, submit, commit and outside
    host_parts: dict[str, float] = field(default_factory=dict)  # median by part
    lone_decode: float | None = None  # the shortest decode step; None: not known
    least_gap_target: float | None = None
    impossible_ttft: int = 0  # prompts whose target is below their prefill on an idle machine
    impossible_gap: int = 0  # prompts whose target is below a lone decode step
    most_seqs_in_target: int | None = None  # most decodes whose step keeps the gap target; None: not known
    slow_requests: int = 0  # whose client read slowly
    slow_seconds: float = 0.0  # that sockets made chunks wait
    lag_seconds: float = 0.0  # in which the event loop of the API process stood still
    lags: int = 0


def facts_of(
    run: EngineRun, recording: Recording, yardsticks: Yardsticks, progress: Callable[[int], None] = lambda percent: None
) -> Facts:
    """The facts of an engine process that has steps. `progress` is told the percentage of the recorded time."""
    own_targets = sum(
        prompt.gap_target is not None or prompt.ttft_target is not None for prompt in run.prompts.values()
    )
    run = _with_targets(run, yardsticks)
    times = StepTimes.of(run)
    info = run.info
    profile = profile_of_run(run)
    block_size = info.block_size if info else DEFAULT_BLOCK_SIZE
    lengths = {key: prompt.prompt_tokens for key, prompt in run.prompts.items()}
    median = float(np.median(list(lengths.values()))) if lengths else 0.0
    long = {key for key, tokens in lengths.items() if tokens >= max(LONG_PROMPT * median, LEAST_LONG_TOKENS)}
    firsts = times.first_tokens()
    ttft = {key: firsts[key] - prompt.arrival for key, prompt in run.prompts.items() if key in firsts}
    prefix = prefix_facts(run, times, block_size)
    limits = _Limits.of(run, times, prefix, profile)
    late_first, late_gaps, blamed = _lateness(run, recording, times, long, limits, len(ttft), progress)
    gap_seconds = times.gaps()[1]
    pauses = times.started[1:] - times.finished[:-1]
    idle = float(np.clip(pauses[pauses <= MOST_HOST_PAUSE_S], 0, None).sum())
    durations = times.finished - times.started
    decode_ratio = Spread.of(
        (step.finished - step.started) / step.predicted for step in run.steps if step.predicted and not step.slices
    )
    late_chunks = [
        (key, chunk.waited)
        for key, request in run.requests.items()
        for chunk in request.late_chunks
        if chunk.waited >= SLOW_CLIENT_S
    ]
    reasons = Counter(request.reason for request in run.requests.values())
    prompts = list(run.prompts.values())
    gap_targets = [prompt.gap_target for prompt in prompts if prompt.gap_target is not None]
    ttft_targets = [prompt.ttft_target for prompt in prompts if prompt.ttft_target is not None]
    waits = Counter(step.waits_for for step in run.steps)
    hosts = np.array([step.host for step in run.steps], np.float64).reshape(-1, 4)
    preempted = [key for step in run.steps for key in step.preempted]
    return Facts(
        engine=info.engine if info else (run.steps[0].engine if run.steps else "0"),
        policy=info.policy if info else "",
        seconds=float(times.finished[-1] - times.started[0]),
        steps=len(run.steps),
        prompts=len(prompts),
        finished=len(run.requests),
        refused=reasons["refused"],
        prompt_tokens=Spread.of(lengths.values()),
        long_prompts=len(long),
        long_prompt_tokens=Spread.of(lengths[key] for key in long),
        ttft=Spread.of(ttft.values()),
        ttft_of_long=Spread.of(seconds for key, seconds in ttft.items() if key in long),
        gap=Spread.of(gap_seconds),
        step=Spread.of(durations),
        decode_step=Spread.of(durations[~times.is_prefill]),
        decode_ratio=decode_ratio,
        prefill_step=Spread.of(durations[times.is_prefill]),
        prefill_tokens_per_step=Spread.of(
            np.bincount(times.slice_steps, times.slice_tokens, len(run.steps))[times.is_prefill]
        ),
        first_tokens=late_first,
        gaps=late_gaps,
        gap_target=float(np.median(gap_targets)) if gap_targets else None,
        gap_is_promised=any(prompt.gap_promised for prompt in prompts),
        ttft_target=float(np.median(ttft_targets)) if ttft_targets else None,
        has_own_targets=2 * own_targets >= len(prompts),
        blamed=blamed,
        running=Spread.of(step.running for step in run.steps),
        waiting=Spread.of(step.waiting for step in run.steps),
        decodes=Spread.of(len(step.decode_keys) for step in run.steps if step.decodes),
        max_num_seqs=info.max_num_seqs if info else None,
        max_num_batched_tokens=_batched_tokens(info) if info else None,
        num_blocks=info.num_blocks if info else None,
        kv_used=Spread.of(1 - step.free_blocks / info.num_blocks for step in run.steps) if info else Spread(),
        preemptions=len(preempted),
        preempted_requests=len(set(preempted)),
        lost_tokens=sum(step.lost_tokens for step in run.steps),
        waits={reason: number / len(run.steps) for reason, number in waits.items() if reason},
        prefix=replace(prefix, known_tokens={}),  # it is for the limits only
        prefix_caching=info.enable_prefix_caching if info else True,
        idle_share=idle / max(1e-9, idle + times.busy_seconds()),
        host=Spread.of(hosts.sum(axis=1)),
        host_parts=dict(zip(("plan", "submit", "commit", "outside"), np.median(hosts, axis=0).tolist(), strict=True)),
        lone_decode=limits.lone_decode,
        least_gap_target=min(gap_targets, default=None),
        impossible_ttft=sum(limits.is_impossible(prompt, is_first=True) for prompt in prompts),
        impossible_gap=sum(limits.is_impossible(prompt, is_first=False) for prompt in prompts),
        most_seqs_in_target=limits.most_seqs(
            float(np.median(gap_targets)) / max(1.0, decode_ratio.p50) if gap_targets else math.inf
        ),
        slow_requests=len({key for key, _ in late_chunks}),
        slow_seconds=sum(waited for _, waited in late_chunks),
        lag_seconds=sum(lag.seconds for lag in recording.lags),
        lags=len(recording.lags),
    )


def profile_of_run(run: EngineRun) -> Profile | None:
    """The calibration in a recording; None if there is none, or one that this version cannot read."""
    if run.info is None or run.info.profile is None:
        return None
    try:
        return read_profile(run.info.model, run.info.profile)
    except (ValueError, TypeError, KeyError):
        return None


def _batched_tokens(info: EngineFrame) -> int:
    """The limit of a step. The policy of a recorded simulation has its own in its name: chunked:512."""
    size = info.policy.partition(":")[2]
    return int(size) if size.isdecimal() else info.max_num_batched_tokens


def _with_targets(run: EngineRun, yardsticks: Yardsticks) -> EngineRun:
    """The run with the yardsticks as targets of standard prompts that have none."""
    prompts, requests = {}, dict(run.requests)
    for key, prompt in run.prompts.items():
        if prompt.flex:  # the flex class has no targets on purpose
            prompts[key] = prompt
            continue
        gap, first = prompt.gap_target, prompt.ttft_target
        if gap is None and key in requests:
            # Without a target, the API process has recorded no late chunks. The ends of steps take their place.
            requests[key] = msgspec.structs.replace(requests[key], stream=False)
        prompts[key] = msgspec.structs.replace(
            prompt,
            gap_target=yardsticks.gap if gap is None else gap,
            ttft_target=yardsticks.first_token(prompt.prompt_tokens) if first is None else first,
        )
    return EngineRun(run.info, run.steps, prompts, requests)


@dataclass(frozen=True)
class _Limits:
    """What the device can do at best, from the profile, else from the recorded steps."""

    profile: Profile | None
    lone_decode: float | None
    context: float  # tokens that a decode reads; median of the steps
    known_tokens: dict[int, int]  # by key: prompt tokens that the prefix cache had, or could have had

    @classmethod
    def of(cls, run: EngineRun, times: StepTimes, prefix: PrefixFacts, profile: Profile | None) -> Self:
        shapes = [step.step_shape for step in run.steps]
        contexts = [shape.context / shape.decodes for shape in shapes if shape.decodes]
        context = float(np.median(contexts)) if contexts else 0.0
        if profile is not None:
            lone: float | None = profile.coefficients.predict(decodes_alone(1, context))
        else:
            decode_steps = (times.finished - times.started)[~times.is_prefill]
            lone = float(decode_steps.min()) if len(decode_steps) else None
        return cls(profile, lone, context, prefix.known_tokens)

    def is_impossible(self, prompt: PromptFrame, *, is_first: bool) -> bool:
        """Whether an idle machine would miss this target of the prompt."""
        if not is_first:
            return None not in (prompt.gap_target, self.lone_decode) and prompt.gap_target < self.lone_decode  # type: ignore[operator]
        if prompt.ttft_target is None or self.profile is None:
            return False
        cached = self.known_tokens.get(prompt.key, 0)
        cost = self.profile.coefficients
        alone = cost.predict(cost.with_slice(StepShape(), cached, prompt.prompt_tokens - cached))
        return prompt.ttft_target < alone

    def most_seqs(self, gap_target: float) -> int | None:
        """Most decodes whose step is predicted to keep the target."""
        if self.profile is None or not math.isfinite(gap_target):
            return None
        cost, low, high = self.profile.coefficients, 0, 1 << 16
        while low < high:
            middle = (low + high + 1) // 2
            if cost.predict(decodes_alone(middle, middle * self.context)) <= SPARE_STEP * gap_target:
                low = middle
            else:
                high = middle - 1
        return low


def _lateness(
    run: EngineRun,
    recording: Recording,
    times: StepTimes,
    long: set[int],
    limits: _Limits,
    num_first: int,
    progress: Callable[[int], None],
) -> tuple[Lateness, Lateness, tuple[BlamedPrompt, ...]]:
    """Lateness of first tokens and of gaps, and the long prompts that caused some of it."""
    late_of: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}  # late tokens by key
    broken: dict[bool, set[int]] = {True: set(), False: set()}
    sums: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    seconds: dict[bool, defaultdict[str, float]] = {True: defaultdict(float), False: defaultdict(float)}
    blamed = defaultdict[int, float](float)
    start = float(times.started[0])
    span = max(1e-9, float(times.finished[-1]) - start)
    for token in late_tokens(run, recording):
        progress(int(100 * (token.ended - start) / span))  # they are in order of time
        prompt = run.prompts.get(token.key)
        if prompt is None:
            continue
        is_first = token.token_index == 0
        one, over = sums[is_first], token.seconds - token.target
        one["late"] += 1
        late_of[is_first][token.key] += 1
        if is_first or late_of[is_first][token.key] > (1 - KEPT_GAPS) * (token.output_tokens - 1):
            broken[is_first].add(token.key)
        one["stalls"] += token.seconds >= STALL * token.target
        if limits.is_impossible(prompt, is_first=is_first):
            one["impossible"] += 1
            seconds[is_first]["impossible"] += over
            continue
        causes = excess(token)
        for cause, value in causes.items():
            seconds[is_first][cause] += value
        if token.key in long:
            continue
        for part in token.parts:
            named = sum(part.shares)
            if part.cause not in (Cause.PREFILL, Cause.QUEUE) or not named:
                continue
            for key, share in zip(part.keys, part.shares, strict=True):
                if key in long:
                    caused = causes.get(part.cause, 0.0) * share / named
                    seconds[is_first]["long"] += caused
                    blamed[key] += caused
    found = []
    for is_first, tokens in ((True, num_first), (False, len(times.token_keys) - len(times.first_tokens()))):
        sum_of, by_cause = sums[is_first], dict(seconds[is_first])
        found.append(
            Lateness(
                tokens,
                sum_of["late"],
                sum_of["stalls"],
                len(broken[is_first]),
                long_prompt_seconds=by_cause.pop("long", 0.0),
                impossible_seconds=by_cause.pop("impossible", 0.0),
                seconds=by_cause,
                impossible=sum_of["impossible"],
            )
        )
    ranked = sorted(blamed.items(), key=lambda item: -item[1])
    most = tuple(
        BlamedPrompt(
            key,
            run.requests[key].request_id if key in run.requests else "",
            run.prompts[key].prompt_tokens,
            value,
        )
        for key, value in ranked[:MOST_BLAMED]
    )
    return found[0], found[1], most
