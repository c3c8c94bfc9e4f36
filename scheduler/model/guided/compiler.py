"""A guide as its caller wrote it → bytes that an engine can follow. Runs in a process that may be killed at any moment.

What must live here: the meaning of each kind of guide, and what makes one refused though it compiles. What must not:
limits on time and memory of the compilation itself (`scheduler/engine/guide_process.py` sets them; nothing in here
could keep them), exceptions' texts, which quote the guide.

JSON is written on one line, `", "` and `": "` between its parts: with white space at will a model may never come to an
end. Properties come in the order of the schema, and none but those of the schema unless it says so itself.

A guide that compiles is *rehearsed*: a matcher follows it along a pseudo-random output. Ambiguous grammars compile in
no time and then cost a second per token, in the engine's loop; here they cost it in the compilation's own time.
"""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Callable

import numpy as np
import xgrammar

from scheduler.guide_messages import GuideKind, GuideOutcome, GuideSource
from scheduler.model.guided.json_schema import keywords_not_enforced
from scheduler.model.guided.vocabulary import JSON_FORM, TEXT_FORM, Vocabularies

SERIALISED_BYTES_MAX = 4 * 1024 * 1024
"""Of a compiled guide. The engine reads such a one in some 70 ms, within its loop."""
REHEARSAL_TOKENS = 48
MASK_S_MAX = 0.1
"""CPU time that one token of one guide may take; usual ones take 0.1 ms."""
COMPRESSION_LEVEL = 1
_JSON_KINDS = (GuideKind.JSON_SCHEMA, GuideKind.JSON_OBJECT)
_ANY_OBJECT = '{"type": "object", "additionalProperties": true}'
_OUT_OF_MEMORY_TEXTS = ("bad_alloc", "length_error", "cannot create std::")
"""What the C++ library says in a plain RuntimeError."""


class GuideRefusedError(Exception):
    """This guide is not to be followed."""

    def __init__(self, outcome: GuideOutcome, what: str = "") -> None:
        super().__init__(outcome.name)
        self.outcome = outcome
        self.what = what


def compile_guide(source: GuideSource, vocabularies: Vocabularies, has_warned: Callable[[], bool]) -> bytes:
    """What `matcher.py` reads: the form's one letter, then the compiled grammar, compressed.

    Args:
        source: Within the limits on its size.
        vocabularies: Of the model.
        has_warned: Whether the library has written anything to stderr, which is how it tells that it leaves out a part
            of what it was asked for.

    Raises:
        GuideRefusedError: with the reason.
    """
    form = JSON_FORM if source.kind in _JSON_KINDS else TEXT_FORM
    info = vocabularies.info(form)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    if source.kind is GuideKind.JSON_SCHEMA:
        _check_schema(source.text)
    try:
        compiled = _compile(source, compiler)
    except MemoryError:
        raise GuideRefusedError(GuideOutcome.MEMORY) from None
    except Exception as error:  # noqa: BLE001 - the library raises RuntimeError, ValueError and its own, by version
        is_memory = any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)
        raise GuideRefusedError(GuideOutcome.MEMORY if is_memory else GuideOutcome.MALFORMED) from None
    if has_warned():
        raise GuideRefusedError(GuideOutcome.UNSUPPORTED, "a combination of keywords")
    if compiled.memory_size_bytes > SERIALISED_BYTES_MAX:
        raise GuideRefusedError(GuideOutcome.SIZE)
    serialised = compiled.serialize_json().encode()
    if len(serialised) > SERIALISED_BYTES_MAX:
        raise GuideRefusedError(GuideOutcome.SIZE)
    _rehearse(compiled, info)
    return form + zlib.compress(serialised, COMPRESSION_LEVEL)


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise GuideRefusedError(GuideOutcome.MEMORY) from None
    except ValueError:
        raise GuideRefusedError(GuideOutcome.MALFORMED) from None
    if not isinstance(schema, dict | bool):
        raise GuideRefusedError(GuideOutcome.MALFORMED)
    if missing := keywords_not_enforced(schema):
        raise GuideRefusedError(GuideOutcome.UNSUPPORTED, ", ".join(sorted(missing)))


def _compile(source: GuideSource, compiler: xgrammar.GrammarCompiler) -> xgrammar.CompiledGrammar:
    match source.kind:
        case GuideKind.JSON_SCHEMA:
            return compiler.compile_json_schema(source.text, any_whitespace=False, strict_mode=True)
        case GuideKind.JSON_OBJECT:
            return compiler.compile_json_schema(_ANY_OBJECT, any_whitespace=False, strict_mode=True)
        case GuideKind.REGEX:
            return compiler.compile_regex(source.text)
        case GuideKind.GRAMMAR:
            return compiler.compile_grammar(source.text)
        case GuideKind.CHOICE:
            return compiler.compile_grammar(choice_grammar(source.options))


def choice_grammar(options: tuple[str, ...]) -> str:
    """A grammar that matches these strings."""
    return "root ::= " + " | ".join(f'"{_escaped(option)}"' for option in options)


def _escaped(text: str) -> str:
    return "".join(
        character if character.isalnum() or character == " " else f"\\U{ord(character):08x}" for character in text
    )


def _rehearse(compiled: xgrammar.CompiledGrammar, info: xgrammar.TokenizerInfo) -> None:
    """Follows a pseudo-random output, always the same one for the same guide."""
    matcher = xgrammar.GrammarMatcher(compiled)
    bitmask = np.full((1, -(-info.vocab_size // 32)), -1, dtype=np.int32)
    eos_token_ids = set(info.stop_token_ids)
    generator = random.Random(0)  # noqa: S311 - a path through a grammar is no secret
    for num_tokens in range(REHEARSAL_TOKENS):
        begun_s = time.process_time()
        matcher.fill_next_token_bitmask(bitmask, 0)
        bits = np.unpackbits(bitmask.view(np.uint8), axis=1, count=info.vocab_size, bitorder="little")[0]
        allowed = np.flatnonzero(bits).tolist()
        if not allowed and not num_tokens:
            raise GuideRefusedError(GuideOutcome.MALFORMED)  # nothing matches it, or no text of this model does
        going_on = [token_id for token_id in allowed if token_id not in eos_token_ids]
        if not going_on:
            return
        # Long tokens end things, short ones keep all ways open: both kinds of walk are taken.
        matcher.accept_token(min(generator.choices(going_on, k=3)) if num_tokens % 2 else generator.choice(going_on))
        if time.process_time() - begun_s > MASK_S_MAX:
            raise GuideRefusedError(GuideOutcome.TIME)
