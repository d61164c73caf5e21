"""CUDA graphs: a step captured once and replayed, so that it costs the host next to nothing.

Decode steps are captured whole. A step with prompts in it is captured but for the attention of its prompts, which is
planned anew for every step: that runs between the pieces, layer by layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.kernels.attention import Heads

Cut = Callable[[Heads, Tensor, Tensor], None]
GRAIN = 128  # tokens from one size of a mixed step to the next, but for the largest
WASTE = 1.25  # of the tokens that a step has, how many it is worth to run for the sake of a graph
LAUNCHING = 1 << 37  # tokens times parameters of a layer that take the device as long as the host takes to launch one


class Whole:
    """A whole step, or what comes behind one, that was warmed up. Its results lie where it always puts them."""

    def __init__(self, step: Callable[[], None], pool: Any) -> None:
        # Not through torch.cuda.graph, which collects garbage each time: with many graphs that takes seconds.
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_side()):
            self._graph.capture_begin(pool=pool)
            step()
            self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class Pieces:
    """A forward pass in pieces, that was warmed up: `forward` calls what it is given where its prompts attend, with
    their layer, the queries and the place for the result, which are always the same.
    """

    def __init__(self, forward: Callable[[Cut], Tensor], pool: Any) -> None:
        self._pool = pool
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._cuts: list[tuple[Heads, Tensor, Tensor]] = []
        with torch.cuda.stream(_side()):
            self._begin()
            self._hidden = forward(self._cut)
            self._graphs[-1].capture_end()

    def replay(self, attend: Cut) -> Tensor:
        """Hidden states; `attend(heads, q, out)` is called for every cut."""
        for graph, cut in zip(self._graphs, self._cuts, strict=False):
            graph.replay()
            attend(*cut)
        self._graphs[-1].replay()
        return self._hidden

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        self._graphs.append(graph)

    def _cut(self, heads: Heads, q: Tensor, out: Tensor) -> None:
        self._graphs[-1].capture_end()
        self._cuts.append((heads, q, out))
        self._begin()


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


def score_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows that steps with prompts compute scores for."""
    return sorted(size for size in {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs} if size <= max_num_seqs)


def draw_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture the drawing of tokens for: far apart, since a row that is nobody's costs little."""
    return sorted({*(1 << power for power in range(max_num_seqs.bit_length())), max_num_seqs})


def mixed_sizes(max_num_batched_tokens: int, layer_parameters: int) -> list[int]:
    """Numbers of tokens to capture mixed steps for: as many as the host takes longer to launch than the device to do.

    Of the sizes between these, many take as long as the next larger one or longer: cuBLAS has no good kernel for them
    (Llama-3-8B on an H200: 14.0 ms for 448 tokens, 10.3 for 512).
    """
    most = min(max_num_batched_tokens, max(2048, min(LAUNCHING // layer_parameters, 8192)))
    parts = ((64, GRAIN, 64), (GRAIN, 1024, GRAIN), (1024, 2048, 256), (2048, 4096, 512), (4096, 1 << 20, 1024))
    return sorted({*_ladder(*parts, most=most), most})


def is_worth_it(size: int, tokens: int, layer_parameters: int) -> bool:
    """Whether so many tokens are run faster by the graph for `size` than launched one by one."""
    return size <= WASTE * tokens + GRAIN or size * layer_parameters <= LAUNCHING


def _ladder(*parts: tuple[int, int, int], most: int) -> list[int]:
    return [size for low, high, step in parts for size in range(low, min(high, most + 1), step)]
