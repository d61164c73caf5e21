"""Fidelity: what a real engine served, beside what the simulator says of the same requests.

Both sides are a `Played`, so that one definition of every figure holds for both (compare.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import Targets
from weft.core.residuals import Heat, RunStep
from weft.sim.compare import Report, run_policy
from weft.sim.profiles import Profile
from weft.sim.simulator import Played, Truth
from weft.sim.traces import Trace

SEED = 0  # of the noise of simulated steps
PLACES = {"p50": "p50", "p99": "p99", "p999": "p99.9"}  # percentiles that are compared, and how they are written
TIMES = {"ttft_ms": "TTFT", "gap_ms": "gap"}
NOISE_LIMIT = 0.5  # Truth cuts factors below this off, so a larger spread would shift the mean


@dataclass(frozen=True)
class Served:
    """One play against a real engine. Arrays have one entry for each request with a first token, in seconds."""

    played: Played  # as the client saw it
    inside: NDArray[np.float64]  # from a request's arrival at the server to its first token, by the server's clock
    outside: NDArray[np.float64]  # the rest of its TTFT, but for the client's lag: network, parsing, writing
    lag: NDArray[np.float64]  # how late the client sent it
    failures: dict[str, int] = field(default_factory=dict)  # errors that are no refusals, and how often they came
    steps: list[RunStep] = field(default_factory=list)  # a client knows none
    request: float = 0.0  # seconds of a TTFT outside of the engine, measured before the play with nothing else running
    token: float | None = None  # seconds between two tokens of one step at their clients, likewise; None: not known
    others: float | None = None  # share of the machine's processor time that other processes took; None: not known


class Line(NamedTuple):
    """One figure of both sides. Shares and errors are fractions: 0.05 is 5%."""

    name: str  # such as "TTFT ms p99"
    served: float  # mean of the runs
    simulated: float
    error: float | None  # simulated / served - 1; of the share of kept promises, the difference
    difference: float | None  # between served runs: (largest - smallest) / mean; likewise. None: there was one run


def truth_of(profile: Profile) -> Truth:
    """How long steps take, by the calibration alone: its coefficients, and the error that it found on held-out steps.

    The error's mean is a bias of all steps, its spread is noise that is drawn anew for each step. Where the rehearsal
    has found how steps differ from the coefficients by size and heat, that takes the place of both.
    """
    if profile.residuals is not None:
        return Truth(profile.coefficients, seed=SEED, residuals=profile.residuals)
    noise = min(profile.spread or 0.0, NOISE_LIMIT)
    return Truth(profile.coefficients, bias=math.expm1(profile.mean), noise=noise, seed=SEED)


def simulate(
    policy: str,
    trace: Trace,
    profile: Profile,
    targets: Targets,
    min_gap: float = 0.0,
    token: float | None = None,
    progress: Callable[[int], None] = lambda arrived: None,
) -> Played:
    """The simulator's half. As when serving, no gap below `min_gap` seconds is promised. `token` is what handing out a
    token really takes (see `Served`); the scheduler counts with what the profile says, as the served one does."""
    promised = replace(targets, gap=max(targets.gap, min_gap))
    host = profile.host if token is None else replace(profile.host, token=token)
    real = replace(profile, host=host)
    return run_policy(policy, trace, real, promised, truth_of(profile), progress, profile.cost_model())


def compared(served: Sequence[Report], simulated: Report) -> list[Line]:
    """All figures: times at three percentiles, tokens a second, and the share of promises kept."""
    lines = []
    for key, name in TIMES.items():
        for place, shown in PLACES.items():
            values = [getattr(one, key)[place] for one in served]
            lines.append(_line(f"{name} ms {shown}", values, getattr(simulated, key)[place]))
    lines.append(_line("output tokens/s", [one.output_tokens_per_s for one in served], simulated.output_tokens_per_s))
    kept = [one.kept for one in served]
    mean = sum(kept) / len(kept)
    between = max(kept) - min(kept) if len(kept) > 1 else None
    lines.append(Line("promises kept", mean, simulated.kept, simulated.kept - mean, between))
    return lines


def inside_lines(served: Sequence[Served], simulated: Report) -> list[Line]:
    """TTFT by the server's own account: what is left of the error without network and client."""
    found = [np.percentile(one.inside, [50, 99, 99.9]) * 1e3 for one in served if len(one.inside)]
    if not found:
        return []
    return [
        _line(f"TTFT in the server ms {shown}", [float(values[index]) for values in found], simulated.ttft_ms[place])
        for index, (place, shown) in enumerate(PLACES.items())
    ]


def outside_ms(served: Sequence[Served]) -> dict[str, float]:
    """Milliseconds of the TTFT that no simulator knows of, over all runs."""
    found: dict[str, float] = {}
    for name in ("outside", "lag"):
        values = np.concatenate([np.empty(0), *(getattr(one, name) for one in served)]) * 1e3
        if len(values):
            found |= {f"{name}_p50": float(np.median(values)), f"{name}_p99": float(np.percentile(values, 99))}
    return found


