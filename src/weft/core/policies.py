"""Policies: how many prefill tokens a step may carry."""

from typing import NamedTuple, Protocol


class StepLoad(NamedTuple):
    """What a policy may look at when the decodes of a step are settled."""

    decodes: int


class Allowance(NamedTuple):
    tokens: int
    reason: str


class Policy(Protocol):
    def allowance(self, load: StepLoad) -> Allowance: ...


class ChunkedPolicy:
    """Stall-free batching with a fixed budget: every decode counts as one token, prefills share what is left."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.budget = max_num_batched_tokens

    def allowance(self, load: StepLoad) -> Allowance:
        return Allowance(max(0, self.budget - load.decodes), "token budget")
