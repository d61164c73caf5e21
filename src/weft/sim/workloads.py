"""Synthetic traffic: arrivals and lengths drawn from distributions. The same seed gives the same traffic.

A workload is one line, such as `gamma:rate=5,cv=3,prompt=lognormal:1000:1.0,output=uniform:50:400,duration=600`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.errors import OptionError
from weft.sim.traces import Arrival, Trace

ARRIVALS = ("poisson", "gamma")
LENGTHS = {
    "fixed": ("N",),
    "uniform": ("A", "B"),
    "lognormal": ("MEDIAN", "SIGMA"),
    "exponential": ("MEAN",),
}
LENGTH_FORMS = ", ".join(":".join((kind, *names)) for kind, names in LENGTHS.items())
MOST_ARRIVALS = 10_000_000  # more is a typing error, not a workload
MOST_TOKENS = 1_000_000_000  # likewise
LEAST_CV, MOST_CV = 0.01, 100.0  # no trace is outside: below, arrivals are like a clock's; above, all in a few bursts
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class TokenLengths:
    """A distribution of lengths in tokens."""

    kind: str
    values: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> Numbers:
        draws: dict[str, Callable[..., Numbers]] = {
            "fixed": lambda tokens: np.full(count, tokens),
            "uniform": lambda low, high: rng.integers(int(low), int(high), count, endpoint=True).astype(np.float64),
            "lognormal": lambda median, sigma: rng.lognormal(math.log(median), sigma, count),
            "exponential": lambda mean: rng.exponential(mean, count),
        }
        return draws[self.kind](*self.values)


@dataclass(frozen=True)
class Workload:
    """A parsed workload. Gaps between arrivals follow a gamma distribution; a cv of 1 is Poisson."""

    name: str
    rate: float  # mean requests per second
    cv: float  # burstiness: standard deviation of the gaps between arrivals over their mean
    prompt: TokenLengths
    output: TokenLengths
    duration: float  # seconds

    def trace(self, seed: int, context: int) -> Trace:
        """The arrivals. Prompts and outputs are cut so that both fit into `context` tokens."""
        # Each part has a separate generator, so that a change of lengths does not change the arrivals.
        times, prompts, outputs = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
        moments = self._moments(times)
        if not len(moments):
            raise OptionError(
                f"workload {self.name!r}: nothing arrives within {self.duration:g} s at rate={self.rate:g}; "
                "raise the rate or the duration"
            )
        prompt = _cut(self.prompt.draw(prompts, len(moments)), np.full(len(moments), context - 1))
        output = _cut(self.output.draw(outputs, len(moments)), context - prompt)
        rows = zip(moments.tolist(), prompt.tolist(), output.tolist(), strict=True)
        return Trace(self.name, tuple(Arrival(*row) for row in rows))

    def _moments(self, rng: np.random.Generator) -> Numbers:
        """Arrival times in seconds. The first request comes one gap after the start."""
        shape = self.cv**-2
        moments = np.empty(0)
        last = 0.0
        while last < self.duration:
            missing = (self.duration - last) * self.rate
            gaps = rng.gamma(shape, 1 / (self.rate * shape), int(missing * 1.1) + 16)
            moments = np.concatenate([moments, last + np.cumsum(gaps)])
            last = float(moments[-1])
        return moments[moments < self.duration]


def parse_workload(text: str) -> Workload:
    kind, _, rest = text.partition(":")
    if kind not in ARRIVALS:
        raise OptionError(f"workload {text!r}: unknown arrivals {kind!r}; known: {', '.join(ARRIVALS)}")
    fields = _fields(text, rest)
    known = ("rate", *(("cv",) if kind == "gamma" else ()), "prompt", "output", "duration")
    for name in fields:
        if name not in known:
            raise OptionError(f"workload {text!r}: unknown part {name!r}; {kind} has {', '.join(known)}")
    for name in known:
        if name not in fields:
            raise OptionError(f"workload {text!r}: {name}= is missing; {kind} has {', '.join(known)}")
    workload = Workload(
        name=text,
        rate=_above_zero(text, "rate", fields["rate"]),
        cv=_number(text, "cv", fields["cv"]) if kind == "gamma" else 1.0,
        prompt=_lengths(text, "prompt", fields["prompt"]),
        output=_lengths(text, "output", fields["output"]),
        duration=_above_zero(text, "duration", fields["duration"]),
    )
    if not LEAST_CV <= workload.cv <= MOST_CV:
        raise OptionError(f"workload {text!r}: cv={workload.cv:g} must be between {LEAST_CV:g} and {MOST_CV:g}")
    if workload.rate * workload.duration > MOST_ARRIVALS:
        raise OptionError(
            f"workload {text!r}: {workload.rate * workload.duration:.3g} requests are more than {MOST_ARRIVALS:,}; "
            "lower rate= or duration="
        )
    return workload


def _fields(text: str, rest: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            raise OptionError(f"workload {text!r}: {part!r} is not NAME=VALUE")
        if name in fields:
            raise OptionError(f"workload {text!r}: {name}= is there twice")
        fields[name] = value
    return fields


def _lengths(text: str, part: str, value: str) -> TokenLengths:
    kind, *rest = value.split(":")
    if kind not in LENGTHS:
        raise OptionError(f"workload {text!r}: {part}={value} has unknown lengths {kind!r}; known: {LENGTH_FORMS}")
    names = LENGTHS[kind]
    if len(rest) != len(names):
        raise OptionError(f"workload {text!r}: {part}={value} should be {':'.join((kind, *names))}")
    values = tuple(_number(text, f"{part}={value}: {name}", word) for name, word in zip(names, rest, strict=True))
    for name, number in zip(names, values, strict=True):
        least = 0 if name == "SIGMA" else 1
        if number < least:
            raise OptionError(f"workload {text!r}: {part}={value}: {name} {number:g} must be at least {least}")
        if number > MOST_TOKENS:
            raise OptionError(f"workload {text!r}: {part}={value}: {name} {number:g} must be at most {MOST_TOKENS:,}")
        if name in ("N", "A", "B") and number != int(number):
            raise OptionError(f"workload {text!r}: {part}={value}: {name} {number:g} is not a whole number of tokens")
    if kind == "uniform" and values[0] > values[1]:
        raise OptionError(f"workload {text!r}: {part}={value}: A {values[0]:g} must not be above B {values[1]:g}")
    return TokenLengths(kind, values)


def _above_zero(text: str, part: str, value: str) -> float:
    number = _number(text, part, value)
    if number <= 0:
        raise OptionError(f"workload {text!r}: {part}={value} must be above 0")
    return number


def _number(text: str, part: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise OptionError(f"workload {text!r}: {part}: {value!r} is not a number")
    return number


def _cut(lengths: Numbers, most: NDArray[np.int64]) -> NDArray[np.int64]:
    """Whole tokens, at least 1 and at most `most`."""
    return np.clip(np.rint(lengths), 1, most).astype(np.int64)
