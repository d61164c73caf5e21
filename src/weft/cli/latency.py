"""`weft bench latency`: times of decode steps and first tokens, compared with the device's limits."""

import argparse
import json
from dataclasses import asdict, replace

from weft.bench.engine.limits import measure_ceilings
from weft.bench.engine.shapes import warm_engine
from weft.cli.shapes import (
    add_shape_arguments,
    at_least_one,
    described,
    device_kind,
    print_engine,
    shape_options,
    write_json,
)
from weft.engine.params import SamplingParams
from weft.errors import RequestError

BATCHES = {"cuda": [1, 16, 64, 256], "cpu": [1, 16]}
PROMPTS = {"cuda": [512, 4096, 16_384, 30_000], "cpu": [512]}
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
SAMPLED = ("temperature", "top_k", "top_p", "min_p", *PENALTIES, "logprobs")  # parameters that make a step slower


def register(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "latency",
        help="decode steps and first tokens, beside the device's limits",
        description="Times a decode step (the median wall time between commits, sampling included, "
        "behind prompts of 128 tokens) at several batch sizes, and the first token of one prompt at several lengths "
        "(the median of five), and tells which fraction of the device's limit each reaches. The limit is the longer "
        "of two times: reading the weights and the KV cache once at the speed of a large copy, and the arithmetic at "
        "the speed of a large matrix product. Both speeds are measured in the same run. Start-up counts from the start "
        "of the process. Needs no model files and no network.",
    )
    add = parser.add_argument
    add("--batch", type=int, nargs="+", metavar="N", help=f"decodes at once (default: {_defaults(BATCHES)})")
    add("--prompt", type=int, nargs="+", metavar="N", help=f"tokens of a prompt (default: {_defaults(PROMPTS)})")
    add("--decode-steps", type=int, default=256, metavar="N", help="steps that count, for each batch (default: 256)")
    add(
        "--sampling",
        type=_sampling,
        default="{}",
        metavar="JSON",
        help=f'of all requests, such as \'{{"top_k": 20, "top_p": 0.95}}\': any of {", ".join(SAMPLED)} '
        "(default: a temperature of 0.6 alone)",
    )
    add_shape_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from weft.bench.engine.latency import decode_obstacle, measure_decode, measure_prefill, prefill_obstacle

    kind = device_kind(arguments.device)
    arguments.batch, arguments.prompt = arguments.batch or BATCHES[kind], arguments.prompt or PROMPTS[kind]
    at_least_one(arguments, "batch", "prompt", "decode_steps")
    options = shape_options(arguments, max_num_seqs=max(arguments.batch))
    decode, prefill, left_out = [], [], []
    with warm_engine(arguments.shape, options) as found:
        print_engine(found)
        ceilings = measure_ceilings(found.device, found.dtype)
        copy, matmul = ceilings.copy / 1e12, ceilings.matmul / 1e12
        print(f"limits: copy {copy:.3g} TB/s, matrix product {matmul:.3g} TFLOP/s\n")
        print(f"{'decode':>8} {'median ms':>11} {'p99 ms':>11} {'floor ms':>11} {'of the limit':>13}", flush=True)
        for batch in arguments.batch:
            if obstacle := decode_obstacle(found.engine, batch, arguments.decode_steps):
                left_out.append(f"batch {batch}: {obstacle}")
                continue
            step = measure_decode(found, ceilings, batch, arguments.decode_steps, arguments.sampling)
            decode.append(step._asdict())
            times = f"{step.ms:>11.3f} {step.p99_ms:>11.3f} {step.floor_ms:>11.3f}"
            print(f"{batch:>8} {times} {step.fraction:>13.1%}", flush=True)
        print(f"\n{'prefill':>8} {'median ms':>11} {'':>11} {'floor ms':>11} {'of the limit':>13}", flush=True)
        for tokens in arguments.prompt:
            if obstacle := prefill_obstacle(found.engine, tokens):
                left_out.append(f"prompt of {tokens}: {obstacle}")
                continue
            first = measure_prefill(found, ceilings, tokens, options.max_num_batched_tokens, arguments.sampling)
            prefill.append(first._asdict())
            print(f"{tokens:>8} {first.ms:>11.3f} {'':>11} {first.floor_ms:>11.3f} {first.fraction:>13.1%}", flush=True)
    for note in left_out:
        print(f"left out: {note}")
    sampling = {name: value for name, value in asdict(arguments.sampling).items() if name in SAMPLED}
    rows = {"sampling": sampling, "decode": decode, "prefill": prefill, "left_out": left_out}
    write_json(arguments.json, {**described(found), **rows, "copy_tb_per_s": copy, "matmul_tflop_per_s": matmul})
    return 0


def _sampling(text: str) -> SamplingParams:
    from weft.bench.engine.latency import SAMPLING

    try:
        given = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object, such as {{"top_p": 0.9}}')
    unknown = sorted(set(given) - set(SAMPLED))
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown parameter {unknown[0]!r}; known: {', '.join(SAMPLED)}")
    try:
        return replace(SAMPLING, **given)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _defaults(by_kind: dict[str, list[int]]) -> str:
    on_gpu, on_cpu = (" ".join(map(str, by_kind[kind])) for kind in ("cuda", "cpu"))
    return f"{on_gpu} on a GPU, {on_cpu} on a CPU"
