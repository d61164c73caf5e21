"""Model families and their weights. A model knows tokens, positions and `attend`, but no requests or blocks."""

from weft.models.base import CausalLM
from weft.models.config import ModelConfig, MoeConfig, RopeConfig
from weft.models.linear import Dtypes
from weft.models.registry import ARCHITECTURES, load_config, resolve_dtype
from weft.models.weights import load_model

__all__ = [
    "ARCHITECTURES",
    "CausalLM",
    "Dtypes",
    "ModelConfig",
    "MoeConfig",
    "RopeConfig",
    "load_config",
    "load_model",
    "resolve_dtype",
]
