"""Stream: token values and sampling parameters of one core Request. The loop owns it; core does not use it."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import Request, Source
from weft.engine.hashing import block_hash
from weft.engine.params import SamplingParams
from weft.engine.structured import RequestGrammar


class Standing(NamedTuple):
    """Scheduling class of a request, and its latency targets in seconds."""

    priority: int = 0  # lower goes first
    tenant: str = ""  # tenants share the engine fairly, counted in tokens
    precedence: int = 0  # lower goes first, among prompts of the same tenant
    flex: bool = False  # has no target; uses capacity that other requests leave
    ttft_target: float = math.inf
    gap_target: float = math.inf
    ttft_source: Source = Source.REQUEST
    gap_source: Source = Source.REQUEST
    gap_wish: float = math.inf  # a smaller gap than the target, met while it costs other requests almost nothing
    user: str = ""  # end user within the tenant: further prompts of one user queue behind other users' prompts


@dataclass(slots=True, eq=False)
class Stream:
    request: Request
    prompt: NDArray[np.int32]
    params: SamplingParams
    seed: int  # of this completion; always set
    stop_ids: frozenset[int]  # end the request when sampled; without the end-of-text ids under ignore_eos
    tail: bytes  # hash of its last full block with known tokens, or the root hash
    output: list[int] = field(default_factory=list)
    grammar: RequestGrammar | None = None  # constrains the output

    @classmethod
    def open(
        cls,
        request_id: str,
        prompt: NDArray[np.int32],
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        eos_ids: tuple[int, ...],
        root: bytes,
        hashes: Sequence[bytes],
        arrival: float,
        standing: Standing | None = None,
        grammar: RequestGrammar | None = None,
        sibling: bool = False,
    ) -> "Stream":
        request = Request(
            id=request_id,
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            arrival=arrival,
            sibling=sibling,
            **(standing or Standing())._asdict(),
            # Cached blocks have no hidden states, which prompt log probabilities and mean pooling need.
            reuse_prefix=params.prompt_logprobs is None and params.pooling != "mean",
            constrained=grammar is not None,
            hashes=list(hashes),
        )
        endless = params.ignore_eos and grammar is None  # after the end of a grammar no token is allowed
        stop_ids = frozenset(params.stop_token_ids or ()) | frozenset(() if endless else eos_ids)
        return cls(request, prompt, params, seed, stop_ids, hashes[-1] if hashes else root, grammar=grammar)

    def values(self, first: int, count: int) -> NDArray[np.int32]:
        """Token ids at positions first..first+count-1."""
        split = len(self.prompt)
        if first + count <= split:
            return self.prompt[first : first + count]
        tail = np.array(self.output[max(0, first - split) : first + count - split], np.int32)
        return np.concatenate([self.prompt[first:split], tail]) if first < split else tail

    def hash_full_blocks(self, computed: int, block_size: int) -> None:
        """Extends the request's hashes over the blocks that `computed` tokens fill."""
        hashes = self.request.hashes
        split = len(self.prompt)
        while (len(hashes) + 1) * block_size <= computed:
            first = len(hashes) * block_size
            if first >= split:  # the usual case; without numpy, because many streams fill a block in every step
                content = array("i", self.output[first - split : first - split + block_size]).tobytes()
            else:
                content = self.values(first, block_size).tobytes()
            self.tail = block_hash(self.tail, content)
            hashes.append(self.tail)
