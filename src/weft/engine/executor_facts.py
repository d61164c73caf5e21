"""`facts_of`: the ExecutorFacts of executors that run a model with torch."""

import platform
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.engine.executor import ExecutorFacts
from weft.kv.spec import KVLayout

if TYPE_CHECKING:
    import torch

    from weft.models import CausalLM


def facts_of(model: "CausalLM", device: "torch.device", block_size: int, **own: Any) -> ExecutorFacts:
    """The facts of an executor of this model. `own` are those that depend on the kind of executor."""
    config, dtypes = model.config, model.dtypes
    layout = KVLayout(
        num_layers=config.num_layers,
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=str(dtypes.kv_cache).removeprefix("torch."),
    )
    return ExecutorFacts(device_name(device), device.type, layout, config.vocab_size, dtypes.name, **own)


def device_name(device: "torch.device") -> str:
    """The name of a device."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or device.type
