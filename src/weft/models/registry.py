"""The known architectures. Reads a directory's config.json with the family that it names."""

import os
from pathlib import Path

import torch

from weft.errors import ModelError, OptionError
from weft.files import read_json
from weft.models.base import CausalLM
from weft.models.config import ModelConfig, check_layers, parse_config
from weft.models.gemma import Gemma3
from weft.models.llama import Llama
from weft.models.mistral import Mistral, Mixtral
from weft.models.phi import Phi3
from weft.models.qwen import Qwen2, Qwen3, Qwen3Moe

ARCHITECTURES: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "MixtralForCausalLM": Mixtral,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "Gemma3ForCausalLM": Gemma3,
    "Phi3ForCausalLM": Phi3,
}

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load_config(path: Path | str) -> ModelConfig:
    """The ModelConfig of a model directory."""
    path = Path(path)
    if not os.path.isdir(path):
        raise ModelError(f"{path} is not a readable directory; give a model directory in Hugging Face layout")
    raw = read_json(path / "config.json")
    generation = read_json(path / "generation_config.json", optional=True)
    listed = raw.get("architectures")
    named = [str(name)[:100] for name in listed] if isinstance(listed, list) else []
    architecture = next((name for name in named if name in ARCHITECTURES), None)
    if architecture is None:
        found = ", ".join(named[:10]) or "none"
        raise ModelError(f"{path}: unknown architecture ({found}); known: {', '.join(ARCHITECTURES)}")
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{path}: quantized checkpoints are not supported (quant_method {method}); use an unquantized one"
        )
    try:
        check_layers(raw)
        return parse_config({**ARCHITECTURES[architecture].modernise(raw), "architecture": architecture}, generation)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ModelError(f"{path}: config.json has a value of the wrong kind: {error}") from error


def resolve_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype to compute in; "auto" is the dtype of the checkpoint."""
    chosen = config.dtype if name == "auto" else name
    if chosen not in DTYPES:
        raise OptionError(f"dtype {chosen!r} is not supported; choose auto, float32, float16 or bfloat16")
    if chosen == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise OptionError(f"{torch.cuda.get_device_name(device)} has no bfloat16; choose dtype float16 or float32")
    return DTYPES[chosen]
