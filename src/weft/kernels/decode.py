"""Attention of decodes over the paged KV cache: one query token per row, with any length of context.

Flash-decoding: a row's context is divided among programs (see shares.py), and the last program to finish merges their
results in a fixed order. Everything that differs from step to step (shares, block tables) is read on the device, so
that a call can be captured in a CUDA graph. Imported only where there is a GPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

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
from weft.kernels.shares import MOST_SPLITS, most_shares

LOG2E = 1.4426950408889634
PROGRAMS_PER_SM = 3  # a multiprocessor (SM) runs two at a time: with the longest first, none is idle at the end
MERGED_NUMBERS = 8192  # numbers of partial results that are read at once: 64 registers per thread


class Tiling(NamedTuple):
    tile: int  # tokens that a program reads at once
    num_warps: int
    num_stages: int


def candidates(dtype: torch.dtype, head_dim: int) -> list[Tiling]:
    """Tilings worth timing, the default first."""
    if dtype == torch.float32:
        return [Tiling(16, 4, 1)]  # no tensor cores, so operands have to fit into registers
    if head_dim > 128:
        return [Tiling(32, 4, 3), Tiling(64, 4, 2), Tiling(64, 8, 3)]
    return [Tiling(64, 4, 3), Tiling(64, 4, 2), Tiling(32, 2, 3), Tiling(32, 4, 4), Tiling(128, 8, 3)]


def wanted_shares(kv_heads: int, sm_count: int) -> int:
    """Number of shares that fills every multiprocessor, with one program per share and kv head."""
    return int(triton.cdiv(PROGRAMS_PER_SM * sm_count, kv_heads))


class Workspace(NamedTuple):
    """Buffers through which the programs of one call pass partial results. For one call at a time."""

    results: Tensor  # [shares, heads, head_dim] float32
    sums: Tensor  # [shares, heads] float32: base-2 logarithms of the sums of exponentials
    ended: Tensor  # [rows, kv_heads] int32: programs that have ended; zero before and after each call

    @classmethod
    def of(cls, rows: int, heads: int, kv_heads: int, head_dim: int, wanted: int, device: torch.device) -> "Workspace":
        """A workspace for calls with up to `rows` rows."""
        shares = most_shares(rows, wanted)
        return cls(
            torch.empty((shares, heads, head_dim), dtype=torch.float32, device=device),
            torch.empty((shares, heads), dtype=torch.float32, device=device),
            torch.zeros((rows, kv_heads), dtype=torch.int32, device=device),
        )


def paged_decode(
    q: Tensor,  # [B, heads, head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor,
    block_tables: Tensor,  # [S, W] int32
    shares: Tensor,  # [7, N] int32: `Shares` of all rows, and unused entries
    scale: float,
    workspace: Workspace,
    out: Tensor | None = None,  # [B, heads * head_dim], contiguous; None: a new one
    *,
    tiling: Tiling | None = None,
) -> Tensor:  # out; a row without a share is not written
    batch, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    if out is None:
        out = torch.empty((batch, heads * head_dim), dtype=q.dtype, device=q.device)
    if not batch:
        return out
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert k_cache.stride(3) == v_cache.stride(3) == block_tables.stride(1) == shares.stride(1) == 1
    assert len(workspace.results) >= shares.shape[1]
    assert len(workspace.ended) >= batch
    tiling = tiling or candidates(k_cache.dtype, head_dim)[0]
    tile_dim = max(16, triton.next_power_of_2(head_dim))
    tile_members = triton.next_power_of_2(heads // kv_heads)
    # kv heads first: neighbouring programs read neighbouring lines of the same tokens at the same time
    _decode[(kv_heads, shares.shape[1])](
        q,
        k_cache,
        v_cache,
        block_tables,
        shares,
        out,
        *workspace,
        scale * LOG2E,
        block_tables.stride(0),
        shares.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        HEADS=heads,
        GROUP=heads // kv_heads,
        DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=tiling.tile,
        TILE_GROUP=max(16, triton.next_power_of_2(heads // kv_heads)),
        TILE_DIM=tile_dim,
        TILE_SPLITS=MOST_SPLITS,
        TILE_MEMBERS=tile_members,
        TILE_MERGED=min(MOST_SPLITS, max(1, MERGED_NUMBERS // (tile_members * tile_dim))),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **dependent(q.device),
    )
    return out


@triton.jit(do_not_specialize=["shares_stride"])
def _decode(
    q,
    k_cache,
    v_cache,
    block_tables,
    shares,
    out,
    results,
    sums,
    ended,
    scale,
    tables_stride,
    shares_stride,
    k_block_stride,
    k_place_stride,
    k_head_stride,
    v_block_stride,
    v_place_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    TILE_DIM: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_MEMBERS: tl.constexpr,
    TILE_MERGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of the query heads of one kv head over one share. `scale` includes log2(e)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    share = shares + tl.program_id(1)
    row = tl.load(share).to(tl.int64)
    if row < 0:
        return
    slot = tl.load(share + shares_stride).to(tl.int64)
    begin = tl.load(share + 2 * shares_stride)
    end = tl.load(share + 3 * shares_stride)
    place = tl.load(share + 4 * shares_stride).to(tl.int64)
    first = tl.load(share + 5 * shares_stride).to(tl.int64)
    splits = tl.load(share + 6 * shares_stride)

    dims = tl.arange(0, TILE_DIM)
    members = tl.arange(0, TILE_GROUP)
    heads = row * HEADS + kv_head * GROUP + members
    member = members < GROUP
    inside = member[:, None] & (dims < DIM)[None, :]
    queries = tl.load(q + heads[:, None] * DIM + dims[None, :], mask=inside, other=0.0)

    table = block_tables + slot * tables_stride
    k_base = k_cache + kv_head * k_head_stride
    v_base = v_cache + kv_head * v_head_stride
    highest = tl.full([TILE_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([TILE_GROUP], tl.float32)
    acc = tl.zeros([TILE_GROUP, TILE_DIM], tl.float32)
    tokens = begin + tl.arange(0, TILE)
    # Places beyond the end were never written, or hold tokens of other requests: neither they nor their table entries
    # may be read. Blocks are looked up one tile ahead, by hand. Otherwise the pipeline would spend its stages on this
    # second load.
    blocks = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < end, other=0)
    for start in tl.range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        seen = tokens < end
        next_blocks = tl.load(table + (tokens + TILE) // BLOCK_SIZE, mask=tokens + TILE < end, other=0)
        places = tokens % BLOCK_SIZE
        readable = seen[:, None]
        if DIM < TILE_DIM:
            readable = readable & (dims < DIM)[None, :]
        from_k = blocks.to(tl.int64) * k_block_stride + places * k_place_stride
        keys = tl.load(k_base + from_k[:, None] + dims[None, :], mask=readable, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # Every tile has at least one visible token, so this is finite.
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        from_v = blocks.to(tl.int64) * v_block_stride + places * v_place_stride
        values = tl.load(v_base + from_v[:, None] + dims[None, :], mask=readable, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        highest = higher
        blocks = next_blocks

    result = acc / total[:, None]
    if splits == 1:
        tl.store(out + heads[:, None] * DIM + dims[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        at = place * HEADS + kv_head * GROUP + members
        tl.store(results + at[:, None] * DIM + dims[None, :], result, mask=inside)
        tl.store(sums + at, highest + tl.log2(total), mask=member)
        # All threads store before one of them counts. Its release makes their stores visible to the last program.
        tl.debug_barrier()
        counter = ended + row * tl.num_programs(0) + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
            tl.store(counter, 0)
            head = kv_head * GROUP
            to = out + (row * HEADS + head) * DIM
            _merge(
                results + head * DIM,
                sums + head,
                to,
                first,
                splits,
                HEADS,
                GROUP,
                DIM,
                TILE_SPLITS,
                TILE_MEMBERS,
                TILE_MERGED,
                TILE_DIM,
            )


@triton.jit
def _merge(
    results,
    sums,
    to,
    first,
    splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_MEMBERS: tl.constexpr,
    TILE_MERGED: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Merges the splits of GROUP heads of one row, a few at a time: their mean, weighted by sums of exponentials."""
    members = tl.arange(0, TILE_MEMBERS)
    member = members < GROUP
    every = tl.arange(0, TILE_SPLITS)
    exists = member[:, None] & (every < splits)[None, :]
    # Bypasses the L1 cache, which does not see the results of other programs.
    places = (first + every)[None, :] * HEADS + members[:, None]
    all_logs = tl.load(sums + places, mask=exists, other=float("-inf"), cache_modifier=".cg")
    highest = tl.where(member, tl.max(all_logs, 1), 0.0)
    total = tl.sum(tl.exp2(all_logs - highest[:, None]), 1)
    dims = tl.arange(0, TILE_DIM)
    acc = tl.zeros([TILE_MEMBERS, TILE_DIM], tl.float32)
    for start in tl.range(0, splits, TILE_MERGED, num_stages=1):
        some = start + tl.arange(0, TILE_MERGED)
        used = member[:, None] & (some < splits)[None, :]
        at = (first + some)[None, :] * HEADS + members[:, None]
        logs = tl.load(sums + at, mask=used, other=float("-inf"), cache_modifier=".cg")
        readable = used[:, :, None] & (dims < DIM)[None, None, :]
        found = tl.load(
            results + at[:, :, None] * DIM + dims[None, None, :], mask=readable, other=0.0, cache_modifier=".cg"
        )
        acc += tl.sum(found * tl.exp2(logs - highest[:, None])[:, :, None], 1)
    merged = acc / tl.where(member, total, 1.0)[:, None]
    inside = member[:, None] & (dims < DIM)[None, :]
    tl.store(to + members[:, None] * DIM + dims[None, :], merged.to(to.dtype.element_ty), mask=inside)
