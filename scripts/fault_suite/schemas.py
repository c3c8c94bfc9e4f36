"""Random JSON schemas whose values are short, so that what is held to them comes to an end; and guides that explode.

The same seed makes the same schema.
"""

from __future__ import annotations

import json
import random
from typing import Any

DEPTH_MAX = 2
NUM_PROPERTIES_MAX = 4
WORDS = ("name", "age", "city", "tags", "item", "price", "unit", "é", 'a "b"', "x/y", "not", "$ref")


def random_schema(seed: int) -> dict[str, Any]:
    """An object's; every keyword that a caller is likely to use is in some of them."""
    rng = random.Random(seed)  # noqa: S311 no secret depends on it
    schema = _object(rng, 0)
    if rng.random() < 0.3:
        schema["$defs"] = {"point": {"type": "array", "prefixItems": [_number(rng), _number(rng)], "minItems": 2}}
        schema["properties"]["point"] = {"$ref": "#/$defs/point", "description": "an annotation beside it"}
    return schema


def explosive(seed: int) -> dict[str, Any]:
    """A guide that takes half a minute or more to compile; each seed's is another one."""
    properties = {f"p{seed}_{number}": {"type": "string"} for number in range(1300)}
    return {"json_schema": json.dumps({"type": "object", "properties": properties})}


def malformed(seed: int) -> dict[str, Any]:
    """A guide that is none; each seed's is another one."""
    kinds = ({"json_schema": f'{{"type": "strin{seed}"}}'}, {"regex": f"({seed}"}, {"grammar": f'root ::= "{seed}'})
    return dict(kinds[seed % len(kinds)])


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = (_string, _number, _fixed, _pattern, _flag)
    if depth >= DEPTH_MAX:
        return rng.choice(leaves)(rng)
    kind = rng.randrange(len(leaves) + 3)
    if kind < len(leaves):
        return leaves[kind](rng)
    if kind == len(leaves):
        return _object(rng, depth + 1)
    if kind == len(leaves) + 1:
        least = rng.randrange(2)
        return {
            "type": "array",
            "items": _value(rng, depth + 1),
            "minItems": least,
            "maxItems": least + rng.randrange(1, 3),
        }
    return {"anyOf": [_value(rng, depth + 1), {"type": "null"}], "title": "an option"}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, NUM_PROPERTIES_MAX))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _string(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "minLength": rng.randrange(2), "maxLength": rng.randint(1, 12)}


def _number(rng: random.Random) -> dict[str, Any]:
    least = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 5000)}


def _fixed(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"const": rng.choice([1, "one", None, [1, 2]])}
    return {"enum": rng.sample(["red", "green", 'a "quoted" one', 7, 2.5, True, None], rng.randint(1, 4))}


def _pattern(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": "string", "format": "date"}
    return {"type": "string", "pattern": rng.choice(["^[A-Z]{2}-[0-9]{3}$", "^(ab|cd){1,3}$", "^[^\\s]{2,4}$"])}


def _flag(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice([["boolean", "null"], "boolean"])}
