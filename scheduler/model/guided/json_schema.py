"""What a JSON schema may ask for. Pure.

What must live here: which of the standard's keywords (2020-12) would be passed over in silence. What must not:
xgrammar, which enforces the others, and warns where a combination of them is beyond it.

Annotations (titles, defaults, unknown keywords) ask for nothing, so they may be passed over; an assertion may not: an
output that breaks it would be called valid.
"""

from __future__ import annotations

from typing import Any

_NOT_ENFORCED = frozenset(
    {
        "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else",
        "if", "maxContains", "minContains", "not", "then",
    }
)  # fmt: skip
_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf")
"""Beside any of these only annotations are looked at: what else is there would be passed over."""
_ASSERTIONS = frozenset(
    {
        "additionalProperties", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "items", "maxItems",
        "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum", "multipleOf",
        "pattern", "patternProperties", "prefixItems", "properties", "propertyNames", "required", "type",
        "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_LISTS_OF_SCHEMAS = ("prefixItems", "anyOf", "oneOf", "allOf")


def keywords_not_enforced(schema: Any) -> set[str]:
    """The standard's names of what `schema` asks for and would not get, such as `not` or `uniqueItems`."""
    found: set[str] = set()
    pending = [schema]
    while pending:
        one = pending.pop()
        if not isinstance(one, dict):
            continue
        found |= _of_one(one)
        for name in _SCHEMAS_BY_NAME:
            value = one.get(name)
            pending += value.values() if isinstance(value, dict) else ()
        pending += (one[name] for name in _SCHEMAS if name in one)
        for name in _LISTS_OF_SCHEMAS:
            value = one.get(name)
            pending += value if isinstance(value, list) else ()
    return found


def _of_one(schema: dict[str, Any]) -> set[str]:
    found = set(_NOT_ENFORCED & schema.keys())
    if schema.get("uniqueItems") is True:
        found |= {"uniqueItems"}
    reference = schema.get("$ref")
    if isinstance(reference, str) and not (reference == "#" or reference.startswith("#/")):
        found |= {"$ref to elsewhere"}
    all_of = schema.get("allOf")
    if isinstance(all_of, list) and len(all_of) > 1:
        found |= {"allOf of several"}
    alternatives = [name for name in _ALTERNATIVES if name in schema]
    if alternatives and (len(alternatives) > 1 or _ASSERTIONS & schema.keys()):
        found |= {f"assertions beside {alternatives[0]}"}
    if "pattern" in schema and {"minLength", "maxLength"} & schema.keys():
        found |= {"pattern with minLength or maxLength"}
    return found
