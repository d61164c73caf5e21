"""Figures: the numbers of a run, and their definitions, which every report prints.

The JSON uses the names of vLLM's benchmark where the meaning is the same.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.bench.http.client import Reply
from weft.bench.http.drive import LoadRun
from weft.errors import OptionError

PERCENTILES = (50, 90, 95, 99, 99.9)
LENGTH_TOLERANCE = 0.01  # relative difference from the requested total tokens above which a caveat is shown
LEAST_SHARE_WITHIN = 0.99  # share of a request's gaps that must be within the gap goal
DEFINITIONS = {
    "ttft": "from when a request was to be sent to its first content (reasoning and tool calls included)",
    "gap": "time between successive tokens, of all requests together; a chunk of k tokens is one gap and k - 1 zeros",
    "itl": "time between successive chunks, of all requests together (what vLLM calls ITL)",
    "tpot": "(e2el - ttft) / (output tokens - 1), one figure a request",
    "e2el": "from when a request was to be sent to the end of its answer",
    "lag": "how late the client itself sent a request (waiting for --max-concurrency not counted); a large one means "
    "that the client was too slow, not the server",
}
Array = NDArray[np.float64]


class Goals(NamedTuple):
    """Latency goals in milliseconds. A good request meets all of them. Infinite: no goal."""

    ttft: float = math.inf
    tpot: float = math.inf
    gap: float = math.inf  # 99% of the request's gaps
    e2el: float = math.inf

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Goals":
        """Parses goals such as `ttft:1000 tpot:50 gap:100`."""
        found: dict[str, float] = {}
        for text in texts:
            name, _, value = text.partition(":")
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if name not in cls._fields or not number > 0:
                raise OptionError(
                    f"--goodput {text!r} is no goal: write NAME:MILLISECONDS with one of {', '.join(cls._fields)}, as "
                    "in ttft:1000"
                )
            found[name] = number
        return cls(**found)


@dataclass(frozen=True)
class MeasurementWindow:
    """The part of a run that counts: begin <= time < end, in seconds.

    Latencies and shares count requests that were due in it. Rates count requests that ended in it.
    """

    begin: float
    end: float
    is_part: bool = False  # whether part of the run is left out
    has_cooldown: bool = True  # whether requests that are due at `end` or later are left out

    @classmethod
    def of(cls, replies: Sequence[Reply], warmup: float, cooldown: float) -> "MeasurementWindow":
        last = max((reply.due for reply in replies), default=0.0)
        if warmup + cooldown and warmup + cooldown >= last:
            raise OptionError(
                f"--warmup {warmup:g} and --cooldown {cooldown:g} leave nothing of a run whose last request was due "
                f"after {last:.1f} s: make them shorter, or the run longer"
            )
        return cls(warmup, last - cooldown, warmup + cooldown > 0, cooldown > 0)

    def holds(self, due: float) -> bool:
        return self.begin <= due and (due < self.end or not self.has_cooldown)


def gaps(reply: Reply) -> Array:
    """Seconds between a reply's tokens."""
    between = np.diff(reply.times)
    return np.concatenate([between, np.zeros(max(0, reply.output_tokens - len(reply.times)))])


def ttft(reply: Reply) -> float:
    return reply.times[0] - reply.due


def lag(reply: Reply) -> float:
    """Seconds by which the client sent the request late, without the wait for the concurrency limit."""
    return max(0.0, reply.sent - max(reply.due, reply.free))


def tpot(reply: Reply) -> float:
    """Seconds per output token after the first; NaN for an answer of one token."""
    return (reply.end - reply.times[0]) / (reply.output_tokens - 1) if reply.output_tokens > 1 else math.nan


def is_good(reply: Reply, goals: Goals) -> bool:
    if not reply.is_complete:
        return False
    per_token = tpot(reply)
    within = float(np.mean(gaps(reply) * 1e3 <= goals.gap)) if reply.output_tokens > 1 else 1.0
    return (
        ttft(reply) * 1e3 <= goals.ttft
        and (math.isnan(per_token) or per_token * 1e3 <= goals.tpot)
        and (reply.end - reply.due) * 1e3 <= goals.e2el
        and within >= LEAST_SHARE_WITHIN
    )


