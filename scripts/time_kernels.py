"""Times every Triton kernel on a GPU, and tunes kernels with several configurations; `pytest tests/kernels` tests them.

    PYTHONPATH=src python scripts/time_kernels.py [--quick] [--only PART ...]

Parts: chain (the time of a layer of a decode step, with kernels that overlap and that do not), matvec64 (17 to 64
rows), fused, decode, draw, matvec. Copy what matvec, matvec64 and chain print to weft/kernels/matvec_tuning.py.
"""

import argparse
import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels import decode, draw, fused, matvec, matvec_tuning, ops, shares


@contextlib.contextmanager
def changed(module: object, name: str, value: object) -> Iterator[None]:
    """Gives a constant of a module another value for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _shares(device: torch.device, positions: Sequence[int], wanted: int) -> Tensor:
    """Shares of rows at these positions. The slot of a row is its number."""
    found = shares.divide(np.arange(len(positions)), np.array(positions), None, wanted)
    return torch.from_numpy(np.stack(found)).int().to(device)


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _permutation(device: torch.device, size: int) -> Tensor:
    return torch.randperm(size, device=device)


# A chain of kernels


HIDDEN, HEADS, KV_HEADS, DIM, INNER, BLOCK_SIZE, CONTEXT = 1024, 16, 8, 128, 3072, 16, 2048  # Qwen3-0.6B


class Layer(NamedTuple):
    norms: Tensor  # [2, HIDDEN]
    head_norms: Tensor  # [2, DIM]
    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    k_cache: Tensor
    v_cache: Tensor


class Chain:
    """Layers of a decode step, on fixed buffers. Every chain begins with a copy of the same cache."""

    def __init__(self, device: torch.device, rows: int, layers: Sequence[Layer], table: Tensor) -> None:
        self.layers = [layer._replace(k_cache=layer.k_cache.clone(), v_cache=layer.v_cache.clone()) for layer in layers]
        self.table = table
        self.x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.positions = torch.full((rows,), 255, dtype=torch.int32, device=device)
        self.tables = torch.arange(rows * CONTEXT // BLOCK_SIZE, dtype=torch.int32, device=device).view(rows, -1)
        wanted = decode.wanted_shares(KV_HEADS, torch.cuda.get_device_properties(device).multi_processor_count)
        self.shares = _shares(device, [255] * rows, wanted)
        self.workspace = decode.Workspace.of(rows, HEADS, KV_HEADS, DIM, wanted, device)

    def run(self) -> Tensor:
        x, residual = self.x * 1, None  # a kernel, as an embedding is; a copy would be none
        for layer in self.layers:
            x, residual = ops.add_rms_norm(x, residual, layer.norms[0], 1e-6)
            caches = (layer.k_cache, layer.v_cache, self.tables, self.slots, self.positions)
            qkv = ops.linear(x, layer.qkv)
            q = fused.norm_rope_write(qkv, *layer.head_norms.unbind(), 1e-6, self.table, *caches, HEADS, KV_HEADS, DIM)
            x = decode.paged_decode(q, *caches[:3], self.shares, 0.1, self.workspace)
            x, residual = ops.add_rms_norm(ops.linear(x, layer.o), residual, layer.norms[1], 1e-6)
            x = ops.linear(ops.gated_linear(x, layer.gate_up, None, F.silu), layer.down)
        assert residual is not None
        return x + residual


def make_layers(device: torch.device, count: int, rows: int) -> tuple[list[Layer], Tensor]:
    def matrix(m: int, k: int) -> Tensor:
        return _weights(device, m, k)[0]

    def layer() -> Layer:
        shape = (rows * CONTEXT // BLOCK_SIZE, BLOCK_SIZE, KV_HEADS, DIM)
        return Layer(
            _random(device, torch.bfloat16, 2, HIDDEN),
            _random(device, torch.bfloat16, 2, DIM),
            matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            matrix(HIDDEN, HEADS * DIM),
            matrix(2 * INNER, HIDDEN),
            matrix(HIDDEN, INNER),
            *(_random(device, torch.bfloat16, *shape) for _ in range(2)),
        )

    table = torch.randn(CONTEXT, 2, DIM // 2, device=device)
    return [layer() for _ in range(count)], table


def time_chain(device: torch.device, quick: bool) -> None:
    """Time of one layer, on average over twelve. Their weights do not fit into L2 together."""
    count = 12
    for rows in (1, 16, 64):
        layers, table = make_layers(device, count, rows)
        chain = Chain(device, rows, layers, table)
        spans = {}
        for pdl in (True, False):
            with changed(fused, "PDL", pdl):
                spans[pdl] = seconds([chain.run] * 3) / count
        both = ", ".join(f"{'overlapping' if pdl else 'one by one'} {span * 1e6:.2f} us" for pdl, span in spans.items())
        print(f"layer N={rows} T=256: {both}", flush=True)
        if rows <= ops.FEW_ROWS and not quick:
            _tune_chain(chain, rows, count)


def _tune_chain(chain: Chain, rows: int, count: int) -> None:
    """Tunes each product in turn within the chain. The fastest configuration there need not be the fastest alone."""
    until = time.perf_counter() + 12
    products = (((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, False), (HIDDEN, HEADS * DIM, False), (INNER, HIDDEN, True))
    for m, k, gated in (*products, (HIDDEN, INNER, False)):
        key = (matvec_tuning.bucket(rows), m, k, gated)
        before = matvec_tuning.configure(rows, m, k, torch.bfloat16, gated=gated)
        timed = {}
        for config in dict.fromkeys([before, *matvec_tuning.candidates(rows, m, k, torch.bfloat16, gated=gated)]):
            if time.perf_counter() > until:
                print("    out of time")
                break
            with changed(matvec_tuning, "TUNED", {**matvec_tuning.TUNED, key: config}):
                timed[config] = seconds([chain.run] * 3) / count
        print("    " + ", ".join(f"{tuple(config)} {span * 1e6:.2f}" for config, span in timed.items()))
        best = min(timed, key=timed.__getitem__, default=before)
        if best != before and timed[best] < 0.99 * timed[before]:
            matvec_tuning.TUNED[key] = best  # the next product is tuned with it
            print(f"    {key}: {best!r},  # in the chain: {timed[before] * 1e6:.2f} -> {timed[best] * 1e6:.2f} us")


# Timing


SHAPES = {  # name: (outputs, inputs)
    "llama-8b qkv": (6144, 4096),
    "llama-8b o": (4096, 4096),
    "llama-8b gate_up": (28672, 4096),
    "llama-8b down": (4096, 14336),
    "llama-8b head": (128256, 4096),
    "qwen-0.6b qkv": (4096, 1024),
    "qwen-0.6b o": (1024, 2048),
    "qwen-0.6b gate_up": (6144, 1024),
    "qwen-0.6b down": (1024, 3072),
    "qwen-0.6b head": (151936, 1024),
}
COLD = 256 << 20  # bytes to read before an input is used again: several times what fits into L2
Tuned = dict[tuple[int, int, int, bool], matvec_tuning.Config]


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds per call, on average over a CUDA graph of all calls: the best of five replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # not torch.cuda.graph, which empties caches each time
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return min(a.elapsed_time(b) for a, b in pairwise(events)) / len(calls) / 1e3


def repeated(call: Callable[..., object], inputs: Sequence[tuple[object, ...]]) -> float:
    """Seconds per call, with the inputs in turn and at least twenty calls."""
    times = -(-20 // len(inputs))
    return seconds([functools.partial(call, *each) for each in list(inputs) * times])


def copies(make: Callable[[], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Fresh inputs, so many that each has left the caches before it is used again; at most 100."""
    first = make()
    size = sum(x.numel() * x.element_size() for x in first)
    return [first, *(make() for _ in range(min(99, COLD // max(1, size))))]


def time_matvec(device: torch.device, quick: bool) -> None:
    tuned: Tuned = {}
    shapes = dict(list(SHAPES.items())[:4]) if quick else SHAPES
    for name, (m, k) in shapes.items():
        weights = [x for (x,) in copies(functools.partial(_weights, device, m, k))]
        _time_shape(name, weights, False, tuned)
        if "gate_up" in name:
            _time_shape(name + " silu", weights, True, tuned)
        del weights
    _print_tuned(tuned)


def time_matvec64(device: torch.device, quick: bool) -> None:
    """17 to 64 rows, the smaller model first. Kernels do not overlap, because torch's do not."""
    tuned: Tuned = {}
    faster: list[tuple[int, int, int, bool]] = []
    until = time.perf_counter() + 45
    with changed(fused, "PDL", False):
        for name, (m, k) in sorted(SHAPES.items(), key=lambda item: "qwen" not in item[0]):
            if time.perf_counter() > until or (quick and "qwen" not in name):
                print(f"{name}: left out")
                continue
            weights = [x for (x,) in copies(functools.partial(_weights, device, m, k))]
            faster += _time_shape(name, weights, False, tuned, (32, 64))
            if "gate_up" in name:
                faster += _time_shape(name + " silu", weights, True, tuned, (32, 64))
            del weights
    _print_tuned(tuned)
    print("\nFASTER: frozenset[tuple[int, int, int, bool]] = frozenset(\n    [")
    for key in faster:
        print(f"        {key},")
    print("    ]\n)")


def _print_tuned(tuned: Tuned) -> None:
    print("\nTUNED: dict[tuple[int, int, int, bool], Config] = {")
    for key, config in tuned.items():
        print(f"    {key}: {config!r},")
    print("}")


def _weights(device: torch.device, m: int, k: int) -> tuple[Tensor]:
    return (torch.randn(m, k, device=device, dtype=torch.bfloat16) / math.sqrt(k),)


def _time_shape(
    name: str, weights: list[Tensor], gated: bool, tuned: Tuned, numbers: Sequence[int] = (1, 4, 16, 2, 8)
) -> list[tuple[int, int, int, bool]]:
    """Fills in `tuned`, and returns the keys for which our kernel is clearly faster than torch."""
    faster = []
    rows_of_weight, k = weights[0].shape
    m = rows_of_weight // (1 + gated)
    ours = matvec.matvec_silu if gated else matvec.matvec
    for rows in numbers:  # the largest of each bucket comes first and is tuned, the others reuse it
        x = torch.randn(rows, k, device=weights[0].device, dtype=torch.bfloat16)
        inputs = [(x, weight) for weight in weights]
        key = (matvec_tuning.bucket(rows), m, k, gated)
        if key not in tuned:
            timed = {}
            for config in matvec_tuning.candidates(rows, m, k, torch.bfloat16, gated=gated):
                try:
                    timed[config] = repeated(functools.partial(ours, config=config), inputs)
                except Exception as error:
                    print(f"    {tuple(config)} fails: {str(error).splitlines()[-1]}")
            print("    " + ", ".join(f"{tuple(config)} {span * 1e6:.1f}" for config, span in timed.items()))
            if not timed:
                continue
            tuned[key] = min(timed, key=timed.__getitem__)
        span = repeated(functools.partial(ours, config=tuned[key]), inputs)
        plain = repeated(_plain_silu if gated else F.linear, inputs)
        _print(f"matvec {name} N={rows}", span, weights[0].numel() * 2, plain)
        if span < 0.97 * plain:
            faster.append(key)
    return faster


def _plain_silu(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def time_decode(device: torch.device, quick: bool) -> None:
    """Contexts of equal length, of different lengths, and with one much longer than the others."""
    kv_heads, dim, block_size, group = 8, 128, 16, 2
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    most = 512 * 2048
    shape = (most // block_size, block_size, kv_heads, dim)
    caches = [[torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(2)] for _ in range(3)]
    random = np.random.default_rng(0)
    blocks = _permutation(device, most // block_size).int()
    for batch in (64, 256) if quick else (1, 4, 16, 32, 48, 64, 128, 256):
        different = random.integers(200, 1800, batch)
        lone = np.where(np.arange(batch) == batch // 2, 64_000, 500)
        alike = {str(context): [context] * batch for context in (256, 1000)}
        for name, contexts in {**alike, "200..1800": different, "lone": lone}.items():
            used = [-(-int(context) // block_size) for context in contexts]
            tables = torch.zeros((batch, max(used)), dtype=torch.int32, device=device)
            for row, (count, end) in enumerate(zip(used, np.cumsum(used).tolist(), strict=True)):
                tables[row, :count] = blocks[end - count : end]
            q = torch.randn(batch, group * kv_heads, dim, device=device, dtype=torch.bfloat16)
            read = int(np.sum(contexts)) * kv_heads * dim * 4
            rates = []
            for programs in (2, 3, 4):
                with changed(decode, "PROGRAMS_PER_SM", programs):
                    wanted = decode.wanted_shares(kv_heads, sm_count)
                work = _shares(device, [int(c) - 1 for c in contexts], wanted)
                workspace = decode.Workspace.of(batch, group * kv_heads, kv_heads, dim, wanted, device)
                for tiling in decode.candidates(torch.bfloat16, dim)[: 2 if quick else 4]:
                    call = functools.partial(decode.paged_decode, tiling=tiling)
                    span = repeated(call, [(q, k, v, tables, work, 0.1, workspace) for k, v in caches])
                    rates.append(f"{programs} {tuple(tiling)} {span * 1e6:.0f} us {read / span / 1e12:.2f}")
            print(f"decode B={batch} T={name}, programs, tiling, TB/s: " + "; ".join(rates), flush=True)


def time_fused(device: torch.device, quick: bool) -> None:
    heads, kv_heads, dim, block_size = 32, 8, 128, 16
    weight = torch.ones(4096, dtype=torch.bfloat16, device=device)
    for rows in (1, 64, 256, 4096):
        random = functools.partial(_random, device, torch.bfloat16, rows)
        inputs = copies(lambda random=random: (random(4096), random(4096)))  # type: ignore[misc]
        span = repeated(lambda x, residual: fused.add_rms_norm(x, residual, weight, 1e-6), inputs)
        plain = repeated(lambda x, residual: F.rms_norm(x + residual, (4096,), weight, 1e-6), inputs)
        _print(f"add_rms_norm T={rows}", span, 4 * rows * 4096 * 2, plain)
        inputs = copies(lambda random=random: (random(28672),))  # type: ignore[misc]
        span = repeated(fused.silu_mul, inputs)
        plain = repeated(lambda x: F.silu(x[:, :14336]) * x[:, 14336:], inputs)
        _print(f"silu_mul T={rows}", span, 3 * rows * 14336 * 2, plain)

        tables = _permutation(device, 8192).view(8, 1024).int()
        shape = (8192, block_size, kv_heads, dim)
        k_cache, v_cache = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
        places = _permutation(device, 8192 * block_size)[:rows].int()
        slots, positions = places // (1024 * block_size), places % (1024 * block_size)
        table = torch.randn(1024 * block_size, 2, dim // 2, device=device)
        inputs = copies(lambda random=random: (random((heads + 2 * kv_heads) * dim),))  # type: ignore[misc]
        for norm in (None, weight[:dim]):
            rest = (norm, norm, 1e-6, table, k_cache, v_cache, tables, slots, positions, heads, kv_heads, dim)
            span = repeated(fused.norm_rope_write, [(*x, *rest) for x in inputs])
            name = "norm_rope_write" if norm is not None else "rope_write"
            _print(f"{name} T={rows}", span, 2 * rows * (heads + 2 * kv_heads) * dim * 2)


def time_draw(device: torch.device, quick: bool) -> None:
    for vocab in (128256, 151936):
        for rows in (1, 64, 256, 4096):
            if rows > 256 and quick:
                continue
            random = functools.partial(_random, device, torch.bfloat16, rows, vocab)
            inputs = copies(lambda random=random: (random(),))  # type: ignore[misc]
            slots = torch.arange(rows, dtype=torch.int32, device=device)
            noise = draw.Noise(slots, slots, slots)
            rest = (torch.ones(rows, device=device), noise, slots.clone(), slots, slots.clone(), slots)
            span = repeated(draw.draw, [(*x, *rest) for x in inputs])
            plain = repeated(lambda x: x.argmax(-1), inputs)
            _print(f"draw V={vocab} N={rows} (torch: argmax)", span, rows * vocab * 2, plain)


def _print(name: str, span: float, size: int, plain: float | None = None) -> None:
    beside = "" if plain is None else f"   torch {plain * 1e6:9.1f} us, {plain / span:5.2f} times as long"
    print(f"{name:58s} {span * 1e6:9.1f} us {size / span / 1e12:6.2f} TB/s{beside}", flush=True)


PARTS: dict[str, Callable[[torch.device, bool], None]] = {
    "chain": time_chain,
    "fused": time_fused,
    "decode": time_decode,
    "draw": time_draw,
    "matvec64": time_matvec64,
    "matvec": time_matvec,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes to time")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=PARTS, help="some parts of it, in this order")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("time_kernels.py needs a GPU; pytest tests/kernels does not", file=sys.stderr)
        return 1
    for name in options.only or PARTS:
        PARTS[name](torch.device("cuda"), options.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
