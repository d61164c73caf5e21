"""`load_model`: reads a model's weights from memory-mapped safetensors, tensor by tensor; or draws random ones."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from weft.errors import ModelError
from weft.files import read_json
from weft.models.base import CausalLM
from weft.models.config import ModelConfig
from weft.models.layers import RMSNorm
from weft.models.linear import ChooseMethod, Dtypes, choose_method
from weft.models.registry import ARCHITECTURES

RANDOM_CHUNK = 1 << 26  # random numbers that are drawn at a time
MOST_HEADER = 100_000_000  # bytes; the library refuses longer headers


def load_model(
    path: Path | str,
    config: ModelConfig,
    *,
    dtypes: Dtypes,
    device: torch.device,
    max_model_len: int,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    choose: ChooseMethod = choose_method,
) -> CausalLM:
    """The model of a directory, ready for inference. "dummy" draws random weights and reads no weight files.

    `max_model_len` selects the frequencies of ropes that have several (see rope.py). `choose` selects the method of
    each linear layer.
    """
    with torch.device("meta"):  # names and shapes only: mismatches are found before memory is allocated
        model = ARCHITECTURES[config.architecture](config, dtypes, choose).requires_grad_(False).eval()
    if load_format == "dummy":
        _allocate(model, device)
        _randomise(model, seed)
    else:
        checkpoint = Checkpoint(Path(path))
        checkpoint.check(model)
        _allocate(model, device)
        for name, target in _sources(model, checkpoint):
            target.copy_(checkpoint.tensor(name))
    model.finish_loading(max_model_len, device)
    return model


def _allocate(model: CausalLM, device: torch.device) -> None:
    """Same as `to_empty`, which would import a computer algebra system (three seconds) to find strides."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    model._apply(empty)  # type: ignore[no-untyped-call]


class Checkpoint:
    """The tensors of a model directory by name, across its files. Files are memory-mapped, not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[Path, Any] = {}
        self._files = self._indexed() if self._has_index() else self._listed()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def files(self) -> dict[str, Path]:
        """The file of each tensor."""
        return self._files

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file(self._files[name]).get_tensor(name)
        return tensor

    def check(self, model: CausalLM) -> None:
        """Checks that every tensor of the model exists, with the right shape and kind of numbers."""
        for name, target in _sources(model, self):
            file = self._files[name]
            try:
                found = self._file(file).get_slice(name)
            except SafetensorError:
                raise ModelError(
                    f"{self.path}: the index says that tensor {name} is in {file.name}, but it is not"
                ) from None
            if tuple(found.get_shape()) != tuple(target.shape):
                expected = list(target.shape)
                raise ModelError(
                    f"{file}: tensor {name} has shape {found.get_shape()}, but config.json asks for {expected}"
                )
            if (found.get_dtype() in ("F64", "F32", "F16", "BF16")) != target.is_floating_point():
                kind = "floating-point weights" if target.is_floating_point() else "integers"
                raise ModelError(f"{file}: tensor {name} is {found.get_dtype()}; only {kind} are supported")

    def _has_index(self) -> bool:
        # A single file wins over an index next to it, as in Transformers.
        return (self.path / _INDEX).exists() and not (self.path / "model.safetensors").exists()

    def _indexed(self) -> dict[str, Path]:
        shards = read_json(self.path / _INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise ModelError(f"{self.path / _INDEX} has no weight_map")
        if missing := sorted(shard for shard in set(shards.values()) if not (self.path / shard).is_file()):
            raise ModelError(f"{self.path}: {_INDEX} names {missing[0]}, which is missing; is the download complete?")
        return {name: self.path / shard for name, shard in shards.items()}

    def _listed(self) -> dict[str, Path]:
        single = self.path / "model.safetensors"
        files = [single] if single.exists() else sorted(self.path.glob("*.safetensors"))
        if not files:
            other = any(self.path.glob("*.bin")) or any(self.path.glob("*.pt*"))
            hint = "; PyTorch's .bin and .pth files are not supported, convert them" if other else ""
            raise ModelError(f"{self.path} has no .safetensors files{hint}")
        return {name: file for file in files for name in self._file(file).keys()}  # noqa: SIM118 (not a mapping)

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} is unreadable: {_damage(file) or error}; download it again") from None
        return self._open[file]


_INDEX = "model.safetensors.index.json"


def _sources(model: CausalLM, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor to read and the memory to fill. Checkpoints hold stacked parameters whole or in parts."""
    for source in model.parameter_sources():
        if source.name in checkpoint:
            yield source.name, source.target
            continue
        for name, view in source.parts.items():
            if name not in checkpoint:
                whole = "" if source.name == name else f" (nor {source.name})"
                raise ModelError(f"{checkpoint.path}: tensor {name} is missing{whole}")
            yield name, view


def _damage(file: Path) -> str | None:
    """What is wrong with an unreadable file, or None. A header is 8 bytes of length, then JSON with byte ranges."""
    try:
        size = file.stat().st_size
        with file.open("rb") as reader:
            start = int.from_bytes(reader.read(8), "little") + 8
            if start > size:
                return "it ends within its header"
            if start > MOST_HEADER:
                return f"its header is said to have {start - 8} bytes"
            header = json.loads(reader.read(start - 8))
        ends = {name: start + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"}
        cut = [name for name in sorted(ends, key=lambda name: ends[name]) if ends[name] > size]
        return f"it ends within tensor {cut[0]}" if cut else None
    except RecursionError:
        return "its header is nested too deep"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _randomise(model: CausalLM, seed: int) -> None:
    """Draws random weights that keep activations at the scale of one. They differ between kinds of device."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(module.neutral)
            else:
                for rows in torch.split(parameter, max(1, RANDOM_CHUNK // parameter[0].numel())):
                    noise = torch.randn(rows.shape, generator=generator, dtype=torch.float32, device=device)
                    rows.copy_(noise * parameter.shape[-1] ** -0.5)
