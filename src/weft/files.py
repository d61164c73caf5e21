"""Reads the JSON files of a model directory, and limits how deep JSON may be nested."""

import json
from pathlib import Path
from typing import Any

from weft.errors import ModelError

MOST_DEPTH = 500  # levels of nested lists and objects: half of what Python can follow


def is_too_deep(value: Any) -> bool:
    """Whether JSON data has more than MOST_DEPTH levels. Checks one level after the other, without recursion."""
    level = [value] if type(value) in (dict, list) else []
    for _ in range(MOST_DEPTH):
        inner = [item for one in level for item in (one.values() if type(one) is dict else one)]
        level = [item for item in inner if type(item) in (dict, list)]
        if not level:
            return False
    return True


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object from a file; {} if an optional file is missing."""
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
    except RecursionError:
        raise _too_deep(path) from None
    if is_too_deep(value):
        raise _too_deep(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _too_deep(path: Path) -> ModelError:
    return ModelError(f"{path} is nested more than {MOST_DEPTH} levels deep: is it the file of a model?")
