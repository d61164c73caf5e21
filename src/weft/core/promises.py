"""Targets and promises: the latency that a request is promised, in seconds, and where the target comes from."""

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

CONSTRAINED_STEPS = 2  # steps per token of a constrained request: its mask depends on the token before


class Source(enum.IntEnum):
    """Origin of a target."""

    DEFAULT = 0  # affects order and step sizes, never causes a refusal, and may be missed under load
    OPERATOR = 1  # promised: kept, or the request is refused. Dropped if even an idle machine would miss it
    REQUEST = 2  # promised: kept, or the request is refused


class Promise(NamedTuple):
    """Latency targets of one request. A target with source DEFAULT is a goal, not a promise."""

    ttft: float = math.inf  # seconds from arrival to the first token
    ttft_source: Source = Source.DEFAULT
    gap: float = math.inf  # seconds between tokens
    gap_source: Source = Source.DEFAULT
    gap_wish: float = math.inf  # a smaller gap than `gap`, granted while it hardly slows prefill (see WISH_PACE_SHARE)

    @property
    def promised_ttft(self) -> float:
        """Infinite if nothing is promised."""
        return math.inf if self.ttft_source is Source.DEFAULT else self.ttft

    @property
    def promised_gap(self) -> float:
        return math.inf if self.gap_source is Source.DEFAULT else self.gap


@dataclass(frozen=True)
class Targets:
    """Targets of a server or a simulation, in seconds. Infinite: no target."""

    gap: float = math.inf  # between tokens
    ttft: float = math.inf  # from arrival to the first token
    ttft_per_1k: float = 0.0  # added per 1,000 tokens of the prompt
    gap_source: Source = Source.OPERATOR
    ttft_source: Source = Source.OPERATOR
    min_gap: float = 0.0  # lower bound of gap targets, so that no client can starve the others

    def first_token(self, prompt_tokens: int) -> float:
        return self.ttft + self.ttft_per_1k * prompt_tokens / 1000

    def promise(
        self, prompt_tokens: int, ttft: float | None = None, gap: float | None = None, constrained: bool = False
    ) -> Promise:
        """The promise for a request with these targets (None: the request sets none).

        This is the only definition: the scheduler, the response headers and the metrics all use it. If a request asks
        for a smaller gap than the server's, that is a wish: the promises to all requests come first. A constrained
        request gets a token every CONSTRAINED_STEPS steps, so its gap is multiplied by that.
        """
        steps = CONSTRAINED_STEPS if constrained else 1
        ttft_target = self.first_token(prompt_tokens) if ttft is None else ttft
        ttft_source = self.ttft_source if ttft is None else Source.REQUEST
        if gap is None:
            return Promise(ttft_target, ttft_source, steps * max(self.gap, self.min_gap), self.gap_source)
        asked, server = max(gap, steps * self.min_gap), steps * self.gap
        if asked >= server:
            return Promise(ttft_target, ttft_source, asked, Source.REQUEST)
        return Promise(ttft_target, ttft_source, server, self.gap_source, asked)
