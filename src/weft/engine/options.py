"""EngineOptions: what the owner of an engine may choose. Names are vLLM's where the meaning is the same."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from weft.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    model: str | None = None  # directory or hub id; None: the model that ships with weft
    dtype: str = "auto"  # auto: the checkpoint's
    device: str = "auto"  # auto: cuda where there is one
    max_model_len: int | None = None  # tokens of prompt and output; None: what model and KV cache allow
    max_num_seqs: int = 256  # requests that run at once
    max_num_batched_tokens: int = 2048  # tokens a step may carry
    block_size: int = 16  # tokens in a block of the KV cache
    kv_cache_memory_bytes: int | None = None  # None: from what the device has
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory that weights and KV cache may take
    enable_prefix_caching: bool = True
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights from the config alone
    seed: int | None = None  # for requests without a seed of their own; None: different every time

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            self._at_least_one(name)
        for name in ("max_model_len", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                self._at_least_one(name)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise OptionError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
                "every running request needs a token in each step"
            )
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise OptionError(f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at most 1")
        if not isinstance(self.enable_prefix_caching, bool):
            raise OptionError(f"enable_prefix_caching={self.enable_prefix_caching!r} must be True or False")
        if self.load_format not in ("auto", "dummy"):
            raise OptionError(f"load_format={self.load_format!r} is unknown: choose auto or dummy")

    @classmethod
    def of(cls, **options: Any) -> "EngineOptions":
        """Options by name; one that does not exist is an OptionError."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise OptionError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}")
        return cls(**options)

    def _at_least_one(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name}={value!r} must be a whole number of at least 1")
