"""What the report of load tests shows: saved runs, their samples, and the parts of each TTFT."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from weft.bench.http.client import Reply
from weft.bench.http.figures import Array, gaps, lag, ttft

SAVED = ("number", "due", "prompt_tokens", "sent", "times", "end", "output_tokens", "server")  # keys of a saved request
METRICS = {"ttft": "TTFT", "gap": "gap", "tpot": "TPOT", "e2el": "E2E", "lag": "client's lag"}
PARTS = {  # parts of a TTFT in time order; except the last, which lies before and after the server's parts
    "place": "waiting for --max-concurrency",
    "lag": "client's lag before sending",
    "queue": "server: queue",
    "prefill": "server: prefill",
    "other": "server: other, until the token is taken from the engine",
    "rest": "network and client",
}


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """A load test as `weft bench serve --json` saved it."""

    label: str
    number: int  # index among the runs; determines the colour
    found: dict[str, Any]

    @cached_property
    def done(self) -> list[Reply]:
        """Requests that completed; empty if requests were not saved."""
        rows = [row for row in self.found.get("requests") or () if row["sent"] is not None and row["end"] is not None]
        return [reply for reply in map(_reply, rows) if reply.is_complete]

    @cached_property
    def milliseconds(self) -> dict[str, Array]:
        """All samples of each metric that has a chart."""
        pooled = {
            "ttft": np.array([ttft(reply) for reply in self.done]),
            "gap": np.concatenate([np.empty(0), *map(gaps, self.done)]),
            "e2el": np.array([reply.end - reply.due for reply in self.done]),
        }
        return {name: values * 1e3 for name, values in pooled.items()}

    @property
    def timed_by_server(self) -> list[Reply]:
        """Completed requests for which the server reported its own TTFT."""
        return [reply for reply in self.done if (reply.server or {}).get("ttft_ms") is not None]

    def figure(self, name: str) -> float | None:
        """A figure of the run; None if it is missing, not a number, or not finite."""
        value = self.found.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return None
        return float(value)


def _reply(row: dict[str, Any]) -> Reply:
    """The Reply of a saved request. Files of older versions have no `free`."""
    return Reply(**{name: row[name] for name in SAVED}, error=row["error"] or "", free=row.get("free") or 0.0)


def chunk_gaps(run: ReportedRun) -> tuple[Array, Array]:
    """For every chunk except the first: when it arrived (s), and the time since the previous chunk (ms)."""
    ends = np.concatenate([np.empty(0), *(reply.times[1:] for reply in run.done)])
    return ends, np.concatenate([np.empty(0), *(np.diff(reply.times) for reply in run.done)]) * 1e3


def goals_ms(runs: Sequence[ReportedRun], name: str) -> list[float]:
    """The distinct goals of the runs for a metric; usually one."""
    return sorted({goals[name] for run in runs if name in (goals := run.found.get("goodput_goals_ms") or {})})


def ttft_parts(reply: Reply) -> list[float]:
    """Milliseconds of each of PARTS, at least 0.

    With several choices the server reports the slowest, so a difference may be negative.
    """
    server, place, late = reply.server or {}, slot_wait(reply) * 1e3, lag(reply) * 1e3
    within, queue, prefill = (float(server.get(f"{name}_ms") or 0.0) for name in ("ttft", "queue", "prefill"))
    parts = [place, late, queue, prefill, within - queue - prefill, ttft(reply) * 1e3 - place - late - within]
    return [max(0.0, part) for part in parts]


def slot_wait(reply: Reply) -> float:
    """Seconds that the request waited for the concurrency limit."""
    return max(0.0, reply.free - reply.due)


def series_by_rate(runs: Sequence[ReportedRun]) -> dict[str, list[ReportedRun]]:
    """Runs that have a rate and a goodput, by the part of their label before " @ "; empty for less than two rates."""
    series: dict[str, list[ReportedRun]] = {}
    for run in sorted(runs, key=lambda run: run.figure("request_rate") or 0.0):
        if None not in (run.figure("request_rate"), run.figure("goodput_share")):
            series.setdefault(run.label.split(" @ ")[0], []).append(run)
    rates = {run.found["request_rate"] for line in series.values() for run in line}
    return series if len(rates) > 1 else {}


def thinned(xs: Array, ys: Array, most: int) -> tuple[Array, Array]:
    """At most `most` points: half of them with the largest y, the others evenly from the rest."""
    if len(ys) <= most:
        return xs, ys
    largest = most - most // 2
    order = np.argsort(-ys, kind="stable")
    rest = np.sort(order[largest:])
    even = rest[np.linspace(0, len(rest) - 1, most // 2).astype(np.int64)]
    kept = np.sort(np.concatenate([order[:largest], even]))
    return xs[kept], ys[kept]


def short(value: float) -> str:
    return f"{value:,.9g}"
