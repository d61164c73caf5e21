"""Fidelity: results of a real engine compared with the simulator's results for the same requests.

Both sides are a `Played`, so that each figure has the same definition on both sides (compare.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import Targets
from weft.engine.residuals import Heat, RunStep
from weft.sim.compare import Report, run_policy
from weft.sim.profiles import Profile
from weft.sim.simulator import Played, Truth
from weft.sim.traces import Arrival, Trace

SEED = 0  # of the noise of simulated steps
SHOWN_PERCENTILES = {"p50": "p50", "p99": "p99", "p999": "p99.9"}  # compared percentiles, and how they are printed
TIMES = {"ttft_ms": "TTFT", "gap_ms": "gap"}
LONE_PROBES = 16  # simulated lone streams: enough for a stable median of noisy steps
NOISE_LIMIT = 0.5  # Truth clips noise factors at 0.5, so a larger spread would shift the mean


class Probe(NamedTuple):
    """Equal streams that were served before the run. Times are medians, as the clients saw them."""

    streams: int  # concurrent streams; 1: several streams one by one, each after an idle time
    prompt_tokens: int
    output_tokens: int
    ttft: float  # seconds
    gap: float  # seconds


@dataclass(frozen=True)
class Served:
    """One run on a real engine. Arrays are in seconds and have one entry for each request with a first token."""

    played: Played  # as the client saw it
    inside: NDArray[np.float64]  # from a request's arrival at the server to its first token, by the server's clock
    outside: NDArray[np.float64]  # rest of the TTFT without the client's lag: network, parsing, writing
    lag: NDArray[np.float64]  # how late the client sent the request
    failures: dict[str, int] = field(default_factory=dict)  # counts of errors that are not refusals
    steps: list[RunStep] = field(default_factory=list)  # empty if a client measured: it cannot see steps
    request: float = 0.0  # seconds of a TTFT outside the engine, measured before the run on an idle server
    token: float | None = None  # seconds between two tokens of one step at their clients, likewise; None: not known
    probes: tuple[Probe, ...] = ()  # streams served before the run on an idle server
    others: float | None = None  # share of the machine's CPU time that other processes used; None: not known


class ComparedFigure(NamedTuple):
    """One figure, served and simulated. Shares and errors are fractions: 0.05 is 5%."""

    name: str  # such as "TTFT ms p99"
    served: float  # mean of the runs
    simulated: float
    error: float | None  # simulated / served - 1; for the share of kept promises, simulated - served
    # Between served runs: (largest - smallest) / mean; for the share of kept promises, largest - smallest.
    # None: there was only one run.
    difference: float | None


def truth_of(profile: Profile) -> Truth:
    """Step times from the calibration alone: its coefficients, and its error on held-out steps.

    The mean of the error is a bias of all steps. Its spread is noise, drawn independently for each step. If the
    rehearsal has measured residuals (how steps differ from the coefficients by kind and heat), they replace both.
    """
    if profile.residuals is not None:
        return Truth(profile.coefficients, seed=SEED, residuals=profile.residuals)
    noise = min(profile.spread or 0.0, NOISE_LIMIT)
    return Truth(profile.coefficients, bias=math.expm1(profile.mean), noise=noise, seed=SEED)


class Correction(NamedTuple):
    """Seconds by which served times differ from the profile's on a CPU.

    Clients and the API process use the engine's cores, which the calibration does not see. And the speed of a shared
    machine drifts: calibrations a quarter of an hour apart differed by 15%.
    """

    step: float = 0.0  # each step
    row: float = 0.0  # more for each decode of a step
    request: float = 0.0  # each first token, including the time outside the engine

    def applied_to(self, truth: Truth) -> Truth:
        cost = truth.coefficients
        fixed, decode = max(0.0, cost.fixed + self.step), max(0.0, cost.decode + self.row)
        return replace(truth, coefficients=replace(cost, fixed=fixed, decode=decode))


def correction_of(profile: Profile, probes: Sequence[Probe], token: float | None = None) -> Correction:
    """Served times of the probes minus their simulated times; nothing if one of the two kinds is missing."""
    lone, many = ([one for one in probes if (one.streams == 1) is is_lone] for is_lone in (True, False))
    if not lone or not many:
        return Correction()
    real = _with_token(replace(profile, host=replace(profile.host, request=0.0)), token)
    truth = truth_of(profile)
    of_one, of_many = (
        float(np.mean([one.gap for one in kind])) - float(np.median(_simulated_probe(kind[0], real, truth).gaps))
        for kind in (lone, many)
    )
    row = (of_many - of_one) / (many[0].streams - 1)
    found = Correction(of_one - row, row)
    simulated = _simulated_probe(lone[0], real, found.applied_to(truth))
    ttft = float(np.mean([one.ttft for one in lone]))
    return found._replace(request=max(0.0, ttft - float(np.median(simulated.ttft))))


def _simulated_probe(probe: Probe, profile: Profile, truth: Truth) -> Played:
    """Simulates the probe: its streams at once, or lone streams a second apart."""
    times = [0.0] * probe.streams if probe.streams > 1 else [float(second) for second in range(LONE_PROBES)]
    arrivals = tuple(Arrival(time, probe.prompt_tokens, probe.output_tokens) for time in times)
    return run_policy("chunked", Trace("probe", arrivals), profile, Targets(), truth)


def simulate(
    policy: str,
    trace: Trace,
    profile: Profile,
    targets: Targets,
    min_gap: float = 0.0,
    token: float | None = None,
    progress: Callable[[int], None] = lambda arrived: None,
    correction: Correction | None = None,
) -> Played:
    """Simulates the trace. The gap target is at least `min_gap` seconds, as when serving.

    `token` is the measured time to deliver one token (see `Served`), and `correction` is what probes found. The
    scheduler still plans with the profile alone, as the served scheduler does.
    """
    promised = replace(targets, gap=max(targets.gap, min_gap))
    truth = (correction or Correction()).applied_to(truth_of(profile))
    return run_policy(policy, trace, _with_token(profile, token), promised, truth, progress, profile.cost_model())


def _with_token(profile: Profile, token: float | None) -> Profile:
    return profile if token is None else replace(profile, host=replace(profile.host, token=token))


def compared(served: Sequence[Report], simulated: Report) -> list[ComparedFigure]:
    """All figures: TTFT and gap at three percentiles, tokens per second, and the share of promises kept."""
    lines = []
    for key, name in TIMES.items():
        for percentile, shown in SHOWN_PERCENTILES.items():
            values = [getattr(one, key)[percentile] for one in served]
            lines.append(_line(f"{name} ms {shown}", values, getattr(simulated, key)[percentile]))
    lines.append(_line("output tokens/s", [one.output_tokens_per_s for one in served], simulated.output_tokens_per_s))
    kept = [one.kept for one in served]
    mean = sum(kept) / len(kept)
    between = max(kept) - min(kept) if len(kept) > 1 else None
    lines.append(ComparedFigure("promises kept", mean, simulated.kept, simulated.kept - mean, between))
    return lines


def inside_figures(served: Sequence[Served], simulated: Report) -> list[ComparedFigure]:
    """TTFT as the server measured it: shows the error without network and client."""
    found = [np.percentile(one.inside, [50, 99, 99.9]) * 1e3 for one in served if len(one.inside)]
    if not found:
        return []
    return [
        _line(
            f"TTFT in the server ms {shown}", [float(values[index]) for values in found], simulated.ttft_ms[percentile]
        )
        for index, (percentile, shown) in enumerate(SHOWN_PERCENTILES.items())
    ]


def outside_ms(served: Sequence[Served]) -> dict[str, float]:
    """Milliseconds of the TTFT that the simulator does not model (outside the server, client lag), over all runs."""
    found: dict[str, float] = {}
    for name in ("outside", "lag"):
        values = np.concatenate([np.empty(0), *(getattr(one, name) for one in served)]) * 1e3
        if len(values):
            found |= {f"{name}_p50": float(np.median(values)), f"{name}_p99": float(np.percentile(values, 99))}
    return found


def step_errors(served: Sequence[Served], profile: Profile) -> dict[str, dict[str, float]]:
    """Error of the profile: measured / predicted - 1 of the served steps, for steps with and without prefill.

    The predicted time is the simulator's time for the step without noise.
    """
    exact = replace(truth_of(profile), noise=0.0)
    ratios: dict[str, list[float]] = {"prefill": [], "decode": []}
    for one in served:
        heat = Heat(profile.coefficients)
        for shape, seconds, idle in one.steps:
            heat.note_idle(idle)
            kind = "prefill" if shape.slices else "decode"
            ratios[kind].append(seconds / exact.expected(shape, heat.share) - 1)
            heat.note_step(shape, seconds)
    found: dict[str, dict[str, float]] = {}
    for kind, errors in ratios.items():
        if errors:
            percentiles = np.percentile(errors, [10, 50, 90]).tolist()
            found[kind] = {"steps": len(errors), **dict(zip(("p10", "p50", "p90"), percentiles, strict=True))}
    return found


def _line(name: str, served: Sequence[float], simulated: float) -> ComparedFigure:
    mean = sum(served) / len(served)
    error = simulated / mean - 1 if mean else None
    between = (max(served) - min(served)) / mean if mean and len(served) > 1 else None
    return ComparedFigure(name, mean, simulated, error, between)


# --- results as text: `result` is the object that the command writes as JSON ---


def known_error(profile: Profile, policy: str) -> str:
    """One line: the last known error of a profile's figures for a policy."""
    kind = policy.partition(":")[0]
    found = [one for one in profile.fidelity if one["policy"] == kind]
    if not found:
        return f"{policy}: the error of {profile.name} against served traffic is not known (weft bench fidelity)"
    last = max(found, key=lambda one: str(one["date"]))
    parts = [
        f"{name} "
        + " / ".join(_percent(last["errors"].get(f"{name} ms {shown}")) for shown in SHOWN_PERCENTILES.values())
        for name in TIMES.values()
    ]
    parts.append(f"tokens/s {_percent(last['errors'].get('output tokens/s'))}")
    parts.append(f"kept {_points(last['errors'].get('promises kept'))}")
    return (
        f"{policy}: last known error against served traffic ({last['date'][:10]}, {last['device']}, {last['slice']}): "
        f"{', '.join(parts)} (times: p50 / p99 / p99.9)"
    )


