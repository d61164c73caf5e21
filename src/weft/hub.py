"""Finds a model: a local directory, or a hub id, which is downloaded into Hugging Face's cache."""

import os
import re
from pathlib import Path

from weft.errors import ModelError

# Files that weft reads. Other files of a repository hold the same weights two or three times over, in other formats.
NEEDED_FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "1_Pooling/config.json",
]


def resolve_model(name: str) -> Path:
    """The directory of a model given by path or by hub id (`org/name`)."""
    path = Path(name).expanduser()
    if os.path.isdir(path):  # unlike Path.is_dir, false if a parent may not be read
        return path
    if os.path.exists(path):
        raise ModelError(f"{name} is a file; give the model's directory")
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        raise ModelError(
            f"model directory {name} does not exist or is not readable; give a directory or a hub id like org/name"
        )
    return _download(name)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and seldom needed

    try:
        return Path(snapshot_download(name, allow_patterns=NEEDED_FILES))
    except (OSError, ValueError) as error:  # raised by the hub's client for names, permissions, networks and disks
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{name} is not a directory here, and downloading it from the hub failed: {reason}") from error
