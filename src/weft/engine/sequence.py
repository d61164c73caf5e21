"""Sequence: one completion of a prompt. It has the token ids and sampling parameters that a core Request lacks."""

import math
from array import array
from collections import abc
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core import Request, Source
from weft.engine.hashing import block_hash
from weft.engine.params import SamplingParams
from weft.engine.structured import RequestGrammar


class SchedulingParams(NamedTuple):
    """What a request gets from the scheduler: its class, and its latency targets in seconds.

    The fields are passed to the core `Request`, which has the same ones.
    """

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
class Sequence:
    request: Request
    prompt: NDArray[np.int32]
    params: SamplingParams
    seed: int  # of this completion; always set
    stop_ids: frozenset[int]  # end the request when sampled; without the end-of-text ids under ignore_eos
    last_block_hash: bytes  # hash of the last full block with known tokens, or the root hash
    output: list[int] = field(default_factory=list)
    grammar: RequestGrammar | None = None  # constrains the output

    @classmethod
    def create(
        cls,
        request_id: str,
        prompt: NDArray[np.int32],
        params: SamplingParams,
        *,
        seed: int,
        max_tokens: int,
        eos_ids: tuple[int, ...],
        root: bytes,
        hashes: abc.Sequence[bytes],
        arrival: float,
        scheduling: SchedulingParams | None = None,
        grammar: RequestGrammar | None = None,
        sibling: bool = False,
    ) -> "Sequence":
        request = Request(
            id=request_id,
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            arrival=arrival,
            sibling=sibling,
            **(scheduling or SchedulingParams())._asdict(),
            # Cached blocks have no hidden states, which prompt log probabilities and mean pooling need.
            reuse_prefix=params.prompt_logprobs is None and params.pooling != "mean",
            constrained=grammar is not None,
            hashes=list(hashes),
        )
        endless = params.ignore_eos and grammar is None  # after the end of a grammar no token is allowed
        stop_ids = frozenset(params.stop_token_ids or ()) | frozenset(() if endless else eos_ids)
        return cls(request, prompt, params, seed, stop_ids, hashes[-1] if hashes else root, grammar=grammar)

    def token_ids(self, first: int, count: int) -> NDArray[np.int32]:
        """Token ids at positions first..first+count-1."""
        split = len(self.prompt)
        if first + count <= split:
            return self.prompt[first : first + count]
        generated = np.array(self.output[max(0, first - split) : first + count - split], np.int32)
        return np.concatenate([self.prompt[first:split], generated]) if first < split else generated

    def hash_full_blocks(self, computed: int, block_size: int) -> None:
        """Extends the request's hashes over the blocks that `computed` tokens fill."""
        hashes = self.request.hashes
        split = len(self.prompt)
        while (len(hashes) + 1) * block_size <= computed:
            first = len(hashes) * block_size
            if first >= split:  # the usual case; without numpy, because many sequences fill a block in every step
                content = array("i", self.output[first - split : first - split + block_size]).tobytes()
            else:
                content = self.token_ids(first, block_size).tobytes()
            self.last_block_hash = block_hash(self.last_block_hash, content)
            hashes.append(self.last_block_hash)
