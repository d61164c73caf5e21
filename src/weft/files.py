"""Reading the JSON files of a model directory."""

import json
from pathlib import Path
from typing import Any

from weft.errors import ModelError


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object from a file; {} where an optional one is missing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise ModelError(f"{path.parent} has no {path.name}; a directory in Hugging Face layout is needed") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value
