"""Closes the objects of a JSON schema, so that constrained output ends.

In JSON Schema, an object that lists its properties may also have any others. A model under such a schema can invent
properties forever, which hardly any author of a schema wants.
"""

from typing import Any
from urllib.parse import unquote

REFERENCE_PASSES = 8  # passes that follow references from parts of objects; a schema that needs more is left unchanged

_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties")  # define further properties explicitly
_SEVERAL = ("allOf", "anyOf", "oneOf")
_JOINED = (*_SEVERAL, "$ref", "if", "then", "else", "dependentSchemas")  # describe the same object as `properties`
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalItems", "additionalProperties", "contains")
_IN_LISTS = ("items", "prefixItems")


def closed(schema: Any) -> Any:
    """Returns a copy in which objects with `properties` allow no others.

    An object stays open if it has no `properties`, if it has `additionalProperties`, `unevaluatedProperties` or
    `patternProperties`, or if it requires a property that it does not list. So does an object that several schemas
    describe together, as in `allOf`: one schema may list what another does not.
    """
    parts: set[str] = set()  # references to schemas that describe a part of an object
    for _ in range(REFERENCE_PASSES):
        before = len(parts)
        found = _close(schema, "#", False, parts)
        if len(parts) == before:
            return found
    return schema


def _close(schema: Any, pointer: str, is_part: bool, parts: set[str]) -> Any:
    """Returns a closed copy of the schema at the JSON pointer `pointer`. Adds references to `parts`."""
    if not isinstance(schema, dict):
        return schema
    is_part = is_part or pointer in parts
    is_shared = is_part or sum(name in schema for name in ("properties", *_OPEN, *_JOINED)) > 1
    found = dict(schema)
    for name, value in schema.items():
        at = f"{pointer}/{name}"
        if isinstance(value, dict) and name in _BY_NAME:
            # A property that several parts may describe is not fully listed by any of them.
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
    """Whether a schema lists all required properties, and no other keyword or schema describes the object."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or any(name in schema for name in (*_OPEN, *_JOINED)):
        return False
    return isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
