"""Random outputs along the masks of random schemas: whatever a model may come to say fulfils the schema.

A random walk finds what a model's own taste would hide for long.
"""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import jsonschema
import numpy as np
import pytest
import xgrammar

from scheduler.guide_messages import GuideKind
from scripts.fault_suite.schemas import random_schema
from tests.model.guided.vocabularies import EOS, TOKENS, compiled, vocabularies

NUM_TOKENS_MAX = 600
WORDS = -(-len(TOKENS) // 32)

SCHEMAS: list[dict[str, Any]] = [
    {"type": "string", "pattern": "^[^x]{1,4}$"},
    {"type": "string", "pattern": "^.{2}$"},
    {"type": "string", "pattern": "a"},
    {"type": "string", "pattern": "^ab|cd$"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "format": "date-time"},
    {"type": "number", "exclusiveMinimum": -2.5, "maximum": 3.75},
    {"type": "integer", "multipleOf": 7},
    {"type": ["string", "integer"], "maxLength": 2, "minimum": 0, "maximum": 5},
    {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}, "maxItems": 3},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    {"type": "object", "patternProperties": {"^[a-c]{1,2}$": {"const": 1}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}, "maxProperties": 3},
    {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 1, "maximum": 5}]},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}}},
]


@pytest.mark.slow
@pytest.mark.parametrize("schema", [*SCHEMAS, *(random_schema(seed) for seed in range(40))], ids=lambda _: "")
def test_every_output_is_valid(schema: dict[str, Any]) -> None:
    """It is JSON, and what the schema asks for, as a validator that is not ours judges it."""
    guide = compiled(GuideKind.JSON_SCHEMA, json.dumps(schema))
    serialised = zlib.decompress(guide[1:]).decode()
    grammar = xgrammar.CompiledGrammar.deserialize_json(serialised, vocabularies().info(guide[:1]))
    ended = 0
    for seed in range(6):
        output = walk(xgrammar.GrammarMatcher(grammar), random.Random(seed))
        if output is not None:
            ended += 1
            jsonschema.validate(json.loads(output.decode()), schema)
    assert ended, "no walk came to an end: nothing was tried"


def walk(matcher: xgrammar.GrammarMatcher, rng: random.Random) -> bytes | None:
    """One output; None if it is too long."""
    bitmask = np.zeros((1, WORDS), dtype=np.int32)
    output = b""
    for _ in range(NUM_TOKENS_MAX):
        matcher.fill_next_token_bitmask(bitmask, 0)
        bits = np.unpackbits(bitmask.view(np.uint8), axis=1, count=len(TOKENS), bitorder="little")[0]
        allowed = np.flatnonzero(bits).tolist()
        assert allowed, f"a dead end after {output!r}"
        token_id = EOS if EOS in allowed and rng.random() < 0.3 else rng.choice(allowed)
        assert matcher.accept_token(token_id)
        if token_id == EOS:
            return output
        output += TOKENS[token_id]
    return None
