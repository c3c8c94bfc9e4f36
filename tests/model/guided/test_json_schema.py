"""Which schemas ask for more than they would get."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.model.guided.json_schema import keywords_not_enforced


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"not": {"type": "string"}, "if": {"const": 1}}, "required": ["not"]},
        {"title": "t", "description": "d", "default": {"not": 1}, "examples": [{"if": 1}], "x-unknown": {"not": {}}},
        {"enum": [{"not": 1}, {"contains": 1}]},
        {"const": {"if": 1}, "title": "t"},
        {"$ref": "#/$defs/a", "description": "beside it", "$defs": {"a": {"type": "integer", "minimum": 0}}},
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}], "title": "t"},
        {"allOf": [{"type": "string"}]},
        {"type": "array", "items": {"type": "number"}, "uniqueItems": False},
        {"type": ["string", "null"], "enum": ["a", None]},
        {"type": "integer", "const": 3},
        {"type": "string", "pattern": r"^[\w.]+@\d{2}\.\S$"},
    ],
)
def test_what_can_be_held_to(schema: Any) -> None:
    """Names of properties, values and annotations are no keywords."""
    assert keywords_not_enforced(schema) == set()


@pytest.mark.parametrize(
    ("schema", "missing"),
    [
        ({"not": {"type": "string"}}, {"not"}),
        ({"type": "object", "properties": {"a": {"uniqueItems": True}}}, {"uniqueItems"}),
        ({"items": {"prefixItems": [{"contains": {}, "minContains": 2}]}}, {"contains", "minContains"}),
        ({"if": {}, "then": {}, "else": {}}, {"if", "then", "else"}),
        ({"$defs": {"a": {"dependentRequired": {}}}}, {"dependentRequired"}),
        ({"$ref": "http://elsewhere/schema"}, {"$ref to elsewhere"}),
        ({"allOf": [{}, {}]}, {"allOf of several"}),
        ({"anyOf": [{}], "type": "string"}, {"assertions beside anyOf"}),
        ({"$ref": "#/$defs/a", "required": []}, {"assertions beside $ref"}),
        ({"anyOf": [{}], "oneOf": [{}]}, {"assertions beside anyOf"}),
        ({"type": "string", "pattern": "a", "maxLength": 1}, {"pattern with minLength, maxLength or format"}),
        ({"type": "string", "pattern": "a", "format": "date"}, {"pattern with minLength, maxLength or format"}),
        ({"type": "string", "pattern": 'a"'}, {"pattern with a quotation mark or a backslash"}),
        ({"type": "string", "pattern": r"\\\\"}, {"pattern with a quotation mark or a backslash"}),
        ({"type": "string", "pattern": r"\u0022"}, {"pattern with a quotation mark or a backslash"}),
        ({"const": 1, "minimum": 5}, {"assertions beside const", "minimum without type"}),
        ({"enum": ["a"], "type": "string", "maxLength": 0}, {"assertions beside enum"}),
        ({"enum": ["a", 1], "type": "string"}, {"enum or const of another type"}),
        ({"const": True, "type": ["integer", "null"]}, {"enum or const of another type"}),
        ({"maxLength": 3}, {"maxLength without type"}),
        ({"type": "object", "required": ["a"]}, {"required beyond properties"}),
        ({"patternProperties": {"^a": {}}, "properties": {"b": {}}}, {"patternProperties with properties"}),
        ({"anyOf": []}, {"an empty list"}),
    ],
)
def test_what_would_be_passed_over_in_silence(schema: Any, missing: set[str]) -> None:
    """Wherever in the schema it is."""
    assert keywords_not_enforced(schema) == missing


def test_a_deep_schema_is_no_recursion() -> None:
    """Depth is the caller's."""
    schema: dict[str, Any] = {"not": {}}
    for _ in range(100_000):
        schema = {"items": schema}
    assert keywords_not_enforced(schema) == {"not"}
    while schema:  # or freeing it would be one
        schema = schema.pop("items", None) or {}
