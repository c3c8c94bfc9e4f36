"""What a JSON schema may ask for. Pure.

What must live here: which of the standard's keywords (2020-12) would be passed over in silence. What must not:
xgrammar, which enforces the others, and warns where a combination of them is beyond it.

Annotations (titles, defaults, unknown keywords) ask for nothing, so they may be passed over; an assertion may not: an
output that breaks it would be called valid.
"""

from __future__ import annotations

import re
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
_NEED_A_TYPE = frozenset(
    {
        "exclusiveMaximum", "exclusiveMinimum", "maxLength", "maximum", "minLength", "minimum", "multipleOf", "pattern",
    }
)  # fmt: skip
"""Without `type` they are passed over, and any value is taken."""
_TYPE_OF: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
_QUOTE_OR_BACKSLASH = re.compile(r'"|\\\\|\\(x|u00)(22|5c)', re.IGNORECASE)
"""In a pattern: they are written as they are, where JSON wants them escaped."""
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
    return found | _of_one_value(schema)


def _of_one_value(schema: dict[str, Any]) -> set[str]:
    """Combinations that xgrammar takes for less than they are, as random outputs of its grammars showed."""
    found: set[str] = set()
    pattern = schema.get("pattern")
    if pattern is not None and {"format", "minLength", "maxLength"} & schema.keys():
        found |= {"pattern with minLength, maxLength or format"}
    if isinstance(pattern, str) and _QUOTE_OR_BACKSLASH.search(pattern):
        found |= {"pattern with a quotation mark or a backslash"}
    for name in ("enum", "const"):
        if name in schema and (_ASSERTIONS & schema.keys()) - {name, "type"}:
            found |= {f"assertions beside {name}"}
    if "type" not in schema:
        found |= {f"{name} without type" for name in _NEED_A_TYPE & schema.keys()}
    elif not _has_type(schema):
        found |= {"enum or const of another type"}
    if "patternProperties" in schema and schema.get("properties"):
        found |= {"patternProperties with properties"}
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(required, list) and not set(map(str, required)) <= set(properties or ()):
        found |= {"required beyond properties"}
    if [] in [schema.get(name) for name in ("anyOf", "oneOf", "allOf", "enum", "type")]:
        found |= {"an empty list"}
    return found


def _has_type(schema: dict[str, Any]) -> bool:
    """Whether each value that is listed has one of the types that are."""
    listed = schema["type"]
    types = set(listed) if isinstance(listed, list) and all(isinstance(one, str) for one in listed) else {listed}
    values = [*(schema["enum"] if isinstance(schema.get("enum"), list) else ()), *_const(schema)]
    return all(types.intersection(_TYPE_OF.get(type(value), ())) for value in values)


def _const(schema: dict[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else []