def entries(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The part of a result that a profile stores: one entry per policy."""
    about = {name: result[name] for name in ("date", "weft", "device", "slice")}
    return [
        {**about, "policy": one["policy"], "errors": {line["name"]: _digits(line["error"]) for line in one["lines"]}}
        for one in result["policies"]
    ]


def with_entries(known: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A profile's entries plus new ones. A new entry replaces an older one with the same device, slice and policy."""
    names = ("device", "slice", "policy")
    replaced = {tuple(one[name] for name in names) for one in new}
    return [*(one for one in known if tuple(one.get(name) for name in names) not in replaced), *new]


def heading(result: dict[str, Any]) -> str:
    return f"{result['slice']}, {result['model']} on {result['device']}"


def markdown(result: dict[str, Any]) -> str:
    """A Markdown section with the tables of a result."""
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
    """Table cells of a line: name, served, simulated, error, difference between the served runs."""
    is_share = line["name"] == "promises kept"
    change = _points if is_share else _percent
    served, simulated = (f"{line[side]:.1%}" if is_share else f"{line[side]:,.4g}" for side in ("served", "simulated"))
    width = "-" if line["difference"] is None else change(line["difference"]).lstrip("+")
    return [line["name"], served, simulated, change(line["error"]), width]


def remarks(one: dict[str, Any]) -> list[str]:
    """Sentences about a policy's results that its figures do not show."""
    refused = "/".join(str(run["refused"]) for run in one["runs"])
    told = [f"Refused: {refused} served, {one['simulated']['refused']} simulated."]
    if one["others"]:
        told.append(f"Other processes took {max(one['others']):.0%} of the machine's processor time.")
    for kind, errors in one["step_errors"].items():
        percentiles = " / ".join(_percent(errors[percentile]) for percentile in ("p10", "p50", "p90"))
        told.append(
            f"{errors['steps']:.0f} {kind} steps took {percentiles} more than the profile says (p10 / p50 / p90)."
        )
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
