"""Targets: what a request is promised, in seconds."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Targets:
    """The default promises of a server or a simulation; infinite where nothing is promised."""

    gap: float = math.inf  # between tokens
    ttft: float = math.inf  # from arrival to the first token
    ttft_per_1k: float = 0.0  # on top, for every 1,000 tokens of the prompt

    def first_token(self, prompt_tokens: int) -> float:
        return self.ttft + self.ttft_per_1k * prompt_tokens / 1000
