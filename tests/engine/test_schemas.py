"""Objects that list their properties are closed, unless something else describes them as well."""

from typing import Any

import pytest

from weft.engine.schemas import closed

TEXT = {"type": "string"}
A = {"type": "object", "properties": {"a": TEXT}}
B = {"type": "object", "properties": {"b": TEXT}}
CLOSED = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [A]}, {"allOf": [CLOSED]}),
        (
            {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": A}},
            {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": CLOSED}, "additionalProperties": False},
        ),
        ({"properties": {"properties": A}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
    ],
)
def test_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": TEXT},
        {**A, "patternProperties": {"^x": TEXT}},
        {**A, "required": ["a", "z"]},
        {"allOf": [A, B]},
        {"allOf": [{"anyOf": [A, B]}, {"required": ["a"]}]},
        {**A, "anyOf": [B, {"properties": {"c": TEXT}}]},
        {**A, "$ref": "#/$defs/b~1b", "$defs": {"b/b": B}},
        {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": {"$ref": "#/$defs/C"}, "C": A}},
        {"const": A},
        {"enum": [A]},
        {"not": A},
        True,
        {"properties": 7},
        {"allOf": 7, "items": "x", "$defs": [A]},
    ],
)
def test_left_open(schema: Any) -> None:
    assert closed(schema) == schema


def test_the_given_schema_is_not_changed() -> None:
    schema = {"items": {"properties": {"a": TEXT}}}
    closed(schema)
    assert schema == {"items": {"properties": {"a": TEXT}}}


def test_what_parts_describe_together_stays_open_one_level_down_too() -> None:
    def part(name: str) -> dict[str, Any]:
        return {"properties": {"x": {"type": "object", "properties": {name: {"type": "integer"}}}}}

    schema = {"type": "object", "allOf": [part("a"), part("b")]}
    assert closed(schema) == schema
