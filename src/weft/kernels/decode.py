"""Attention of decodes over the paged cache: one query token a row, however long its context.

Flash-decoding: a row's context is divided among programs, and the last of them to end merges what they found, in a
fixed order. All that differs from step to step (positions, block tables) is read on the device, so that a call can be
captured in a CUDA graph: how many of the programs a row has work for, too. Only imported where there is a GPU.
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

LOG2E = 1.4426950408889634
MAX_SPLITS = 64  # merging more costs more than it gains
MERGE_AT_ONCE = True  # the last program of a row's kv head merges; False: a second kernel does, as for too many of them
COUNTERS = 1 << 16  # rows times kv heads up to which there is a counter for each
MERGED = 8192  # partial results that are read at once: 64 registers a thread


class Tiling(NamedTuple):
    tile: int  # tokens a program reads at once
    num_warps: int
    num_stages: int


def candidates(dtype: torch.dtype, head_dim: int) -> list[Tiling]:
    """Tilings worth timing, the default first."""
    if dtype == torch.float32:
        return [Tiling(16, 4, 1)]  # no tensor cores, so operands have to fit into registers
    if head_dim > 128:
        return [Tiling(32, 4, 3), Tiling(64, 4, 2), Tiling(64, 8, 3)]
    return [Tiling(64, 4, 3), Tiling(32, 4, 4), Tiling(64, 4, 4), Tiling(32, 4, 3), Tiling(128, 8, 3)]


def choose_splits(batch: int, kv_heads: int, sm_count: int) -> int:
    """Among how many programs a row's context is divided: enough for about four programs a multiprocessor.

    More would balance contexts of different lengths better, and cost more than that gains: with eight, and at least two
    splits, a step of 256 rows of Qwen3-0.6B took 4.03 ms on an H200 instead of 3.45.

    From the batch size alone, because lengths differ between replays of a CUDA graph; of a short context each split has
    one tile, and those without any end at once. Another number of splits rounds differently: where a row's result must
    not depend on the batch size to the last bit, use one number for all sizes.
    """
    wanted = triton.cdiv(4 * sm_count, max(1, batch * kv_heads))
    return int(min(triton.next_power_of_2(wanted), MAX_SPLITS))


def workspace_size(batch: int, heads: int, head_dim: int, splits: int) -> int:
    """How many float32 elements `paged_decode` needs."""
    return batch * heads * splits * (head_dim + 1) if splits > 1 else 0


def paged_decode(
    q: Tensor,  # [B, heads, head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    v_cache: Tensor,
    block_tables: Tensor,  # [S, W] int32
    slots: Tensor,  # [B] int32: each row's row of the block tables; negative: padding, whose result is 0
    positions: Tensor,  # [B] int32
    scale: float,
    window: int | None,
    splits: int = 1,
    partial: Tensor | None = None,  # float32, `workspace_size(...)` elements or more; needed where splits > 1
    out: Tensor | None = None,  # [B, heads * head_dim], contiguous; None: a new one
    *,
    tiling: Tiling | None = None,
) -> Tensor:  # out
    """Each row sees the keys at positions 0 to its own, and only those after its own - window.

    One call at a time on a device: calls share the counters of the programs that have ended.
    """
    batch, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1], k_cache.shape[2]
    if out is None:
        out = torch.empty((batch, heads * head_dim), dtype=q.dtype, device=q.device)
    if not batch:
        return out
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert k_cache.stride(3) == v_cache.stride(3) == block_tables.stride(1) == 1
    if splits > 1:
        assert partial is not None
        assert partial.dtype == torch.float32
        assert partial.numel() >= workspace_size(batch, heads, head_dim, splits)
    tiling = tiling or candidates(k_cache.dtype, head_dim)[0]
    tile_dim = max(16, triton.next_power_of_2(head_dim))
    merge = MERGE_AT_ONCE and splits > 1 and batch * kv_heads <= COUNTERS
    tile_splits = triton.next_power_of_2(splits)
    tile_members = triton.next_power_of_2(heads // kv_heads)
    # kv heads first: neighbours read neighbouring lines of the same tokens at the same time
    _decode[(kv_heads, splits, batch)](
        q,
        k_cache,
        v_cache,
        block_tables,
        slots,
        positions,
        out,
        partial if splits > 1 else out,  # not touched without splits
        _zeros(q.device) if merge else out,  # not touched, either
        scale * LOG2E,
        block_tables.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        HEADS=heads,
        GROUP=heads // kv_heads,
        DIM=head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=window or 0,
        SPLITS=splits,
        TILE=tiling.tile,
        TILE_GROUP=max(16, triton.next_power_of_2(heads // kv_heads)),
        TILE_DIM=tile_dim,
        MERGE=merge,
        TILE_SPLITS=tile_splits,
        TILE_MEMBERS=tile_members,
        TILE_MERGED=min(tile_splits, max(1, MERGED // (tile_members * tile_dim))),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **dependent(q.device),
    )
    if splits > 1 and not merge:
        _merge[(heads, batch)](
            partial,
            out,
            slots,
            positions,
            HEADS=heads,
            DIM=head_dim,
            WINDOW=window or 0,
            SPLITS=splits,
            TILE=tiling.tile,
            TILE_SPLITS=tile_splits,
            TILE_DIM=tile_dim,
            num_warps=4 if splits > 8 else 2,
            **dependent(q.device),
        )
    return out


@functools.cache
def _zeros(device: torch.device) -> Tensor:
    """Counters that are zero before and after each call, one for each kv head of each row.

    Kept for good, outside of any graph's memory: made by the first call, which must not be one that is captured.
    """
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def _share(slots, positions, row, WINDOW: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Of a row: its slot, the first position it sees, one past the last, how many tiles a split takes, and how many
    splits have any."""
    slot = tl.load(slots + row)
    end = tl.where(slot >= 0, tl.load(positions + row) + 1, 0)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(end - WINDOW, 0)
    tiles = (end + TILE - 1) // TILE - first // TILE
    share = tl.maximum((tiles + SPLITS - 1) // SPLITS, 1)
    return slot, first, end, share, (tiles + share - 1) // share


@triton.jit
def _decode(
    q,
    k_cache,
    v_cache,
    block_tables,
    slots,
    positions,
    out,
    partial,
    counters,
    scale,
    tables_stride,
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
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_GROUP: tl.constexpr,
    TILE_DIM: tl.constexpr,
    MERGE: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_MEMBERS: tl.constexpr,
    TILE_MERGED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The query heads of one kv head over one split of one row's context. `scale` includes log2(e)."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot, first, last, share, active = _share(slots, positions, row, WINDOW, SPLITS, TILE)
    if split >= tl.maximum(active, 1):  # padding has none, but the first split stores its zeros
        return
    begin = (first // TILE + split * share) * TILE
    end = tl.minimum(begin + share * TILE, last)

    dims = tl.arange(0, TILE_DIM)
    members = tl.arange(0, TILE_GROUP)
    heads = row * HEADS + kv_head * GROUP + members
    member = members < GROUP
    queries = tl.load(q + heads[:, None] * DIM + dims[None, :], mask=member[:, None] & (dims < DIM)[None, :], other=0.0)

    table = block_tables + slot.to(tl.int64) * tables_stride
    k_base = k_cache + kv_head * k_head_stride
    v_base = v_cache + kv_head * v_head_stride
    highest = tl.full([TILE_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([TILE_GROUP], tl.float32)
    acc = tl.zeros([TILE_GROUP, TILE_DIM], tl.float32)
    tokens = begin + tl.arange(0, TILE)
    # What lies outside was written by nobody, or by somebody else: neither it nor its table entry may be read.
    seen = tokens < end
    if WINDOW > 0:
        seen = seen & (tokens >= first)
    # Blocks are looked up one tile ahead, by hand: else the pipeline would spend its stages on this second load.
    blocks = tl.load(table + tokens // BLOCK_SIZE, mask=seen, other=0)
    for start in tl.range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        seen = tokens < end
        if WINDOW > 0:
            seen = seen & (tokens >= first)
        next_blocks = tl.load(table + (tokens + TILE) // BLOCK_SIZE, mask=tokens + TILE < end, other=0)
        places = tokens % BLOCK_SIZE
        readable = seen[:, None]
        if DIM < TILE_DIM:
            readable = readable & (dims < DIM)[None, :]
        from_k = blocks.to(tl.int64) * k_block_stride + places * k_place_stride
        keys = tl.load(k_base + from_k[:, None] + dims[None, :], mask=readable, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # Every tile has at least one token that is seen, so that this is finite.
        higher = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        from_v = blocks.to(tl.int64) * v_block_stride + places * v_place_stride
        values = tl.load(v_base + from_v[:, None] + dims[None, :], mask=readable, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
        highest = higher
        blocks = next_blocks

    found = total > 0
    result = acc / tl.where(found, total, 1.0)[:, None]
    inside = member[:, None] & (dims < DIM)[None, :]
    if SPLITS == 1:
        tl.store(out + heads[:, None] * DIM + dims[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        sums = partial + tl.num_programs(2).to(tl.int64) * (HEADS * SPLITS * DIM)
        logs = highest + tl.log2(tl.where(found, total, 1.0))
        places = heads * SPLITS + split
        if MERGE:
            if active > 1:
                tl.store(partial + places[:, None] * DIM + dims[None, :], result, mask=inside)
                tl.store(sums + places, logs, mask=member)
                # All threads have stored before one of them counts; its release makes their stores visible to the last.
                tl.debug_barrier()
                counter = counters + row * tl.num_programs(0) + kv_head
                if tl.atomic_add(counter, 1, sem="acq_rel") == active - 1:
                    tl.store(counter, 0)
                    head = row * HEADS + kv_head * GROUP
                    _merge_group(
                        partial,
                        sums,
                        out,
                        head,
                        active,
                        GROUP,
                        DIM,
                        SPLITS,
                        TILE_SPLITS,
                        TILE_MEMBERS,
                        TILE_MERGED,
                        TILE_DIM,
                    )
            else:  # nobody to merge with
                tl.store(out + heads[:, None] * DIM + dims[None, :], result.to(out.dtype.element_ty), mask=inside)
        else:
            # Padding stores nothing: the merge knows as well as this program how many splits there are.
            some = active > 0
            tl.store(partial + places[:, None] * DIM + dims[None, :], result, mask=inside & some)
            tl.store(sums + places, logs, mask=member & some)


@triton.jit
def _merge_group(
    partial,
    sums,
    out,
    head,
    active,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_MEMBERS: tl.constexpr,
    TILE_MERGED: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """GROUP heads from `head` on: as in `_merge`, but for all of them together, a few splits at a time."""
    members = tl.arange(0, TILE_MEMBERS)
    member = members < GROUP
    places = (head + members) * SPLITS
    every = tl.arange(0, TILE_SPLITS)
    exists = member[:, None] & (every < active)[None, :]
    # Not through the L1 cache, which does not know of other programs' results.
    all_logs = tl.load(sums + places[:, None] + every[None, :], mask=exists, other=float("-inf"), cache_modifier=".cg")
    highest = tl.where(member, tl.max(all_logs, 1), 0.0)
    total = tl.sum(tl.exp2(all_logs - highest[:, None]), 1)
    dims = tl.arange(0, TILE_DIM)
    inside = member[:, None] & (dims < DIM)[None, :]
    acc = tl.zeros([TILE_MEMBERS, TILE_DIM], tl.float32)
    for start in tl.range(0, active, TILE_MERGED, num_stages=1):
        splits = start + tl.arange(0, TILE_MERGED)
        used = member[:, None] & (splits < active)[None, :]
        at = places[:, None] + splits[None, :]
        logs = tl.load(sums + at, mask=used, other=float("-inf"), cache_modifier=".cg")
        readable = used[:, :, None] & (dims < DIM)[None, None, :]
        results = tl.load(
            partial + at[:, :, None] * DIM + dims[None, None, :], mask=readable, other=0.0, cache_modifier=".cg"
        )
        acc += tl.sum(results * tl.exp2(logs - highest[:, None])[:, :, None], 1)
    merged = acc / tl.where(member, total, 1.0)[:, None]
    to = out + (head + members)[:, None] * DIM + dims[None, :]
    tl.store(to, merged.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merge(
    partial,
    out,
    slots,
    positions,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    TILE_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one row: the mean of its splits, each weighted by its sum of exponentials."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    head = row * HEADS + tl.program_id(0)
    _, _, _, _, active = _share(slots, positions, row, WINDOW, SPLITS, TILE)
    splits = tl.arange(0, TILE_SPLITS)
    used = splits < active
    dims = tl.arange(0, TILE_DIM)
    inside = dims < DIM
    sums = partial + tl.num_programs(1).to(tl.int64) * (HEADS * SPLITS * DIM)
    logs = tl.load(sums + head * SPLITS + splits, mask=used, other=float("-inf"))
    places = head * SPLITS + splits
    results = tl.load(partial + places[:, None] * DIM + dims[None, :], mask=used[:, None] & inside[None, :], other=0.0)
    highest = tl.max(logs, 0)
    weights = tl.where(used, tl.exp2(logs - highest), 0.0)
    total = tl.sum(weights, 0)
    merged = tl.sum(results * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + head * DIM + dims, merged.to(out.dtype.element_ty), mask=inside)
