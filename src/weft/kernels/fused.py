"""Triton kernels for the work between the matrix products of a layer: norms, SwiGLU, rotations, KV cache writes.

Each kernel reads its input once and writes its result once. It computes in float32 and rounds at the end. Imported only
where there is a GPU.

The kernels of a step (here, in matvec and in decode) start while the previous kernel still runs (programmatic dependent
launch). Each of them waits (gdc_wait) before it reads anything but weights, and before it writes anything. The wait
ends when the previous kernel has ended. All earlier kernels have then ended too, because the previous kernel has waited
as well. Only weights are read before the wait, so the step must not change them. Kernels of other libraries are
launched normally, and wait for everything.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra.cuda import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    gdc_launch_dependents,
    gdc_wait,
)

COPIED = 4096  # numbers copied per program
SHORT_READ = 16 << 20  # bytes; reading them takes about as long as starting a kernel
PDL = True  # programmatic dependent launch, where supported; False: a kernel starts when all earlier kernels have ended


def dependent(device: torch.device, reads: int = 0) -> dict[str, Any]:
    """Launch arguments that decide whether a kernel starts while the previous kernel still runs.

    A kernel that `reads` many bytes of weights does not: it would take bandwidth from the previous kernel.
    """
    return {"PDL": True, "launch_pdl": True} if PDL and reads <= SHORT_READ and _has_pdl(device) else {"PDL": False}


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and the sum, for x [T, H].

    The sum overwrites `residual` and its norm overwrites `x`. Without a residual the sum is x itself, unchanged, and
    the norm is a new tensor.
    """
    rows, size = x.shape
    normed = torch.empty_like(x) if residual is None else x
    total = x if residual is None else residual
    assert x.stride(1) == total.stride(1) == normed.stride(1) == weight.stride(0) == 1
    if rows:
        block = triton.next_power_of_2(size)
        _add_rms_norm[(rows,)](
            x,
            total,
            weight,
            normed,
            eps,
            size,
            x.stride(0),
            total.stride(0),
            normed.stride(0),
            ADD=residual is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 4), 16),
            **dependent(x.device),
        )
    return normed, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for gate_up [T, 2 * inner] with the gates first."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        # Few rows: small blocks, so that every SM has one. Many rows: there are plenty of programs, so each does more.
        block = 512 if rows <= 32 else 1024 if rows <= 256 else 2048
        block = min(block, triton.next_power_of_2(inner))
        _silu_mul[(rows, triton.cdiv(inner, block))](
            gate_up,
            out,
            inner,
            gate_up.stride(0),
            BLOCK=block,
            num_warps=min(max(block // 256, 1), 8),
            **dependent(gate_up.device),
        )
    return out


def norm_rope_write(
    qkv: Tensor,  # [T, (heads + 2 * kv_heads) * head_dim]
    q_weight: Tensor | None,  # [head_dim]; None: queries are not normed
    k_weight: Tensor | None,
    eps: float,
    table: Tensor,  # [max_len, 2, rotary_dim / 2] float32: cos, then sin
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor,
    block_tables: Tensor,  # [S, W] int32
    slots: Tensor,  # [T] int32: each token's row in the block tables; negative: padding, not written to the cache
    positions: Tensor,  # [T] int32
    heads: int,
    kv_heads: int,
    head_dim: int,
    q: Tensor | None = None,  # receives the queries; None: a new tensor
    copy: Tensor | None = None,  # [2, L, kv_heads, head_dim]: second copy of one slot's keys and values, by position
    copied: Tensor | None = None,  # [1] int32: the slot to copy; negative: none
) -> Tensor:
    """Norms and rotates queries and keys, and writes keys and values to the cache.

    Returns the queries as [T, heads, head_dim].
    """
    assert (copy is None) == (copied is None)
    assert copy is None or copy[0].is_contiguous()
    tokens = qkv.shape[0]
    if q is None:
        q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    assert q.is_contiguous()
    half = table.shape[2]
    rest = head_dim - 2 * half
    assert qkv.shape[1] == (heads + 2 * kv_heads) * head_dim
    assert rest >= 0
    assert table.is_contiguous()
    assert qkv.stride(1) == k_cache.stride(3) == v_cache.stride(3) == block_tables.stride(1) == 1
    if tokens:
        total = heads + 2 * kv_heads
        tile_heads = min(triton.next_power_of_2(total), 4 if tokens <= 32 else 8 if tokens <= 512 else 16)
        _norm_rope_write[(tokens, triton.cdiv(total, tile_heads))](
            qkv,
            qkv if q_weight is None else q_weight,
            qkv if k_weight is None else k_weight,
            table,
            q,
            k_cache,
            v_cache,
            block_tables,
            slots,
            positions,
            qkv if copy is None else copy,
            slots if copied is None else copied,
            eps,
            qkv.stride(0),
            block_tables.stride(0),
            0 if copy is None else copy.stride(0),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=head_dim,
            HALF=half,
            BLOCK_SIZE=k_cache.shape[1],
            Q_NORM=q_weight is not None,
            K_NORM=k_weight is not None,
            COPY=copy is not None,
            TILE_HEADS=tile_heads,
            TILE_HALF=triton.next_power_of_2(half),
            TILE_REST=triton.next_power_of_2(rest) if rest else 0,
            num_warps=min(max(tile_heads * triton.next_power_of_2(head_dim) // 512, 1), 4),
            **dependent(qkv.device),
        )
    return q


@triton.jit
def _add_rms_norm(
    x,
    residual,
    weight,
    out,
    eps,
    size,
    x_stride,
    residual_stride,
    out_stride,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    if PDL:
        gdc_launch_dependents()
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    total = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        kept = residual + row * residual_stride + columns
        added = total.to(tl.float32) + tl.load(kept, mask=inside, other=0.0).to(tl.float32)
        total = added.to(residual.dtype.element_ty)
        tl.store(kept, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    normed = wide * scale * weights
    tl.store(out + row * out_stride + columns, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate_up, out, inner, stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < inner
    source = gate_up + row * stride
    gate = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + inner + columns, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * inner + columns, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rope_write(
    qkv,
    q_weight,
    k_weight,
    table,
    q,
    k_cache,
    v_cache,
    block_tables,
    slots,
    positions,
    copy,
    copied,
    eps,
    qkv_stride,
    tables_stride,
    copy_stride,
    k_block_stride,
    k_place_stride,
    k_head_stride,
    v_block_stride,
    v_place_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    COPY: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_REST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, TILE_HEADS of its heads, numbered through queries, keys and values. A head is split in three parts:
    the two halves that are rotated against each other, and the rest, which is not rotated.
    """
    if PDL:
        gdc_launch_dependents()
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    is_q = heads < HEADS
    is_k = (heads >= HEADS) & (heads < HEADS + KV_HEADS)
    is_v = (heads >= HEADS + KV_HEADS) & (heads < HEADS + 2 * KV_HEADS)
    columns = tl.arange(0, TILE_HALF)
    low = columns < HALF
    if Q_NORM or K_NORM:
        weights_a = _weights(q_weight, k_weight, columns, low, is_q, is_k, Q_NORM, K_NORM)
        weights_b = _weights(q_weight, k_weight, HALF + columns, low, is_q, is_k, Q_NORM, K_NORM)
    if PDL:
        gdc_wait()

    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    owned = slot >= 0
    position = tl.where(owned, tl.load(positions + token), 0)
    block = tl.load(block_tables + slot * tables_stride + position // BLOCK_SIZE, mask=owned, other=0).to(tl.int64)
    place = position % BLOCK_SIZE

    sources = qkv + token * qkv_stride + heads * DIM
    to_q = q + token * (HEADS * DIM) + heads * DIM
    to_k = k_cache + block * k_block_stride + place * k_place_stride + (heads - HEADS) * k_head_stride
    to_v = v_cache + block * v_block_stride + place * v_place_stride + (heads - HEADS - KV_HEADS) * v_head_stride
    write_k = is_k & owned
    write_v = is_v & owned
    exists = is_q | is_k | is_v

    a = tl.load(sources[:, None] + columns[None, :], mask=exists[:, None] & low[None, :], other=0.0).to(tl.float32)
    b = tl.load(sources[:, None] + HALF + columns[None, :], mask=exists[:, None] & low[None, :], other=0.0)
    b = b.to(tl.float32)
    if Q_NORM or K_NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if TILE_REST > 0:
            others = 2 * HALF + tl.arange(0, TILE_REST)
            rest = tl.load(
                sources[:, None] + others[None, :], mask=exists[:, None] & (others < DIM)[None, :], other=0.0
            ).to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        normed = (is_q & Q_NORM) | (is_k & K_NORM)
        scale = tl.where(normed, tl.rsqrt(squares / DIM + eps), 1.0)
        a = a * scale[:, None] * weights_a
        b = b * scale[:, None] * weights_b
    angles = table + position.to(tl.int64) * (2 * HALF) + columns
    cos = tl.load(angles, mask=low, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=low, other=0.0)[None, :]
    turned_a = tl.where(is_v[:, None], a, a * cos - b * sin)
    turned_b = tl.where(is_v[:, None], b, b * cos + a * sin)
    _scatter(turned_a, columns, low, to_q, to_k, to_v, is_q, write_k, write_v)
    _scatter(turned_b, HALF + columns, low, to_q, to_k, to_v, is_q, write_k, write_v)
    if COPY:
        mine = owned & (slot == tl.load(copied))
        to_copy = copy + position.to(tl.int64) * (KV_HEADS * DIM) + (heads - HEADS) * DIM
        to_copy += tl.where(is_v, copy_stride - KV_HEADS * DIM, 0)
        _store(turned_a, columns, low, to_copy, (is_k | is_v) & mine)
        _store(turned_b, HALF + columns, low, to_copy, (is_k | is_v) & mine)
    if TILE_REST > 0:
        others = 2 * HALF + tl.arange(0, TILE_REST)
        rest = tl.load(
            sources[:, None] + others[None, :], mask=exists[:, None] & (others < DIM)[None, :], other=0.0
        ).to(tl.float32)
        if Q_NORM or K_NORM:
            weights = _weights(q_weight, k_weight, others, others < DIM, is_q, is_k, Q_NORM, K_NORM)
            rest = rest * scale[:, None] * weights
        _scatter(rest, others, others < DIM, to_q, to_k, to_v, is_q, write_k, write_v)
        if COPY:
            _store(rest, others, others < DIM, to_copy, (is_k | is_v) & mine)


@triton.jit
def _weights(q_weight, k_weight, columns, inside, is_q, is_k, Q_NORM: tl.constexpr, K_NORM: tl.constexpr):
    """The norm weights of each head's columns; 1 for a head without a norm."""
    weights = tl.full([is_q.shape[0], columns.shape[0]], 1.0, tl.float32)
    if Q_NORM:
        of_q = tl.load(q_weight + columns, mask=inside, other=0.0).to(tl.float32)
        weights = tl.where(is_q[:, None], of_q[None, :], weights)
    if K_NORM:
        of_k = tl.load(k_weight + columns, mask=inside, other=0.0).to(tl.float32)
        weights = tl.where(is_k[:, None], of_k[None, :], weights)
    return weights


@triton.jit
def _scatter(values, columns, inside, to_q, to_k, to_v, is_q, is_k, is_v):
    """Stores each head's columns as queries, keys or values."""
    _store(values, columns, inside, to_q, is_q)
    _store(values, columns, inside, to_k, is_k)
    _store(values, columns, inside, to_v, is_v)


@triton.jit
def _store(values, columns, inside, to, some):
    """Stores the columns of the heads in the mask `some`."""
    values = values.to(to.dtype.element_ty)
    tl.store(to[:, None] + columns[None, :], values, mask=some[:, None] & inside[None, :])


def copy_tokens(k_cache: Tensor, v_cache: Tensor, kv_indices: Tensor, begin: int, to: Tensor) -> None:
    """Copies keys and values of the tokens from `begin` on from the caches to `to` [2, T, ...], in the order of the
    tokens. `kv_indices` [T] int32 are block * block_size + offset.
    """
    size = k_cache[0, 0].numel()
    assert to[0].is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    count = len(kv_indices) - begin
    if count > 0:
        block = triton.next_power_of_2(size)
        tile = max(1, COPIED // block)
        grid = (triton.cdiv(count, tile), 2)
        _copy_tokens[grid](
            k_cache, v_cache, kv_indices, to, begin, len(kv_indices), to.stride(0), SIZE=size, BLOCK=block, TILE=tile
        )


@triton.jit(do_not_specialize=["begin", "end", "half_stride"])  # they differ from step to step
def _copy_tokens(
    k_cache,
    v_cache,
    places,
    to,
    begin,
    end,
    half_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    tokens = begin + tl.program_id(0) * TILE + tl.arange(0, TILE)
    numbers = tl.arange(0, BLOCK)
    inside = (tokens < end)[:, None] & (numbers < SIZE)[None, :]
    source = tl.load(places + tokens, mask=tokens < end, other=0).to(tl.int64)[:, None] * SIZE + numbers[None, :]
    target = to + tokens.to(tl.int64)[:, None] * SIZE + numbers[None, :]
    if tl.program_id(1) == 0:
        tl.store(target, tl.load(k_cache + source, mask=inside), mask=inside)
    else:
        tl.store(target + half_stride, tl.load(v_cache + source, mask=inside), mask=inside)
