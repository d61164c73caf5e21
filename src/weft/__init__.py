"""weft serves language models. A stream does not stutter when another request's long prompt arrives."""

from weft.engine.params import SamplingParams, StructuredOutputs
from weft.errors import EngineError, ModelError, OptionError, RequestError, WeftError
from weft.llm import LLM, Completion, Delta, Embedding, Generation, Metrics

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Completion",
    "Delta",
    "Embedding",
    "EngineError",
    "Generation",
    "Metrics",
    "ModelError",
    "OptionError",
    "RequestError",
    "SamplingParams",
    "StructuredOutputs",
    "WeftError",
]