def figures(run: LoadRun, window: MeasurementWindow, goals: Goals | None = None) -> dict[str, Any]:
    """All numbers of a run, ready for JSON; a missing value is None."""
    inside = [reply for reply in run.replies if window.holds(reply.due)]
    done = [reply for reply in inside if reply.is_complete]
    seconds = _seconds(run, window, inside)
    read, written = sum(reply.prompt_tokens for reply in done), sum(reply.output_tokens for reply in done)
    ended = done
    if window.is_part:  # count requests that ended in it, whenever they began: its queue is the same at both ends
        seconds = window.end - window.begin
        ended = [reply for reply in run.replies if reply.is_complete and window.begin <= reply.end < window.end]
    rates = [sum(getattr(reply, name) for reply in ended) for name in ("prompt_tokens", "output_tokens")]
    errors = _grouped(reply.error for reply in inside if reply.error)
    found: dict[str, Any] = {
        "duration": seconds,
        "num_prompts": len(inside),
        "completed": len(done),
        "failed": len(inside) - len(done),
        "unfinished": len(run.unanswered),
        "left_out_too_long": run.left_out,
        "completed_without_usage": sum(reply.is_without_usage for reply in done),
        "error_counts": errors,
        "retries": sum(reply.retries for reply in inside),
        "retried_requests": sum(reply.retries > 0 for reply in inside),
        "was_interrupted": run.was_interrupted,
        "total_input_tokens": read,
        "total_output_tokens": written,
        **_requested(done),
        "request_throughput": len(ended) / seconds,
        "output_throughput": rates[1] / seconds,
        "total_token_throughput": sum(rates) / seconds,
        "achieved_request_rate": _sent_rate(inside),
        "max_concurrent_requests": _most_at_once(run.replies),
    }
    found |= {"request_goodput": None, "goodput_output_throughput": None}
    if goals is not None:
        unanswered = sum(map(window.holds, run.unanswered.values()))
        good = sum(is_good(reply, goals) for reply in inside)
        kept = [reply for reply in ended if is_good(reply, goals)]
        found["request_goodput"] = len(kept) / seconds
        found["goodput_output_throughput"] = sum(reply.output_tokens for reply in kept) / seconds
        found["goodput_share"] = good / max(1, len(inside) + unanswered)
        found["goodput_goals_ms"] = {name: value for name, value in goals._asdict().items() if value < math.inf}
    pooled = {
        "ttft": np.array([ttft(reply) for reply in done]),
        "gap": np.concatenate([np.empty(0), *map(gaps, done)]),
        "itl": np.concatenate([np.empty(0), *(np.diff(reply.times) for reply in done)]),
        "tpot": np.array([value for reply in done if not math.isnan(value := tpot(reply))]),
        "e2el": np.array([reply.end - reply.due for reply in done]),
        "lag": np.array([lag(reply) for reply in inside if not math.isnan(reply.sent)]),
    }
    for name, values in pooled.items():
        found |= _statistics(name, values * 1e3)
    if found["retries"]:
        found |= _statistics("retry_wait", np.array([reply.retry_wait * 1e3 for reply in inside if reply.retries]))
    return {**found, **_cached(done), **_server_side(done)}


def caveats(found: dict[str, Any]) -> list[str]:
    """Sentences on how a run differs from what was requested. Files of older versions lack some of the keys."""
    told = []
    if left_out := found.get("left_out_too_long"):
        told.append(f"{left_out} requests were left out, as they are longer than the model's context")
    if found.get("ignore_eos") is False:
        told.append("the server refused ignore_eos: answers may be shorter than asked for")
    if uncounted := found.get("completed_without_usage"):
        told.append(
            f"the server told no usage for {uncounted} of {found.get('completed')} requests: each of their chunks is "
            "counted as one token"
        )
    told += filter(None, (_length_caveat(found, "output", "answers"), _length_caveat(found, "input", "prompts")))
    if found.get("was_interrupted") and (unfinished := found.get("unfinished")):
        told.append(
            f"{unfinished} requests had no answer yet when the run was interrupted: percentiles leave out who still "
            "waited, and so may be too low"
        )
    return told


def _length_caveat(found: dict[str, Any], side: str, what: str) -> str:
    """A sentence if total lengths differ from the requested ones by more than LENGTH_TOLERANCE, else ""."""
    asked, got = found.get(f"requested_{side}_tokens") or 0, found.get(f"total_{side}_tokens") or 0
    differing = found.get(f"completed_with_other_{side}")
    if not differing or abs(got - asked) <= LENGTH_TOLERANCE * asked:
        return ""
    return (
        f"{what} have {got} tokens in all, not the {asked} that were asked for: those of {differing} of "
        f"{found.get('completed')} requests differ"
    )


