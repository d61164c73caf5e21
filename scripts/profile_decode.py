"""Measures with torch's profiler how busy decode steps keep a GPU, and where it is idle.

    PYTHONPATH=src python scripts/profile_decode.py [--shape S] [--batch N] [--steps N]

The steps run with torch's sync-debug mode set to raise, so that nothing in them waits for the device except by an
event. Busy is the time in which at least one kernel or copy runs, as a share of the time from the first to the last. A
gap between two kernels counts as idle. Kernels that overlap are counted once.
"""

import argparse
import json
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from weft.bench.engine.latency import WARM_UP_STEPS, open_decodes
from weft.bench.engine.shapes import warm_engine
from weft.engine.engine import Engine
from weft.engine.options import EngineOptions

WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Busy(NamedTuple):
    """Times in microseconds."""

    span: float
    busy: float
    gaps: int
    between: list[float]  # idle time before the kernel that begins a step, for each step
    slowest: list[tuple[str, float]]  # kernels by total time


def decode(engine: Engine, batch: int, steps: int) -> list[dict[str, Any]]:
    """What the device did in `steps` steps that carry only `batch` decodes."""
    sequences = open_decodes(engine, batch)
    while min(len(sequence.output) for sequence in sequences) < WARM_UP_STEPS:
        engine.loop.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                engine.loop.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((event for event in events if event.get("cat") in WORK), key=lambda event: float(event["ts"]))


def measure(events: list[dict[str, Any]]) -> Busy:
    first = next(event["name"] for event in events if "fetch" in event["name"])  # a step begins by reading its numbers
    begin = end = float(events[0]["ts"])
    busy, gaps, between, times = 0.0, 0, list[float](), Counter[str]()
    for event in events:
        start, duration = float(event["ts"]), float(event["dur"])
        gaps += start > end
        if event["name"] == first:
            between.append(max(0.0, start - end))
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
        times[event["name"]] += duration
    return Busy(end - begin, busy, gaps, between, times.most_common(8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device")
    options = EngineOptions(
        load_format="dummy", device="cuda", max_num_seqs=max(arguments.batch, 256), max_num_batched_tokens=16_384
    )
    with warm_engine(arguments.shape, options) as found:
        result = measure(decode(found.engine, arguments.batch, arguments.steps))
    idle = result.span - result.busy
    print(
        f"{arguments.shape}, {arguments.steps} steps of {arguments.batch} decodes: "
        f"busy {result.busy / result.span:.2%} of {result.span / 1000:.1f} ms; "
        f"{result.gaps} gaps of {idle / max(1, result.gaps):.2f} us, "
        f"{statistics.mean(result.between):.1f} us of them before each step "
        f"(median {statistics.median(result.between):.1f}, longest {max(result.between):.0f})"
    )
    for name, time in result.slowest:
        print(f"{time / arguments.steps:10.1f} us a step  {name[:100]}")


if __name__ == "__main__":
    main()
