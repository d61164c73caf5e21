"""Configurations of the matvec kernels: how each shape of product is divided among programs."""

from typing import NamedTuple

import torch

MAX_ROWS = 64
DEVICE_PROGRAMS = 2 * 132  # programs that fill an H200: two for each of its 132 multiprocessors


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
    return min(max(1, DEVICE_PROGRAMS // -(-m // block_m)), most, 8)


def _padded(k: int, dot: bool) -> int:
    return max(16 if dot else 1, 1 << (k - 1).bit_length())
