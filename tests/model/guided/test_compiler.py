"""What guides mean, and which are refused though they compile. Limits of time and memory are the process's."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.guide_messages import GuideKind, GuideOutcome, GuideSource
from scheduler.model.guided import compiler
from scheduler.model.guided.compiler import GuideRefusedError, compile_guide
from tests.model.guided.vocabularies import TOKENS, compiled, vocabularies

# An alphabet where escaping can go wrong: quotes, brackets, backslashes and what stands behind them.
HARD = st.text(st.sampled_from('"\\[]()|*u0041nx{}-^ aé'), min_size=1, max_size=6)


def refusal(kind: GuideKind, text: str) -> GuideOutcome:
    with pytest.raises(GuideRefusedError) as caught:
        compiled(kind, text)
    assert caught.value.__cause__ is None
    assert text not in str(caught.value)
    return caught.value.outcome


def accepts(guide: bytes, text: str) -> bool:
    """Whether the guide takes the text, and could end there."""
    info = vocabularies().info(guide[:1])
    grammar = xgrammar.CompiledGrammar.deserialize_json(zlib.decompress(guide[1:]).decode(), info)
    matcher = xgrammar.GrammarMatcher(grammar)
    byte_ids = [TOKENS.index(bytes([byte])) for byte in text.encode()]
    return all(matcher.accept_token(token_id) for token_id in byte_ids) and matcher.accept_token(2)


@settings(max_examples=60, deadline=None)
@given(options=st.lists(HARD, min_size=1, max_size=4, unique=True), other=HARD)
def test_a_choice_is_its_options_and_nothing_else(options: list[str], other: str) -> None:
    """Whatever characters they are made of."""
    guide = compiled(GuideKind.CHOICE, options=tuple(options))
    for option in options:
        assert accepts(guide, option)
    assert accepts(guide, other) == (other in options)


def test_json_is_written_on_one_line() -> None:
    """White space at will would let a model go on for ever."""
    guide = compiled(
        GuideKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    )
    assert accepts(guide, '{"a": 12}')
    assert not accepts(guide, '{"a":  12}')
    assert not accepts(guide, '{"b": 12}')


@pytest.mark.parametrize("pattern", ["^[^x]{1,3}$", "^.{1,3}$", "^(a|\\S)+$"])
def test_json_has_no_control_characters(pattern: str) -> None:
    """Not even where the pattern of a string would let them be: JSON would not."""
    guide = compiled(GuideKind.JSON_SCHEMA, json.dumps({"type": "string", "pattern": pattern}))
    assert accepts(guide, '"a~"')
    for token_id in (TOKENS.index(b"\n"), TOKENS.index(b"a\x01")):
        assert token_id not in walk(guide, '"')
    assert TOKENS.index(b"\n") in walk(compiled(GuideKind.REGEX, "[^x]+"), "a"), "text may have them"


def walk(guide: bytes, text: str) -> list[int]:
    """What may come after the text."""
    info = vocabularies().info(guide[:1])
    grammar = xgrammar.CompiledGrammar.deserialize_json(zlib.decompress(guide[1:]).decode(), info)
    matcher = xgrammar.GrammarMatcher(grammar)
    assert matcher.accept_string(text)
    bitmask = np.zeros((1, -(-len(TOKENS) // 32)), dtype=np.int32)
    matcher.fill_next_token_bitmask(bitmask, 0)
    return list(np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little")).tolist())


def test_any_object_is_an_object() -> None:
    """With any properties, but not another kind of value."""
    guide = compiled(GuideKind.JSON_OBJECT)
    for value in ({}, {"a": [1, "x", None]}, {"b": {"c": True}}):
        assert accepts(guide, json.dumps(value))
    for text in ("[]", "12", '"a"', "{"):
        assert not accepts(guide, text)


def test_a_regex_is_matched_whole() -> None:
    """Not somewhere in the output."""
    guide = compiled(GuideKind.REGEX, "[a-c]{2,3}(-12)?")
    assert accepts(guide, "abc-12")
    assert accepts(guide, "cc")
    assert not accepts(guide, "xabc")
    assert not accepts(guide, "abcd")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GuideKind.JSON_SCHEMA, "{"),
        (GuideKind.JSON_SCHEMA, "[]"),
        (GuideKind.JSON_SCHEMA, "false"),
        (GuideKind.JSON_SCHEMA, '{"type": "strin"}'),
        (GuideKind.JSON_SCHEMA, '{"minLength": 2, "maxLength": 1, "type": "string"}'),
        (GuideKind.REGEX, "(a"),
        (GuideKind.REGEX, "(?=a)b"),
        (GuideKind.REGEX, "(a)\\1"),
        (GuideKind.GRAMMAR, 'root ::= "a'),
        (GuideKind.GRAMMAR, 'other ::= "a"'),
        (GuideKind.GRAMMAR, "root ::= root"),
        (GuideKind.GRAMMAR, 'root ::= "\\U0001f600"'),  # this vocabulary has no bytes for it
    ],
)
def test_malformed_guides(kind: GuideKind, text: str) -> None:
    """Not what it says it is, or nothing that could ever be generated matches it."""
    assert refusal(kind, text) is GuideOutcome.MALFORMED


def test_what_the_library_leaves_out_is_refused() -> None:
    """It says so on stderr alone; an output that breaks the schema would be called valid."""
    source = GuideSource(GuideKind.JSON_SCHEMA, '{"type": "string"}')
    with pytest.raises(GuideRefusedError) as caught:
        compile_guide(source, vocabularies(), lambda: True)
    assert caught.value.outcome is GuideOutcome.UNSUPPORTED
    assert refusal(GuideKind.JSON_SCHEMA, '{"not": {}}') is GuideOutcome.UNSUPPORTED


def test_a_deep_schema_is_a_matter_of_memory() -> None:
    """Not of our stack."""
    text = '{"items":' * 10_000 + "{}" + "}" * 10_000
    assert refusal(GuideKind.JSON_SCHEMA, text) is GuideOutcome.MEMORY


def test_a_guide_that_compiles_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine would have to read it."""
    monkeypatch.setattr(compiler, "SERIALISED_BYTES_MAX", 2000)
    assert refusal(GuideKind.REGEX, "(abc|acb|bca){1,50}") is GuideOutcome.SIZE


def test_a_guide_that_is_slow_to_follow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it compiles in no time: each token would hold up everybody."""
    grammar = 'root ::= s s s\ns ::= s s | [a-z]* | ""'
    monkeypatch.setattr(compiler, "MASK_S_MAX", 0.0)
    clock = iter(range(1000))
    monkeypatch.setattr(compiler.time, "process_time", lambda: next(clock))
    assert refusal(GuideKind.GRAMMAR, grammar) is GuideOutcome.TIME


def test_the_rehearsal_follows_what_the_guide_allows() -> None:
    """Compiled guides can be walked to their end without a word of refusal: nothing here raises."""
    for length in (1, 2, 60):
        assert accepts(compiled(GuideKind.REGEX, f"a{{{length}}}"), "a" * length)
