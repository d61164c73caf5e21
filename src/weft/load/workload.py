"""What is asked for, before there is any text: when requests come, how long they are, and what they share."""

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
MOST_TOKENS = 1_000_000_000  # more is a slip of the keyboard, not a length
MOST_SIGMA = 10.0  # likewise; one standard deviation is then a factor of 22,000
PROMPT_SIDE = ("human", "user")  # who speaks, in the data sets that follow ShareGPT
MOST_BURSTS = 10  # times the expected number of requests, where bursts are so large that no time passes in them
ANSWER_SIDE = ("gpt", "assistant")


class Wish(NamedTuple):
    at: float  # seconds from the start
    prompt_tokens: int  # as the server counts them, whatever it puts around the prompt included
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()  # equal ids at equal places mean equal blocks of MOONCAKE_BLOCK tokens
    text: str = ""  # a given prompt; "" means that one is made up
    answer: str = ""  # to a given prompt: the one that is wished for is as long


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
    """Seconds from the start, in order. The first request comes at 0 in every pattern, as waiting for it tells nothing.

    `rate` is in requests a second; at an infinite one all come at 0. `burstiness` is the shape of the gamma
    distribution of the intervals: 1 is a Poisson process, less comes in bursts, more is evener. A "ramp" changes its
    rate linearly in time, from `rate` to `ramp_to` over the `duration`, or as long as `count` requests take.

    With a `duration` there are as many as come within it, `count` at most. Without one there are `count`, and their
    mean rate is the one asked for: a few random intervals would have quite another.
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
    """On a clock that ticks once a request in the mean, exactly so from the first to the last."""
    steps = random.gamma(burstiness, 1 / burstiness, count)
    steps[:1] = 0
    ticks: NDArray[np.float64] = np.cumsum(steps)
    return ticks * ((count - 1) / ticks[-1]) if count and ticks[-1] > 0 else ticks


def _ticks_until(whole: float, burstiness: float, random: np.random.Generator) -> NDArray[np.float64]:
    """On the same clock, all before it shows `whole`; how many these are is random."""
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
    """Times at which a clock, whose rate goes from `begin` to `end` within `whole` ticks, shows `ticks`."""
    # The square of a rate that is linear in time is linear in the ticks; up to each tick the mean rate is half the sum
    # of the first rate and the one reached.
    reached = np.sqrt(begin**2 + (end**2 - begin**2) * ticks / max(whole, 1e-9))
    times: NDArray[np.float64] = 2 * ticks / (begin + reached)
    return times


class Lengths(Protocol):
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
    """Lengths in the order of a file, and from its beginning again where it ends: two columns of it stay pairs."""

    tokens: tuple[int, ...]

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        return np.resize(np.array(self.tokens, np.int64), count)


def parse_lengths(text: str, name: str) -> Lengths:
    """Lengths by their text on the command line; `name` is the option's, for the error."""
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
    except OSError:  # a name that no file can have, as it is too long
        return False


def load_pairs(path: Path) -> tuple[Listed, Listed]:
    """Prompts' and outputs' lengths from a file with two whole numbers a line; `drawn` keeps them together."""
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
    count: int, times: NDArray[np.float64], prompt: Lengths, output: Lengths, random: np.random.Generator
) -> list[Wish]:
    """`count` wishes at `times` (seconds), with lengths from two distributions."""
    lengths = prompt.draw(count, random).tolist(), output.draw(count, random).tolist()
    return [Wish(*row) for row in zip(times.tolist(), *lengths, strict=True)]


def of_trace(path: Path, *, rate_scale: float, duration: float | None, count: int | None) -> list[Wish]:
    """The requests of a trace, `rate_scale` times as fast: those of its first `duration` seconds, `count` at most.

    The duration is on the trace's own clock, before it is scaled, as in `weft simulate`.
    """
    for name, value in (("rate scale", rate_scale), ("duration", duration), ("number of requests", count)):
        if value is not None and not value > 0:
            raise OptionError(f"the {name} is {value:g}; it must be above 0")
    trace = load_trace(path)
    if duration is not None:
        trace = trace.first(duration)
    return [
        Wish(arrival.time, arrival.prompt_tokens, arrival.output_tokens, arrival.prefix_ids)
        for arrival in trace.scaled(rate_scale).arrivals[:count]
    ]


def of_sharegpt(path: Path, count: int | None, random: np.random.Generator) -> list[Wish]:
    """First questions of conversations with their answers, `count` at most, in random order.

    All come at 0 and have no lengths yet: the caller sets the times, and `prompts.counted` the lengths.
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
    return [Wish(0.0, 0, 0, text=question, answer=answer) for question, answer in chosen]


def _first_turns(place: str, conversation: object) -> tuple[str, str] | None:
    """The question and its answer, or None where a conversation does not begin with two such texts."""
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


def cut(wishes: Sequence[Wish], context: int) -> tuple[list[Wish], LeftOut | None]:
    """The wishes that fit into a context of so many tokens, and what is left out."""
    lengths = [wish.prompt_tokens + wish.output_tokens for wish in wishes]
    kept = [wish for wish, length in zip(wishes, lengths, strict=True) if length <= context]
    if len(kept) == len(wishes):
        return kept, None
    return kept, LeftOut(len(wishes) - len(kept), len(wishes), max(lengths), context)
