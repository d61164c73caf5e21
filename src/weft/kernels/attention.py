"""The attention interface: what a model's layer calls, and what every backend provides."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Angles(NamedTuple):
    """cos and sin of the angles of a step's tokens, each [T, 1, rotary_dim / 2]: one row for all heads."""

    cos: Tensor
    sin: Tensor


class Rotation(Protocol):
    """A rotary position embedding. Layers with equal settings share one object."""

    @property
    def table(self) -> Tensor:
        """cos and sin of every position that a context may have, [max_model_len, 2, rotary_dim / 2], in float32."""
        ...

    def __call__(self, positions: Tensor) -> Angles: ...


class HeadNorm(NamedTuple):
    """The norm of each head of the queries or of the keys."""

    apply: Callable[[Tensor], Tensor]
    weight: Tensor | None  # None: not a plain root mean square norm; only `apply` computes it
    eps: float


class AttentionParams(NamedTuple):
    """Parameters of one layer's attention, apart from its weight matrices."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # a query at position p sees keys at positions > p - window; None: all up to p
    rotation: Rotation
    q_norm: HeadNorm | None = None  # before the rotation
    k_norm: HeadNorm | None = None
    is_last_layer: bool = False  # only rows that are sampled from need its output


class Attend(Protocol):
    """Attention over the flat batch of one step. A model calls it once per layer. It knows no requests and blocks.

    The slices of the step are concatenated on the first axis (T tokens). The backend norms and rotates queries and keys
    and writes k and v of every token into the paged cache. Only then it attends, so that a slice may read what another
    slice writes in the same step.
    """

    def __call__(self, params: AttentionParams, qkv: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`qkv` [T, (heads + 2 * kv_heads) * head_dim] -> attention output [T, heads * head_dim], and `residual`.

        `residual` [T, hidden] is returned as it is, except that in the last layer a backend may drop, from both
        results, the rows of tokens that are not sampled from.
        """
        ...


class PlainNormRope:
    """Norms and rotations in plain torch, for backends without a kernel for them."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self._angles: dict[Rotation, Angles] = {}

    def split(self, params: AttentionParams, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (both rotated) and v, each [T, heads, head_dim]."""
        qkv = qkv.view(len(qkv), -1, params.head_dim)
        qk, v = torch.split(qkv, [params.num_heads + params.num_kv_heads, params.num_kv_heads], dim=1)
        if params.q_norm is not None and params.k_norm is not None:
            q, k = torch.split(qk, [params.num_heads, params.num_kv_heads], dim=1)
            qk = torch.cat((params.q_norm.apply(q), params.k_norm.apply(k)), dim=1)
        if params.rotation not in self._angles:
            self._angles[params.rotation] = params.rotation(self.positions)
        q, k = torch.split(rotate(qk, self._angles[params.rotation]), [params.num_heads, params.num_kv_heads], dim=1)
        return q, k, v


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """x [T, heads, head_dim] with its leading dimensions rotated: dimension i is paired with i + rotary_dim / 2."""
    cos, sin = angles
    half = cos.shape[-1]
    a, b, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
