"""Hardware profiles: what a model costs on a device, and how much of it fits."""

import json
from dataclasses import dataclass
from pathlib import Path

from weft.core import Coefficients
from weft.errors import OptionError

FOLDER = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Profile:
    name: str
    origin: str  # "measured" or "fitted", and to what
    coefficients: Coefficients
    max_model_len: int  # tokens
    kv_tokens: int  # that the KV cache holds
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int


def known_profiles() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_profile(name: str) -> Profile:
    """A profile by name, or from a JSON file."""
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if not path.is_file():
        raise OptionError(f"unknown profile {name!r}; known: {', '.join(known_profiles())}, or a path to a JSON file")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Profile(**{**data, "name": path.stem, "coefficients": Coefficients(**data["coefficients"])})
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(f"profile {path}: {error}") from None
