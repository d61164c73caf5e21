"""Products of a few rows with a large matrix, as in decoding. Most of the time goes into reading the matrix once.

For up to 64 rows. One row is multiplied and summed. Several rows go through tensor cores, padded to 16, 32 or 64. If
the matrix has too few rows to fill the device, several programs divide its columns. The last program to finish adds the
partial sums in a fixed order, so that results are reproducible. Imported only where there is a GPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from weft.kernels.fused import dependent

MAX_ROWS = 64
PROGRAMS = 2 * 132  # programs that fill an H200: two for each of its 132 multiprocessors


class Config(NamedTuple):
    block_m: int  # matrix rows per program; for a gated matrix, rows of each half
    block_k: int  # columns read at once
    splits: int  # programs that divide the columns
    num_warps: int
    num_stages: int  # 1: no pipeline, but many programs per multiprocessor
    dot: bool  # whether to use tensor cores


# (rows rounded up to a bucket, M, K, gated) -> the fastest configuration that scripts/time_kernels.py found on an H200.
# Other keys use the first of `candidates`. M counts the outputs: half of the rows of a gated matrix.
TUNED: dict[tuple[int, int, int, bool], Config] = {
    (1, 1024, 2048, False): Config(2, 2048, 1, 8, 1, False),
    (4, 1024, 2048, False): Config(64, 128, 8, 4, 4, True),
    (16, 1024, 2048, False): Config(32, 128, 8, 4, 5, True),
    (32, 1024, 2048, False): Config(64, 128, 8, 4, 3, True),
    (64, 1024, 2048, False): Config(64, 64, 8, 4, 5, True),
    (1, 1024, 3072, False): Config(4, 1024, 1, 4, 4, False),
    (4, 1024, 3072, False): Config(64, 128, 8, 4, 4, True),
    (16, 1024, 3072, False): Config(64, 128, 8, 4, 4, True),
    (32, 1024, 3072, False): Config(64, 64, 8, 4, 5, True),
    (64, 1024, 3072, False): Config(64, 64, 8, 4, 5, True),
    (1, 3072, 1024, True): Config(1, 1024, 1, 4, 1, False),
    (4, 3072, 1024, True): Config(64, 64, 4, 4, 4, True),
    (16, 3072, 1024, True): Config(64, 64, 4, 4, 4, True),
    (32, 3072, 1024, True): Config(64, 64, 4, 4, 3, True),
    (64, 3072, 1024, True): Config(64, 64, 4, 4, 3, True),
    (1, 4096, 1024, False): Config(4, 1024, 1, 4, 4, False),
    (4, 4096, 1024, False): Config(64, 128, 4, 4, 4, True),
    (16, 4096, 1024, False): Config(64, 128, 4, 4, 4, True),
    (32, 4096, 1024, False): Config(64, 64, 4, 4, 5, True),
    (64, 4096, 1024, False): Config(64, 128, 4, 4, 3, True),
    (1, 4096, 4096, False): Config(2, 2048, 1, 8, 1, False),
    (4, 4096, 4096, False): Config(64, 128, 4, 4, 4, True),
    (16, 4096, 4096, False): Config(64, 64, 4, 4, 6, True),
    (32, 4096, 4096, False): Config(64, 64, 4, 4, 5, True),
    (64, 4096, 4096, False): Config(64, 128, 4, 4, 3, True),
    (1, 4096, 14336, False): Config(2, 2048, 1, 8, 1, False),
    (4, 4096, 14336, False): Config(64, 128, 4, 4, 4, True),
    (16, 4096, 14336, False): Config(64, 128, 4, 4, 4, True),
    (32, 4096, 14336, False): Config(64, 128, 4, 4, 3, True),
    (64, 4096, 14336, False): Config(64, 128, 4, 4, 3, True),
    (1, 6144, 1024, False): Config(2, 1024, 1, 4, 1, False),
    (4, 6144, 1024, False): Config(32, 128, 1, 4, 5, True),
    (16, 6144, 1024, False): Config(32, 256, 1, 4, 3, True),
    (32, 6144, 1024, False): Config(64, 64, 2, 4, 5, True),
    (64, 6144, 1024, False): Config(64, 64, 2, 4, 5, True),
    (1, 6144, 4096, False): Config(2, 2048, 1, 8, 1, False),
    (4, 6144, 4096, False): Config(64, 128, 2, 4, 4, True),
    (16, 6144, 4096, False): Config(64, 128, 2, 4, 4, True),
    (32, 6144, 4096, False): Config(64, 64, 2, 4, 5, True),
    (64, 6144, 4096, False): Config(64, 64, 2, 4, 5, True),
    (1, 14336, 4096, True): Config(2, 1024, 1, 4, 4, False),
    (4, 14336, 4096, True): Config(64, 64, 1, 4, 4, True),
    (16, 14336, 4096, True): Config(64, 64, 1, 4, 4, True),
    (32, 14336, 4096, True): Config(64, 64, 1, 4, 3, True),
    (64, 14336, 4096, True): Config(64, 64, 1, 4, 3, True),
    (1, 28672, 4096, False): Config(2, 2048, 1, 8, 1, False),
    (4, 28672, 4096, False): Config(64, 128, 1, 4, 4, True),
    (16, 28672, 4096, False): Config(128, 128, 1, 8, 3, True),
    (32, 28672, 4096, False): Config(128, 128, 1, 8, 3, True),
    (64, 28672, 4096, False): Config(128, 128, 1, 8, 3, True),
    (1, 128256, 4096, False): Config(4, 1024, 1, 4, 4, False),
    (4, 128256, 4096, False): Config(64, 128, 1, 4, 4, True),
    (16, 128256, 4096, False): Config(128, 128, 1, 8, 3, True),
    (32, 128256, 4096, False): Config(64, 128, 1, 4, 3, True),
    (64, 128256, 4096, False): Config(64, 128, 1, 4, 3, True),
    (1, 151936, 1024, False): Config(8, 512, 1, 2, 1, False),
    (4, 151936, 1024, False): Config(64, 128, 1, 4, 4, True),
    (16, 151936, 1024, False): Config(128, 128, 1, 8, 3, True),
    (32, 151936, 1024, False): Config(64, 128, 1, 4, 3, True),
    (64, 151936, 1024, False): Config(64, 64, 1, 4, 5, True),
}

# Keys of TUNED with more than 16 rows for which this kernel was faster than torch: a subset of what the script prints.
# All other products of more than 16 rows are left to torch.
FASTER: frozenset[tuple[int, int, int, bool]] = frozenset(
    [
        (32, 1024, 2048, False),
        (32, 1024, 3072, False),
        (32, 3072, 1024, True),
        (32, 4096, 4096, False),
        (32, 4096, 14336, False),
        (32, 14336, 4096, True),
        (32, 128256, 4096, False),
        (32, 151936, 1024, False),
        (64, 1024, 3072, False),
        (64, 14336, 4096, True),
        (64, 128256, 4096, False),
    ]
)


def bucket(rows: int) -> int:
    """Rows rounded up to a size that is tuned: 1, 4, 16, 32 or 64."""
    return next(size for size in (1, 4, 16, 32, MAX_ROWS) if rows <= size)


def candidates(rows: int, m: int, k: int, dtype: torch.dtype, *, gated: bool = False) -> list[Config]:
    """Returns at most six configurations worth timing, the default first."""
    if dtype == torch.float32:
        return [Config(4, 512, 1, 4, 1, False)] if rows == 1 else [Config(16, 32, 1, 4, 1, True)]
    if rows == 1:
        # 256 columns per warp: x then has the same layout as the weights, and the loop needs no barrier.
        small = m * k < 1 << 23
        found = [
            Config(2 if small else 4, 1024, 1, 4, 1, False),
            Config(4, 1024, 1, 4, 4, False),
            Config(4 if small else 8, 1024, 1, 4, 1, False),
            Config(4, 512, 1, 2, 1, False) if small else Config(8, 512, 1, 2, 1, False),
            # Up to 4096 columns in one step: the loads of all weights are then issued before x is ready.
            Config(2, 4096, 1, 8, 1, False)
            if 2048 < k < 4096
            else Config(2, 2048, 1, 8, 1, False)
            if k >= 2048
            else Config(1, 1024, 1, 4, 1, False),
            Config(16, 256, _splits(m, k, 16, 256), 4, 4, True),
        ]
    else:
        found = [
            Config(block_m, block_k, _splits(m, k, block_m, block_k), num_warps, num_stages, True)
            for block_m, block_k, num_warps, num_stages in _tiles(rows, m)
        ]
    if gated:  # two matrices at once need twice the shared memory, or twice the registers
        found = [
            config._replace(block_k=config.block_k // 2)
            if config.dot
            else config._replace(block_m=-(-config.block_m // 2))
            for config in found
        ]
    fitting = [config._replace(block_k=min(config.block_k, _padded(k, config.dot))) for config in found]
    return list(dict.fromkeys(fitting))


def configure(rows: int, m: int, k: int, dtype: torch.dtype, *, gated: bool = False) -> Config:
    tuned = TUNED.get((bucket(rows), m, k, gated)) if dtype != torch.float32 else None
    return tuned or candidates(rows, m, k, dtype, gated=gated)[0]


def matvec(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None, config: Config | None = None
) -> Tensor:
    """x [N, K] times weight [M, K] transposed, plus bias [M]; N <= MAX_ROWS. Written to `out` if given.

    Weights are read before the previous kernel on the stream has ended (see `fused.PDL`), so that kernel must not write
    them. Only one call at a time may run on a device: calls share the counters for partial sums.
    """
    return _launch(x, weight, bias, out, False, config)


def matvec_silu(x: Tensor, gate_up: Tensor, *, config: Config | None = None) -> Tensor:
    """silu(gate) * up [N, inner]. x [N, K] times gate_up [2 * inner, K] transposed gives the gates, then the ups."""
    return _launch(x, gate_up, None, None, True, config)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, gated: bool, config: Config | None
) -> Tensor:
    (rows, k), m = x.shape, len(weight) // (1 + gated)
    assert rows <= MAX_ROWS
    assert x.stride(1) == weight.stride(1) == 1
    assert weight.shape[1] == k
    out = torch.empty((rows, m), dtype=x.dtype, device=x.device) if out is None else out
    assert out.shape == (rows, m)
    assert out.is_contiguous()
    if not rows:
        return out
    config = config or configure(rows, m, k, weight.dtype, gated=gated)
    tiles = triton.cdiv(m, config.block_m)
    partial, counters = out, out  # placeholders: not used without splits
    if config.splits > 1:
        partial = torch.empty((config.splits, 1 + gated, rows, m), dtype=torch.float32, device=x.device)
        assert tiles <= PROGRAMS, "so many programs need not share columns"
        counters = _zeros(x.device)
    if config.dot:
        kernel, special = _dot_rows, {"ROWS": max(16, triton.next_power_of_2(rows))}
    else:
        assert rows == 1, "several rows need tensor cores"
        kernel, special = _one_row, {"ONCE": triton.cdiv(k, config.block_k) == config.splits}
    kernel[(tiles, config.splits)](
        x,
        weight,
        out if bias is None else bias,
        out,
        partial,
        counters,
        rows,
        m,
        k,
        x.stride(0),
        weight.stride(0),
        BIAS=bias is not None,
        GATED=gated,
        EVEN=k % config.block_k == 0,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
        SPLITS=config.splits,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **special,
        **dependent(x.device, weight.numel() * weight.element_size()),
    )
    return out


def _tiles(rows: int, m: int) -> list[tuple[int, int, int, int]]:
    """(block_m, block_k, warps, stages). Each program reads all of x, so a small block_m is slow for many rows."""
    if rows <= 4:
        return [(16, 256, 4, 4), (32, 128, 4, 5), (32, 256, 4, 3), (64, 128, 4, 4), (16, 512, 4, 3)]
    if rows > 16:
        return [(64, 128, 4, 3), (64, 64, 4, 5), (128, 128, 8, 3)]
    if m <= 2048:
        return [(16, 256, 4, 4), (32, 128, 4, 5), (32, 256, 4, 4), (64, 128, 4, 4), (16, 128, 4, 5)]
    return [(64, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 6), (128, 64, 4, 4), (128, 128, 8, 3)]


def _splits(m: int, k: int, block_m: int, block_k: int) -> int:
    """Number of column splits: about two programs per multiprocessor, each with at least two steps over its columns."""
    most = max(1, k // (2 * block_k))
    return min(max(1, PROGRAMS // int(triton.cdiv(m, block_m))), most, 8)


def _padded(k: int, dot: bool) -> int:
    return max(16 if dot else 1, int(triton.next_power_of_2(k)))


@functools.cache
def _zeros(device: torch.device) -> Tensor:
    """Counters, one per tile of outputs that several programs share. They are zero before and after each call.

    The first call allocates them for good, outside the memory of any graph. So the first call must not be captured.
    """
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["rows"])
def _one_row(
    x,
    weight,
    bias,
    out,
    partial,
    counters,
    rows,
    m,
    k,
    x_stride,
    stride,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x. Each thread adds products in its registers; the sum over the columns is taken only at the end."""
    tile = tl.program_id(0)
    outputs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    begin, end = _columns(k, BLOCK_K, SPLITS)
    columns = tl.arange(0, BLOCK_K)
    # Beyond the last matrix row, the last row is read again and not stored. This costs less than a mask.
    from_weight = weight + tl.minimum(outputs, m - 1).to(tl.int64)[:, None] * stride + columns[None, :]
    from_up = from_weight
    if GATED:
        from_up += m.to(tl.int64) * stride
    if ONCE:
        # One step over the columns, so that the program issues the loads of all its weights before x is ready.
        inside = begin + columns < end
        if EVEN:
            weights = tl.load(from_weight + begin)
        else:
            weights = tl.load(from_weight + begin, mask=inside[None, :], other=0.0)
        ups = weights
        if GATED:
            ups = tl.load(from_up + begin) if EVEN else tl.load(from_up + begin, mask=inside[None, :], other=0.0)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        if EVEN:
            values = tl.load(x + begin + columns).to(tl.float32)[None, :]
        else:
            values = tl.load(x + begin + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc = weights.to(tl.float32) * values
        up = acc
        if GATED:
            up = ups.to(tl.float32) * values
    else:
        if PDL:
            _prefetch(weight, tile, m, begin, end, stride, GATED, BLOCK_M)
            gdc_launch_dependents()
            gdc_wait()
        acc = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        up = acc
        for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
            if EVEN:
                values = tl.load(x + start + columns).to(tl.float32)[None, :]
                acc += tl.load(from_weight + start).to(tl.float32) * values
                if GATED:
                    up += tl.load(from_up + start).to(tl.float32) * values
            else:
                inside = start + columns < k
                values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
                acc += tl.load(from_weight + start, mask=inside[None, :], other=0.0).to(tl.float32) * values
                if GATED:
                    ups = tl.load(from_up + start, mask=inside[None, :], other=0.0)
                    up += ups.to(tl.float32) * values
    first = tl.sum(acc, 1)[:, None]
    second = first
    if GATED:
        second = tl.sum(up, 1)[:, None]
    row = tl.zeros([1], tl.int32)
    _finish(first, second, bias, out, partial, counters, outputs, row, rows, m, BIAS, GATED, SPLITS)


@triton.jit(do_not_specialize=["rows"])
def _dot_rows(
    x,
    weight,
    bias,
    out,
    partial,
    counters,
    rows,
    m,
    k,
    x_stride,
    stride,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Several rows of x, padded to ROWS. The matrix is the left operand, so its rows are the rows of the product."""
    tile = tl.program_id(0)
    outputs = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    begin, end = _columns(k, BLOCK_K, SPLITS)
    columns = tl.arange(0, BLOCK_K)
    row = tl.arange(0, ROWS)
    from_weight = weight + tl.minimum(outputs, m - 1).to(tl.int64)[:, None] * stride + columns[None, :]
    from_x = x + row[:, None] * x_stride + columns[None, :]
    exists = (row < rows)[:, None]
    if PDL:
        _prefetch(weight, tile, m, begin, end, stride, GATED, BLOCK_M)
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_M, ROWS], tl.float32)
    up = acc
    for start in tl.range(begin, end, BLOCK_K):
        if EVEN:
            values = tl.trans(tl.load(from_x + start, mask=exists, other=0.0))
            acc = tl.dot(tl.load(from_weight + start), values, acc, input_precision="ieee")
            if GATED:
                ups = tl.load(from_weight + m.to(tl.int64) * stride + start)
                up = tl.dot(ups, values, up, input_precision="ieee")
        else:
            inside = (start + columns < k)[None, :]
            values = tl.trans(tl.load(from_x + start, mask=exists & inside, other=0.0))
            acc = tl.dot(tl.load(from_weight + start, mask=inside, other=0.0), values, acc, input_precision="ieee")
            if GATED:
                ups = tl.load(from_weight + m.to(tl.int64) * stride + start, mask=inside, other=0.0)
                up = tl.dot(ups, values, up, input_precision="ieee")
    _finish(acc, up, bias, out, partial, counters, outputs, row, rows, m, BIAS, GATED, SPLITS)


@triton.jit
def _columns(k, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):
    """The range of columns of this program's split."""
    share = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
    begin = tl.program_id(1) * share
    return begin, tl.minimum(begin + share, k)


@triton.jit
def _finish(
    first,
    second,
    bias,
    out,
    partial,
    counters,
    outputs,
    row,
    rows,
    m,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Adds up the splits and stores `first` [outputs, rows]; if GATED, stores silu(first) * second instead."""
    at = row[None, :] * m + outputs[:, None]
    inside = (row < rows)[None, :] & (outputs < m)[:, None]
    if SPLITS == 1:
        _store(first, second, bias, out, at, inside, outputs, m, BIAS, GATED)
    else:
        size = rows * m
        here = partial + tl.program_id(1) * (size * (1 + GATED))
        tl.store(here + at, first, mask=inside)
        if GATED:
            tl.store(here + size + at, second, mask=inside)
        # All threads store before one of them counts. Its release makes their stores visible to the last program.
        tl.debug_barrier()
        counter = counters + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counter, 0)
            first = tl.zeros(first.shape, tl.float32)
            second = tl.zeros(first.shape, tl.float32)
            for split in tl.static_range(SPLITS):
                there = partial + split * (size * (1 + GATED))
                first += tl.load(there + at, mask=inside, other=0.0, cache_modifier=".cg")
                if GATED:
                    second += tl.load(there + size + at, mask=inside, other=0.0, cache_modifier=".cg")
            _store(first, second, bias, out, at, inside, outputs, m, BIAS, GATED)


@triton.jit
def _store(first, second, bias, out, at, inside, outputs, m, BIAS: tl.constexpr, GATED: tl.constexpr):
    if BIAS:
        first += tl.load(bias + outputs, mask=outputs < m, other=0.0).to(tl.float32)[:, None]
    if GATED:
        first = first * tl.sigmoid(first) * second
    tl.store(out + at, first.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _prefetch(weight, tile, m, begin, end, stride, GATED: tl.constexpr, BLOCK_M: tl.constexpr):
    """Prefetches the first lines of each weight row into L2 before x is ready. No kernel of a step writes weights."""
    outputs = tl.minimum(tile * BLOCK_M + tl.arange(0, BLOCK_M), m - 1).to(tl.int64)
    lines = tl.maximum(tl.minimum(begin + tl.arange(0, 16) * 64, end - 1), 0)
    places = weight + outputs[:, None] * stride + lines[None, :]
    _ask(places)
    if GATED:
        _ask(places + m.to(tl.int64) * stride)


@triton.jit
def _ask(places):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )
