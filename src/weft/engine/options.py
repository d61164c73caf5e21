"""EngineOptions: the settings of an engine. Names are vLLM's where the meaning is the same."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from weft.errors import OptionError

POLICIES = ("slo", "chunked", "monolithic")
DTYPES = ("auto", "float32", "float16", "bfloat16", "float64")
ALIASES = {"half": "float16", "float": "float32"}  # vLLM's other names for dtypes


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    model: str | None = None  # directory or hub id; None: the model that ships with weft
    dtype: str = "auto"  # auto: the checkpoint's dtype; half and float become float16 and float32
    device: str = "auto"  # auto: cuda if available
    max_model_len: int | None = None  # tokens of prompt plus output; None: as many as model and KV cache allow
    max_num_seqs: int = 256  # most running requests
    max_num_batched_tokens: int = 2048  # most tokens of a step
    block_size: int = 16  # tokens in a block of the KV cache
    kv_cache_memory_bytes: int | None = None  # None: from the memory of the device
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory that weights, steps and KV cache may take
    enable_prefix_caching: bool = True
    policy: Literal["slo", "chunked", "monolithic"] = "slo"  # slo without any target works as chunked
    gap_target_ms: float | None = None  # promised time between tokens; None: no promise
    ttft_target_ms: float | None = None  # promised time to the first token; None: no promise
    ttft_target_per_1k_ms: float | None = None  # added per 1,000 prompt tokens; None: 0, or the default target's
    default_targets: bool = False  # missing targets get defaults, which never cause a refusal: gaps of 50 ms (or two
    # decode steps, if longer), and a first token within 1 s plus 0.25 s per 1,000 prompt tokens
    min_gap_target_ms: float | None = None  # smaller targets are raised to it; None: 1.5 calibrated decode steps
    max_queued_requests: int | None = None  # more are refused; None: no limit
    max_queued_tokens: int | None = None  # of waiting prompts; None: no limit
    load_format: Literal["auto", "dummy"] = "auto"  # dummy: random weights from the config alone
    seed: int | None = None  # for requests that name no seed; None: different every time

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", ALIASES.get(self.dtype, self.dtype))
        if self.dtype not in DTYPES:
            raise OptionError(f"dtype {self.dtype!r} is not supported; choose auto, float32, float16 or bfloat16")
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size"):
            self._at_least_one(name)
        for name in ("max_model_len", "kv_cache_memory_bytes", "max_queued_requests", "max_queued_tokens"):
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
        self._check_targets()
        if self.load_format not in ("auto", "dummy"):
            raise OptionError(f"load_format={self.load_format!r} is unknown: choose auto or dummy")

    @property
    def has_targets(self) -> bool:
        return self.gap_target_ms is not None or self.ttft_target_ms is not None or self.default_targets

    @classmethod
    def of(cls, **options: Any) -> "EngineOptions":
        """Builds options by name. Raises an OptionError on an unknown name."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise OptionError(f"unknown option {unknown[0]!r}; known: {', '.join(known)}")
        return cls(**options)

    def _check_targets(self) -> None:
        if self.policy not in POLICIES:
            raise OptionError(f"policy={self.policy!r} is unknown: choose {', '.join(POLICIES)}")
        for name in ("gap_target_ms", "ttft_target_ms", "min_gap_target_ms"):
            value = getattr(self, name)
            if value is not None:
                check_milliseconds(name, value)
        if self.ttft_target_per_1k_ms:
            check_milliseconds("ttft_target_per_1k_ms", self.ttft_target_per_1k_ms)
            if self.ttft_target_ms is None and not self.default_targets:
                raise OptionError(
                    f"ttft_target_per_1k_ms={self.ttft_target_per_1k_ms:g} adds to ttft_target_ms: give that too"
                )
        if self.has_targets and self.policy != "slo":
            raise OptionError(f"policy={self.policy!r} keeps no promises: leave the targets out, or choose slo")

    def _at_least_one(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name}={value!r} must be a whole number of at least 1")


def check_milliseconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise OptionError(f"{name}={value!r} must be a number of milliseconds above 0")
