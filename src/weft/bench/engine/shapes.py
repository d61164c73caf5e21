"""Engines for device benchmarks: built with a model's shape, by default from a config alone with random weights."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.engine.cpu_features import prepare_cpu
from weft.engine.options import EngineOptions
from weft.engine.params import SamplingParams
from weft.errors import EngineError, OptionError

if TYPE_CHECKING:  # torch takes seconds to import, and must not be imported before prepare_cpu()
    import torch

    from weft.engine.engine import Engine  # `weft --help` needs the names of the shapes, and no engine
    from weft.models import ModelConfig

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "llama-3-8b": {  # Llama-3.1-8B
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}
WARM_UP = 8  # tokens of the warm-up prompt, and of its answer


@dataclass(frozen=True)
class WarmEngine:
    """A warm engine and its parts. Times are seconds since the start of the process."""

    shape: str
    engine: "Engine"
    config: "ModelConfig"
    device: "torch.device"
    dtype: "torch.dtype"
    parts: dict[str, float]  # seconds of each phase of building the engine; the first phase starts with the process
    ready: float  # when the engine was built
    first_token: float  # when it had sampled its first token

    @property
    def device_name(self) -> str:
        from weft.engine.executor_facts import device_name

        return device_name(self.device)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@contextmanager
def warm_engine(shape: str, options: EngineOptions) -> Iterator[WarmEngine]:
    """Yields a warm engine of a shape; closes it afterwards."""
    parts: dict[str, float] = {}

    def note(part: str) -> None:
        parts[part] = process_seconds() - sum(parts.values())

    with shape_directory(shape, options.load_format) as path, closing_engine(options, path, note) as engine:
        ready = process_seconds()
        first_token = _warm_up(engine)
        from weft.models import load_config, resolve_dtype

        config, device = load_config(path), chosen_device(options.device)
        dtype = resolve_dtype(options.dtype, config, device)
        yield WarmEngine(shape, engine, config, device, dtype, parts, ready, first_token)


@contextmanager
def shape_directory(shape: str, load_format: str = "dummy") -> Iterator[Path]:
    """Yields a directory with the config.json of a shape. `shape` is a name in SHAPES or such a directory."""
    if shape in SHAPES:
        if load_format != "dummy":
            raise OptionError(f"--load-format {load_format}: the shape {shape} has no weights; give a DIRECTORY")
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:
            path = Path(folder, shape)  # files that are kept for a model, such as its calibration, use this name
            path.mkdir()
            (path / "config.json").write_text(json.dumps(SHAPES[shape]))
            yield path
        return
    path = Path(shape).expanduser()
    if not os.path.isdir(path):
        raise OptionError(f"--shape {shape} is unknown: choose {', '.join(SHAPES)}, or a directory with a config.json")
    yield path


@contextmanager
def closing_engine(
    options: EngineOptions, path: Path, done: Callable[[str], None] = lambda part: None
) -> "Iterator[Engine]":
    from weft.engine.build import build_engine
    from weft.engine.garbage_collection import GarbageCollection

    engine = build_engine(options, path, done=done)
    garbage_collection = GarbageCollection()
    garbage_collection.freeze()
    try:
        yield engine
    finally:
        clear(engine)
        engine.loop.close()
        garbage_collection.thaw()


def clear(engine: "Engine") -> None:
    """Aborts all sequences, and waits for the steps in flight."""
    for sequence in list(engine.loop.sequences.values()):
        engine.loop.abort(sequence)
    engine.loop.discard_in_flight()


def chosen_device(name: str) -> "torch.device":
    """The device of an engine with this --device option."""
    prepare_cpu()
    import torch

    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def process_seconds() -> float:
    """Seconds since the start of this process or, if that is not known, since the import of this module."""
    least = time.perf_counter() - _IMPORTED
    try:
        started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(least, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError, ValueError, IndexError):  # not Linux
        return least


_IMPORTED = time.perf_counter()


def _warm_up(engine: "Engine") -> float:
    """Answers one short request. Returns the time of its first token, in seconds since the start of the process."""
    params = SamplingParams(temperature=0.6, max_tokens=WARM_UP, ignore_eos=True)
    prompt = [token % engine.vocab_size for token in range(1, 1 + min(WARM_UP, engine.max_model_len - 1))]
    (sequence,) = engine.create_sequences(prompt, params)
    engine.loop.add(sequence)
    first_token = None
    while engine.loop.has_work:
        engine.loop.step()
        if first_token is None and sequence.output:
            first_token = process_seconds()
    if first_token is None:
        raise EngineError(f"the engine did not answer: its first request ended with {sequence.request.finish_reason}")
    return first_token
