"""Replay: the recorded requests of an engine process in the simulator, as they were and with a change."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from weft.core import HostCost, Request, Scheduler, Targets
from weft.core.promises import Source
from weft.diagnose.facts import Spread
from weft.diagnose.finding import Change
from weft.diagnose.step_times import StepTimes
from weft.engine.simulated import VirtualClock
from weft.observe.frames import EngineFrame, PromptFrame
from weft.observe.recording import EngineRun
from weft.sim.compare import KEPT_GAPS, make_policy
from weft.sim.fidelity import truth_of
from weft.sim.profiles import Profile
from weft.sim.simulator import TraceTable, play
from weft.sim.traces import Arrival, Trace

START = Change("as it was")
TOLERANCE = 1 + 1e-9  # of a target, for rounding


@dataclass(frozen=True)
class Scores:
    """How requests fared. Times in seconds."""

    name: str
    requests: int
    refused: int
    ttft: Spread
    gap: Spread
    kept: float  # share of the requests with the first token in its target and 99% of the gaps within theirs


@dataclass(frozen=True)
class ReplayedRequest:
    prompt: PromptFrame
    output_tokens: int


def replayable(run: EngineRun) -> str:
    """Why a run cannot be replayed; "" if it can."""
    if run.info is None:
        return "the recording begins after the engine's start, so its limits are not known"
    if run.info.profile is None:
        return "the engine was not calibrated (it has no targets), so the cost of its steps is not known"
    return "" if _requests(run) else "no request got a token"


def recorded(run: EngineRun) -> Scores:
    """The recorded requests, from the engine's own times."""
    times = StepTimes.of(run)
    firsts = times.first_tokens()
    keys, gaps = times.gaps()
    requests = _requests(run)
    known = {one.prompt.key: index for index, one in enumerate(requests)}
    owners = np.array([known.get(key, -1) for key in keys.tolist()], np.int64)
    ttft = np.array([firsts[one.prompt.key] - one.prompt.arrival for one in requests])
    refused = sum(frame.reason == "refused" for frame in run.requests.values())
    return _scores("recorded", requests, ttft, owners[owners >= 0], gaps[owners >= 0], START, refused)


def replay(
    run: EngineRun, profile: Profile, change: Change, progress: Callable[[int], None] = lambda arrived: None
) -> Scores:
    """Plays the requests under the real scheduler, in virtual time."""
    info = run.info
    assert info is not None, "only a run with its EngineFrame can be replayed"
    requests = [one for one in _requests(run) if one.prompt.key not in change.without][:: change.keep_one_in]
    if not requests:
        return Scores(change.words, 0, 0, Spread(), Spread(), 1.0)
    profile = _profile(info, profile, change)
    scheduler = Scheduler(
        wave=profile.coefficients.wave,
        policy=make_policy(change.policy or info.policy, profile, profile.cost_model()),
        num_blocks=profile.kv_tokens // profile.block_size,
        block_size=profile.block_size,
        max_num_seqs=profile.max_num_seqs,
        enable_prefix_caching=info.enable_prefix_caching,
    )
    start = requests[0].prompt.arrival
    arrivals = [Arrival(one.prompt.arrival - start, one.prompt.prompt_tokens, one.output_tokens) for one in requests]
    make_table = partial(_ReplayTable, requests=requests, gap_target=change.gap_target)
    played = play(
        Trace("recording", tuple(arrivals)),
        scheduler,
        truth_of(profile),
        Targets(),  # every request has its own
        progress,
        profile.host,
        make_table,
    )
    refused = int(played.refused.sum())
    return _scores(change.words, requests, played.ttft, played.gap_owner, played.gaps, change, refused)


class _ReplayTable(TraceTable):
    """A TraceTable whose requests have the block hashes and the targets that were recorded."""

    def __init__(
        self,
        trace: Trace,
        scheduler: Scheduler,
        targets: Targets,
        clock: VirtualClock,
        host: HostCost,
        *,
        requests: list[ReplayedRequest],
        gap_target: float | None,
    ) -> None:
        super().__init__(trace, scheduler, targets, clock, host)
        self._replayed, self._gap_target = requests, gap_target

    def add_arrivals(self) -> None:
        while self.arrived < len(self._replayed) and self.next_known_at <= self.clock.now:
            request = _request(self.arrived, self._replayed[self.arrived], self.trace, self._gap_target)
            self.index_of[request] = self.arrived
            self.requests.append(request)
            self.scheduler.add(request)
            self.arrived += 1
            self.clock.now += self.host.arrival


def _request(number: int, one: ReplayedRequest, trace: Trace, gap_target: float | None) -> Request:
    prompt = one.prompt
    is_changed = gap_target is not None and not prompt.flex
    gap = gap_target if is_changed else prompt.gap_target
    return Request(
        id=f"{number:06d}",
        prompt_tokens=prompt.prompt_tokens,
        max_tokens=one.output_tokens,
        arrival=trace.arrivals[number].time,
        priority=prompt.priority,
        hashes=np.frombuffer(prompt.prefix, np.int32).tolist(),
        flex=prompt.flex,
        gap_target=math.inf if gap is None else gap,
        gap_source=Source.OPERATOR if is_changed or prompt.gap_promised else Source.DEFAULT,
        ttft_target=math.inf if prompt.ttft_target is None else prompt.ttft_target,
        ttft_source=Source.OPERATOR if prompt.ttft_promised else Source.DEFAULT,
    )


def _requests(run: EngineRun) -> list[ReplayedRequest]:
    """The requests with a first token, in order of arrival, as long as they were when the recording ended."""
    tokens = StepTimes.of(run).output_tokens()
    known = [ReplayedRequest(prompt, tokens[key]) for key, prompt in run.prompts.items() if key in tokens]
    return sorted(known, key=lambda one: one.prompt.arrival)


def _profile(info: EngineFrame, profile: Profile, change: Change) -> Profile:
    """The profile with the limits of the engine that served, changed."""
    return replace(
        profile,
        kv_tokens=int(info.num_blocks * change.kv_factor) * info.block_size,
        block_size=info.block_size,
        max_num_seqs=change.max_num_seqs or info.max_num_seqs,
        max_num_batched_tokens=change.max_num_batched_tokens or info.max_num_batched_tokens,
    )


def _scores(
    name: str,
    requests: list[ReplayedRequest],
    ttft: NDArray[np.float64],  # seconds by request; infinite: no first token
    owners: NDArray[np.int64],  # by gap: index of its request
    gaps: NDArray[np.float64],
    change: Change,
    refused: int,
) -> Scores:
    """Requests are scored against the recorded targets, or against a larger gap target of the change."""
    count = len(requests)
    gap_targets = np.array([max(one.prompt.gap_target or math.inf, change.gap_target or 0.0) for one in requests])
    ttft_targets = np.array([one.prompt.ttft_target or math.inf for one in requests])
    good = np.bincount(owners[gaps <= gap_targets[owners] * TOLERANCE], minlength=count)
    total = np.bincount(owners, minlength=count)
    kept = (ttft <= ttft_targets * TOLERANCE) & (good >= KEPT_GAPS * total) & np.isfinite(ttft)
    return Scores(
        name, count, refused, Spread.of(ttft[np.isfinite(ttft)]), Spread.of(gaps), float(kept.mean()) if count else 1.0
    )
