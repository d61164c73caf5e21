"""Workloads before any text exists: arrival times, lengths, and shared prefixes of requests."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.errors import OptionError
from weft.sim.traces import LeftOut, load_trace

PATTERNS = ("poisson", "constant", "ramp")
LENGTH_FORMS = "128, 100:1024 (from:to), lognormal:500,1.2 (median,sigma), or a file with one whole number a line"
MOST_TOKENS = 1_000_000_000  # more is a typing error, not a length
MOST_SIGMA = 10.0  # likewise; one standard deviation is then a factor of 22,000
PROMPT_SIDE = ("human", "user")  # names of the speaker in data sets in ShareGPT's format
MOST_BURSTS = 10  # limit, as a multiple of the expected requests, for bursts so large that no time passes in them
ANSWER_SIDE = ("gpt", "assistant")


class RequestSpec(NamedTuple):
    at: float  # seconds from the start
    prompt_tokens: int  # by the server's count, including tokens that it adds around the prompt
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()  # equal ids at equal indices mean equal blocks of MOONCAKE_BLOCK tokens
    text: str = ""  # a given prompt; "": the prompt is generated
    answer: str = ""  # known answer to a given prompt; the requested output has its length


def arrival_times(
    count: int | None,
    rate: float,
    *,
    pattern: str = "poisson",
    burstiness: float = 1.0,
    ramp_to: float | None = None,
    duration: float = math.inf,
    random: np.random.Generator,
) -> NDArray[np.float64]:
    """Arrival times in seconds, sorted. The first request comes at 0 in every pattern, as waiting for it is useless.

    `rate` is in requests per second; with an infinite rate all requests come at 0. `burstiness` is the shape of the
    gamma distribution of the intervals: 1 is a Poisson process, less gives bursts, more gives even intervals. A "ramp"
    changes its rate linearly in time, from `rate` to `ramp_to`, over the `duration` or over the time that `count`
    requests take.

    With a `duration`, the number of requests is the number that comes within it, at most `count`. Without one there
    are `count` requests, scaled to the exact mean rate: a few random intervals could have a very different mean.
    """
    _check_arrivals(rate, pattern, burstiness, ramp_to)
    if math.isinf(rate):
        assert count is not None, "any number of requests can come at once"
        return np.zeros(count)
    mean = rate if ramp_to is None else (rate + ramp_to) / 2
    if math.isinf(duration):
        assert count is not None, "a number or a duration must bound the requests"
        whole = float(count)
        ticks = _ticks(count, burstiness, random) if pattern != "constant" else np.arange(whole)
    else:
        whole = duration * mean
        ticks = _ticks_until(whole, burstiness, random) if pattern != "constant" else np.arange(whole)
        ticks = ticks[:count]
    return ticks / rate if ramp_to is None else _ramped(ticks, rate, ramp_to, whole)


def _ticks(count: int, burstiness: float, random: np.random.Generator) -> NDArray[np.float64]:
    """Arrivals in units of the mean interval, scaled so that the mean interval is exactly 1."""
    steps = random.gamma(burstiness, 1 / burstiness, count)
    steps[:1] = 0
    ticks: NDArray[np.float64] = np.cumsum(steps)
    return ticks * ((count - 1) / ticks[-1]) if count and ticks[-1] > 0 else ticks


def _ticks_until(whole: float, burstiness: float, random: np.random.Generator) -> NDArray[np.float64]:
    """Arrivals before `whole`, in units of the mean interval; their number is random."""
    at_once = math.ceil(whole) + 10
    ticks = np.zeros(1)
    while ticks[-1] < whole and len(ticks) < MOST_BURSTS * at_once:
        more = np.cumsum(random.gamma(burstiness, 1 / burstiness, at_once))
        ticks = np.concatenate([ticks, ticks[-1] + more])
    return ticks[ticks < whole]


def _check_arrivals(rate: float, pattern: str, burstiness: float, ramp_to: float | None) -> None:
    if pattern not in PATTERNS:
        raise OptionError(f"unknown pattern of arrivals {pattern!r}; known: {', '.join(PATTERNS)}")
    if not rate > 0:
        raise OptionError(f"the rate is {rate:g}; it must be above 0 requests a second (inf: all at once)")
    if not 0 < burstiness < math.inf:
        raise OptionError(f"the burstiness is {burstiness:g}; it must be above 0 (1: a Poisson process, less: bursts)")
    if burstiness != 1 and pattern != "poisson":
        raise OptionError(f"the burstiness is {burstiness:g}, but a {pattern} pattern has none; use poisson")
    if pattern != "ramp":
        if ramp_to is not None:
            raise OptionError(f"the rate shall ramp to {ramp_to:g}, but the pattern is {pattern}; use ramp")
    elif ramp_to is None or not 0 < ramp_to < math.inf or math.isinf(rate):
        wrong = "nothing" if ramp_to is None else f"{ramp_to:g}"
        raise OptionError(f"a ramp from a rate of {rate:g} to {wrong}: both must be above 0 and finite")


def _ramped(ticks: NDArray[np.float64], begin: float, end: float, whole: float) -> NDArray[np.float64]:
    """Times of `ticks` on a clock with a rate that goes from `begin` to `end` within `whole` ticks."""
    # If the rate is linear in time, its square is linear in the ticks. The mean rate up to a tick is half the sum of
    # the first rate and the rate at that tick.
    reached = np.sqrt(begin**2 + (end**2 - begin**2) * ticks / max(whole, 1e-9))
    times: NDArray[np.float64] = 2 * ticks / (begin + reached)
    return times


class LengthDistribution(Protocol):
    """A distribution of lengths in tokens, all at least 1."""

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]: ...


@dataclass(frozen=True)
class Uniform:
    low: int
    high: int  # included; a fixed length has both equal

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        return random.integers(self.low, self.high, count, endpoint=True)


@dataclass(frozen=True)
class LogNormal:
    median: float  # tokens
    sigma: float  # standard deviation of the natural logarithm

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        tokens = np.rint(random.lognormal(math.log(self.median), self.sigma, count))
        return np.clip(tokens, 1, MOST_TOKENS).astype(np.int64)


@dataclass(frozen=True)
class Listed:
    """Lengths in the order of a file, repeated from its beginning at its end. So two columns of a file stay paired."""

    tokens: tuple[int, ...]

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        return np.resize(np.array(self.tokens, np.int64), count)


def parse_lengths(text: str, name: str) -> LengthDistribution:
    """Parses lengths from the command line. `name` is the option's name, for the error message."""
    if match := re.fullmatch(r"([0-9]{1,12})(?::([0-9]{1,12}))?", text):
        low, high = int(match[1]), int(match[2] or match[1])
        if not 1 <= low <= high <= MOST_TOKENS:
            raise OptionError(f"{name} {text!r}: lengths go from 1 to {MOST_TOKENS:,} tokens, the smaller first")
        return Uniform(low, high)
    if text.startswith("lognormal:"):
        return _parse_lognormal(text, name)
    if not _is_file(text):
        raise OptionError(f"{name} {text!r} is neither a form of lengths nor a file; write {LENGTH_FORMS}")
    (column,) = _read_columns(Path(text), 1)
    return column


