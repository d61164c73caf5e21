"""Closes the objects of a JSON schema, so that what is written by it comes to an end.

By the letter of JSON Schema, an object that lists its properties may have any others as well. A model that is held to
such a schema may go on with properties of its own making for ever, and hardly any author of a schema means that.
"""

from typing import Any
from urllib.parse import unquote

ROUNDS = 8  # in which references from parts of objects are followed; a schema that needs more stays as it is

_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties")  # say themselves what else may be there
_SEVERAL = ("allOf", "anyOf", "oneOf")
_JOINED = (*_SEVERAL, "$ref", "if", "then", "else", "dependentSchemas")  # describe the same object as `properties`
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains")
_IN_LISTS = ("items", "prefixItems")


def closed(schema: Any) -> Any:
    """A copy in which objects with `properties` take no others, where they do not mention `additionalProperties`.

    Objects without `properties` stay open. So do objects that several schemas describe together, as in `allOf`: what
    one of these does not list, another may.
    """
    parts: set[str] = set()  # references to schemas that describe a part of an object
    for _ in range(ROUNDS):
        before = len(parts)
        found = _close(schema, "#", False, parts)
        if len(parts) == before:
            return found
    return schema


def _close(schema: Any, place: str, is_part: bool, parts: set[str]) -> Any:
    """A copy of the schema at `place`, a JSON pointer; adds to `parts`."""
    if not isinstance(schema, dict):
        return schema
    is_part = is_part or place in parts
    is_shared = is_part or sum(name in schema for name in ("properties", *_OPEN, *_JOINED)) > 1
    found = dict(schema)
    for name, value in schema.items():
        at = f"{place}/{name}"
        if isinstance(value, dict) and name in _BY_NAME:
            # Of a property that several parts may describe, no part lists all.
            partly = is_part and name in ("properties", "patternProperties")
            found[name] = {key: _close(one, f"{at}/{_escaped(key)}", partly, parts) for key, one in value.items()}
        elif isinstance(value, dict) and name in _SINGLE:
            found[name] = _close(value, at, False, parts)
        elif isinstance(value, list) and name in (*_SEVERAL, *_IN_LISTS):
            together = name in _SEVERAL and (is_shared or (name == "allOf" and len(value) > 1))
            found[name] = [_close(one, f"{at}/{number}", together, parts) for number, one in enumerate(value)]
        elif name == "$ref" and isinstance(value, str) and is_shared:
            parts.add(unquote(value))
    if not is_part and _is_complete(schema):
        found["additionalProperties"] = False
    return found


def _is_complete(schema: dict[str, Any]) -> bool:
    """Whether a schema lists all properties that its object needs, and nothing else describes the object."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or any(name in schema for name in (*_OPEN, *_JOINED)):
        return False
    return isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
