"""weft serves language models. A stream does not stutter when another request's long prompt arrives.

The public names are imported when they are first used. So `import weft.core` needs only numpy and the standard library.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_MODULES = {  # each module, and the public names that it defines
    "weft.engine.params": ("SamplingParams", "StructuredOutputs"),
    "weft.errors": ("EngineError", "ModelError", "OptionError", "RequestError", "WeftError"),
    "weft.llm": ("LLM", "Completion", "Delta", "Embedding", "Generation", "Metrics"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
