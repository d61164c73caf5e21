"""Products of a few rows with a large matrix, as in decoding. Most of the time goes into reading the matrix once.

For up to 64 rows. One row is multiplied and summed. Several rows go through tensor cores, padded to 16, 32 or 64. If
the matrix has too few rows to fill the device, several programs divide its columns. The last program to finish adds the
partial sums in a fixed order, so that results are reproducible. Imported only where there is a GPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

from weft.kernels.fused import dependent
from weft.kernels.matvec_tuning import DEVICE_PROGRAMS, MAX_ROWS, Config, configure


def matvec(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None, config: Config | None = None
) -> Tensor:
    """x [N, K] times weight [M, K] transposed, plus bias [M]; N <= MAX_ROWS. Written to `out` if given.

    Weights are read before the previous kernel on the CUDA stream has ended (see `fused.PDL`), so that kernel must not
    write them. Only one call at a time may run on a device: calls share the counters for partial sums.
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
        assert tiles <= DEVICE_PROGRAMS, "so many programs need not share columns"
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


@functools.cache
def _zeros(device: torch.device) -> Tensor:
    """Counters, one per tile of outputs that several programs share. They are zero before and after each call.

    The first call allocates them for good, outside the memory of any graph. So the first call must not be captured.
    """
    return torch.zeros(DEVICE_PROGRAMS, dtype=torch.int32, device=device)


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
        weights = _load(from_weight + begin, inside[None, :], EVEN)
        ups = weights
        if GATED:
            ups = _load(from_up + begin, inside[None, :], EVEN)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        values = _load(x + begin + columns, inside, EVEN).to(tl.float32)[None, :]
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
            inside = start + columns < k
            values = _load(x + start + columns, inside, EVEN).to(tl.float32)[None, :]
            acc += _load(from_weight + start, inside[None, :], EVEN).to(tl.float32) * values
            if GATED:
                up += _load(from_up + start, inside[None, :], EVEN).to(tl.float32) * values
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
        inside = (start + columns < k)[None, :]
        values = tl.trans(tl.load(from_x + start, mask=exists if EVEN else exists & inside, other=0.0))
        acc = tl.dot(_load(from_weight + start, inside, EVEN), values, acc, input_precision="ieee")
        if GATED:
            ups = _load(from_weight + m.to(tl.int64) * stride + start, inside, EVEN)
            up = tl.dot(ups, values, up, input_precision="ieee")
    _finish(acc, up, bias, out, partial, counters, outputs, row, rows, m, BIAS, GATED, SPLITS)


@triton.jit
def _columns(k, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):
    """The range of columns of this program's split."""
    share = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
    begin = tl.program_id(1) * share
    return begin, tl.minimum(begin + share, k)


@triton.jit
def _load(places, inside, EVEN: tl.constexpr):
    """Loads a block, with zeros outside the matrix. EVEN: all of it is inside, and no mask is needed."""
    return tl.load(places) if EVEN else tl.load(places, mask=inside, other=0.0)


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
