"""`weft calibrate`: measures the cost of steps on this device, which the scheduler needs to meet targets."""

import argparse
import json
import math
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench.engine.shapes import shape_directory
from weft.cli.estimate import in_words, tell_estimate
from weft.cli.options import add_engine_arguments, engine_options
from weft.cli.shapes import SHAPE_HELP
from weft.errors import EngineError, OptionError

if TYPE_CHECKING:
    from weft.engine.calibration import Calibration
    from weft.llm import LLM

UNITS = {
    "fixed": "a step, whatever it carries",
    "weights": "reading all weights",
    "token": "arithmetic for a token",
    "pair": "one query over one key in a prefill",
    "slice": "a prefill slice more",
    "decode": "a decode more",
    "context": "a token of context that a decode reads",
    "reach": "a token of context that a prefill slice reads",
    "prefill": "a step with prefill, however many slices",
    "few": "a decode more, as long as there are at most 16; beside `decode`",
}

LUMPS = {
    "grain": "tokens: steps with prefill fill a multiple of it",
    "wave": "queries of a slice that read its context together (0: all)",
}

EPILOG = """\
It measures real steps, so the machine should be as idle, or as busy, as it will be when it serves. The result is kept
for this model, device, dtype and these limits, and the engine uses it from then on.
"""


def register(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure what steps cost on this device",
        description="Measures what steps cost on this device and saves it for the scheduler, replacing what was there.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=5.0,
        metavar="S",
        help="time to measure single steps for, and as long again for a rehearsal of service, on a GPU 2.4 times as "
        "long (default: 5)",
    )
    parser.add_argument("--shape", metavar="S", help=f"{SHAPE_HELP}, instead of MODEL, with random weights")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as a JSON object")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE.json", help="also write a hardware profile, for `weft simulate --profile`"
    )
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="no progress bar")
    add_engine_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from weft.engine.simulator_profile import profile_of
    from weft.llm import LLM

    if not 0 < arguments.seconds < math.inf:
        raise OptionError(f"--seconds {arguments.seconds} must be above 0")
    options = engine_options(arguments)
    if arguments.shape is not None and options["model"] is not None:
        raise OptionError(f"MODEL {options['model']} and --shape {arguments.shape}: give one of them")
    with ExitStack() as stack:
        if arguments.shape is not None:
            options["model"] = str(stack.enter_context(shape_directory(arguments.shape)))
            options["load_format"] = "dummy"
        seconds = in_words(arguments.seconds)
        why = f"{seconds} of single steps and {seconds} of a rehearsal, after the model is loaded"
        tell_estimate(2 * arguments.seconds, why)
        llm = LLM(**options)
        calibration, file = _measure(llm, arguments)
    _show(calibration, file, llm.options.max_num_batched_tokens)
    if arguments.json is not None:
        _write(arguments.json, {**asdict(calibration), "decode_step": calibration.decode_step, "file": str(file)})
    if arguments.profile is not None:
        _write(arguments.profile, profile_of(llm.engine, calibration, llm.options.max_num_batched_tokens))
    return 0


def _measure(llm: "LLM", arguments: argparse.Namespace) -> "tuple[Calibration, Path]":
    """Calibrates a model. Returns the calibration and the file that it was saved in."""
    from weft.engine.calibration import calibration_file, save_calibration
    from weft.engine.run_calibration import calibrate
    from weft.progress import work_progress

    engine, scheduler = llm.engine, llm.engine.loop.scheduler
    executor = engine.loop.executor
    file = calibration_file(
        llm.path,
        dtype=executor.facts.dtypes,
        device=executor.facts.device,
        block_size=scheduler.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=llm.options.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
    )
    with llm, work_progress("measuring", 1000, arguments.progress) as advance:
        calibration = calibrate(
            executor,
            max_num_seqs=scheduler.max_num_seqs,
            num_blocks=scheduler.num_blocks,
            block_size=scheduler.block_size,
            max_model_len=engine.max_model_len,
            max_num_batched_tokens=llm.options.max_num_batched_tokens,
            seconds=arguments.seconds,
            progress=lambda share: advance(int(1000 * share)),
        )
    save_calibration(file, calibration)
    return calibration, file


def _show(calibration: "Calibration", file: Path, max_num_batched_tokens: int) -> None:
    print(f"{calibration.device}: {calibration.steps} steps measured\n")
    for (name, unit), value in zip(UNITS.items(), calibration.coefficients.vector, strict=True):
        print(f"{name:<12} {_time(value):>10}   {unit}")
    for name, unit in LUMPS.items():
        print(f"{name:<12} {getattr(calibration.coefficients, name):>10}   {unit}")
    print()
    tokens = min(max_num_batched_tokens, calibration.largest)
    print(f"decode step          {_time(calibration.decode_step)} (one decode behind 1,000 tokens)")
    print(f"prefill              {calibration.prefill_speed(tokens):.0f} tokens/s (a step of {tokens} tokens)")
    print(
        f"error                {calibration.error_p50:.1%} / {calibration.error_p99:.1%} (p50 / p99 of held-out steps)"
    )
    print(f"saved                {file}")


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _write(file: Path, data: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(data, indent=1) + "\n")
    except OSError as error:
        raise EngineError(f"cannot write {file}: {error.strerror}") from None
