"""`weft bench streams`: many streams at once against a real server."""

import argparse
import asyncio
import json
from dataclasses import asdict
from pathlib import Path

from weft.errors import OptionError


def register(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "streams",
        help="many streams at once, and what a token costs the API process",
        description="Starts a server, opens many streams at once, one frame a token, reads them all to the end, and "
        "compares each with the same request answered whole. Tells the processor time that the API process has spent "
        "for each token, and its memory before and after. Linux only.",
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="left out: the small model that ships with weft")
    add("--streams", type=int, default=512, metavar="N", help="at once (default: 512)")
    add("--max-tokens", type=int, default=64, metavar="N", help="of each (default: 64)")
    add("--json", type=Path, metavar="FILE", help="also write the result as an object")
    add("--no-progress", dest="progress", action="store_false", help="no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from weft.bench.http.streams import measure
    from weft.progress import work_progress

    for name in ("streams", "max_tokens"):
        if getattr(arguments, name) < 1:
            raise OptionError(f"--{name.replace('_', '-')} {getattr(arguments, name)} must be at least 1")
    model = [] if arguments.model is None else [arguments.model]
    total = arguments.streams * arguments.max_tokens
    with work_progress("streaming", total, arguments.progress) as advance:
        result = asyncio.run(measure(arguments.streams, arguments.max_tokens, model, advance))
    print(
        f"{result.streams} streams, {result.tokens} tokens in {result.frames} frames, {result.seconds:.1f} s "
        f"({result.tokens / result.seconds:.0f} tokens/s)\n"
        f"lost: {result.lost}, out of order: {result.disordered}\n"
        f"API process: {result.us_per_token:.1f} us of processor time a token; memory "
        f"{result.memory_before / 1e6:.1f} MB before, {result.memory_after / 1e6:.1f} MB after"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**asdict(result), "us_per_token": result.us_per_token}, indent=1) + "\n")
    return 0 if not result.lost and not result.disordered else 1
