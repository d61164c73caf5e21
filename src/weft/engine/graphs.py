"""CUDA graphs: a step captured once and replayed, so that it costs the host next to nothing.

Decode steps are captured whole. A step with prompts in it is captured but for the attention of its prompts, which is
planned anew for every step: that runs between the pieces, layer by layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.kernels.attention import Attend, Heads


class Whole:
    """A whole step."""

    def __init__(self, step: Callable[[], Tensor], pool: Any) -> None:
        # Not through torch.cuda.graph, which collects garbage each time: with many graphs that takes seconds.
        warm_up(step)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_side()):
            self._graph.capture_begin(pool=pool)
            self._result = step()
            self._graph.capture_end()

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._result


class Pieces:
    """A forward pass in pieces, cut where its prompts attend.

    `before` is what an attention does ahead of the prompts' part: it returns the queries and the place for the result,
    both always the same. The result of an attention is [T, heads * head_dim].
    """

    def __init__(
        self,
        forward: Callable[[Attend], Tensor],
        before: Callable[[Heads, Tensor], tuple[Tensor, Tensor]],
        pool: Any,
    ) -> None:
        self._before, self._pool = before, pool
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._cuts: list[tuple[Heads, Tensor, Tensor]] = []
        warm_up(lambda: forward(lambda heads, qkv: before(heads, qkv)[1].flatten(1)))
        with torch.cuda.stream(_side()):
            self._begin()
            self._hidden = forward(self._cut)
            self._graphs[-1].capture_end()

    def replay(self, attend: Callable[[Heads, Tensor, Tensor], None]) -> Tensor:
        """Hidden states; `attend(heads, q, out)` is called for every layer."""
        for graph, cut in zip(self._graphs, self._cuts, strict=False):
            graph.replay()
            attend(*cut)
        self._graphs[-1].replay()
        return self._hidden

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        self._graphs.append(graph)

    def _cut(self, heads: Heads, qkv: Tensor) -> Tensor:
        q, out = self._before(heads, qkv)
        self._graphs[-1].capture_end()
        self._cuts.append((heads, q, out))
        self._begin()
        return out.flatten(1)


def warm_up(step: Callable[[], object]) -> None:
    """Compiles kernels and sets libraries up, which cannot be captured."""
    stream = _side()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()


@functools.cache
def _side() -> torch.cuda.Stream:
    """One for all: torch and its libraries keep memory for each stream that was ever used."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture decode steps for: close together where a row more costs most."""
    parts = ((1, 2, 1), (2, 4, 2), (4, 8, 4), (8, 64, 8), (64, 256, 16), (256, 1 << 20, 64))
    ladder = _ladder(*parts, most=max_num_seqs)
    return sorted({*ladder, max_num_seqs})


def mixed_sizes(max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens to capture mixed steps for. Above these the device takes longer than the host.

    Close together, because the cost model counts tokens and not places in a graph.
    """
    most = min(max_num_batched_tokens, 2048)
    return sorted({*_ladder((64, 1024, 64), (1024, 2049, 128), most=most), most})


def _ladder(*parts: tuple[int, int, int], most: int) -> list[int]:
    return [size for low, high, step in parts for size in range(low, min(high, most + 1), step)]
