"""Compares two versions of weft on one machine: runs the same commands with both, in turns, and prints the ratios.

    python scripts/compare_versions.py ../old . --run "bench latency --batch 1 64" --run "bench offline" --rounds 3

OLD and NEW are folders with a checkout of weft. Each command must take `--json`. Every number that both versions write
is compared by its median over the rounds. Only differences of at least --show percent are printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Values = dict[str, list[float]]  # by the path of a number in the JSON: one value a round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="folder with the old checkout")
    parser.add_argument("new", type=Path, help="folder with the new checkout")
    parser.add_argument("--run", action="append", required=True, metavar="COMMAND", help="arguments of weft")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each version (default: 3)")
    parser.add_argument("--show", type=float, default=2.0, metavar="PERCENT", help="smallest difference (default: 2)")
    parser.add_argument("--match", default="", help="only numbers whose path contains this text")
    arguments = parser.parse_args()
    for command in arguments.run:
        compare(arguments.old, arguments.new, command, arguments.rounds, arguments.show, arguments.match)


def compare(old: Path, new: Path, command: str, rounds: int, show: float, match: str) -> None:
    """Runs a command in turns and prints the numbers that differ by more than `show` percent."""
    found: dict[Path, Values] = {old: {}, new: {}}
    seconds: dict[Path, list[float]] = {old: [], new: []}
    for number in range(rounds):
        for version in (old, new) if number % 2 == 0 else (new, old):
            started = time.monotonic()
            result = run(version, command)
            seconds[version].append(time.monotonic() - started)
            for path, value in numbers(result):
                found[version].setdefault(path, []).append(value)
            print(f"weft {command}: round {number + 1}, {version}: {seconds[version][-1]:.1f} s", file=sys.stderr)
    paths = [path for path in found[old] if path in found[new] and match in path]
    print(f"weft {command}: {len(paths)} numbers, {rounds} rounds; the whole command took", end=" ")
    print(f"{statistics.median(seconds[old]):.1f} s (old), {statistics.median(seconds[new]):.1f} s (new)")
    for path in paths:
        before, after = statistics.median(found[old][path]), statistics.median(found[new][path])
        change = 100 * (after / before - 1) if before else (0.0 if after == before else float("inf"))
        if abs(change) >= show:
            spread = " ".join(f"{value:.6g}" for value in found[old][path] + found[new][path])
            print(f"  {path}: {before:.6g} -> {after:.6g} ({change:+.2f}%)  [{spread}]")
    for name, one, other in (("old", old, new), ("new", new, old)):
        if only := [path for path in found[one] if path not in found[other]]:
            print(f"  only in {name}: {', '.join(only[:5])}{' ...' if len(only) > 5 else ''}")


def run(version: Path, command: str) -> Any:
    """What the command writes with `--json`."""
    source = (version / "src").resolve()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
        arguments = [sys.executable, "-m", "weft", *command.split(), "--json", str(target)]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{version}: weft {command} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
        return json.loads(target.read_text())


def numbers(result: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a JSON value, with their paths."""
    if isinstance(result, dict):
        for key, value in result.items():
            yield from numbers(value, f"{path}.{key}" if path else key)
    elif isinstance(result, list):
        for index, value in enumerate(result):
            yield from numbers(value, f"{path}[{index}]")
    elif isinstance(result, int | float) and not isinstance(result, bool):
        yield path, float(result)


if __name__ == "__main__":
    main()