def step_errors(served: Sequence[Served], profile: Profile) -> dict[str, dict[str, float]]:
    """Measured over predicted - 1 of the steps that were served, with prefill and without: what of the error is the
    profile's own. Predicted is what the simulator makes a step take on average.
    """
    exact = replace(truth_of(profile), noise=0.0)
    ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
    for one in served:
        heat = Heat(profile.coefficients)
        for shape, seconds, idle in one.steps:
            heat.rest(idle)
            kind = "prefill" if shape.slices else "decode"
            ratios[kind].append(seconds / exact.expected(shape, heat.share) - 1)
            heat.run(shape, seconds)
    found: dict[str, dict[str, float]] = {}
    for kind, errors in ratios.items():
        if errors:
            places = np.percentile(errors, [10, 50, 90]).tolist()
            found[kind] = {"steps": len(errors), **dict(zip(("p10", "p50", "p90"), places, strict=True))}
    return found


def _line(name: str, served: Sequence[float], simulated: float) -> Line:
    mean = sum(served) / len(served)
    error = simulated / mean - 1 if mean else None
    between = (max(served) - min(served)) / mean if mean and len(served) > 1 else None
    return Line(name, mean, simulated, error, between)


# --- results in words: `result` is the object that the command writes as JSON ---


def known_error(profile: Profile, policy: str) -> str:
    """What is known of the error of a profile's figures for a policy, in one line."""
    kind = policy.partition(":")[0]
    found = [one for one in profile.fidelity if one["policy"] == kind]
    if not found:
        return f"{policy}: the error of {profile.name} against served traffic is not known (weft bench fidelity)"
    last = max(found, key=lambda one: str(one["date"]))
    parts = [
        f"{name} " + " / ".join(_percent(last["errors"].get(f"{name} ms {shown}")) for shown in PLACES.values())
        for name in TIMES.values()
    ]
    parts.append(f"tokens/s {_percent(last['errors'].get('output tokens/s'))}")
    parts.append(f"kept {_points(last['errors'].get('promises kept'))}")
    return (
        f"{policy}: last known error against served traffic ({last['date'][:10]}, {last['device']}, {last['slice']}): "
        f"{', '.join(parts)} (times: p50 / p99 / p99.9)"
    )


def entries(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What a profile keeps of a result: one entry a policy."""
    about = {name: result[name] for name in ("date", "weft", "device", "slice")}
    return [
        {**about, "policy": one["policy"], "errors": {line["name"]: _digits(line["error"]) for line in one["lines"]}}
        for one in result["policies"]
    ]


def with_entries(known: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of a profile with new ones, each in the place of an older one of the same device, slice and policy."""
    names = ("device", "slice", "policy")
    replaced = {tuple(one[name] for name in names) for one in new}
    return [*(one for one in known if tuple(one.get(name) for name in names) not in replaced), *new]


def heading(result: dict[str, Any]) -> str:
    return f"{result['slice']}, {result['model']} on {result['device']}"


def markdown(result: dict[str, Any]) -> str:
    """A section with the tables of a result."""
    targets = result["targets_ms"]
    promise = f"{targets['ttft']:g} ms"
    if targets["ttft_per_1k"]:
        promise += f" + {targets['ttft_per_1k']:g} ms per 1,000 tokens"
    parts = [
        f"### {heading(result)}",
        f"{result['date'][:10]}, weft {result['weft']}, {result['how']}, {result['requests']} requests in "
        f"{result['seconds']:.0f} s{_left_out(result)}; targets: gap {targets['gap']:g} ms, first token {promise}. "
        f"Profile: {result['profile']['origin']}.",
        f"    {result['command']}",
    ]
    for one in result["policies"]:
        runs = len(one["runs"])
        rows = [
            f"| `{one['policy']}` | served | simulated | error | between {runs} served runs |",
            "| --- |" + " --- |" * 4,
        ]
        rows += [f"| {' | '.join(cells(line))} |" for line in [*one["lines"], *one["inside"]]]
        parts += ["\n".join(rows), " ".join(remarks(one))]
    return "\n\n".join(part for part in parts if part) + "\n"


def cells(line: dict[str, Any]) -> list[str]:
    """Name, served, simulated, error, difference of the served runs."""
    is_share = line["name"] == "promises kept"
    change = _points if is_share else _percent
    served, simulated = (f"{line[side]:.1%}" if is_share else f"{line[side]:,.4g}" for side in ("served", "simulated"))
    width = "-" if line["difference"] is None else change(line["difference"]).lstrip("+")
    return [line["name"], served, simulated, change(line["error"]), width]


def remarks(one: dict[str, Any]) -> list[str]:
    """What the figures of a policy leave out, in sentences."""
    refused = "/".join(str(run["refused"]) for run in one["runs"])
    told = [f"Refused: {refused} served, {one['simulated']['refused']} simulated."]
    if one["others"]:
        told.append(f"Other processes took {max(one['others']):.0%} of the machine's processor time.")
    for kind, errors in one["step_errors"].items():
        places = " / ".join(_percent(errors[place]) for place in ("p10", "p50", "p90"))
        told.append(f"{errors['steps']:.0f} {kind} steps took {places} more than the profile says (p10 / p50 / p90).")
    outside = one["outside_ms"]
    if "outside_p50" in outside:
        late = f"; the client sent {outside['lag_p99']:.2f} ms late at p99" if outside["lag_p99"] else ""
        told.append(
            f"Outside the server's own account: {outside['outside_p50']:.2f} ms of the TTFT at p50, "
            f"{outside['outside_p99']:.2f} at p99{late}."
        )
    for error, count in one["failures"].items():
        told.append(f"{count} requests failed: {error}.")
    return told


def _left_out(result: dict[str, Any]) -> str:
    return f" ({result['left_out_too_long']} longer than the context left out)" if result["left_out_too_long"] else ""


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _points(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} points"


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
