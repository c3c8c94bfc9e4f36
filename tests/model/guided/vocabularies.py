"""A vocabulary that fits on a screen."""

from __future__ import annotations

from typing import Any

from scheduler.guide_messages import GuideKind, GuideSource
from scheduler.model.guided.compiler import compile_guide
from scheduler.model.guided.vocabulary import tokenizer_info

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
]
"""Ids 0 and 1 have no text, 2 is the end of sequence; then printable ASCII, a few longer ones, and the halves of é."""
EOS = 2


def info() -> Any:
    return tokenizer_info(TOKENS, [EOS])


def compiled(kind: GuideKind, text: str = "", options: tuple[str, ...] = ()) -> bytes:
    """Raises GuideRefusedError."""
    return compile_guide(GuideSource(kind, text, options), info(), lambda: False)


def ids(text: str) -> list[int]:
    """One token per byte."""
    return [TOKENS.index(bytes([byte])) for byte in text.encode()]