def _requested(done: list[Reply]) -> dict[str, int]:
    """Requested tokens, and the number of requests with other lengths than requested.

    Replies without usage are not compared, because their chunks only count as tokens.
    """
    known = [reply for reply in done if reply.asked_output and not reply.is_without_usage]
    return {
        "requested_input_tokens": sum(reply.asked_input for reply in done),
        "requested_output_tokens": sum(reply.asked_output for reply in done),
        "completed_with_other_input": sum(reply.prompt_tokens != reply.asked_input for reply in known),
        "completed_with_other_output": sum(reply.output_tokens != reply.asked_output for reply in known),
    }


def _cached(done: list[Reply]) -> dict[str, int]:
    """Prompt tokens from the server's prefix cache, if the server reports them. weft reports them for all or none."""
    told = [reply.cached_tokens for reply in done if reply.cached_tokens is not None]
    if not told and not any(reply.server for reply in done):
        return {}
    return {"total_cached_tokens": sum(told)}


def _server_side(done: list[Reply]) -> dict[str, Any]:
    """Times that a weft server reports for the same requests: milliseconds of queue, prefill, decode and TTFT.

    `outside` is the client's TTFT minus the client's lag and the server's TTFT: the network, reading the request, and
    writing the answer.
    """
    told = [reply for reply in done if reply.server is not None and "ttft_ms" in reply.server]
    if not told:
        return {}
    found: dict[str, Any] = {}
    for name in ("queue", "prefill", "decode", "ttft"):
        values = [reply.server[f"{name}_ms"] for reply in told if reply.server and f"{name}_ms" in reply.server]
        found |= _statistics(f"server_{name}", np.array(values, np.float64))
    outside = [(reply.times[0] - reply.sent) * 1e3 - reply.server["ttft_ms"] for reply in told if reply.server]
    found |= _statistics("outside", np.array(outside))
    return found


def _grouped(errors: Iterable[str]) -> dict[str, int]:
    """Counts of errors. Errors that differ only in numbers are counted together, under the first of them.

    A leading HTTP status does not count as such a number: a 429 and a 503 stay apart.
    """
    first: dict[str, str] = {}
    counts = Counter(first.setdefault(_without_numbers(error), error) for error in errors)
    return dict(counts.most_common())


def _without_numbers(error: str) -> str:
    status_end = 3 if re.match(r"\d{3}: ", error) else 0
    return error[:status_end] + re.sub(r"\d+(\.\d+)?", "0", error[status_end:])


def _statistics(name: str, values: Array) -> dict[str, float | None]:
    if not len(values):
        return dict.fromkeys([f"{kind}_{name}_ms" for kind in ("mean", "median", "std", *_labels(), "max")])
    spread = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    spread |= dict(zip(_labels(), np.percentile(values, PERCENTILES), strict=True))
    spread["max"] = values.max()
    return {f"{kind}_{name}_ms": float(value) for kind, value in spread.items()}


def _labels() -> list[str]:
    return [f"p{percentile:g}" for percentile in PERCENTILES]


def _seconds(run: LoadRun, window: MeasurementWindow, inside: list[Reply]) -> float:
    """Seconds from the window's begin to the last of its answers: the time that rates are divided by."""
    ends = [reply.end for reply in inside if not math.isnan(reply.end)]
    return max(max(ends, default=run.seconds) - window.begin, 1e-9)


def _sent_rate(replies: list[Reply]) -> float | None:
    """Requests per second between the first and the last send time; None if both are equal."""
    times = [reply.sent for reply in replies if not math.isnan(reply.sent)]
    span = max(times, default=0.0) - min(times, default=0.0)
    return (len(times) - 1) / span if span > 0 else None


def _most_at_once(replies: list[Reply]) -> int:
    events = [(reply.sent, 1) for reply in replies if not math.isnan(reply.sent)]
    events += [(reply.end, -1) for reply in replies if not math.isnan(reply.end)]
    under_way = most = 0
    for _, change in sorted(events):
        under_way += change
        most = max(most, under_way)
    return most
