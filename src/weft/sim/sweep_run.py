"""One run of a sweep: the inputs that all runs share, and the scores of a run."""

import sys
from dataclasses import dataclass
from pathlib import Path

from weft.core import Targets
from weft.errors import OptionError
from weft.sim.compare import kept_promises, run_policy
from weft.sim.profiles import Profile, load_profile
from weft.sim.simulator import Truth
from weft.sim.sweep_grid import TRUTHS, Grid, Score, SweepRun, six_digits
from weft.sim.traces import Trace, load_trace

PROFILE = "h200-llama-3-8b"


@dataclass(frozen=True)
class Material:
    """Inputs that all runs share."""

    grid: Grid
    profile: Profile
    traces: dict[str, Trace]  # by the name of the course; unscaled


def load_material(grid: Grid, folder: Path, profile: str = PROFILE) -> Material:
    if not folder.is_dir():
        raise OptionError(f"--traces {folder} is not a folder")
    loaded = load_profile(profile)
    traces = {}
    for course in grid.courses:
        trace, left_out = load_trace(folder / course.file).first(grid.duration).fitting(loaded.max_model_len)
        if left_out is not None:
            print(f"weft: {course.file}: {left_out}", file=sys.stderr)
        if trace.span <= 0:
            raise OptionError(
                f"{course.name} has no two moments of arrival in its first {grid.duration:g} s, so it has no rate"
            )
        traces[course.name] = trace
    return Material(grid, loaded, traces)


def score_run(run: SweepRun, material: Material) -> list[Score]:
    grid, profile = material.grid, material.profile
    course, base = grid.course(run.trace), material.traces[run.trace]
    gaps = run.gaps(grid)
    promises = {gap: Targets(gap / 1000, course.ttft, course.ttft_per_1k) for gap in gaps}
    truth = Truth(profile.coefficients, **TRUTHS[run.truth])
    played = run_policy(run.policy, base.scaled(run.scale), profile, promises[gaps[0]], truth)
    tokens = played.prompt_tokens + played.output_tokens
    scores = []
    for gap, targets in promises.items():
        kept = kept_promises(played, targets)
        scores.append(
            Score(
                trace=run.trace,
                truth=run.truth,
                policy=run.policy,
                scale=run.scale,
                rate_rps=six_digits(run.scale * len(base.arrivals) / base.span),
                gap_ms=gap,
                kept=int(kept.sum()),
                goodput_rps=six_digits(kept.sum() / played.span),
                refused=int(played.refused.sum()),
                preemptions=played.preemptions,
                requests=len(base.arrivals),
                kept_tokens=six_digits(tokens[kept].sum() / tokens.sum()),
                longest_gap_ms=six_digits(1000 * played.gaps.max(initial=0.0)),
            )
        )
    return scores
