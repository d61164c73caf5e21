"""`weft bench offline`: throughput of requests that are all submitted at the start."""

import argparse
import sys
from dataclasses import asdict

from weft.bench.engine.limits import H200_COPY_RATE, measure_copy
from weft.bench.engine.offline import WORKLOADS, measure
from weft.bench.engine.shapes import warm_engine
from weft.cli.shapes import add_shape_arguments, at_least_one, described, print_engine, shape_options, write_json
from weft.errors import OptionError
from weft.progress import work_progress


def register(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser(
        "offline",
        help="tokens a second of requests that are all there from the start",
        description="Submits all requests of a workload at once and tells how fast they were done, after one short "
        "request for warming up. uniform256 is nano-vllm's benchmark: 256 random prompts of 100 to 1,024 tokens, "
        "random.seed(0), 133,966 output tokens, temperature 0.6, no end of text, no prefix caching. Start-up counts "
        "from the start of the process. Needs no model files and no network.",
    )
    add = parser.add_argument
    add("--workload", choices=WORKLOADS, default="uniform256", help="the requests (default: uniform256)")
    add("--num-prompts", type=int, metavar="N", help="only the workload's first N, as for a CPU (default: all)")
    add("--max-num-seqs", type=int, metavar="N", default=256, help="requests that run at once (default: 256)")
    add_shape_arguments(parser)
    add("--no-progress", dest="progress", action="store_false", help="no progress bar; a file never gets one")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    requests = WORKLOADS[arguments.workload]()
    if arguments.num_prompts is not None:
        at_least_one(arguments, "num_prompts")
        if arguments.num_prompts > len(requests):
            raise OptionError(
                f"--num-prompts {arguments.num_prompts} is more than the {len(requests)} of {arguments.workload}: "
                "lower it"
            )
        requests = requests[: arguments.num_prompts]
    # The progress bar takes CPU time from the loop, so it is shown only on a terminal.
    show = arguments.progress and sys.stderr.isatty()
    with warm_engine(arguments.shape, shape_options(arguments, arguments.max_num_seqs)) as found:
        print_engine(found)
        with work_progress("tokens", sum(request.max_tokens for request in requests), show) as advance:
            result = measure(found.engine, requests, advance)
        copy = measure_copy(found.device)
    beside = f" (the H200 of others' figures: {H200_COPY_RATE / 1e12:.2f})" if found.device.type == "cuda" else ""
    print(
        f"{arguments.workload}: {result.prompts} prompts, {result.input_tokens} tokens in, {result.output_tokens} out, "
        f"{result.seconds:.2f} s, {result.steps} steps, {result.preemptions} preemptions\n"
        f"output {result.output_rate:.1f} tokens/s, total {result.total_rate:.1f} tokens/s\n"
        f"copy bandwidth {copy / 1e12:.3g} TB/s{beside}"
    )
    rates = {"output_tokens_per_s": result.output_rate, "total_tokens_per_s": result.total_rate}
    data = {**described(found), "workload": arguments.workload, **asdict(result), **rates, "copy_tb_per_s": copy / 1e12}
    write_json(arguments.json, data)
    return 0
