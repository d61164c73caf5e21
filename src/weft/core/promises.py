"""Targets and promises: what a request is promised, in seconds, and who asked for it."""

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

CONSTRAINED_STEPS = 2  # from one token of a constrained request to the next: its mask depends on the token before


class Source(enum.IntEnum):
    """Who set a target."""

    DEFAULT = 0  # the default: it shapes order and step sizes, never refuses a request, and gives way under load
    OPERATOR = 1  # kept or refused; without a promise where even an idle machine could not keep it
    REQUEST = 2  # kept or refused


class Promise(NamedTuple):
    """What one request gets. A target whose source is DEFAULT is aimed at and not promised."""

    ttft: float = math.inf  # seconds from arrival to the first token
    ttft_source: Source = Source.DEFAULT
    gap: float = math.inf  # seconds between tokens
    gap_source: Source = Source.DEFAULT
    gap_wish: float = math.inf  # a smaller gap than promised, given while it costs other prompts next to nothing

    @property
    def promised_ttft(self) -> float:
        """Infinite where nothing is promised."""
        return math.inf if self.ttft_source is Source.DEFAULT else self.ttft

    @property
    def promised_gap(self) -> float:
        return math.inf if self.gap_source is Source.DEFAULT else self.gap


@dataclass(frozen=True)
class Targets:
    """The targets of a server or a simulation; infinite where there is none."""

    gap: float = math.inf  # between tokens
    ttft: float = math.inf  # from arrival to the first token
    ttft_per_1k: float = 0.0  # on top, for every 1,000 tokens of the prompt
    gap_source: Source = Source.OPERATOR
    ttft_source: Source = Source.OPERATOR
    min_gap: float = 0.0  # a request's own gap target is raised to it, so that no client can starve the others

    def first_token(self, prompt_tokens: int) -> float:
        return self.ttft + self.ttft_per_1k * prompt_tokens / 1000

    def promise(
        self, prompt_tokens: int, ttft: float | None = None, gap: float | None = None, constrained: bool = False
    ) -> Promise:
        """What a request with these targets of its own (None: it named none) gets.

        The one definition of it: the scheduler, the response headers and the metrics all use this. A request's own
        gap below the server's is a wish: what all are promised comes first. A constrained request has a token every
        CONSTRAINED_STEPS steps, and is promised as many times the gap.
        """
        steps = CONSTRAINED_STEPS if constrained else 1
        firm_ttft = self.first_token(prompt_tokens) if ttft is None else ttft
        ttft_source = self.ttft_source if ttft is None else Source.REQUEST
        if gap is None:
            return Promise(firm_ttft, ttft_source, steps * max(self.gap, self.min_gap), self.gap_source)
        own, server = max(gap, steps * self.min_gap), steps * self.gap
        if own >= server:
            return Promise(firm_ttft, ttft_source, own, Source.REQUEST)
        return Promise(firm_ttft, ttft_source, server, self.gap_source, own)
