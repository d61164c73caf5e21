"""Arguments that the device benchmarks share: the shape of the model, and the engine's options."""

import argparse
import json
from pathlib import Path
from typing import Any

from weft.bench.engine.shapes import SHAPES, WarmEngine, chosen_device
from weft.engine.options import EngineOptions
from weft.errors import EngineError, OptionError

SHAPE_HELP = f"of the model: {', '.join(SHAPES)}, or a DIRECTORY with a config.json"
CHUNK = {"cuda": 16_384, "cpu": 2048}  # default of --max-num-batched-tokens


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", default="qwen3-0.6b", metavar="S", help=f"{SHAPE_HELP} (default: qwen3-0.6b)")
    add(
        "--load-format",
        choices=("dummy", "auto"),
        default="dummy",
        help="auto: the weights of a DIRECTORY; dummy: random ones (default: dummy)",
    )
    add("--dtype", default="auto", help="auto (the config's), float32, float16 or bfloat16 (default: auto)")
    add("--device", default="auto", help="auto (cuda where there is one), cpu or cuda (default: auto)")
    add(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help=f"tokens a step may carry (default: {CHUNK['cuda']} on a GPU, {CHUNK['cpu']} on a CPU)",
    )
    add(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        default=0.9,
        help="share of a GPU's memory that weights and KV cache may take (default: 0.9)",
    )
    add("--json", type=Path, metavar="FILE", help="also write the result as a JSON object")


def shape_options(arguments: argparse.Namespace, max_num_seqs: int) -> EngineOptions:
    """Engine options from the arguments. Prefix caching is off: no prompt is repeated."""
    chunk = arguments.max_num_batched_tokens
    if chunk is None:
        chunk = max(CHUNK[device_kind(arguments.device)], max_num_seqs)
    return EngineOptions(
        dtype=arguments.dtype,
        device=arguments.device,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=chunk,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        enable_prefix_caching=False,
        load_format=arguments.load_format,
        seed=0,
    )


def device_kind(name: str) -> str:
    """cuda or cpu. An invalid device is rejected later, when the engine is built."""
    if name == "auto":
        return chosen_device(name).type
    return "cuda" if name.startswith("cuda") else "cpu"


def print_engine(warm: WarmEngine) -> None:
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in warm.parts.items())
    print(
        f"{warm.shape}, {warm.dtype_name}, {warm.device_name}\n"
        f"start-up: first token after {warm.first_token:.1f} s ({parts})",
        flush=True,
    )


def described(warm: WarmEngine) -> dict[str, Any]:
    """The warm's properties for JSON."""
    return {
        "shape": warm.shape,
        "device": warm.device_name,
        "dtype": warm.dtype_name,
        "startup_parts_s": warm.parts,
        "ready_s": warm.ready,
        "startup_s": warm.first_token,
    }


def at_least_one(arguments: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(arguments, name)
        for number in value if isinstance(value, list) else [value]:
            if number < 1:
                raise OptionError(f"--{name.replace('_', '-')} {number} must be at least 1")


def write_json(file: Path | None, data: dict[str, Any]) -> None:
    if file is None:
        return
    try:
        file.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise EngineError(f"cannot write {file}: {error.strerror}; the figures are above") from None
