"""CUDA graphs: a step is captured once and replayed, which costs the host almost nothing.

Decode steps are captured as full graphs. Steps with prompts are captured as piecewise graphs, without the attention of
the prompts. That attention is planned for every step and runs between the pieces, layer by layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.kernels.attention import AttentionParams

PromptAttention = Callable[[AttentionParams, Tensor, Tensor], None]  # arguments: a layer's parameters, queries, output
# Tokens between two sizes of mixed steps up to 1,024 (and 64 is a size); larger sizes are farther apart.
GRAPH_GRAIN = 128
MOST_PADDING = 1.25  # a graph may run up to this many times the tokens of a step, plus GRAPH_GRAIN
# Tokens * parameters of a layer: with less, the device takes less time than the host to launch it.
LAUNCH_WORK = 1 << 37


class FullGraph:
    """One graph of a whole step, or of its sampling. Warm the step up first. Results are at fixed addresses."""

    def __init__(self, step: Callable[[], None], pool: Any) -> None:
        # Not torch.cuda.graph: it collects garbage each time, which takes seconds with many graphs.
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_capture_stream()):
            self._graph.capture_begin(pool=pool)
            step()
            self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class PiecewiseGraph:
    """A forward pass as several graphs. It is split at the attention of each layer. Warm the pass up first.

    `forward(split)` must call `split(params, q, out)` in each layer where prompts attend. At each replay, an attention
    function runs there instead, with the same arguments: the tensors are at fixed addresses.
    """

    def __init__(self, forward: Callable[[PromptAttention], Tensor], pool: Any) -> None:
        self._pool = pool
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._split_points: list[tuple[AttentionParams, Tensor, Tensor]] = []
        with torch.cuda.stream(_capture_stream()):
            self._begin()
            self._hidden = forward(self._split)
            self._graphs[-1].capture_end()

    def replay(self, attend: PromptAttention) -> Tensor:
        """Returns the hidden states. Calls `attend(params, q, out)` between the pieces."""
        for graph, arguments in zip(self._graphs, self._split_points, strict=False):
            graph.replay()
            attend(*arguments)
        self._graphs[-1].replay()
        return self._hidden

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool)
        self._graphs.append(graph)

    def _split(self, params: AttentionParams, q: Tensor, out: Tensor) -> None:
        self._graphs[-1].capture_end()
        self._split_points.append((params, q, out))
        self._begin()


def warm_up(step: Callable[[], object]) -> None:
    """Runs a step to compile kernels and initialise libraries, which cannot happen in a capture."""
    cuda_stream = _capture_stream()
    cuda_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(cuda_stream):
        step()
    torch.cuda.synchronize()


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    """The one CUDA stream for captures. Torch and its libraries keep memory for each stream that was ever used."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture decode steps for: close together where one more row costs most."""
    parts = ((1, 2, 1), (2, 4, 2), (4, 8, 4), (8, 64, 8), (64, 256, 16), (256, 1 << 20, 64))
    ladder = _ladder(*parts, most=max_num_seqs)
    return sorted({*ladder, max_num_seqs})


def logits_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows that steps with prompts compute logits for."""
    return sorted(size for size in {1, 2, 4, *range(8, max_num_seqs, 8), max_num_seqs} if size <= max_num_seqs)


def sampling_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of rows to capture sampling for: far apart, because a dummy row costs little."""
    return sorted({*(1 << power for power in range(max_num_seqs.bit_length())), max_num_seqs})


def mixed_sizes(max_num_batched_tokens: int, layer_parameters: int) -> list[int]:
    """Numbers of tokens to capture mixed steps for.

    They go up to the size at which the device takes as long to run a step as the host takes to launch it, but at least
    to 2,048 and at most to 8,192 tokens, within max_num_batched_tokens. Many sizes in between take as long as the next
    captured size, or longer, because cuBLAS has no good kernel for them (Llama-3-8B on an H200: 14.0 ms for 448 tokens,
    10.3 ms for 512).
    """
    most = min(max_num_batched_tokens, max(2048, min(LAUNCH_WORK // layer_parameters, 8192)))
    parts = (
        (64, GRAPH_GRAIN, 64),
        (GRAPH_GRAIN, 1024, GRAPH_GRAIN),
        (1024, 2048, 256),
        (2048, 4096, 512),
        (4096, 1 << 20, 1024),
    )
    return sorted({*_ladder(*parts, most=most), most})


def is_graph_faster(size: int, tokens: int, layer_parameters: int) -> bool:
    """Whether the graph for `size` runs a step of `tokens` faster than launching its kernels one by one."""
    return size <= MOST_PADDING * tokens + GRAPH_GRAIN or size * layer_parameters <= LAUNCH_WORK


def _ladder(*parts: tuple[int, int, int], most: int) -> list[int]:
    return [size for low, high, step in parts for size in range(low, min(high, most + 1), step)]
