"""Arguments that several commands share: engine and sampling options."""

import argparse
import os
from dataclasses import fields, replace
from typing import Any

from weft.engine.options import POLICIES, EngineOptions
from weft.engine.params import SamplingParams
from weft.errors import OptionError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="model directory in Hugging Face layout, or a hub id; left out: the small model that ships with weft",
    )
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add(
        "--dtype",
        default="auto",
        help="auto (as in the checkpoint), float32 or float, float16 or half, or bfloat16 (default: auto)",
    )
    add("--device", default="auto", help="auto (cuda if there is a GPU), cpu or cuda (default: auto)")
    add(
        "--max-model-len",
        type=_tokens,
        metavar="N",
        help="most tokens of a prompt and its output together (default: the model's limit)",
    )
    add("--max-num-seqs", type=int, metavar="N", default=256, help="requests that run at once (default: 256)")
    add("--max-num-batched-tokens", type=int, metavar="N", default=2048, help="most tokens in a step (default: 2048)")
    add("--block-size", type=int, metavar="N", default=16, help="tokens in a block of the KV cache (default: 16)")
    add(
        "--kv-cache-memory-bytes",
        type=byte_size,
        metavar="BYTES",
        help="memory for the KV cache, as 4000000000, 4G or 4GiB (default: depends on the device's free memory)",
    )
    add(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        default=0.9,
        help="share of a GPU's memory that weights, steps and KV cache may take (default: 0.9)",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the KV cache of prompts, and reuse it for prompts with the same beginning (default: on)",
    )
    add("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights (default: auto)")


def add_model_option(parser: argparse.ArgumentParser) -> None:
    """Adds --model, vLLM's other way to name the model."""
    parser.add_argument("--model", dest="named_model", metavar="MODEL", help="the same as MODEL without --model")


def choose_model(arguments: argparse.Namespace) -> None:
    """Sets `model` from the positional MODEL or from --model."""
    named, default = arguments.named_model, os.environ.get("WEFT_MODEL", "").strip()
    if arguments.model is not None and named not in (None, arguments.model, default):
        raise OptionError(f"MODEL {arguments.model} and --model {named}: give one of them")
    arguments.model = named if arguments.model is None else arguments.model


def add_promise_arguments(parser: argparse.ArgumentParser) -> None:
    promises = parser.add_argument_group(
        "promises",
        "With a target, the device is measured once (weft calibrate). A request is refused if its first token would be "
        "later than promised.",
    )
    promise = promises.add_argument
    promise(
        "--policy",
        choices=POLICIES,
        default="slo",
        help="slo: prefill uses the time that the targets leave; chunked: up to --max-num-batched-tokens a step, as "
        "with slo without targets; monolithic: whole prompts, while decoding waits (default: slo)",
    )
    promise("--gap-target-ms", type=float, metavar="MS", help="promised time between tokens (default: none)")
    promise("--ttft-target-ms", type=float, metavar="MS", help="promised time to the first token (default: none)")
    promise(
        "--ttft-target-per-1k-ms",
        type=float,
        metavar="MS",
        help="added to the time to the first token, per 1,000 prompt tokens (default: 0)",
    )
    promise(
        "--min-gap-target-ms",
        type=float,
        metavar="MS",
        help="a smaller target for the time between tokens is raised to this (default: 1.5 measured decode steps)",
    )
    promise("--max-queued-requests", type=int, metavar="N", help="most waiting requests (default: no limit)")
    promise("--max-queued-tokens", type=int, metavar="N", help="most tokens of waiting prompts (default: no limit)")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `LLM` from parsed arguments."""
    names = [field.name for field in fields(EngineOptions) if field.name != "seed"]
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def serve_arguments(arguments: argparse.Namespace) -> list[str]:
    """The engine's options as command-line arguments of `weft serve`."""
    names = [field.name for field in fields(EngineOptions) if field.name not in ("model", "seed")]
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None}
    caches = given.pop("enable_prefix_caching")
    found = [] if arguments.model is None else [arguments.model]
    for name, value in given.items():
        found += [f"--{name.replace('_', '-')}", str(value)]
    return [*found, "--enable-prefix-caching" if caches else "--no-enable-prefix-caching"]


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling", "The defaults are the model's recommendations, if it has any.")
    add = group.add_argument
    add("--max-tokens", type=int, metavar="N", default=max_tokens, help=f"most tokens to write (default: {max_tokens})")
    add("--temperature", type=float, metavar="T", help="0 always takes the most likely token")
    add("--top-p", type=float, metavar="P", help="keep the likeliest tokens of this total probability")
    add("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    add("--min-p", type=float, metavar="P", help="keep tokens this likely relative to the likeliest one")
    add("--repetition-penalty", type=float, metavar="R", help="above 1: make repeated tokens less likely")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text (default: a different one each time)")
    add("--stop", action="append", metavar="TEXT", help="end before this text (may be given several times)")


def sampling_params(arguments: argparse.Namespace, defaults: SamplingParams | None = None) -> SamplingParams:
    """The defaults, overridden by the values from the command line."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    return replace(defaults or SamplingParams(), **given)


def _tokens(text: str) -> int | None:
    """A number of tokens, also as 32k (32,000) or 32K (32,768), as in vLLM; None for auto, which uses the model's."""
    if text in ("auto", "-1"):
        return None
    unit = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}.get(text[-1:], 1)
    try:
        return int(float(text[:-1]) * unit) if unit > 1 else int(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens: write 32768, 32k or auto") from None


def byte_size(text: str) -> int:
    digits = text.rstrip("bBkKmMgGiI")
    unit = text[len(digits) :].lower().removesuffix("b")
    try:
        return int(float(digits) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes: write 4000000000, 4G or 4GiB") from None
