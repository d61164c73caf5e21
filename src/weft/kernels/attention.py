"""The attention interface: what a model's layer calls, and what every backend provides."""

from typing import Protocol

from torch import Tensor


class Attend(Protocol):
    """Attention over one step's flat batch. A model calls it once per layer; it knows nothing of requests or blocks.

    All slices of the step lie behind each other on the first axis (T tokens). The backend first writes k and v of every
    token into the paged cache and then attends, so that a slice may read what a neighbour writes in the same step.
    """

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [T, heads, head_dim], rotated
        k: Tensor,  # [T, kv_heads, head_dim], rotated
        v: Tensor,  # [T, kv_heads, head_dim]
        scale: float,
        window: int | None,  # a query at position p sees keys at positions > p - window; None: all up to p
    ) -> Tensor:  # [T, heads * head_dim]
        ...
