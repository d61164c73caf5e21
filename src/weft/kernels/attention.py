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


class Heads(NamedTuple):
    """Parameters of a layer's attention, apart from its weight matrices."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None  # a query at position p sees keys at positions > p - window; None: all up to p
    rotation: Rotation
    q_norm: HeadNorm | None = None  # before the rotation
    k_norm: HeadNorm | None = None
    last: bool = False  # the model's last layer: its output is only read for tokens that are sampled from


class Attend(Protocol):
    """Attention over the flat batch of one step. A model calls it once per layer, and knows no requests or blocks.

    The slices of the step are concatenated on the first axis (T tokens). The backend norms and rotates queries and keys
    and writes k and v of every token into the paged cache. Only then it attends, so that a slice may read what another
    slice writes in the same step.
    """

    def __call__(self, heads: Heads, qkv: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        """[T, (heads + 2 * kv_heads) * head_dim] -> [T, heads * head_dim], and the residual stream [T, hidden].

        In the last layer a backend may drop, from both, the rows of tokens that nothing is sampled from.
        """
        ...


class PlainHeads:
    """Norms and rotations in plain torch, for backends without a kernel for them."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions
        self._angles: dict[Rotation, Angles] = {}

    def split(self, heads: Heads, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k (both rotated) and v, each [T, heads, head_dim]."""
        qkv = qkv.view(len(qkv), -1, heads.head_dim)
        qk, v = torch.split(qkv, [heads.heads + heads.kv_heads, heads.kv_heads], dim=1)
        if heads.q_norm is not None and heads.k_norm is not None:
            q, k = torch.split(qk, [heads.heads, heads.kv_heads], dim=1)
            qk = torch.cat((heads.q_norm.apply(q), heads.k_norm.apply(k)), dim=1)
        if heads.rotation not in self._angles:
            self._angles[heads.rotation] = heads.rotation(self.positions)
        q, k = torch.split(rotate(qk, self._angles[heads.rotation]), [heads.heads, heads.kv_heads], dim=1)
        return q, k, v


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """x [T, heads, head_dim] with its leading dimensions rotated: dimension i is paired with i + rotary_dim / 2."""
    cos, sin = angles
    half = cos.shape[-1]
    a, b, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