def _parse_lognormal(text: str, name: str) -> LogNormal:
    try:
        median, sigma = map(float, text.removeprefix("lognormal:").split(","))
    except ValueError:
        raise OptionError(f"{name} {text!r} is not lognormal:MEDIAN,SIGMA; write {LENGTH_FORMS}") from None
    if not 1 <= median <= MOST_TOKENS or not 0 <= sigma <= MOST_SIGMA:
        raise OptionError(
            f"{name} {text!r}: the median goes from 1 to {MOST_TOKENS:,} tokens, the sigma from 0 to {MOST_SIGMA:g}"
        )
    return LogNormal(median, sigma)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # the text is too long for a file name
        return False


def load_pairs(path: Path) -> tuple[Listed, Listed]:
    """Prompt and output lengths from a file with two whole numbers per line. `drawn` keeps them paired."""
    prompt, output = _read_columns(path, 2)
    return prompt, output


def _read_columns(path: Path, width: int) -> list[Listed]:
    rows = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        words = re.findall(r"[^\s,]+", line)
        if not words:
            continue
        tokens = [int(word) if re.fullmatch("[0-9]{1,12}", word) else 0 for word in words]
        if len(words) != width or not 1 <= min(tokens) <= max(tokens) <= MOST_TOKENS:
            wanted = "one whole number" if width == 1 else "two whole numbers (prompt and output)"
            raise OptionError(f"{path}, line {number}: {line!r} is not {wanted} from 1 to {MOST_TOKENS:,}")
        rows.append(tokens)
    if not rows:
        raise OptionError(f"{path} has no lengths in it")
    return [Listed(column) for column in zip(*rows, strict=True)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {path}: {error}") from None


def drawn(
    count: int,
    times: NDArray[np.float64],
    prompt: LengthDistribution,
    output: LengthDistribution,
    random: np.random.Generator,
) -> list[RequestSpec]:
    """`count` specs at `times` (seconds), with lengths from two distributions."""
    lengths = prompt.draw(count, random).tolist(), output.draw(count, random).tolist()
    return [RequestSpec(*row) for row in zip(times.tolist(), *lengths, strict=True)]


def of_trace(path: Path, *, rate_scale: float, duration: float | None, count: int | None) -> list[RequestSpec]:
    """The first `duration` seconds of a trace, at most `count` requests, `rate_scale` times as fast.

    The duration is in unscaled time of the trace, as in `weft simulate`.
    """
    for name, value in (("rate scale", rate_scale), ("duration", duration), ("number of requests", count)):
        if value is not None and not value > 0:
            raise OptionError(f"the {name} is {value:g}; it must be above 0")
    trace = load_trace(path)
    if duration is not None:
        trace = trace.first(duration)
    return [
        RequestSpec(arrival.time, arrival.prompt_tokens, arrival.output_tokens, arrival.prefix_ids)
        for arrival in trace.scaled(rate_scale).arrivals[:count]
    ]


def of_sharegpt(path: Path, count: int | None, random: np.random.Generator) -> list[RequestSpec]:
    """First questions of conversations with their answers, at most `count`, in random order.

    All have time 0 and no lengths yet: the caller sets the times, and `prompts.with_token_counts` sets the lengths.
    """
    try:
        conversations = json.loads(_read(path))
    except ValueError as error:
        raise OptionError(f"{path} is not JSON: {error}") from None
    if not isinstance(conversations, list):
        raise OptionError(f"{path} is not a list of conversations, as ShareGPT's files are")
    pairs = [
        pair
        for number, conversation in enumerate(conversations)
        if (pair := _first_turns(f"{path}, conversation {number}", conversation))
    ]
    if not pairs:
        raise OptionError(f"{path} has no conversation that begins with a question by human and an answer by gpt")
    chosen = [pairs[index] for index in random.permutation(len(pairs))[:count]]
    return [RequestSpec(0.0, 0, 0, text=question, answer=answer) for question, answer in chosen]


def _first_turns(place: str, conversation: object) -> tuple[str, str] | None:
    """The first question and its answer; None if the conversation does not begin with them."""
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list):
        raise OptionError(f'{place}: there is no list "conversations"')
    spoken: list[tuple[str, str]] = []
    for turn in turns[:2]:
        match turn:
            case {"from": str(speaker), "value": str(text)}:
                spoken.append((speaker, text))
            case _:
                raise OptionError(f'{place}: a turn has no texts "from" and "value"')
    if len(spoken) < 2 or spoken[0][0] not in PROMPT_SIDE or spoken[1][0] not in ANSWER_SIDE:
        return None
    question, answer = spoken[0][1], spoken[1][1]
    return (question, answer) if question.strip() and answer.strip() else None


def cut(specs: Sequence[RequestSpec], context: int) -> tuple[list[RequestSpec], LeftOut | None]:
    """The specs that fit into `context` tokens, and a count of the left-out ones."""
    lengths = [spec.prompt_tokens + spec.output_tokens for spec in specs]
    kept = [spec for spec, length in zip(specs, lengths, strict=True) if length <= context]
    if len(kept) == len(specs):
        return kept, None
    return kept, LeftOut(len(specs) - len(kept), len(specs), max(lengths), context)
