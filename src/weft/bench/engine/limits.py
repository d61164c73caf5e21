"""Limits of a device, measured with a few large operations, and the least time that a step needs under them."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # torch takes seconds to import, and must not be imported before prepare_cpu()
    import torch

    from weft.models import ModelConfig

H200_COPY_RATE = 4.28e12  # bytes per second: measured on the H200 that the figures of other engines come from
REPEATS = 5  # measurements; the fastest counts
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}
MATRIX_SIZE = {"cuda": 8192, "cpu": 1024}  # rows and columns
CALLS_PER_MEASUREMENT = {"cuda": 50, "cpu": 1}  # a GPU runs asynchronously and is synchronized once for all of them


class Ceilings(NamedTuple):
    """What a device can do at most."""

    copy: float  # bytes per second, read plus written
    matmul: float  # floating-point operations per second, in the model's dtype


class Work(NamedTuple):
    """The least work of a step."""

    read: float  # bytes
    flops: float

    def floor(self, ceilings: Ceilings) -> float:
        """Least seconds: reading and computing may overlap, so the longer of the two."""
        return max(self.read / ceilings.copy, self.flops / ceilings.matmul)


def measure_ceilings(device: "torch.device", dtype: "torch.dtype") -> Ceilings:
    import torch

    found = Ceilings(measure_copy(device), measure_matmul(device, dtype))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the engine may need the memory
    return found


def measure_copy(device: "torch.device") -> float:
    """Bytes per second, read plus written, of a large copy within the device."""
    import torch

    size = COPY_BYTES[device.type]
    if device.type == "cuda":  # the engine has left little free memory
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def measure_matmul(device: "torch.device", dtype: "torch.dtype") -> float:
    """Floating-point operations per second of a large matrix product."""
    import torch

    size = MATRIX_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / _seconds(lambda: torch.mm(left, right, out=out), device)


def decode_work(config: "ModelConfig", itemsize: int, batch: int, context: float) -> Work:
    """Work of a step with `batch` decodes of `context` tokens each. A number takes `itemsize` bytes."""
    read, active = _layer_weights(config, batch)
    head = config.hidden_size * config.vocab_size
    seen = [min(context, window or context) for window in config.layer_windows]
    cached = 2 * config.num_kv_heads * config.head_dim * sum(seen)
    attention = 4 * config.num_heads * config.head_dim * sum(seen)
    return Work(itemsize * (read + head + batch * cached), batch * (2 * (active + head) + attention))


def prefill_work(config: "ModelConfig", itemsize: int, tokens: int, chunk: int) -> Work:
    """Work of a prompt up to its first token, in steps of `chunk` tokens. Only the last token needs the LM head."""
    steps = -(-tokens // chunk)
    read, active = _layer_weights(config, min(tokens, chunk))
    head = config.hidden_size * config.vocab_size
    cached = 2 * config.num_kv_heads * config.head_dim * config.num_layers * tokens
    pairs = sum(_pairs(tokens, window or tokens) for window in config.layer_windows)
    attention = 4 * config.num_heads * config.head_dim * pairs
    return Work(itemsize * (steps * read + head + cached), 2 * (tokens * active + head) + attention)


def _layer_weights(config: "ModelConfig", tokens: int) -> tuple[float, float]:
    """Weights of all layers that a step of `tokens` tokens reads, and weights that one token is multiplied with.

    Norms and biases, a thousandth of the whole, are left out. For experts, tokens are assumed to choose them evenly.
    """
    hidden, moe = config.hidden_size, config.moe
    attention = 2 * hidden * config.head_dim * (config.num_heads + config.num_kv_heads)
    sparse = 0 if moe is None else len(moe.sparse_layers)
    dense = config.num_layers * attention + (config.num_layers - sparse) * 3 * hidden * config.intermediate_size
    if moe is None:
        return dense, dense
    router, expert = hidden * moe.num_experts, 3 * hidden * moe.intermediate_size
    chosen = moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens)
    return dense + sparse * (router + chosen * expert), dense + sparse * (router + moe.experts_per_token * expert)


def _pairs(tokens: int, window: int) -> int:
    """Number of (query, key) pairs of the attention of one layer over a whole prompt."""
    window = min(window, tokens)
    return window * (window + 1) // 2 + (tokens - window) * window


def _seconds(work: Callable[[], object], device: "torch.device") -> float:
    """Seconds of the fastest call; the first round is for warm-up."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    found = []
    calls = CALLS_PER_MEASUREMENT[device.type]
    for _ in range(1 + REPEATS):
        wait()
        started = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        found.append((time.perf_counter() - started) / calls)
    return min(found[1:])
