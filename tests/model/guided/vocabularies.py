"""A vocabulary that fits on a screen."""

from __future__ import annotations

from scheduler.guide_messages import GuideKind, GuideSource
from scheduler.model.guided.compiler import compile_guide
from scheduler.model.guided.vocabulary import Vocabularies

TOKENS = [
    b"",
    b"",
    b"",
    *(bytes([byte]) for byte in range(32, 127)),
    b"ab",
    b"abc",
    b"true",
    b'": ',
    b"12",
    b"\xc3",
    b"\xa9",
    b"\n",
    b"a\x01",
]
"""Ids 0 and 1 have no text, 2 is the end of sequence; then printable ASCII, a few longer ones, and the halves of é."""
EOS = 2


def vocabularies() -> Vocabularies:
    return Vocabularies(TOKENS, [EOS])


def compiled(kind: GuideKind, text: str = "", options: tuple[str, ...] = ()) -> bytes:
    """Raises GuideRefusedError."""
    return compile_guide(GuideSource(kind, text, options), vocabularies(), lambda: False)


def ids(text: str) -> list[int]:
    """One token per byte."""
    return [TOKENS.index(bytes([byte])) for byte in text.encode()]
