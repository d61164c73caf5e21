"""vLLM options that weft does not have. Options without effect here are accepted, the others are rejected by name."""

import argparse
import sys
from typing import Any

# Options that are always so in weft, or have no effect. IGNORED_FLAGS: no value. IGNORED_VALUES: any value.
# ONLY_VALUE: accepted with the one value that weft implements.
IGNORED_FLAGS = (
    *("trust-remote-code", "enable-auto-tool-choice", "enable-chunked-prefill", "no-enable-chunked-prefill"),
    *("enable-reasoning", "enforce-eager", "disable-log-requests", "enable-log-requests", "no-enable-log-requests"),
    *("disable-log-stats", "disable-uvicorn-access-log", "async-scheduling", "enable-prompt-tokens-details"),
    *("enable-server-load-tracking", "enable-request-id-headers", "disable-frontend-multiprocessing"),
    *("disable-fastapi-docs", "use-tqdm-on-load"),
)
IGNORED_VALUES = (
    *("uvicorn-log-level", "max-log-len", "swap-space", "distributed-executor-backend", "compilation-config"),
    *("max-seq-len-to-capture", "download-dir", "seed-everything", "scheduling-policy", "limit-mm-per-prompt"),
    *("max-parallel-loading-workers", "stream-interval"),
)
ONLY_VALUE = {
    **dict.fromkeys(("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size", "api-server-count"), "1"),
    **dict.fromkeys(("cpu-offload-gb", "max-cpu-loras"), "0"),
    **dict.fromkeys(("kv-cache-dtype", "tokenizer-mode", "generation-config", "config-format"), "auto"),
    **dict.fromkeys(("runner", "task"), "generate"),
    "response-role": "assistant",
}
SHORT_NAMES = {
    "tensor-parallel-size": "-tp",
    "pipeline-parallel-size": "-pp",
    "data-parallel-size": "-dp",
    "quantization": "-q",
}

# Features that weft lacks, each with an alternative.
_LORA = "weft has no LoRA; merge the adapter into the model's weights"
_DRAFT = "weft has no speculative decoding; leave it out"
_ONE = "weft runs a model on one GPU; leave it out"
_REVISION = "weft takes a hub id as it is today; download the revision, and give its directory as MODEL"
_CLIENTS = "weft does not check certificates of clients; let a proxy do it"
LACKING = {
    "quantization": "weft has no quantized weights; serve the checkpoint in float16 or bfloat16",
    **dict.fromkeys(("enable-lora", "lora-modules", "max-loras", "max-lora-rank"), _LORA),
    **dict.fromkeys(("speculative-config", "speculative-model", "num-speculative-tokens"), _DRAFT),
    **dict.fromkeys(("enable-expert-parallel", "kv-transfer-config"), _ONE),
    **dict.fromkeys(("revision", "tokenizer-revision", "code-revision"), _REVISION),
    **dict.fromkeys(("ssl-ca-certs", "ssl-cert-reqs"), _CLIENTS),
    "tokenizer": "weft reads the tokenizer from MODEL; put tokenizer.json there",
    "hf-overrides": "weft reads config.json as it is; change it in a copy of MODEL",
    "override-generation-config": "weft reads generation_config.json as it is; change it in a copy of MODEL",
    "hf-token": "weft takes no token as an option; set HF_TOKEN in the environment",
    "num-gpu-blocks-override": "weft takes the size of the KV cache in bytes; use --kv-cache-memory-bytes",
}


def add_foreign_options(parser: argparse.ArgumentParser) -> None:
    """Adds these options without showing them in the help. `arguments.foreign` lists the ones that were given."""
    parser.set_defaults(foreign=())
    for name in (*IGNORED_FLAGS, *IGNORED_VALUES, *ONLY_VALUE, *LACKING):
        names = [f"--{name}", *([SHORT_NAMES[name]] if name in SHORT_NAMES else [])]
        nargs = 0 if name in IGNORED_FLAGS else "*" if name in LACKING else None
        parser.add_argument(*names, dest=f"foreign-{name}", action=ForeignOption, nargs=nargs, help=argparse.SUPPRESS)


def report_foreign_options(arguments: argparse.Namespace) -> None:
    for option, value in arguments.foreign:
        print(f"weft: {option} {value}".rstrip() + " has no meaning here and is ignored", file=sys.stderr)


class ForeignOption(argparse.Action):
    """Records an option without effect; rejects an option or a value that weft does not support."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name = self.dest.removeprefix("foreign-")
        if name in LACKING:
            parser.error(f"{' '.join([option_string or '', *values])}: {LACKING[name]}")
        only = ONLY_VALUE.get(name)
        if only is not None and values != only:
            parser.error(f"argument {option_string}: {values} is not supported here, only {only}")
        namespace.foreign = (*namespace.foreign, (option_string, values or ""))
