"""The block space of an engine: what KV blocks of equal tokens need in common to hold equal numbers."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from weft.engine.executor import ExecutorFacts
from weft.engine.hashing import DIGEST_BYTES

if TYPE_CHECKING:
    from weft.models import ModelConfig

SAMPLE_BYTES = 1024  # of each tensor


def block_space(
    path: Path, config: "ModelConfig", facts: ExecutorFacts, *, load_format: str, max_model_len: int
) -> bytes:
    """A digest of the weights, the rotation of keys, the types of numbers and the layout of the KV cache.

    Two processes that serve the same model in the same way have the same, on any machine. `max_model_len` changes the
    frequencies of some rotary embeddings.
    """
    from weft.models.rope import frequencies

    rotations = [frequencies(rope, max_model_len).tolist() for rope in config.layer_ropes]
    key = (fingerprint(path, load_format, facts.device_type), rotations, facts.dtypes, tuple(facts.layout))
    return hashlib.blake2b(repr(key).encode(), digest_size=DIGEST_BYTES).digest()


def fingerprint(path: Path, load_format: str, device_type: str) -> str:
    """A digest of config.json and of a sample from the middle of each weight tensor that the model loads.

    To read all weights would take minutes. Models that differ only outside of the samples have the same fingerprint; a
    fine-tune changes most numbers of the tensors that it changes at all. Random weights depend on the kind of device.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update((path / "config.json").read_bytes())
    if load_format == "dummy":
        digest.update(f"dummy {device_type}".encode())
        return digest.hexdigest()
    from weft.models.weights import Checkpoint

    files = Checkpoint(path).files
    headers = {file: _header(file) for file in set(files.values())}
    for name in sorted(files):
        start, tensors = headers[files[name]]
        begin, end = tensors[name]["data_offsets"]
        digest.update(f"{name} {tensors[name]['dtype']} {tensors[name]['shape']}".encode())
        with files[name].open("rb") as reader:
            reader.seek(start + max(begin, (begin + end - SAMPLE_BYTES) // 2))
            digest.update(reader.read(min(SAMPLE_BYTES, end - begin)))
    return digest.hexdigest()


def _header(file: Path) -> tuple[int, dict[str, dict[str, list[int]]]]:
    """Where the tensors of a safetensors file start, and its header, which the loader has checked."""
    with file.open("rb") as reader:
        length = int.from_bytes(reader.read(8), "little")
        return 8 + length, json.loads(reader.read(length))
